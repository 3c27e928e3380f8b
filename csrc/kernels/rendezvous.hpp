// Words in: the waits by which a rank learns what its peers are about to do and have done.
#pragma once

#include "session.hpp"

namespace mori {
inline namespace MORI_VARIANT {

// Waits for a word whose tag is this call's number.
template <Order order, class T>
MORI_DEVICE bool await_tagged(Session<T>& s, u64 control_offset, u32 source, Phase phase, u64& found) {
  const u64 wanted = CountWord::tag_of(s.call);
  const auto verdict = [&](u64& word) { return judge(CountWord::tag(word), wanted, call_tag_mask); };
  return wait_word<order>(s.target, s.wait(), s.ep.word(s.rank(), control_offset), source, phase, verdict,
                          CountWord::encode(s.call, 0), found);
}

// Waits for the header of `source` for this call. A header of the other kind, or of a later call, means that the ranks
// have fallen out of step. One that differs from this rank's own in row bytes, dtype or scales makes the block
// suspicious: if all ranks find all headers equal to their own, all are equal; if not, every rank finds one that is
// not.
template <Order order, class T>
MORI_DEVICE bool await_header(Session<T>& s, u32 source, const Header& own, Phase phase, u64& found) {
  const u64 wanted = HeaderWord::tag_of(s.call), expected = HeaderWord::encode(s.call, own);
  const auto verdict = [&](u64& word) {
    const Verdict by_tag = judge(HeaderWord::tag(word), wanted, 0xffffffffull);
    return by_tag == Verdict::ready && HeaderWord::kind(word) != own.kind ? Verdict::ahead : by_tag;
  };
  const u64* word = s.ep.word(s.rank(), s.words.header(s.parity, source));
  if (!wait_word<order>(s.target, s.wait(), word, source, phase, verdict, expected, found)) return false;
  if (((found ^ expected) & HeaderWord::compared(own.kind)) != 0) s.flags->suspect = 1;
  return true;
}

// The first live rank whose header differs from the lowest live rank's; found alike everywhere. `headers` holds all.
template <class T>
MORI_RARE CallFault first_mismatch(const u64* headers, const CommControl* comm, u32 world, u64 call) {
  u32 first = world;
  MORI_ROLLED
  for (u32 source = 0; source < world; ++source) {
    if (!is_live<T>(comm, source)) continue;
    if (first == world) first = source;
    if (((headers[source] ^ headers[first]) & HeaderWord::compared(HeaderWord::kind(headers[first]))) != 0) {
      return {call, CallFaultKind::row_mismatch, source, headers[first], headers[source]};
    }
  }
  return {};
}

}  // namespace MORI_VARIANT
}  // namespace mori

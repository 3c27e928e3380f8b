// Words out, words in: the part of a call in which a rank tells every peer about itself and hears from all.
#pragma once

#include "session.hpp"

namespace mori {
inline namespace MORI_VARIANT {

// Sends this call's header to every live peer. The caller has released whatever the header guards.
template <class T>
MORI_DEVICE void send_header(Session<T>& s, const Header& header) {
  const u64 word = HeaderWord::encode(s.call, header);
  MORI_ROLLED
  for (u32 peer = s.target.thread(); peer < s.world(); peer += s.target.threads()) {
    if (s.live(peer)) s.send_word(peer, s.words.header(s.parity, s.rank()), word);
  }
}

// Waits for the header of `source` for this call. A header of the other kind, or of a later call, means that
// the ranks have fallen out of step.
template <class T>
MORI_DEVICE bool await_header(Session<T>& s, u32 source, CallKind kind, Phase phase, u64& found) {
  const u64 wanted = HeaderWord::tag_of(s.call);
  const auto verdict = [&](u64& word) {
    const Verdict by_tag = judge(HeaderWord::tag(word), wanted, 0xffffffffull);
    if (by_tag == Verdict::ready && HeaderWord::decode(word).kind != kind) return Verdict::ahead;
    return by_tag;
  };
  const u64 expected = HeaderWord::encode(s.call, {0, 0, kind, false, 0});
  return wait_word(s.target, s.wait, s.ep.word(s.rank(), s.words.header(s.parity, source)), source, phase, verdict,
                   expected, found);
}

// Waits for a word whose tag is this call's number (count, rows, entered words).
template <class T>
MORI_DEVICE bool await_tagged(Session<T>& s, u64 control_offset, u32 source, Phase phase, u64& found) {
  const u64 wanted = CountWord::tag_of(s.call);
  const auto verdict = [&](u64& word) { return judge(CountWord::tag(word), wanted, call_tag_mask); };
  return wait_word(s.target, s.wait, s.ep.word(s.rank(), control_offset), source, phase, verdict,
                   CountWord::encode(s.call, 0), found);
}

// All headers of one call are known on every rank, so all ranks find the same first rank that differs from the
// lowest live one in row bytes or dtype.
template <class T>
MORI_DEVICE CallFault compare_headers(Session<T>& s, const u64* headers) {
  constexpr u64 compared = 0xfffffff0ull;  // row_bytes and dtype
  u32 first = s.world();
  MORI_ROLLED
  for (u32 source = 0; source < s.world(); ++source) {
    if (!s.live(source)) continue;
    if (first == s.world()) first = source;
    if ((headers[source] & compared) != (headers[first] & compared)) {
      return {s.call, CallFaultKind::row_mismatch, source, headers[first], headers[source]};
    }
  }
  return {0, CallFaultKind::none, 0, 0, 0};
}

}  // namespace MORI_VARIANT
}  // namespace mori

// The 64-bit words that ranks exchange. Every word carries the number of the call it belongs to, so a
// reader takes it only if it is the word it waits for: nothing is ever reset, and a graph may replay for ever.
#pragma once

#include "../device/base.hpp"

namespace mori {
inline namespace MORI_VARIANT {

enum class CallKind : u32 { none = 0, dispatch = 1, combine = 2 };

// count word: call:40 | value:24
constexpr u32 count_value_bits = 24;
constexpr u64 count_value_limit = 1ull << count_value_bits;
constexpr u64 call_tag_mask = (1ull << 40) - 1;

struct CountWord {
  MORI_SHARED_CODE static constexpr u64 encode(u64 call, u32 value) {
    return (call & call_tag_mask) << count_value_bits | value;
  }
  MORI_SHARED_CODE static constexpr u32 value(u64 word) { return u32(word & (count_value_limit - 1)); }
  MORI_SHARED_CODE static constexpr u64 tag(u64 word) { return word >> count_value_bits; }
  MORI_SHARED_CODE static constexpr u64 tag_of(u64 call) { return call & call_tag_mask; }
};

// header word: call:32 | row_bytes:24 | dtype:4 | kind:1 | flags:3
constexpr u64 row_bytes_limit = 1ull << 24;

enum HeaderFlag : u32 {
  header_staged_path = 1,  // dispatch: rows go to the landing area first
  header_scales = 2,       // dispatch: rows come with scales
  header_packed = 4,       // dispatch: rows are also ordered by their experts
  header_weights = 1,      // combine: this rank gives weight rows
  header_chunked = 2,      // combine: rows or weights are being staged; a ready word follows per chunk
  header_quantised = 4,    // combine: rows come in the op's quantised form
};

struct Header {
  u32 row_bytes;
  u32 dtype;
  CallKind kind;
  u32 flags;
};

struct HeaderWord {
  // What must be equal on all ranks: row_bytes and dtype, and what else changes the meaning of rows.
  MORI_SHARED_CODE static constexpr u64 compared(CallKind kind) {
    return 0xfffffff0ull | u64(kind == CallKind::dispatch ? header_scales | header_packed : header_quantised);
  }

  MORI_SHARED_CODE static constexpr u64 encode(u64 call, const Header& header) {
    return (call & 0xffffffffull) << 32 | u64(header.row_bytes) << 8 | u64(header.dtype) << 4 |
           u64(header.kind == CallKind::combine) << 3 | header.flags;
  }
  MORI_SHARED_CODE static constexpr CallKind kind(u64 word) {
    return (word >> 3 & 1) != 0 ? CallKind::combine : CallKind::dispatch;
  }
  MORI_SHARED_CODE static constexpr bool has(u64 word, HeaderFlag flag) { return (word & flag) != 0; }
  MORI_SHARED_CODE static constexpr u64 tag(u64 word) { return word >> 32; }
  MORI_SHARED_CODE static constexpr u64 tag_of(u64 call) { return call & 0xffffffffull; }
};

// How a reader that waits for `wanted` judges the tag it finds. A peer can never be further than this ahead
// without having broken the protocol; anything else that is not equal is an older word.
enum class Verdict : u32 { pending, ready, ahead };
constexpr u64 ahead_window = 1 << 16;

MORI_SHARED_CODE constexpr Verdict judge(u64 tag, u64 wanted, u64 mask) {
  const u64 distance = (tag - wanted) & mask;
  if (distance == 0) return Verdict::ready;
  return distance <= ahead_window ? Verdict::ahead : Verdict::pending;
}

// A plain flag word (rows done, ready, entered) is a count word without a value.
struct FlagWord {
  MORI_SHARED_CODE static constexpr u64 encode(u64 call) { return CountWord::encode(call, 0); }
};

}  // namespace MORI_VARIANT
}  // namespace mori

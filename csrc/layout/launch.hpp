// The launch structs: all that a kernel gets from the host. Token count and addresses are the only things that
// change per call, so a captured graph replays with new data in place.
#pragma once

#include "../device/base.hpp"
#include "comm_control.hpp"
#include "ep_layout.hpp"

namespace mori {
inline namespace MORI_VARIANT {

// Division of expert ids by a constant divisor, as a multiplication: exact while dividend < 2^24 and
// dividend * divisor < 2^40.
struct Divider {
  u64 multiplier;

  MORI_SHARED_CODE static constexpr Divider by(u32 divisor) { return {divide_up(1ull << 40, divisor)}; }
  MORI_SHARED_CODE constexpr u32 operator()(u32 dividend) const { return u32(dividend * multiplier >> 40); }
};

// A build may fix these values (0: not fixed). The kernels then hold no code for others: at a few tokens their time
// is the fetching of instructions.
#ifndef MORI_FIXED_WORLD_SIZE
#define MORI_FIXED_WORLD_SIZE 0
#endif
#ifndef MORI_FIXED_TOPK
#define MORI_FIXED_TOPK 0
#endif
#ifndef MORI_FIXED_EXPERTS_PER_RANK
#define MORI_FIXED_EXPERTS_PER_RANK 0
#endif
#ifndef MORI_FIXED_MAX_TOKENS
#define MORI_FIXED_MAX_TOKENS 0
#endif
// 0: no source takes the staged path, and no call is split in two launches.
#ifndef MORI_MAY_STAGE
#define MORI_MAY_STAGE 1
#endif
// 0: no traces and no delays for tests.
#ifndef MORI_TRACED
#define MORI_TRACED 1
#endif

struct EpArgs {
  Symmetric symmetric;
  u64 window;  // offset of the op's window in every slice
  EpShape shape;
  EpLayout layout;
  Divider experts;    // by experts per rank
  CommControl* twin;  // GPUs: this rank's control block in host memory; null on the host target
  u64 timeout_ns;
  u64* profiler;      // null: tracing is off; else one time per block and point
  u32 test_delay_us;  // 0: no artificial delays
  u32 test_delay_seed;

  MORI_SHARED_CODE u32 world() const { return fixed(MORI_FIXED_WORLD_SIZE, shape.world_size); }
  MORI_SHARED_CODE u32 topk() const { return fixed(MORI_FIXED_TOPK, shape.topk); }
  MORI_SHARED_CODE u32 experts_per_rank() const { return fixed(MORI_FIXED_EXPERTS_PER_RANK, shape.experts_per_rank); }
  MORI_SHARED_CODE u32 max_tokens() const { return fixed(MORI_FIXED_MAX_TOKENS, shape.max_tokens); }
  MORI_SHARED_CODE u32 flat_stride() const { return world() * max_tokens(); }
  MORI_SHARED_CODE u32 null_index() const { return world() * flat_stride(); }
  // The rank that owns an expert.
  MORI_SHARED_CODE u32 owner(u32 expert) const {
    return MORI_FIXED_EXPERTS_PER_RANK != 0 ? expert / experts_per_rank() : experts(expert);
  }

  template <class Type>
  MORI_SHARED_CODE Type* at(u32 peer, RegionId id, u64 byte = 0) const {
    return symmetric.at<Type>(peer, window + layout.of(id) + byte);
  }
  template <class Type>
  MORI_SHARED_CODE Type* own(RegionId id, u64 byte = 0) const {
    return at<Type>(symmetric.rank, id, byte);
  }
  MORI_SHARED_CODE u64* word(u32 peer, u64 control_offset) const {
    return at<u64>(peer, RegionId::control, control_offset);
  }

 private:
  MORI_SHARED_CODE static constexpr u32 fixed(u32 constant, u32 value) { return constant != 0 ? constant : value; }
};

// Which way a dispatch's rows went: written by that dispatch, read by the combines that belong to it. An op has one of
// its own; a routing handle is another.
struct Routing {
  u32* sender_map;      // [tokens][K]: flat index of the row at its destination, for the first k that names it; or null
  u32* received_count;  // what the caller gets to see
  RoutingSummary* summary;
};

// A call is one launch, or two of which the first never waits.
enum Half : u32 { half_send = 1, half_receive = 2, whole_call = 3 };

// Received rows ordered by local expert, as an expert computation may want them: [E][W*M] places.
struct Packed {
  u8* rows;      // [E][W*M][row_bytes]
  u32* sources;  // [E][W*M] flat index of the token; null when rows are only read
};

struct DispatchArgs {
  EpArgs ep;
  Routing routing;
  Packed packed;
  const u8* input;       // [tokens, row_bytes]
  const float* weights;  // [tokens, K] or null: receivers get zeros
  const u8* scales;      // [tokens, scale_bytes] or null
  const i32* indices;    // [tokens, K]
  u32 tokens;
  u32 row_bytes;
  u32 scale_bytes;  // of this call; 0: none
  u32 dtype;
  u32 parts;      // work items per token: a row is split over warps when tokens are few
  u32 streaming;  // 1: rows bypass the cache
  u32 staged;     // 1: rows go to the landing areas, without waiting for anyone
  u32 halves;     // of Half
};

struct CombineArgs {
  EpArgs ep;
  Routing routing;
  Packed packed;
  const u8* input;       // [input_rows, row_bytes]; null: zero copy, the rows are in combine_in already
  const float* weights;  // [weight_rows, K] or null
  u32 input_rows;
  u32 weight_rows;
  u32 tokens;  // rows of the result
  u32 row_bytes;
  u32 dtype;
  u32 parts;
  u32 stagers;  // so many blocks, the first to start, stage rows; the others begin to fetch at once
  u32 streaming;
  u32 halves;  // of Half
};

// Rows in the order in which they were received.
struct ReceivedRows {
  const u8* rows;      // [count][row_bytes]
  const i32* indices;  // [count][K]
  u32 count;
  u32 row_bytes;
  u32 parts;
};

// Rows into the places of their experts, and back as weighted sums. The count is the op's own.
struct ConvertArgs {
  EpArgs ep;
  Packed packed;
  ReceivedRows received;
};

}  // namespace MORI_VARIANT
}  // namespace mori

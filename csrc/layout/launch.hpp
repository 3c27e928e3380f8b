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

// A build may fix the shape, all but the rank, by a macro for each member of EpShape. Offsets are then constants, and
// the kernels hold no code for other shapes: at a few tokens their time is the fetching of instructions.
#ifdef MORI_SHAPE_WORLD_SIZE
constexpr bool shape_is_fixed = true;
constexpr EpShape fixed_shape{MORI_SHAPE_WORLD_SIZE,
                              0,
                              MORI_SHAPE_MAX_TOKENS,
                              MORI_SHAPE_HIDDEN_DIM,
                              MORI_SHAPE_MAX_ELEMENT_BYTES,
                              MORI_SHAPE_SCALE_DIM,
                              MORI_SHAPE_SCALE_ELEMENT_BYTES,
                              MORI_SHAPE_EXPERTS_PER_RANK,
                              MORI_SHAPE_TOPK,
                              MORI_SHAPE_MAX_RECV_TOKENS,
                              MORI_SHAPE_MAY_STAGE,
                              MORI_SHAPE_BLOCK_SCALES,
                              MORI_SHAPE_SLOT_STRIDE,
                              MORI_SHAPE_SOURCE_STRIDE};
#else
constexpr bool shape_is_fixed = false;
constexpr EpShape fixed_shape{};
#endif

// Whether some source may take the staged path, or a call be split in two launches.
constexpr bool may_stage = !shape_is_fixed || fixed_shape.may_stage != 0;

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

  MORI_SHARED_CODE u32 world() const { return shape_is_fixed ? fixed_shape.world_size : shape.world_size; }
  MORI_SHARED_CODE u32 topk() const { return shape_is_fixed ? fixed_shape.topk : shape.topk; }
  MORI_SHARED_CODE u32 experts_per_rank() const {
    return shape_is_fixed ? fixed_shape.experts_per_rank : shape.experts_per_rank;
  }
  MORI_SHARED_CODE u32 max_tokens() const { return shape_is_fixed ? fixed_shape.max_tokens : shape.max_tokens; }
  MORI_SHARED_CODE u32 max_recv_tokens() const {
    return shape_is_fixed ? fixed_shape.max_recv_tokens : shape.max_recv_tokens;
  }
  MORI_SHARED_CODE u32 block_scales() const { return shape_is_fixed ? fixed_shape.block_scales : shape.block_scales; }
  MORI_SHARED_CODE u32 all_tokens() const { return world() * max_tokens(); }
  MORI_SHARED_CODE u32 slot_stride() const {
    const u32 stride = shape_is_fixed ? fixed_shape.slot_stride : shape.slot_stride;
    return stride != 0 ? stride : all_tokens();
  }
  MORI_SHARED_CODE u32 source_stride() const {
    const u32 stride = shape_is_fixed ? fixed_shape.source_stride : shape.source_stride;
    return stride != 0 ? stride : all_tokens();
  }
  MORI_SHARED_CODE u32 null_index() const { return world() * slot_stride(); }
  // The rank that owns an expert.
  MORI_SHARED_CODE u32 owner(u32 expert) const {
    return shape_is_fixed ? expert / larger(1u, fixed_shape.experts_per_rank) : experts(expert);
  }

  MORI_SHARED_CODE u64 offset(RegionId id) const {
    constexpr EpLayout fixed = ep_layout(fixed_shape);
    return shape_is_fixed ? fixed.of(id) : layout.of(id);
  }
  template <class Type>
  MORI_SHARED_CODE Type* at(u32 peer, RegionId id, u64 byte = 0) const {
    return symmetric.at<Type>(peer, window + offset(id) + byte);
  }
  template <class Type>
  MORI_SHARED_CODE Type* own(RegionId id, u64 byte = 0) const {
    return at<Type>(symmetric.rank, id, byte);
  }
  MORI_SHARED_CODE u64* word(u32 peer, u64 control_offset) const {
    return at<u64>(peer, RegionId::control, control_offset);
  }
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

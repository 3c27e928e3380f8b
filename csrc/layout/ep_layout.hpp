// Where everything an operator owns lies inside its window: one pure function of the shape, equal on all ranks.
#pragma once

#include "../device/base.hpp"
#include "comm_control.hpp"
#include "words.hpp"

namespace mori {
inline namespace MORI_VARIANT {

struct EpShape {
  u32 world_size;
  u32 rank;
  u32 max_tokens;         // M: most tokens one rank may dispatch
  u32 hidden_dim;         // H: most elements of a row
  u32 max_element_bytes;  // of a row, over all calls
  u32 scale_dim;          // S
  u32 scale_element_bytes;
  u32 experts_per_rank;  // E
  u32 topk;              // K
  u32 max_recv_tokens;   // R: most rows one rank may receive
  u32 may_stage;         // 1: some source may take the staged path, so there are landing areas
  u32 block_scales;      // scales per row that combine sends when it quantises block-wise; 0: it does not
  u32 slot_stride;       // flat indices of rows are rank * slot_stride + slot, W * slot_stride is none; 0: W*M
  u32 source_stride;     // those of tokens are rank * source_stride + token; 0: W*M

  MORI_SHARED_CODE constexpr u64 row_bytes() const { return u64(hidden_dim) * max_element_bytes; }
  MORI_SHARED_CODE constexpr u64 scale_bytes() const { return u64(scale_dim) * scale_element_bytes; }
};

// A per-call fault, decided alike on every rank from the same words. The op stays usable.
enum class CallFaultKind : u32 { none = 0, receive_overflow = 1, row_mismatch = 2 };

struct CallFault {
  u64 call;  // 0: never any
  CallFaultKind kind;
  u32 rank;      // the rank that overflows, or the first that differs
  u64 expected;  // capacity, or the lowest live rank's header word
  u64 seen;      // need, or the differing header word
};

// What a call finds: one aligned record, so that a kernel learns it in one go.
struct alignas(16) LastCall {
  u64 call;       // calls completed, dispatches and combines alike
  CallKind kind;  // of the last completed call
  u32 received;   // rows of the last dispatch
};

// What a combine has to know of the dispatch that it belongs to, beside the sender map.
struct RoutingSummary {
  u32 tokens;     // that this rank dispatched
  u32 received;   // rows that it got
  u32 own_first;  // rows [own_first, own_first + own_rows) of these came from this rank itself
  u32 own_rows;
  // followed by u32 received_by[W], the rows that each rank got

  MORI_SHARED_CODE u32* received_by() { return reinterpret_cast<u32*>(this + 1); }
  MORI_SHARED_CODE const u32* received_by() const { return reinterpret_cast<const u32*>(this + 1); }
};

// Fixed part of the control region. Only this rank's own kernels touch it.
struct OpState {
  LastCall last;
  alignas(64) u32 ticket;        // blocks that entered this launch
  alignas(64) u32 arrived;       // blocks that need its state no more
  alignas(64) u32 stage_ticket;  // staging chunks handed out
  alignas(64) u32 count_ticket;  // chunks of tokens handed out to be counted
  alignas(64) CallFault fault;   // of the last faulty call
};

// Counters behind `stats()`; zeroed by the user only.
struct OpStats {
  u64 dispatches;
  u64 combines;
  u64 no_expert_ids;  // -1 in the router's ids
  u64 out_of_range_ids;
  u64 bytes_sent;  // of dispatched rows with all that belongs to them
  u64 bytes_received;
  // followed by u64 rows_sent[W], rows_received[W], last_received[W]: what each rank got in the last dispatch
};

enum class RegionId : u32 {
  control,
  dispatch_rows,
  dispatch_weights,
  dispatch_scales,
  dispatch_indices,
  dispatch_source,
  received_count,
  combine_in_rows,
  combine_in_weights,
  combine_in_scales,  // f32, of block-wise quantised rows
  combine_rows,
  combine_weights,
  sender_map,
  expert_places,  // where a received row lies among those of its k-th expert: standard-MoE layouts
  expert_counts,
  stats,
  landing_rows,  // landing regions: [2 parities][W sources][M], in the order of the dispatch regions
  landing_weights,
  landing_scales,
  landing_indices,
  landing_source,
  count
};

struct EpLayout {
  u64 offset[u32(RegionId::count)];
  u64 bytes[u32(RegionId::count)];
  u64 total_bytes;

  MORI_SHARED_CODE constexpr u64 of(RegionId id) const { return offset[u32(id)]; }
  MORI_SHARED_CODE constexpr u64 size(RegionId id) const { return bytes[u32(id)]; }
};

constexpr u64 region_alignment = 256;
constexpr u32 max_blocks = 256;          // of any grid
constexpr u32 max_staging_chunks = 128;  // of a combine's rows
constexpr u32 max_counted_chunks = 64;   // of a dispatch's tokens

// Tokens per chunk: of many tokens, several blocks count some each.
MORI_SHARED_CODE constexpr u32 counted_chunk_tokens(u32 tokens) {
  constexpr u32 smallest = 256;
  const u32 even = (tokens + max_counted_chunks - 1) / max_counted_chunks;
  return even < smallest ? smallest : even;
}

// Sums of chunks: how many were added, and their rows. Whoever adds the last one knows the total.
struct CountedSum {
  static_assert(max_counted_chunks < 1u << (32 - count_value_bits), "a sum has room for the number of chunks");
  MORI_SHARED_CODE static constexpr u32 encode(u32 rows) { return 1u << count_value_bits | rows; }
  MORI_SHARED_CODE static constexpr u32 chunks(u32 sum) { return sum >> count_value_bits; }
  MORI_SHARED_CODE static constexpr u32 rows(u32 sum) { return sum & (u32(count_value_limit) - 1); }
};

// A combine's rows are staged in chunks of 2^chunk_shift(rows): readers know the size from the row count.
MORI_SHARED_CODE constexpr u32 chunk_shift(u32 rows) {
  u32 shift = 0;
  while (rows > max_staging_chunks << shift) ++shift;
  return shift;
}

// Words inside the control region, behind OpState. Each has two slots by call parity: a rank may already be in
// the next call while a slow block of its peer still polls for this one.
//   count[parity][source][destination]  rows that source sends to destination
//   header[parity][source]              what source is about to do
//   blocks[parity][source]              how many rows words source will send
//   entered[parity][source]             source is in a combine that follows a combine
//   rows[parity][source][block]         that block of source has written its rows here
//   ready[parity][source][chunk]        source has staged that chunk
// Of this rank's own blocks, which share a launch, one slot each:
//   counted[chunk][destination]         rows that the chunk's tokens send to destination
struct ControlWords {
  u64 world_size;
  MORI_SHARED_CODE constexpr explicit ControlWords(u32 world) : world_size(world) {}

  static constexpr u64 first = align_up(sizeof(OpState), 64);

  MORI_SHARED_CODE constexpr u64 count(u32 parity, u32 source, u32 destination) const {
    return first + 8 * ((parity * world_size + source) * world_size + destination);
  }
  MORI_SHARED_CODE constexpr u64 header(u32 parity, u32 source) const { return single(0, parity, source); }
  MORI_SHARED_CODE constexpr u64 blocks(u32 parity, u32 source) const { return single(1, parity, source); }
  MORI_SHARED_CODE constexpr u64 entered(u32 parity, u32 source) const { return single(2, parity, source); }
  MORI_SHARED_CODE constexpr u64 rows(u32 parity, u32 source, u32 block) const {
    return single(3, 0, 0) + 8 * ((parity * world_size + source) * max_blocks + block);
  }
  MORI_SHARED_CODE constexpr u64 ready(u32 parity, u32 source, u32 chunk) const {
    return rows(2, 0, 0) + 8 * ((parity * world_size + source) * max_staging_chunks + chunk);
  }
  MORI_SHARED_CODE constexpr u64 counted(u32 chunk, u32 destination) const {
    return ready(2, 0, 0) + 8 * (chunk * world_size + destination);
  }
  MORI_SHARED_CODE constexpr u64 end() const { return counted(max_counted_chunks, 0); }
  // Behind the words: for each destination the sum over the chunks counted so far (CountedSum).
  MORI_SHARED_CODE constexpr u64 sum(u32 destination) const { return end() + 4 * u64(destination); }
  // The RoutingSummary of dispatches that are given no other place for it.
  MORI_SHARED_CODE constexpr u64 summary() const { return align_up(sum(u32(world_size)), 8); }
  MORI_SHARED_CODE constexpr u64 region_end() const {
    return align_up(summary() + sizeof(RoutingSummary) + 4 * world_size, 64);
  }

 private:
  MORI_SHARED_CODE constexpr u64 single(u32 array, u32 parity, u32 source) const {
    return count(2, 0, 0) + 8 * ((2 * array + parity) * world_size + source);
  }
};

MORI_SHARED_CODE constexpr u64 region_bytes(const EpShape& shape, RegionId id) {
  const u64 tokens = shape.max_tokens, received = shape.max_recv_tokens, topk = shape.topk;
  const u64 landed = shape.may_stage != 0 ? 2 * shape.world_size * tokens : 0;
  switch (id) {
    case RegionId::control: return ControlWords(shape.world_size).region_end();
    case RegionId::dispatch_rows:
    case RegionId::combine_in_rows: return received * shape.row_bytes();
    case RegionId::dispatch_weights:
    case RegionId::dispatch_indices:
    case RegionId::combine_in_weights: return received * topk * 4;
    case RegionId::dispatch_scales: return received * shape.scale_bytes();
    case RegionId::dispatch_source: return received * 4;
    case RegionId::received_count: return 4;
    case RegionId::combine_rows: return tokens * shape.row_bytes();
    case RegionId::combine_weights:
    case RegionId::sender_map: return tokens * topk * 4;
    case RegionId::combine_in_scales: return received * shape.block_scales * 4;
    case RegionId::expert_places: return received * topk * 4;
    case RegionId::expert_counts: return u64(shape.experts_per_rank) * 4;
    case RegionId::stats: return sizeof(OpStats) + 24ull * shape.world_size;
    case RegionId::landing_rows: return landed * shape.row_bytes();
    case RegionId::landing_weights:
    case RegionId::landing_indices: return landed * topk * 4;
    case RegionId::landing_scales: return landed * shape.scale_bytes();
    case RegionId::landing_source: return landed * 4;
    case RegionId::count: break;
  }
  return 0;
}

MORI_SHARED_CODE constexpr EpLayout ep_layout(const EpShape& shape) {
  EpLayout layout{};
  u64 next = 0;
  for (u32 id = 0; id < u32(RegionId::count); ++id) {
    layout.offset[id] = next;
    layout.bytes[id] = region_bytes(shape, RegionId(id));
    next = align_up(next + layout.bytes[id], region_alignment);
  }
  layout.total_bytes = next;
  return layout;
}

}  // namespace MORI_VARIANT
}  // namespace mori

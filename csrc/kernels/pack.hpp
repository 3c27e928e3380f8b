// Received rows into the places of their local experts: [E][W*M], in the order of the rows. A row that several local
// experts want is copied to each, once if an expert is named twice. `expert_slots` notes each (row, k)'s place.
//
// Places are counted, not drawn, so they are the same in every run: whoever packs a chunk of rows has counted the ids
// of all rows before it.
#pragma once

#include "session.hpp"

namespace mori {
inline namespace MORI_VARIANT {

constexpr u32 pack_chunk_rows = 8;
constexpr u32 no_place = ~0u;

// A received row's ids, as local experts.
struct LocalExperts {
  u32 first, count, topk;

  MORI_DEVICE explicit LocalExperts(const EpArgs& ep)
      : first(ep.symmetric.rank * ep.experts_per_rank()), count(ep.experts_per_rank()), topk(ep.topk()) {}

  // The local expert that column k names; `count` or more for any other.
  MORI_DEVICE u32 of(const i32* ids, u32 k) const { return u32(ids[k]) - first; }
  MORI_DEVICE bool is_local(u32 expert) const { return expert < count; }
  // Whether no column before k names the same expert.
  MORI_DEVICE bool is_first(const i32* ids, u32 k) const {
    MORI_ROLLED
    for (u32 lower = 0; lower < k; ++lower) {
      if (ids[lower] == ids[k]) return false;
    }
    return true;
  }
};

template <class T>
class Packer {
 public:
  MORI_DEVICE Packer(T& target, const EpArgs& args, const Packed& packed, const ReceivedRows& received, u8* scratch)
      : t(target),
        ep(args),
        packed(packed),
        received(received),
        experts(args),
        targets(reinterpret_cast<RowTarget*>(scratch + (-reinterpret_cast<u64>(scratch) & (sizeof(RowTarget) - 1)))),
        taken(reinterpret_cast<u32*>(targets + t.warps() * experts.topk)),
        places(taken + experts.count) {
    MORI_ROLLED
    for (u32 expert = t.thread(); expert < experts.count; expert += t.threads()) taken[expert] = 0;
    t.sync_block();
  }

  MORI_SHARED_CODE static u64 scratch_bytes(u32 experts, u32 topk, u32 warps) {
    return (u64(warps) * topk + 1) * sizeof(RowTarget) + 4 * (u64(experts) + pack_chunk_rows * topk);
  }

  MORI_DEVICE u32 chunks() const { return (received.count + pack_chunk_rows - 1) / pack_chunk_rows; }

  // By all threads of a block; chunks in ascending order.
  MORI_DEVICE void pack(u32 chunk) {
    const u32 begin = chunk * pack_chunk_rows, end = smaller(received.count, begin + pack_chunk_rows);
    count_before(begin);
    place_pairs(begin, end);
    t.sync_block();
    MORI_ROLLED
    for (u32 item = begin * received.parts + t.warp(); item < end * received.parts; item += t.warps()) {
      copy_row(item / received.parts, item % received.parts, places + (item / received.parts - begin) * experts.topk);
    }
    t.sync_block();
  }

  MORI_DEVICE void write_counts() {
    count_before(received.count);
    u32* counts = ep.template own<u32>(RegionId::expert_counts);
    MORI_ROLLED
    for (u32 expert = t.thread(); expert < experts.count; expert += t.threads()) counts[expert] = taken[expert];
  }

 private:
  MORI_DEVICE const i32* ids_of(u32 row) const { return received.indices + u64(row) * experts.topk; }

  MORI_DEVICE void count_before(u32 end) {
    MORI_ROLLED
    for (u32 pair = counted * experts.topk + t.thread(); pair < end * experts.topk; pair += t.threads()) {
      const i32* ids = ids_of(pair / experts.topk);
      const u32 k = pair % experts.topk, expert = experts.of(ids, k);
      if (experts.is_local(expert) && experts.is_first(ids, k)) t.add_block(&taken[expert], 1);
    }
    counted = end;
    t.sync_block();
  }

  MORI_DEVICE void place_pairs(u32 begin, u32 end) {
    MORI_ROLLED
    for (u32 pair = t.thread(); pair < (end - begin) * experts.topk; pair += t.threads()) {
      const u32 row = begin + pair / experts.topk, k = pair % experts.topk;
      const u32 expert = experts.of(ids_of(row), k);
      u32 place = no_place;
      if (experts.is_local(expert)) {
        place = expert * ep.all_tokens() + taken[expert];
        MORI_ROLLED
        for (u32 earlier = begin; earlier < row; ++earlier) place += names(earlier, expert) ? 1 : 0;
      }
      places[pair] = place;
      ep.template own<u32>(RegionId::expert_places)[u64(row) * experts.topk + k] = place;
    }
  }

  MORI_DEVICE bool names(u32 row, u32 expert) const {
    const i32* ids = ids_of(row);
    bool found = false;
    MORI_ROLLED
    for (u32 k = 0; k < experts.topk; ++k) found = found || experts.of(ids, k) == expert;
    return found;
  }

  MORI_DEVICE void copy_row(u32 row, u32 part, const u32* row_places) {
    const i32* ids = ids_of(row);
    RowTarget* row_targets = targets + t.warp() * experts.topk;
    u32 count = 0;
    MORI_ROLLED
    for (u32 k = 0; k < experts.topk; ++k) {
      const u32 expert = experts.of(ids, k);
      if (!experts.is_local(expert) || !experts.is_first(ids, k)) continue;
      const u64 place = row_places[k];
      if (t.lane() == 0) {
        row_targets[count] = {packed.rows + place * received.row_bytes};
        if (part == 0) packed.sources[place] = ep.template own<u32>(RegionId::dispatch_source)[row];
      }
      ++count;
    }
    t.sync_warp();
    const RowPart bytes(received.row_bytes, part, received.parts);
    t.fan_out(row_targets, count, received.rows + u64(row) * received.row_bytes, bytes.begin, bytes.end, false);
    t.sync_warp();
  }

  T& t;
  const EpArgs& ep;
  const Packed& packed;
  const ReceivedRows& received;
  LocalExperts experts;
  RowTarget* targets;  // [warps][K]
  u32* taken;          // [E] rows of each expert among those counted
  u32* places;         // [chunk rows][K]
  u32 counted = 0;
};

// The same for rows in any buffer, in a launch of its own.
template <class T>
class Pack {
 public:
  MORI_DEVICE Pack(T& target, const ConvertArgs& args) : t(target), a(args) {}

  MORI_DEVICE void run() {
    ReceivedRows received = a.received;
    received.count = a.ep.template own<OpState>(RegionId::control)->last.received;
    Packer<T> packer(t, a.ep, a.packed, received, t.template scratch<u8>());
    const BlockShare share(packer.chunks(), t.block(), t.blocks());
    MORI_ROLLED
    for (u32 chunk = share.begin; chunk < share.end; ++chunk) packer.pack(chunk);
    if (t.block() == t.blocks() - 1) packer.write_counts();
  }

 private:
  T& t;
  const ConvertArgs& a;
};

}  // namespace MORI_VARIANT
}  // namespace mori

// The way back from the experts' places: a received row's contribution is the sum of its local experts' rows, each
// times the weight that came with the dispatch; in f32 from +0.0, ascending k, rounded once.
#pragma once

#include "pack.hpp"
#include "plain_rows.hpp"

namespace mori {
inline namespace MORI_VARIANT {

// Part of one row, by one warp, into the memory that a zero-copy combine reads.
template <class T, class Codec>
MORI_DEVICE void add_experts(T& t, const EpArgs& ep, const u8* packed, u32 row, u32 row_bytes, const RowPart& part) {
  using Stored = typename Codec::Stored;
  using Vector = typename T::template Vector<Stored>;
  constexpr u32 vector = T::vector_bytes;
  const u32 topk = ep.topk();
  const u32* places = ep.own<u32>(RegionId::expert_places, u64(row) * topk * 4);
  const float* weights = ep.own<float>(RegionId::dispatch_weights, u64(row) * topk * 4);
  u8* out = ep.own<u8>(RegionId::combine_in_rows, u64(row) * row_bytes);
  u32 rest = part.begin;
  if ((row_bytes | u32(reinterpret_cast<u64>(packed))) % T::vector_alignment == 0) {
    rest = part.end - (part.end - part.begin) % vector;
    MORI_ROLLED
    for (u32 at = part.begin + t.lane() * vector; at < rest; at += T::lanes * vector) {
      VectorSums<T, Codec, 1> sums;
      MORI_ROLLED
      for (u32 k = 0; k < topk; ++k) {
        if (places[k] == no_place) continue;
        Vector held;
        held.load(packed + u64(places[k]) * row_bytes + at);
        sums.add_weighted(held, weights[k]);
      }
      sums.store(out + at, 0, false);
    }
  }
  MORI_ROLLED
  for (u32 at = rest + t.lane() * u32(sizeof(Stored)); at < part.end; at += T::lanes * u32(sizeof(Stored))) {
    typename Codec::Value sum{};
    MORI_ROLLED
    for (u32 k = 0; k < topk; ++k) {
      if (places[k] == no_place) continue;
      const u8* row_of_expert = packed + u64(places[k]) * row_bytes;
      sum += Codec::decode(*reinterpret_cast<const Stored*>(row_of_expert + at)) * weights[k];
    }
    *reinterpret_cast<Stored*>(out + at) = Codec::encode(sum);
  }
}

// Rows of a combine that are made on the way.
template <class T, class Codec>
struct PackedRows : PlainRows<T, Codec> {
  static constexpr bool stages_own = true, packed = true;

  MORI_DEVICE static void stage(T& t, const CombineArgs& a, u32 row, const RowPart& part) {
    add_experts<T, Codec>(t, a.ep, a.packed.rows, row, a.row_bytes, part);
  }
};

// The same for all rows, in a launch of its own.
template <class T, class Codec>
class Unpack {
 public:
  MORI_DEVICE Unpack(T& target, const ConvertArgs& args) : t(target), a(args) {}

  MORI_DEVICE void run() {
    const u32 received = a.ep.template own<OpState>(RegionId::control)->last.received, parts = a.received.parts;
    const BlockShare share(received * parts, t.block(), t.blocks());
    MORI_ROLLED
    for (u32 item = share.begin + t.warp(); item < share.end; item += t.warps()) {
      const RowPart part(a.received.row_bytes, item % parts, parts);
      add_experts<T, Codec>(t, a.ep, a.packed.rows, item / parts, a.received.row_bytes, part);
    }
  }

 private:
  T& t;
  const ConvertArgs& a;
};

}  // namespace MORI_VARIANT
}  // namespace mori

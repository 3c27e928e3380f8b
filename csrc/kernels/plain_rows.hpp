// Rows that travel as they are: how a combine stages them and adds them up.
//
// What a combine asks of a kind of rows:
//   staged_bytes()  of a row, by the bytes of a row of the result
//   stage()         a row, or part of it if the kind `splits_rows`, for whoever fetches it
//   add()           the rows of a token into its result, or part of it
//   stages_own      whether rows that a rank passes to itself are staged too, because they are not what is added
//   quantised       whether they travel in the op's quantised form
//   packed          whether they are made from the experts' places instead of being passed
#pragma once

#include "../device/fp4.hpp"
#include "../device/fp8.hpp"
#include "session.hpp"

namespace mori {
inline namespace MORI_VARIANT {

struct RowSource {
  const u8* row;         // null: nothing to add
  const u64* ready;      // the word to wait for before the row may be read; null: no wait
  const float* weights;  // null: no weights from there
  const float* scales;   // of block-wise quantised rows
};

// The sums of `flight` vectors of a lane, and how vectors are added to them. Values are f32, or pairs of them.
template <class T, class Codec, u32 flight>
struct VectorSums {
  using Vector = typename T::template Vector<typename Codec::Stored>;
  using Value = typename Codec::Value;

  MORI_DEVICE VectorSums() {
    MORI_UNROLL
    for (u32 v = 0; v < flight; ++v) {
      MORI_UNROLL
      for (u32 e = 0; e < Vector::elements; ++e) sum[v][e] = Value{};
    }
  }

  MORI_DEVICE void add(const Vector (&held)[flight]) {
    MORI_UNROLL
    for (u32 v = 0; v < flight; ++v) {
      MORI_UNROLL
      for (u32 e = 0; e < Vector::elements; ++e) sum[v][e] += Codec::decode(held[v].get(e));
    }
  }

  // The same as adding one after the other, but the sums are touched once.
  MORI_DEVICE void add(const Vector (&first)[flight], const Vector (&second)[flight]) {
    MORI_UNROLL
    for (u32 v = 0; v < flight; ++v) {
      MORI_UNROLL
      for (u32 e = 0; e < Vector::elements; ++e) {
        sum[v][e] = sum[v][e] + Codec::decode(first[v].get(e)) + Codec::decode(second[v].get(e));
      }
    }
  }

  MORI_DEVICE void add_weighted(const Vector& held, float weight) {
    MORI_UNROLL
    for (u32 e = 0; e < Vector::elements; ++e) sum[0][e] += Codec::decode(held.get(e)) * weight;
  }

  MORI_DEVICE void store(u8* out, u32 v, bool streaming) const {
    Vector rounded;
    MORI_UNROLL
    for (u32 e = 0; e < Vector::elements; ++e) rounded.set(e, Codec::encode(sum[v][e]));
    rounded.store(out, streaming);
  }

  Value sum[flight][Vector::elements];
};

template <class T, class Codec>
struct PlainRows {
  using Stored = typename Codec::Stored;
  using Vector = typename T::template Vector<Stored>;
  // A lane keeps at most 32 sums in registers.
  static constexpr u32 flight =
      larger(1u, smaller(T::vectors_in_flight, u32(128 / (Vector::elements * sizeof(typename Codec::Value)))));
  static constexpr bool splits_rows = true, stages_own = false, quantised = false, packed = false;

  MORI_SHARED_CODE static u32 staged_bytes(u32 row_bytes) { return row_bytes; }

  // Rows beyond those that were passed become zeros: never an earlier call's rows.
  MORI_DEVICE static void stage(T& t, const CombineArgs& a, u32 row, const RowPart& part) {
    const RowTarget to{a.ep.template own<u8>(RegionId::combine_in_rows, u64(row) * a.row_bytes)};
    if (row < a.input_rows) {
      t.fan_out(&to, 1, a.input + u64(row) * a.row_bytes, part.begin, part.end, a.streaming != 0);
      return;
    }
    MORI_ROLLED
    for (u32 byte = part.begin + t.lane(); byte < part.end; byte += T::lanes) to.address[byte] = 0;
  }

  // Bytes of the rows: whole vectors first, what is left by single elements.
  MORI_DEVICE static void add(T& t, const CombineArgs& a, const RowSource* sources, u32 count, u8* out,
                              const RowPart& part) {
    constexpr u32 vector = T::vector_bytes, stride = T::lanes * vector;
    u32 rest = part.begin;
    if ((a.row_bytes | u32(reinterpret_cast<u64>(a.input))) % T::vector_alignment == 0) {
      rest = part.end - (part.end - part.begin) % vector;
      u32 at = part.begin + t.lane() * vector;
      // A part of one vector per lane takes the short code: what runs once is fetched from far.
      if (rest - part.begin <= stride) {
        if (at < rest) add_vectors<1>(sources, count, out, at, rest, stride, a.streaming != 0);
        at = rest;
      }
      MORI_ROLLED
      for (; at < rest; at += flight * stride) {
        add_vectors<flight>(sources, count, out, at, rest, stride, a.streaming != 0);
      }
    }
    MORI_ROLLED
    for (u32 at = rest + t.lane() * u32(sizeof(Stored)); at < part.end; at += T::lanes * u32(sizeof(Stored))) {
      typename Codec::Value sum{};
      MORI_ROLLED
      for (u32 i = 0; i < count; ++i) {
        if (sources[i].row == nullptr) continue;
        sum += Codec::decode(*reinterpret_cast<const Stored*>(sources[i].row + at));
      }
      *reinterpret_cast<Stored*>(out + at) = Codec::encode(sum);
    }
  }

 private:
  // Several vectors of a lane at once, and two rows at once, keep loads under way; the order of addition stays.
  template <u32 flight>
  MORI_DEVICE static void add_vectors(const RowSource* sources, u32 count, u8* out, u32 at, u32 end, u32 stride,
                                      bool streaming) {
    VectorSums<T, Codec, flight> sums;
    MORI_ROLLED
    for (u32 i = 0; i < count; i += 2) {
      const u8* row = sources[i].row;
      const u8* next = i + 1 < count ? sources[i + 1].row : nullptr;
      if (row == nullptr) row = next, next = nullptr;
      Vector held[flight], held_next[flight];
      fetch(held, row, at, end, stride);
      fetch(held_next, next, at, end, stride);
      if (row != nullptr && next != nullptr) {
        sums.add(held, held_next);
      } else if (row != nullptr) {
        sums.add(held);
      }
    }
    MORI_UNROLL
    for (u32 v = 0; v < flight; ++v) {
      if (at + v * stride < end) sums.store(out + at + v * stride, v, streaming);
    }
  }

  template <u32 flight>
  MORI_DEVICE static void fetch(Vector (&held)[flight], const u8* row, u32 at, u32 end, u32 stride) {
    if (row == nullptr) return;
    MORI_UNROLL
    for (u32 v = 0; v < flight; ++v) {
      if (at + v * stride < end) held[v].load(row + at + v * stride);
    }
  }
};

}  // namespace MORI_VARIANT
}  // namespace mori

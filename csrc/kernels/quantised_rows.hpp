// bf16 rows that travel in fewer bits: each element cast, or each block of a row scaled to its own maximum. A rank's
// own rows go the same way, so a result does not depend on where a token's experts are.
#pragma once

#include "../device/block_quant.hpp"
#include "plain_rows.hpp"

namespace mori {
inline namespace MORI_VARIANT {

// A format turns `n` values at a time into bytes and back.
template <class Codec>
struct Fp8Cast {
  static constexpr bool blockwise = false;
  static constexpr u32 per_byte = 1;
  MORI_DEVICE static BlockScale scale(u32) { return {1.0f, 1.0f, false}; }
  template <u32 n, class Bytes>
  MORI_DEVICE static void pack(const float (&values)[n], Bytes& bytes) {
    MORI_UNROLL
    for (u32 e = 0; e < n; ++e) bytes.set(e, Codec::encode(values[e]));
  }
  template <u32 n, class Bytes>
  MORI_DEVICE static void unpack(const Bytes& bytes, float (&values)[n]) {
    MORI_UNROLL
    for (u32 e = 0; e < n; ++e) values[e] = Codec::decode(bytes.get(e));
  }
};

template <class Codec>
struct Fp8Blocks : Fp8Cast<Codec> {
  static constexpr bool blockwise = true;
  MORI_DEVICE static BlockScale scale(u32 magnitude) { return fp8_block_scale<Codec>(magnitude); }
};

struct Fp4Blocks {
  static constexpr bool blockwise = true;
  static constexpr u32 per_byte = 2;
  MORI_DEVICE static BlockScale scale(u32 magnitude) { return fp4_block_scale<Fp4E2M1>(magnitude); }
  template <u32 n, class Bytes>
  MORI_DEVICE static void pack(const float (&values)[n], Bytes& bytes) {
    MORI_UNROLL
    for (u32 e = 0; e < n / 2; ++e) bytes.set(e, Fp4E2M1Pair::encode({values[2 * e], values[2 * e + 1]}));
  }
  template <u32 n, class Bytes>
  MORI_DEVICE static void unpack(const Bytes& bytes, float (&values)[n]) {
    MORI_UNROLL
    for (u32 e = 0; e < n / 2; ++e) {
      const FloatPair pair = Fp4E2M1Pair::decode(bytes.get(e));
      values[2 * e] = pair.low;
      values[2 * e + 1] = pair.high;
    }
  }
};

template <class T, class Format>
class QuantisedRows {
  using Vector = typename T::template Vector<u16>;
  static constexpr u32 unit = Vector::elements;  // values that a lane handles at a time
  using Bytes = typename T::template Bytes<unit / Format::per_byte>;
  static constexpr u32 flight = T::vectors_in_flight;

 public:
  static constexpr bool splits_rows = !Format::blockwise, stages_own = true, quantised = true, packed = false;

  MORI_SHARED_CODE static u32 staged_bytes(u32 row_bytes) { return u32(divide_up(row_bytes / 2, Format::per_byte)); }

  // Rows beyond those that were passed become zeros.
  MORI_DEVICE static void stage(T& t, const CombineArgs& a, u32 row, const RowPart& part) {
    const u8* from = row < a.input_rows ? a.input + u64(row) * a.row_bytes : nullptr;
    u8* to = a.ep.template own<u8>(RegionId::combine_in_rows, u64(row) * staged_bytes(a.row_bytes));
    float* scales = a.ep.template own<float>(RegionId::combine_in_scales, u64(row) * a.ep.block_scales() * 4);
    if (Format::blockwise) note_magnitudes(t, a, from, scales);
    t.sync_warp();
    MORI_ROLLED
    for (u32 at = part.begin / 2 + t.lane() * unit; at < part.end / 2; at += T::lanes * unit) {
      float values[unit];
      load(a, from, at, part.end / 2, values);
      scale_down(a, scales, at, values);
      Bytes bytes;
      Format::pack(values, bytes);
      store(a, to, at, part.end / 2, bytes);
    }
    t.sync_warp();
    if (Format::blockwise) note_scales(t, a, scales);
  }

  MORI_DEVICE static void add(T& t, const CombineArgs& a, const RowSource* sources, u32 count, u8* out,
                              const RowPart& part) {
    const u32 end = part.end / 2, stride = T::lanes * unit;
    MORI_ROLLED
    for (u32 at = part.begin / 2 + t.lane() * unit; at < end; at += flight * stride) {
      float sum[flight][unit] = {};
      MORI_ROLLED
      for (u32 i = 0; i < count; ++i) {
        if (sources[i].row == nullptr) continue;
        Bytes held[flight];
        MORI_UNROLL
        for (u32 v = 0; v < flight; ++v) {
          if (at + v * stride < end) fetch(a, sources[i].row, at + v * stride, end, held[v]);
        }
        MORI_UNROLL
        for (u32 v = 0; v < flight; ++v) {
          float values[unit];
          Format::unpack(held[v], values);
          scale_up(a, sources[i].scales, at + v * stride, values);
          MORI_UNROLL
          for (u32 e = 0; e < unit; ++e) sum[v][e] += values[e];
        }
      }
      MORI_UNROLL
      for (u32 v = 0; v < flight; ++v) {
        if (at + v * stride < end) round(a, out, at + v * stride, end, sum[v]);
      }
    }
  }

 private:
  // Whether a whole unit may be loaded and stored at once: rows lie aligned, on the targets where that matters.
  MORI_DEVICE static bool fits(const CombineArgs& a, u32 at, u32 end) {
    return at + unit <= end && (a.row_bytes | at * 2 | u32(reinterpret_cast<u64>(a.input))) % T::vector_alignment == 0;
  }
  MORI_DEVICE static u32 block_length(const CombineArgs& a) {
    return u32(divide_up(a.row_bytes / 2, a.ep.block_scales()));
  }

  // Values [at, at + unit) of a row of `end`; zeros behind it.
  MORI_DEVICE static void load(const CombineArgs& a, const u8* row, u32 at, u32 end, float (&values)[unit]) {
    if (row != nullptr && fits(a, at, end)) {
      Vector vector;
      vector.load(row + u64(at) * 2);
      MORI_UNROLL
      for (u32 e = 0; e < unit; ++e) values[e] = BFloat16::decode(vector.get(e));
      return;
    }
    MORI_UNROLL
    for (u32 e = 0; e < unit; ++e) {
      const bool is_there = row != nullptr && at + e < end;
      values[e] = is_there ? BFloat16::decode(reinterpret_cast<const u16*>(row)[at + e]) : 0.0f;
    }
  }

  MORI_DEVICE static void store(const CombineArgs& a, u8* row, u32 at, u32 end, const Bytes& bytes) {
    u8* to = row + at / Format::per_byte;
    if (fits(a, at, end)) return bytes.store(to);
    MORI_UNROLL
    for (u32 e = 0; e < unit / Format::per_byte; ++e) {
      if (at + e * Format::per_byte < end) to[e] = bytes.get(e);
    }
  }

  MORI_DEVICE static void fetch(const CombineArgs& a, const u8* row, u32 at, u32 end, Bytes& bytes) {
    const u8* from = row + at / Format::per_byte;
    if (fits(a, at, end)) return bytes.load(from);
    MORI_UNROLL
    for (u32 e = 0; e < unit / Format::per_byte; ++e) {
      bytes.set(e, at + e * Format::per_byte < end ? from[e] : u8(0));
    }
  }

  MORI_DEVICE static void round(const CombineArgs& a, u8* out, u32 at, u32 end, const float (&sum)[unit]) {
    u16* to = reinterpret_cast<u16*>(out) + at;
    if (fits(a, at, end)) {
      Vector rounded;
      MORI_UNROLL
      for (u32 e = 0; e < unit; ++e) rounded.set(e, BFloat16::encode(sum[e]));
      return rounded.store(reinterpret_cast<u8*>(to), a.streaming != 0);
    }
    MORI_UNROLL
    for (u32 e = 0; e < unit; ++e) {
      if (at + e < end) to[e] = BFloat16::encode(sum[e]);
    }
  }

  // First the scales' places hold the blocks' magnitudes, as f32. A block is one group of lanes' work.
  MORI_DEVICE static void note_magnitudes(T& t, const CombineArgs& a, const u8* row, float* scales) {
    const u32 length = block_length(a), columns = a.row_bytes / 2, blocks = a.ep.block_scales();
    u32 group = 1;
    while (group * 2 <= T::lanes && group * 2 * unit <= length) group *= 2;
    MORI_ROLLED
    for (u32 first = 0; first < blocks; first += T::lanes / group) {
      const u32 block = first + t.lane() / group;
      const u32 end = smaller(columns, (block + 1) * length);
      u32 magnitude = 0;
      MORI_ROLLED
      for (u32 at = block * length + t.lane() % group * unit; at < end; at += group * unit) {
        float values[unit];
        load(a, row, at, end, values);
        MORI_UNROLL
        for (u32 e = 0; e < unit; ++e) magnitude = larger(magnitude, block_magnitude(BFloat16::encode(values[e])));
      }
      magnitude = t.largest_of_group(magnitude, group);
      if (block < blocks && t.lane() % group == 0) scales[block] = float_of_bits(magnitude);
    }
  }

  // Then the scales.
  MORI_DEVICE static void note_scales(T& t, const CombineArgs& a, float* scales) {
    bool any = false;
    MORI_ROLLED
    for (u32 block = t.lane(); block < a.ep.block_scales(); block += T::lanes) {
      const BlockScale found = Format::scale(bits_of_float(scales[block]));
      any = any || found.scaled;
      scales[block] = found.scale;
    }
    const bool some = t.ballot(any) != 0;
    if (t.lane() == 0) scales[0] = first_scale(scales[0], some);
  }

  MORI_DEVICE static void scale_down(const CombineArgs& a, const float* magnitudes, u32 at, float (&values)[unit]) {
    if (!Format::blockwise) return;
    const auto factor = [&](u32 block) { return Format::scale(bits_of_float(magnitudes[block])).factor; };
    multiply(block_length(a), at, a.row_bytes / 2, values, factor);
  }

  MORI_DEVICE static void scale_up(const CombineArgs& a, const float* scales, u32 at, float (&values)[unit]) {
    if (!Format::blockwise || !is_scaled(scales[0])) return;
    multiply(block_length(a), at, a.row_bytes / 2, values, [&](u32 block) { return block_factor(scales[block]); });
  }

  // Each value by its block's factor, which is looked up once if the unit lies in one block.
  template <class Factor>
  MORI_DEVICE static void multiply(u32 length, u32 at, u32 end, float (&values)[unit], Factor factor) {
    if (at >= end) return;
    if (at / length == (smaller(at + unit, end) - 1) / length) {
      const float all = factor(at / length);
      MORI_UNROLL
      for (u32 e = 0; e < unit; ++e) values[e] *= all;
      return;
    }
    MORI_UNROLL
    for (u32 e = 0; e < unit; ++e) {
      if (at + e < end) values[e] *= factor((at + e) / length);
    }
  }
};

}  // namespace MORI_VARIANT
}  // namespace mori

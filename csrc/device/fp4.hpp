// 4-bit floating point, e2m1: magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign. Rounds to nearest, ties to the even
// code; saturates at 6. There is no NaN to keep: one becomes -0 (code 8), as in ml_dtypes.
//
// Rows hold two elements per byte, so the codec's unit is a byte, and what a kernel adds up is a pair: the same kernel
// text serves `float` and `FloatPair`.
#pragma once

#include "small_float.hpp"

namespace mori {
inline namespace MORI_VARIANT {

struct FloatPair {
  float low, high;

  MORI_DEVICE FloatPair operator+(const FloatPair& other) const { return {low + other.low, high + other.high}; }
  MORI_DEVICE FloatPair operator*(float factor) const { return {low * factor, high * factor}; }
  // By members: g++ does not vectorise a loop that copies pairs as a whole.
  MORI_DEVICE FloatPair& operator+=(const FloatPair& other) {
    low += other.low;
    high += other.high;
    return *this;
  }
};

struct Fp4E2M1 {
  static constexpr float largest = 6.0f;

  MORI_DEVICE static float decode(u32 code) { return float_of_bits(Magnitude::widen(code & 7u) | (code & 8u) << 28); }
  MORI_DEVICE static u32 encode(float value) {
    const u32 bits = bits_of_float(value), magnitude = bits & 0x7fffffffu;
    const u32 nan = i32(magnitude) > 0x7f800000, sign = bits >> 28 & 8u;
    return (Magnitude::round(magnitude) + nan) | sign;  // -0 follows the largest code
  }

 private:
  using Magnitude = SmallFloat<1, 1, 0x40c00000>;
};

// The even element in the low nibble, the odd one in the high nibble.
struct Fp4E2M1Pair {
  using Stored = u8;
  using Value = FloatPair;

  MORI_DEVICE static FloatPair decode(Stored stored) {
#if defined(MORI_AMD_FP4_PAIRS)
    const auto values = __builtin_amdgcn_cvt_scalef32_pk_f32_fp4(stored, 1.0f, 0);
    return {values[0], values[1]};
#elif defined(MORI_AMD_FP4_EIGHTS)
    const auto values = __builtin_amdgcn_cvt_scale_pk8_f32_fp4(stored, 127u, 0);  // times 2^(127 - 127)
    return {values[0], values[1]};
#else
    return {Fp4E2M1::decode(stored & 15u), Fp4E2M1::decode(stored >> 4)};
#endif
  }
  MORI_DEVICE static Stored encode(const FloatPair& value) {
#if defined(MORI_AMD_FP4_PAIRS)
    return Stored(__builtin_amdgcn_cvt_scalef32_pk_fp4_f32(0u, bounded(value.low), bounded(value.high), 1.0f, 0));
#elif defined(MORI_AMD_FP4_EIGHTS)
    const float __attribute__((ext_vector_type(8))) eight = {bounded(value.low), bounded(value.high)};
    return Stored(__builtin_amdgcn_cvt_scalef32_pk8_fp4_f32(eight, 1.0f));
#else
    return Stored(Fp4E2M1::encode(value.low) | Fp4E2M1::encode(value.high) << 4);
#endif
  }

#if defined(MORI_AMD_FP4_PAIRS) || defined(MORI_AMD_FP4_EIGHTS)
 private:
  // What the instructions do with NaN and with what is too large does not matter then.
  MORI_DEVICE static float bounded(float value) {
    return value != value ? -0.0f : __builtin_amdgcn_fmed3f(value, -Fp4E2M1::largest, Fp4E2M1::largest);
  }
#endif
};

}  // namespace MORI_VARIANT
}  // namespace mori

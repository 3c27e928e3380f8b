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
    return {Fp4E2M1::decode(stored & 15u), Fp4E2M1::decode(stored >> 4)};
  }
  MORI_DEVICE static Stored encode(const FloatPair& value) {
    return Stored(Fp4E2M1::encode(value.low) | Fp4E2M1::encode(value.high) << 4);
  }
};

}  // namespace MORI_VARIANT
}  // namespace mori

// Conversions of the numeric contract: every target rounds alike, so results are bitwise equal everywhere.
// f32 arithmetic, round to nearest even, every NaN result is the canonical quiet NaN.
#pragma once

#include "base.hpp"

namespace mori {
inline namespace MORI_VARIANT {

#if defined(__CUDA_ARCH__)
MORI_DEVICE float float_of_bits(u32 bits) { return __uint_as_float(bits); }
MORI_DEVICE u32 bits_of_float(float value) { return __float_as_uint(value); }
#else
MORI_DEVICE float float_of_bits(u32 bits) { return __builtin_bit_cast(float, bits); }
MORI_DEVICE u32 bits_of_float(float value) { return __builtin_bit_cast(u32, value); }
#endif

// A codec turns stored elements into f32 and back. `Stored` is what lies in a row, `Value` what a kernel adds up for
// it: a float, or a FloatPair where two elements share a byte.
struct Float32 {
  using Stored = u32;
  using Value = float;
  MORI_DEVICE static float decode(Stored stored) { return float_of_bits(stored); }
  MORI_DEVICE static Stored encode(float value) {
    const u32 bits = bits_of_float(value);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits;
  }
};

struct BFloat16 {
  using Stored = u16;
  using Value = float;
  MORI_DEVICE static float decode(Stored stored) { return float_of_bits(u32(stored) << 16); }
  MORI_DEVICE static Stored encode(float value) {
#if defined(__CUDA_ARCH__)
    u16 stored;  // rounds alike, but for the NaN it makes
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(stored) : "f"(value));
    return value != value ? Stored(0x7fc0) : stored;
#elif defined(MORI_AMD_BFLOAT16)
    return value != value ? Stored(0x7fc0) : __builtin_bit_cast(Stored, static_cast<__bf16>(value));
#else
    const u32 bits = bits_of_float(value);
    const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;  // ties to even; overflows to infinity
    return Stored((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
#endif
  }
};

}  // namespace MORI_VARIANT
}  // namespace mori

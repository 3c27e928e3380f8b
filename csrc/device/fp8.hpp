// 8-bit floating point, both flavours of e4m3. Rounds to nearest, ties to even; what is too large, infinities too,
// becomes the largest finite value of its sign; every NaN becomes the flavour's canonical one.
#pragma once

#include "small_float.hpp"

namespace mori {
inline namespace MORI_VARIANT {

// OCP e4m3fn: up to 448, no infinities, NaN is 0x7f (0xff is one too).
struct Fp8E4M3 {
  using Stored = u8;
  using Value = float;
  static constexpr float largest = 448.0f;

  MORI_DEVICE static float decode(Stored stored) {
#if defined(__CUDA_ARCH__)
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(u16(stored)));
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(u16(halves)));
    return value != value ? float_of_bits(0x7fc00000u) : value;
#else
    const u32 code = stored & 0x7fu, sign = (stored & 0x80u) << 24;
    return float_of_bits(select_bits(code == 0x7fu, 0x7fc00000u, Magnitude::widen(code) | sign));
#endif
  }

  MORI_DEVICE static Stored encode(float value) {
#if defined(__CUDA_ARCH__)
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
    return Stored(pair);
#else
    const u32 bits = bits_of_float(value), magnitude = bits & 0x7fffffffu;
    const u32 nan = i32(magnitude) > 0x7f800000, sign = bits >> 24 & (nan - 1) & 0x80u;
    return Stored((Magnitude::round(magnitude) + nan) | sign);  // NaN follows the largest code
#endif
  }

 private:
  using Magnitude = SmallFloat<3, 7, 0x43e00000>;
};

// AMD's e4m3fnuz of gfx942: up to 240, no infinities, no -0; 0x80 is the only NaN.
struct Fp8E4M3Fnuz {
  using Stored = u8;
  using Value = float;
  static constexpr float largest = 240.0f;

  MORI_DEVICE static float decode(Stored stored) {
    const u32 code = stored & 0x7fu, sign = (stored & 0x80u) << 24;
    return float_of_bits(select_bits(stored == 0x80u, 0x7fc00000u, Magnitude::widen(code) | sign));
  }

  MORI_DEVICE static Stored encode(float value) {
    const u32 bits = bits_of_float(value), magnitude = bits & 0x7fffffffu;
    const u32 nan = i32(magnitude) > 0x7f800000, sign = bits >> 24 & 0x80u;
    const u32 code = Magnitude::round(magnitude);
    return Stored((code + nan) | ((code + 0x7fu) & sign));  // NaN follows the largest code; a zero loses its sign
  }

 private:
  using Magnitude = SmallFloat<3, 8, 0x43700000>;
};

}  // namespace MORI_VARIANT
}  // namespace mori

// 8-bit floating point, both flavours of e4m3. Rounds to nearest, ties to even; what is too large, infinities too,
// becomes the largest finite value of its sign; every NaN becomes the flavour's canonical one.
#pragma once

#include "small_float.hpp"

namespace mori {
inline namespace MORI_VARIANT {

#if defined(MORI_AMD_FP8_OCP) || defined(MORI_AMD_FP8_FNUZ)
// The instruction makes NaN of what is too large, unless a mode bit says otherwise: so nothing too large gets there.
MORI_DEVICE u32 amd_fp8(float value, float largest) {
  const float bounded = __builtin_amdgcn_fmed3f(value, -largest, largest);
  return u32(__builtin_amdgcn_cvt_pk_fp8_f32(bounded, bounded, 0, false));
}
#endif

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
#elif defined(MORI_AMD_FP8_OCP)
    const float value = __builtin_amdgcn_cvt_f32_fp8(stored, 0);
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
#elif defined(MORI_AMD_FP8_OCP)
    return value != value ? Stored(0x7f) : Stored(amd_fp8(value, largest));
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
#if defined(MORI_AMD_FP8_FNUZ)
    const float value = __builtin_amdgcn_cvt_f32_fp8(stored, 0);
    return value != value ? float_of_bits(0x7fc00000u) : value;
#else
    const u32 code = stored & 0x7fu, sign = (stored & 0x80u) << 24;
    return float_of_bits(select_bits(stored == 0x80u, 0x7fc00000u, Magnitude::widen(code) | sign));
#endif
  }

  MORI_DEVICE static Stored encode(float value) {
#if defined(MORI_AMD_FP8_FNUZ)
    return value != value ? Stored(0x80) : Stored(amd_fp8(value, largest));
#else
    const u32 bits = bits_of_float(value), magnitude = bits & 0x7fffffffu;
    const u32 nan = i32(magnitude) > 0x7f800000, sign = bits >> 24 & 0x80u;
    const u32 code = Magnitude::round(magnitude);
    return Stored((code + nan) | ((code + 0x7fu) & sign));  // NaN follows the largest code; a zero loses its sign
#endif
  }

 private:
  using Magnitude = SmallFloat<3, 8, 0x43700000>;
};

// What quantised rows travel in: ranks of one op have GPUs of one flavour.
#if defined(MORI_AMD_FP8_FNUZ)
using WireFp8 = Fp8E4M3Fnuz;
#else
using WireFp8 = Fp8E4M3;
#endif

}  // namespace MORI_VARIANT
}  // namespace mori

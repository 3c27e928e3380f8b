// Magnitudes of floating-point formats of at most 8 bits: integer arithmetic and one f32 addition, without branches and
// tables, so that a compiler vectorises it.
#pragma once

#include "numeric.hpp"

namespace mori {
inline namespace MORI_VARIANT {

// One of two words. With ?: g++ keeps a floating-point operation that only one side needs in a branch of its own, and
// then does not vectorise the loop around it.
MORI_DEVICE u32 select_bits(bool condition, u32 yes, u32 no) {
  const u32 mask = 0u - u32(condition);
  return (yes & mask) | (no & ~mask);
}

// A format without its sign: exponents biased by `bias`, subnormal numbers, and a largest finite value, given as f32
// bits. Codes count upwards with the magnitudes.
template <u32 mantissa_bits, u32 bias, i32 largest>
struct SmallFloat {
  static constexpr u32 shift = 23 - mantissa_bits;
  static constexpr i32 smallest_normal = i32(128 - bias) << 23;

  // The code of an f32 magnitude, to nearest, ties to even; saturates, also for infinity and NaN. The sum's last place
  // is one step of the result, so the adder rounds. Signed integers, for SSE2 has no other comparison.
  MORI_DEVICE static u32 round(u32 magnitude) {
    const i32 bounded = smaller(i32(magnitude), largest);
    const u32 anchor = (u32(larger(bounded, smallest_normal)) & 0x7f800000u) + (shift << 23);
    const u32 sum = bits_of_float(float_of_bits(u32(bounded)) + float_of_bits(anchor));
    return sum - anchor + (anchor >> shift) - ((shift + 128 - bias) << mantissa_bits);
  }

  // The f32 bits of a code, exactly. A subnormal one gets a leading one that is then subtracted.
  MORI_DEVICE static u32 widen(u32 code) {
    const u32 subnormal = 0u - u32(i32(code) < (1 << mantissa_bits));
    const u32 bits = (code << shift) + ((127 - bias) << 23) + (subnormal & (1u << 23));
    return bits_of_float(float_of_bits(bits) - float_of_bits(subnormal & u32(smallest_normal)));
  }
};

}  // namespace MORI_VARIANT
}  // namespace mori

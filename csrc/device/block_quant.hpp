// Block-wise quantisation of bf16 rows: each block of a row gets an f32 scale, and its elements are stored in few bits.
//
//   sender    reduce block_magnitude() by integer maximum; scale = fp8_block_scale() or fp4_block_scale();
//             stored = Codec::encode(x * scale.factor)
//   receiver  is_scaled(scale[0]) ? Codec::decode(stored) * block_factor(scale[block]) : Codec::decode(stored)
//
// The sign of a token's first scale says whether any of its blocks was scaled; if none was, all scales are one. The
// maximum passes over NaN, which stays NaN in fp8. An infinity makes its block's scale infinite and so, at the
// receiver, every element of the block NaN.
#pragma once

#include "numeric.hpp"

namespace mori {
inline namespace MORI_VARIANT {

struct BlockScale {
  float scale;   // what the receiver multiplies by
  float factor;  // what the sender multiplies by
  bool scaled;
};

// |x| of a stored bf16 as f32 bits, which order as the magnitudes do; 0 for NaN.
MORI_DEVICE u32 block_magnitude(u16 stored) {
  const u32 magnitude = stored & 0x7fffu;
  return (magnitude > 0x7f80u ? 0u : magnitude) << 16;
}

// A block that fits is stored as it is: only blocks beyond the format's largest value are scaled.
template <class Codec>
MORI_DEVICE BlockScale fp8_block_scale(u32 magnitude) {
  const float m = float_of_bits(magnitude);
  if (m > Codec::largest) return {m / Codec::largest, Codec::largest / m, true};
  return {1.0f, 1.0f, false};
}

// Every block is scaled to the format's range; one of zeros has scale one, and its elements become zeros.
template <class Codec>
MORI_DEVICE BlockScale fp4_block_scale(u32 magnitude) {
  const float m = float_of_bits(magnitude);
  if (magnitude == 0) return {1.0f, 0.0f, true};
  return {m / Codec::largest, Codec::largest / m, true};
}

// The first scale as it is sent.
MORI_DEVICE float first_scale(float scale, bool any_scaled) { return any_scaled ? -scale : scale; }

MORI_DEVICE bool is_scaled(float first_scale) { return first_scale < 0.0f; }

// What the receiver multiplies by, of any scale as it was sent.
MORI_DEVICE float block_factor(float scale) { return float_of_bits(bits_of_float(scale) & 0x7fffffffu); }

}  // namespace MORI_VARIANT
}  // namespace mori

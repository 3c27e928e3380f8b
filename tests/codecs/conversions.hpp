// The codecs over arrays, one text for every target. tests/codecs/conversions.py adds entry points, and numbers the
// conversions in the order of `convert` below.
#include "device/block_quant.hpp"
#include "device/fp4.hpp"
#include "device/fp8.hpp"

namespace conversions {

using namespace mori;

template <class Codec>
struct Decode {
  using From = typename Codec::Stored;
  using To = typename Codec::Value;
  MORI_DEVICE static To apply(From stored) { return Codec::decode(stored); }
};

template <class Codec>
struct Encode {
  using From = typename Codec::Value;
  using To = typename Codec::Stored;
  MORI_DEVICE static To apply(From value) { return Codec::encode(value); }
};

// The scale of a block whose maximum is that of one bf16, as three floats.
struct Scale {
  float scale, factor, scaled;
};

template <class Codec>
struct Fp8Scale {
  using From = u16;
  using To = Scale;
  MORI_DEVICE static To apply(From stored) {
    const BlockScale found = fp8_block_scale<Codec>(block_magnitude(stored));
    return {found.scale, found.factor, found.scaled ? 1.0f : 0.0f};
  }
};

struct Fp4Scale {
  using From = u16;
  using To = Scale;
  MORI_DEVICE static To apply(From stored) {
    const BlockScale found = fp4_block_scale<Fp4E2M1>(block_magnitude(stored));
    return {found.scale, found.factor, found.scaled ? 1.0f : 0.0f};
  }
};

template <class Conversion>
MORI_DEVICE void each(const void* from, void* to, u64 begin, u64 count, u64 stride) {
  for (u64 i = begin; i < count; i += stride) {
    static_cast<typename Conversion::To*>(to)[i] =
        Conversion::apply(static_cast<const typename Conversion::From*>(from)[i]);
  }
}

MORI_DEVICE void convert(u64 which, const void* from, void* to, u64 begin, u64 count, u64 stride) {
  switch (which) {
    case 0: return each<Decode<Float32>>(from, to, begin, count, stride);
    case 1: return each<Encode<Float32>>(from, to, begin, count, stride);
    case 2: return each<Decode<BFloat16>>(from, to, begin, count, stride);
    case 3: return each<Encode<BFloat16>>(from, to, begin, count, stride);
    case 4: return each<Decode<Fp8E4M3>>(from, to, begin, count, stride);
    case 5: return each<Encode<Fp8E4M3>>(from, to, begin, count, stride);
    case 6: return each<Decode<Fp8E4M3Fnuz>>(from, to, begin, count, stride);
    case 7: return each<Encode<Fp8E4M3Fnuz>>(from, to, begin, count, stride);
    case 8: return each<Decode<Fp4E2M1Pair>>(from, to, begin, count, stride);
    case 9: return each<Encode<Fp4E2M1Pair>>(from, to, begin, count, stride);
    case 10: return each<Fp8Scale<Fp8E4M3>>(from, to, begin, count, stride);
    case 11: return each<Fp8Scale<Fp8E4M3Fnuz>>(from, to, begin, count, stride);
    case 12: return each<Fp4Scale>(from, to, begin, count, stride);
  }
}

}  // namespace conversions

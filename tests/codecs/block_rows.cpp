// Rows through block-wise quantisation, as csrc/device/block_quant.hpp says that a sender and a receiver do it. A code
// fills a byte here, also one of four bits.
#include "device/block_quant.hpp"
#include "device/fp4.hpp"
#include "device/fp8.hpp"

namespace {

using namespace mori;

template <class Codec, class ScaleOf>
void send(const u16* row, u32 hidden, u32 block, u32 blocks, float* scales, u8* codes, ScaleOf scale_of) {
  bool any_scaled = false;
  for (u32 b = 0; b < blocks; ++b) {
    const u32 begin = smaller(b * block, hidden), end = smaller(begin + block, hidden);
    u32 magnitude = 0;
    for (u32 i = begin; i < end; ++i) magnitude = larger(magnitude, block_magnitude(row[i]));
    const BlockScale scale = scale_of(magnitude);
    for (u32 i = begin; i < end; ++i) codes[i] = u8(Codec::encode(BFloat16::decode(row[i]) * scale.factor));
    scales[b] = scale.scale;
    any_scaled |= scale.scaled;
  }
  scales[0] = first_scale(scales[0], any_scaled);
}

template <class Codec>
void receive(const float* scales, const u8* codes, u32 hidden, u32 block, float* values) {
  for (u32 i = 0; i < hidden; ++i) {
    const float value = Codec::decode(codes[i]);
    values[i] = is_scaled(scales[0]) ? value * block_factor(scales[i / block]) : value;
  }
}

template <class Codec, class ScaleOf>
void pass(const u16* rows, u32 count, u32 hidden, u32 block, u32 blocks, float* scales, u8* codes, float* values,
          ScaleOf scale_of) {
  for (u64 row = 0; row < count; ++row) {
    float* own = scales + row * blocks;
    send<Codec>(rows + row * hidden, hidden, block, blocks, own, codes + row * hidden, scale_of);
    receive<Codec>(own, codes + row * hidden, hidden, block, values + row * hidden);
  }
}

}  // namespace

#define FORMAT(name, codec, scale_of)                                                                                  \
  extern "C" void pass_##name(const u16* rows, u32 count, u32 hidden, u32 block, u32 blocks, float* scales, u8* codes, \
                              float* values) {                                                                         \
    pass<codec>(rows, count, hidden, block, blocks, scales, codes, values, [](u32 m) { return scale_of<codec>(m); });  \
  }
FORMAT(e4m3fn, Fp8E4M3, fp8_block_scale)
FORMAT(e4m3fnuz, Fp8E4M3Fnuz, fp8_block_scale)
FORMAT(e2m1fn, Fp4E2M1, fp4_block_scale)

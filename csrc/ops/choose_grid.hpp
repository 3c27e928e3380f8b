// The grid of a call on a GPU: results never depend on it, times do.
#pragma once

#include "../layout/ep_layout.hpp"

namespace mori {

struct Grid {
  u32 blocks;
  u32 warps;    // per block
  u32 parts;    // work items per token: a row is split over warps when tokens are few
  u32 stagers;  // blocks of a combine that stage rows for the peers
};

constexpr u32 most_warps = 16;  // the kernels are compiled for so many

// `block_num` and `warps` are upper bounds; 0 or less leaves the choice open.
Grid choose_grid(u32 tokens, u32 row_bytes, int block_num, int warps, u32 multiprocessors, u32 lanes);

}  // namespace mori

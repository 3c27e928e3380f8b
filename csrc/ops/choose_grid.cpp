#include "choose_grid.hpp"

namespace mori {
namespace {

constexpr u32 many_tokens = 256;  // from here on a GPU is full whatever the rows are
constexpr u32 warps_for_few = 8;  // with few tokens, more and smaller blocks start sooner
// A vector for each lane of a warp: the shortest code, and no load waits for another.
constexpr u32 smallest_part_bytes = 512;

// One block of so many stages rows for the peers: many rows leave them time to be ahead of the fetching, and copying
// inside a GPU is several times faster than fetching from another. Measured in benchmarks/NOTES.md.
u32 blocks_per_stager(u32 tokens) { return tokens >= 1024 ? 6 : tokens >= many_tokens ? 3 : 2; }

u32 most_parts(u32 row_bytes, u32 smallest_bytes) { return larger<u32>(1, row_bytes / smallest_bytes); }

}  // namespace

u32 parts_of(u32 tokens, u32 row_bytes, u32 workers, u32 smallest_bytes) {
  if (tokens == 0 || tokens >= workers) return 1;
  return smaller<u32>(most_parts(row_bytes, smallest_bytes), u32(divide_up(workers, tokens)));
}

Grid choose_grid(u32 tokens, u32 row_bytes, int block_num, int warps, u32 multiprocessors) {
  Grid grid{};
  const u32 wanted = tokens >= many_tokens ? most_warps : warps_for_few;
  grid.warps = warps > 0 ? smaller(u32(warps), wanted) : wanted;
  const u32 resident = smaller(multiprocessors, max_blocks);
  const u32 bound = block_num > 0 ? smaller(u32(block_num), resident) : resident;
  const u64 useful = divide_up(u64(tokens) * most_parts(row_bytes, smallest_part_bytes), grid.warps);
  grid.blocks = u32(larger<u64>(1, smaller<u64>(useful, bound)));
  grid.parts = parts_of(tokens, row_bytes, grid.blocks * grid.warps, smallest_part_bytes);
  grid.stagers = u32(divide_up(grid.blocks, blocks_per_stager(tokens)));
  return grid;
}

}  // namespace mori

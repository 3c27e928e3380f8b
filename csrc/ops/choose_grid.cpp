#include "choose_grid.hpp"

namespace mori {
namespace {

constexpr u32 many_tokens = 256;  // from here on a GPU is full whatever the rows are
constexpr u32 warps_for_few = 8;  // with few tokens, more and smaller blocks start sooner
// The smallest part of a row has a vector for each lane of a warp: the shortest code, and no load waits for another.
constexpr u32 vector_bytes = 16;

// Few rows are staged by all blocks. Many leave the stagers time to be ahead of the fetching, for copying inside a GPU
// is several times faster than fetching from another. Measured in benchmarks/NOTES.md.
constexpr u32 most_blocks_per_stager = 6;

u32 stagers_of(u32 blocks, u32 tokens) {
  const u32 shared = tokens <= many_tokens ? blocks : blocks * many_tokens / tokens;
  return larger(shared, u32(divide_up(blocks, most_blocks_per_stager)));
}

}  // namespace

Grid choose_grid(u32 tokens, u32 row_bytes, int block_num, int warps, u32 multiprocessors, u32 lanes) {
  Grid grid{};
  const u32 wanted = tokens >= many_tokens ? most_warps : warps_for_few;
  grid.warps = warps > 0 ? smaller(u32(warps), wanted) : wanted;
  const u32 resident = smaller(multiprocessors, max_blocks);
  const u32 bound = block_num > 0 ? smaller(u32(block_num), resident) : resident;
  // A dispatch has an item more per token than a row has parts. Every warp should have one: a second round costs more
  // than smaller parts gain.
  const u32 most_parts = larger<u32>(1, row_bytes / (vector_bytes * lanes));
  const u64 useful = divide_up(u64(tokens) * (most_parts + 1), grid.warps);
  grid.blocks = u32(larger<u64>(1, smaller<u64>(useful, bound)));
  const u32 items = tokens == 0 ? 0 : grid.blocks * grid.warps / tokens;
  grid.parts = items < 2 ? 1 : smaller(most_parts, items - 1);
  grid.stagers = stagers_of(grid.blocks, tokens);
  return grid;
}

}  // namespace mori

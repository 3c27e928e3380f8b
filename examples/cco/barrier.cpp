// Every block goes through a barrier `rounds` times with the same block of all other ranks. In each round it leaves its
// count in memory of all ranks before the barrier and reads theirs behind it.
#include <mori/cco.hpp>

using namespace mori;
using namespace mori::cco;

struct Arguments {
  const ccoDevComm* comm;
  ccoWindow_t window;  // u32 of [2][blocks][ranks], then u32 of [blocks]: wrong counts that the block has read
  u32 rounds;
};

CCO_KERNEL(count_rounds, Arguments) {
  const ccoDevComm& comm = *arguments.comm;
  const u32 me = comm.lsaRank, ranks = comm.lsaSize, block = grid.block(), blocks = grid.blocks();
  u32* const wrong = static_cast<u32*>(ccoLocalPtr(arguments.window)) + 2 * blocks * ranks + block;
  ccoLsaBarrierSession<ccoCoopBlock> barrier({}, &comm, ccoTeamLsa(comm), comm.lsaBarrier, block);
  u32 mistakes = 0;
  for (u32 round = 0; round < arguments.rounds; ++round) {
    // Two places that take turns: a rank that is a round ahead writes to the other one.
    const u64 place = (round % 2 * blocks + block) * ranks * sizeof(u32);
    for (u32 peer = grid.thread(); peer < ranks; peer += grid.threads()) {
      static_cast<u32*>(ccoLsaPtr(arguments.window, peer, place))[me] = round + 1;
    }
    if (barrier.sync({}) != 0) {
      mistakes += 1;  // a rank has ended
      break;
    }
    if (grid.thread() == 0) {
      const u32* counts = static_cast<const u32*>(ccoLocalPtr(arguments.window, place));
      for (u32 peer = 0; peer < ranks; ++peer) mistakes += counts[peer] != round + 1;
    }
  }
  if (grid.thread() == 0) *wrong = mistakes;
}

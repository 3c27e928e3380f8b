// Every rank stores its values into a place of its own on every rank.
#include <mori/cco.hpp>

using namespace mori;
using namespace mori::cco;

struct Arguments {
  const ccoDevComm* comm;
  ccoWindow_t source;   // u32 of [count]
  ccoWindow_t landing;  // u32 of [ranks][count]
  u64 count;
};

CCO_KERNEL(put, Arguments) {
  const ccoDevComm& comm = *arguments.comm;
  const u32* source = static_cast<const u32*>(ccoLocalPtr(arguments.source));
  const u64 offset = comm.lsaRank * arguments.count * sizeof(u32);
  const u64 first = u64(grid.block()) * grid.threads() + grid.thread(), step = u64(grid.blocks()) * grid.threads();
  for (u32 turn = 0; turn < comm.lsaSize; ++turn) {
    const u32 peer = (comm.lsaRank + turn) % comm.lsaSize;  // so that not all ranks write to one at a time
    u32* landing = static_cast<u32*>(ccoLsaPtr(arguments.landing, peer, offset));
    for (u64 i = first; i < arguments.count; i += step) landing[i] = source[i];
  }
  // Each block waits for the blocks of its number, so what this rank's blocks together return from covers all of them.
  ccoLsaBarrierSession<ccoCoopBlock> barrier({}, &comm, ccoTeamLsa(comm), comm.lsaBarrier, grid.block());
  barrier.sync({});
}

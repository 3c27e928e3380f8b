// What the tests launch. COOP is who takes part in a barrier: every group has an index of its own.
#include <mori/cco.hpp>

using namespace mori;
using namespace mori::cco;

#ifndef COOP
#define COOP ccoCoopBlock
#endif

struct Arguments {
  const ccoDevComm* comm;
  ccoWindow_t data;   // u32 of [2][groups][ranks]
  ccoWindow_t marks;  // u32 of [groups][2]: what went wrong, then what the last wait returned
  u64 cycles;         // 0: waits have no limit
  u32 rounds;
  u32 split;
  u32 hybrid;
};

CCO_KERNEL(barriers, Arguments) {
  const ccoDevComm& comm = *arguments.comm;
  COOP coop;
  const u32 per_block = grid.threads() / coop.size(), groups = grid.blocks() * per_block;
  const u32 group = grid.block() * per_block + grid.thread() / coop.size();
  const ccoLsaBarrierHandle& handle = arguments.hybrid ? comm.hybridLsaBarrier : comm.lsaBarrier;
  ccoLsaBarrierSession<COOP> barrier(coop, &comm, ccoTeamLsa(comm), handle, group);
  u32 wrong = 0;
  int missing = 0;
  for (u32 round = 1; round <= arguments.rounds && missing == 0; ++round) {
    const u64 place = (u64(round % 2) * groups + group) * comm.lsaSize * sizeof(u32);
    for (u32 peer = coop.thread_rank(); peer < comm.lsaSize; peer += coop.size()) {
      static_cast<u32*>(ccoLsaPtr(arguments.data, peer, place))[comm.lsaRank] = round;
    }
    if (arguments.split) {
      barrier.arrive(coop);
      for (u32 i = 0; i < round % 7; ++i) ccoRelax(i);
      missing = arguments.cycles != 0 ? barrier.wait(coop, arguments.cycles) : barrier.wait(coop);
    } else {
      missing = arguments.cycles != 0 ? barrier.sync(coop, arguments.cycles) : barrier.sync(coop);
    }
    if (missing != 0) break;
    const u32* counts = static_cast<const u32*>(ccoLocalPtr(arguments.data, place));
    for (u32 peer = 0; peer < comm.lsaSize; ++peer) wrong += counts[peer] != round;
  }
  wrong = coop.any(wrong != 0);
  if (coop.thread_rank() == 0) {
    u32* mark = static_cast<u32*>(ccoLocalPtr(arguments.marks)) + 2 * group;
    mark[0] = wrong;
    mark[1] = u32(missing);
  }
}

struct Question {
  const ccoDevComm* comm;
  const void* address;
  u64* answers;  // window of the address, its peer 0 at offset 8, whether the descriptor is ours, facts
};

CCO_KERNEL(look_up, Question) {
  const ccoDevComm& comm = *arguments.comm;
  if (grid.block() != 0 || grid.thread() != 0) return;
  const ccoWindow_t window = findWindow(&comm, arguments.address);
  arguments.answers[0] = reinterpret_cast<u64>(window);
  arguments.answers[1] = window != nullptr ? reinterpret_cast<u64>(ccoLsaPtr(window, 0, 8)) : 0;
  arguments.answers[2] = ccoIsCompatible(comm);
  const u64 facts[] = {comm.rank,     comm.worldSize,   comm.lsaRank,
                       comm.lsaSize,  comm.myNodeStart, comm.gdaConnType,
                       comm.flatBase, comm.perRankSize, comm.lsaBarrier.nBarriers,
                       comm.hybridLsaBarrier.nBarriers};
  for (u32 i = 0; i < sizeof facts / sizeof facts[0]; ++i) arguments.answers[3 + i] = facts[i];
}

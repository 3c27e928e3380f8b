// Sum over ranks, in ascending order of rank: each block adds up its share of the elements for all ranks.
#include <mori/cco.hpp>

using namespace mori;
using namespace mori::cco;

struct Arguments {
  const ccoDevComm* comm;
  ccoWindow_t values;  // f32 of [count]; the sums take their place
  u64 count;
};

CCO_KERNEL(all_reduce, Arguments) {
  const ccoDevComm& comm = *arguments.comm;
  const u32 ranks = comm.lsaSize;
  ccoLsaBarrierSession<ccoCoopBlock> barrier({}, &comm, ccoTeamLsa(comm), comm.lsaBarrier, grid.block());
  barrier.sync({});  // earlier work on every rank's stream has made the values
  // Of every `ranks` times `blocks` pieces this block of this rank has one; nobody else reads or writes it.
  const u64 pieces = u64(ranks) * grid.blocks(), piece = u64(comm.lsaRank) * grid.blocks() + grid.block();
  const u64 begin = arguments.count * piece / pieces, end = arguments.count * (piece + 1) / pieces;
  for (u64 i = begin + grid.thread(); i < end; i += grid.threads()) {
    float sum = 0;
    for (u32 peer = 0; peer < ranks; ++peer) sum += static_cast<const float*>(ccoLsaPtr(arguments.values, peer))[i];
    for (u32 peer = 0; peer < ranks; ++peer) static_cast<float*>(ccoLsaPtr(arguments.values, peer))[i] = sum;
  }
  barrier.sync({});
}

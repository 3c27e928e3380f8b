#include "../device/target_host.hpp"
#include "../kernels/combine.hpp"
#include "../kernels/dispatch.hpp"
#include "launcher.hpp"

namespace mori {

u64 scratch_bytes(KernelId kernel, const EpShape& shape, u32 warps) {
  const u64 dispatch = DispatchScratch::bytes(shape.world_size, warps);
  const u64 pack = Packer<HostTarget>::scratch_bytes(shape.experts_per_rank, shape.topk, warps);
  switch (kernel) {
    case KernelId::dispatch:
    case KernelId::dispatch_replay: return dispatch;
    case KernelId::dispatch_packed: return dispatch + pack;
    case KernelId::pack: return pack;
    default: return CombineScratch::bytes(shape.world_size, shape.topk, warps);
  }
}

}  // namespace mori

// One kernel as AMD's driver loads it: the one that MORI_KERNEL names. Compiled at first use, or ahead of time, by mori.jit.
#include "../device/target_hip.hpp"
#include "../kernels/kernels.hpp"

#ifndef MORI_KERNEL
#define MORI_KERNEL dispatch
#endif
#define MORI_JOIN_(a, b) a##b
#define MORI_JOIN(a, b) MORI_JOIN_(a, b)

using MoriArgs = mori::KernelOf<mori::HipTarget, mori::KernelId::MORI_KERNEL>::Args;
constexpr int most_threads = 16 * mori::HipTarget::lanes;

extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(mori::HipTarget::lanes, most_threads))) void
MORI_JOIN(mori_, MORI_KERNEL)(const MoriArgs args) {
  mori::HipTarget target;
  mori::run_kernel<mori::HipTarget, mori::KernelId::MORI_KERNEL>(target, args);
}

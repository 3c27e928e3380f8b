// One kernel as the NVIDIA driver loads it: the one that MORI_KERNEL names. Compiled at first use by mori.jit.
#include "../device/target_cuda.hpp"
#include "../kernels/kernels.hpp"

#ifndef MORI_KERNEL
#define MORI_KERNEL dispatch
#endif
#define MORI_JOIN_(a, b) a##b
#define MORI_JOIN(a, b) MORI_JOIN_(a, b)

using MoriArgs = mori::KernelOf<mori::CudaTarget, mori::KernelId::MORI_KERNEL>::Args;

extern "C" __global__ void __launch_bounds__(512, 1) MORI_JOIN(mori_, MORI_KERNEL)(const __grid_constant__ MoriArgs args) {
  mori::CudaTarget target;
  mori::run_kernel<mori::CudaTarget, mori::KernelId::MORI_KERNEL>(target, args);
}

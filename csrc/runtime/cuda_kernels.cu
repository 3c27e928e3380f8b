// The kernels as the NVIDIA driver loads them. Compiled at first use by mori.jit; one launch struct per kernel.
#include "../device/target_cuda.hpp"
#include "../kernels/combine.hpp"
#include "../kernels/dispatch.hpp"

extern "C" __global__ void __launch_bounds__(512, 1) mori_dispatch(const __grid_constant__ mori::DispatchArgs args) {
  mori::CudaTarget target;
  mori::Dispatch<mori::CudaTarget>(target, args).run();
}

extern "C" __global__ void __launch_bounds__(512, 1) mori_combine_f32(const __grid_constant__ mori::CombineArgs args) {
  mori::CudaTarget target;
  mori::Combine<mori::CudaTarget, mori::Float32>(target, args).run();
}

extern "C" __global__ void __launch_bounds__(512, 1) mori_combine_bf16(const __grid_constant__ mori::CombineArgs args) {
  mori::CudaTarget target;
  mori::Combine<mori::CudaTarget, mori::BFloat16>(target, args).run();
}

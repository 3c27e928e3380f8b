#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "../device/target_host.hpp"
#include "../kernels/combine.hpp"
#include "../kernels/dispatch.hpp"
#include "../runtime/driver_cuda.hpp"
#include "launcher.hpp"

namespace mori {
namespace {

constexpr u32 wave = 32;
constexpr u32 kernel_count = u32(KernelId::count);
constexpr const char* kernel_names[kernel_count] = {"mori_dispatch", "mori_combine_f32", "mori_combine_bf16"};

struct Kernels {
  cuda::Function function[kernel_count];
  u32 scratch_bytes;  // dynamic shared memory that each of them may use
};

Kernels load(const cuda::Gpu& gpu, const std::string& cubin) {
  const cuda::ContextGuard current(gpu);
  const cuda::RelaxedCapture relaxed;
  cuda::Module module = nullptr;
  cuda::call(MORI_CUDA(cuModuleLoadData), &module, static_cast<const void*>(cubin.data()));
  Kernels kernels{{}, gpu.shared_memory_bytes};
  for (u32 id = 0; id < kernel_count; ++id) {
    cuda::call(MORI_CUDA(cuModuleGetFunction), &kernels.function[id], module, kernel_names[id]);
    // Asking makes the driver load the code now. Left to the first launch it might wait for kernels that wait for
    // peers.
    int static_bytes = 0;
    cuda::call(MORI_CUDA(cuFuncGetAttribute), &static_bytes, cuda::function_shared_bytes, kernels.function[id]);
    kernels.scratch_bytes = smaller(kernels.scratch_bytes, gpu.shared_memory_bytes - u32(static_bytes));
  }
  for (const cuda::Function function : kernels.function) {
    cuda::call(MORI_CUDA(cuFuncSetAttribute), function, cuda::function_max_dynamic_shared_bytes,
               int(kernels.scratch_bytes));
  }
  return kernels;
}

// Modules are kept until the process ends: a captured graph may outlive the op that it was captured from.
const Kernels& loaded(int ordinal, const std::string& cubin) {
  static auto* const modules = new std::map<std::pair<int, std::string>, Kernels>;
  static auto* const mutex = new std::mutex;
  const std::lock_guard lock(*mutex);
  const auto key = std::make_pair(ordinal, cubin);
  const auto found = modules->find(key);
  return found != modules->end() ? found->second : modules->emplace(key, load(cuda::gpu(ordinal), cubin)).first->second;
}

class CudaLauncher final : public Launcher {
 public:
  CudaLauncher(int ordinal, const std::string& cubin, const EpShape& shape)
      : gpu_(cuda::gpu(ordinal)), kernels_(loaded(ordinal, cubin)), warps_(most_warps) {
    while (warps_ > 0 && scratch(shape, warps_) > kernels_.scratch_bytes) --warps_;
    if (warps_ == 0) {
      throw std::invalid_argument("world_size " + std::to_string(shape.world_size) + " and topk " +
                                  std::to_string(shape.topk) + " need " + std::to_string(scratch(shape, 1)) +
                                  " bytes of shared memory per block, the GPU has " +
                                  std::to_string(kernels_.scratch_bytes) + ": use fewer ranks");
    }
  }

  bool synchronous() const override { return false; }
  Grid grid(u32 tokens, u32 row_bytes, int block_num, int warps) const override {
    const int bound = warps_ == most_warps ? warps : int(smaller(warps > 0 ? u32(warps) : warps_, warps_));
    return choose_grid(tokens, row_bytes, block_num, bound, gpu_.multiprocessors);
  }
  bool streams(u64) const override { return false; }  // the kernels decide
  void run(KernelId kernel, const void* args, const Grid& grid, u64 scratch_bytes, u64 stream) override {
    const cuda::ContextGuard current(gpu_);
    void* parameters[] = {const_cast<void*>(args)};
    cuda::call(MORI_CUDA(cuLaunchKernel), kernels_.function[u32(kernel)], grid.blocks, 1u, 1u, grid.warps * wave, 1u,
               1u, u32(scratch_bytes), cuda::stream_of(stream), &parameters[0], nullptr);
  }
  bool capturing(u64 stream) const override {
    const cuda::ContextGuard current(gpu_);
    return cuda::is_capturing(stream);
  }
  std::string description() const override { return gpu_.name; }

 private:
  static u64 scratch(const EpShape& shape, u32 warps) {
    return larger(DispatchScratch::bytes(shape.world_size, warps),
                  CombineScratch::bytes(shape.world_size, shape.topk, warps));
  }

  const cuda::Gpu& gpu_;
  const Kernels& kernels_;
  u32 warps_;  // that fit into a block with their scratch memory
};

}  // namespace

std::shared_ptr<Launcher> make_cuda_launcher(int ordinal, const std::string& cubin, const EpShape& shape) {
  return std::make_shared<CudaLauncher>(ordinal, cubin, shape);
}

}  // namespace mori

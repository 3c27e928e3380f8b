#include <map>
#include <mutex>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "../runtime/gpu_driver.hpp"
#include "launcher.hpp"

namespace mori {
namespace {

constexpr u32 kernel_count = u32(KernelId::count);
#define MORI_KERNEL_SYMBOL(name, ...) "mori_" #name,
constexpr const char* kernel_symbols[kernel_count] = {MORI_KERNEL_TABLE(MORI_KERNEL_SYMBOL)};

// Modules are kept until the process ends: a captured graph may outlive the op that it was captured from.
gpu::Function loaded(const gpu::Gpu& gpu, KernelId kernel, const std::string& code) {
  static auto* const functions = new std::map<std::tuple<const gpu::Gpu*, KernelId, std::string>, gpu::Function>;
  static auto* const mutex = new std::mutex;
  const std::lock_guard lock(*mutex);
  const auto [place, is_new] = functions->try_emplace({&gpu, kernel, code}, nullptr);
  if (is_new) {
    try {
      place->second = gpu::load_function(gpu, kernel_symbols[u32(kernel)], code);
    } catch (...) {
      functions->erase(place);
      throw;
    }
  }
  return place->second;
}

class GpuLauncher final : public Launcher {
 public:
  GpuLauncher(const gpu::Gpu& gpu, const EpShape& shape) : gpu_(gpu), warps_(most_warps) {
    while (warps_ > 0 && scratch(shape, warps_) > gpu_.block_memory_bytes) --warps_;
    if (warps_ == 0) {
      throw std::invalid_argument("world_size " + std::to_string(shape.world_size) + " and topk " +
                                  std::to_string(shape.topk) + " need " + std::to_string(scratch(shape, 1)) +
                                  " bytes of shared memory per block, the GPU has " +
                                  std::to_string(gpu_.block_memory_bytes) + ": use fewer ranks");
    }
  }

  void load(KernelId kernel, const std::string& code) override { functions_[u32(kernel)] = loaded(gpu_, kernel, code); }
  bool synchronous() const override { return false; }
  Grid grid(u32 tokens, u32 row_bytes, int block_num, int warps) const override {
    const int bound = warps_ == most_warps ? warps : int(smaller(warps > 0 ? u32(warps) : warps_, warps_));
    return choose_grid(tokens, row_bytes, block_num, bound, gpu_.multiprocessors, gpu_.lanes);
  }
  bool streams(u64) const override { return false; }  // the kernels decide
  void run(KernelId kernel, const void* args, const Grid& grid, u64 scratch_bytes, u64 stream) override {
    if (scratch_bytes > gpu_.block_memory_bytes) {
      throw std::invalid_argument("this op's experts per rank and topk need " + std::to_string(scratch_bytes) +
                                  " bytes of shared memory per block for standard-MoE layouts, the GPU has " +
                                  std::to_string(gpu_.block_memory_bytes) + ": use fewer experts per rank");
    }
    const gpu::DeviceGuard current(gpu_);
    void* parameters[] = {const_cast<void*>(args)};
    gpu_.driver.call(gpu_.driver.launch, functions_[u32(kernel)], grid.blocks, 1u, 1u, grid.warps * gpu_.lanes, 1u, 1u,
                     u32(scratch_bytes), gpu::stream_of(stream), &parameters[0], nullptr);
  }
  bool capturing(u64 stream) const override {
    const gpu::DeviceGuard current(gpu_);
    return gpu::is_capturing(gpu_.driver, stream);
  }
  std::string description() const override { return gpu_.name; }

 private:
  static u64 scratch(const EpShape& shape, u32 warps) {
    return larger(mori::scratch_bytes(KernelId::dispatch, shape, warps),
                  mori::scratch_bytes(KernelId::combine_bf16, shape, warps));
  }

  const gpu::Gpu& gpu_;
  gpu::Function functions_[kernel_count] = {};
  u32 warps_;  // that fit into a block with their scratch memory
};

}  // namespace

std::shared_ptr<Launcher> make_gpu_launcher(const std::string& api, int ordinal, const EpShape& shape) {
  return std::make_shared<GpuLauncher>(gpu::gpu(gpu::api_of(api), ordinal), shape);
}

}  // namespace mori

// How a plan gets its kernels run: by threads of this process, or by a GPU.
#pragma once

#include <memory>
#include <string>

#include "../cco/symmetric_memory.hpp"
#include "../kernels/table.hpp"
#include "../layout/launch.hpp"
#include "choose_grid.hpp"

namespace mori {

class Launcher {
 public:
  virtual ~Launcher() = default;

  // Makes a kernel ready to run, from a code object on a GPU. A kernel is loaded before it is first run, also while the
  // calling thread captures a graph.
  virtual void load(KernelId kernel, const std::string& code) = 0;
  // Whether a call has ended when run() returns.
  virtual bool synchronous() const = 0;
  // The grid of a call; block_num and warps are what the caller asked for, 0 or less: anything.
  virtual Grid grid(u32 tokens, u32 row_bytes, int block_num, int warps) const = 0;
  // Whether rows of so many bytes in all should bypass the caches.
  virtual bool streams(u64 bytes) const = 0;
  // `args` is the launch struct of the kernel, copied before run() returns.
  virtual void run(KernelId kernel, const void* args, const Grid& grid, u64 scratch_bytes, u64 stream) = 0;
  virtual bool capturing(u64 stream) const = 0;
  virtual std::string description() const = 0;
};

struct HostOptions {
  std::string isa = "auto";
  unsigned threads = 1;
  u64 spin_ns = 20'000;
};
std::shared_ptr<Launcher> make_host_launcher(const HostOptions& options);

// For GPU `ordinal` of "cuda" or "hip".
std::shared_ptr<Launcher> make_gpu_launcher(const std::string& api, int ordinal, const EpShape& shape);

// Scratch memory that a block of so many warps needs.
u64 scratch_bytes(KernelId kernel, const EpShape& shape, u32 warps);

}  // namespace mori

// A persistent pool of threads that runs one kernel at a time: the host's stand-in for a GPU grid.
#pragma once

#include <cstddef>
#include <memory>

#include "../device/target_host.hpp"
#include "host_variant.hpp"

namespace mori {

class HostGrid {
 public:
  // `spin_ns`: how long a waiting thread polls before it sleeps.
  HostGrid(mori_host::Variant variant, unsigned threads, u64 spin_ns);
  ~HostGrid();
  HostGrid(const HostGrid&) = delete;
  HostGrid& operator=(const HostGrid&) = delete;

  unsigned threads() const;
  const char* variant_name() const;

  // Runs the kernel on all threads, the caller being thread 0, and returns when all have finished.
  void run(unsigned kernel, const void* args, std::size_t scratch_bytes);

 private:
  struct Pool;
  std::unique_ptr<Pool> pool_;
  int owner_pid_;
};

}  // namespace mori

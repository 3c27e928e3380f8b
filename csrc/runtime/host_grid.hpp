// A persistent pool of threads that runs one kernel at a time: the host's stand-in for a GPU grid.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

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

  unsigned threads() const { return unsigned(places_.size()); }
  const char* variant_name() const { return variant_.name; }

  // Runs the kernel on all threads, the caller being thread 0, and returns when all have finished.
  void run(mori_host::Kernel kernel, const void* args, std::size_t scratch_bytes);

 private:
  void work(unsigned index);

  mori_host::Variant variant_;
  std::vector<HostPlace> places_;
  std::vector<std::unique_ptr<std::max_align_t[]>> scratch_;
  std::size_t scratch_bytes_ = 0;

  std::mutex mutex_;
  std::condition_variable start_, finished_;
  unsigned long generation_ = 0;
  unsigned running_ = 0;
  bool stop_ = false;
  mori_host::Kernel kernel_{};
  const void* args_ = nullptr;
  std::vector<std::thread> workers_;
  int owner_pid_;
};

}  // namespace mori

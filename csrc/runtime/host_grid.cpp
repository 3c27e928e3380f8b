#include "host_grid.hpp"

#include <unistd.h>

namespace mori {

HostGrid::HostGrid(mori_host::Variant variant, unsigned threads, u64 spin_ns)
    : variant_(variant), places_(threads), scratch_(threads), owner_pid_(getpid()) {
  for (unsigned i = 0; i < threads; ++i) places_[i] = {i, threads, nullptr, spin_ns};
  for (unsigned i = 1; i < threads; ++i) workers_.emplace_back(&HostGrid::work, this, i);
}

HostGrid::~HostGrid() {
  if (getpid() != owner_pid_) {  // a forked child has the objects but not the threads
    for (std::thread& worker : workers_) worker.detach();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void HostGrid::run(mori_host::Kernel kernel, const void* args, std::size_t scratch_bytes) {
  if (scratch_bytes > scratch_bytes_) {
    for (unsigned i = 0; i < threads(); ++i) {
      scratch_[i] = std::make_unique<std::max_align_t[]>(scratch_bytes / sizeof(std::max_align_t) + 1);
      places_[i].scratch = scratch_[i].get();
    }
    scratch_bytes_ = scratch_bytes;
  }
  if (threads() > 1) {
    const std::lock_guard lock(mutex_);
    kernel_ = kernel;
    args_ = args;
    running_ = threads() - 1;
    ++generation_;
    start_.notify_all();
  }
  variant_.run(unsigned(kernel), args, &places_[0]);
  if (threads() > 1) {
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [this] { return running_ == 0; });
  }
}

void HostGrid::work(unsigned index) {
  unsigned long seen = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    start_.wait(lock, [&] { return stop_ || generation_ != seen; });
    if (stop_) return;
    seen = generation_;
    lock.unlock();
    variant_.run(unsigned(kernel_), args_, &places_[index]);
    lock.lock();
    if (--running_ == 0) finished_.notify_one();
  }
}

}  // namespace mori

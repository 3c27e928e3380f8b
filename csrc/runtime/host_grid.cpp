#include "host_grid.hpp"

#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace mori {

struct HostGrid::Pool {
  Pool(mori_host::Variant chosen, unsigned threads, u64 spin_ns) : variant(chosen), places(threads), scratch(threads) {
    for (unsigned i = 0; i < threads; ++i) places[i] = {i, threads, nullptr, spin_ns};
    try {
      for (unsigned i = 1; i < threads; ++i) workers.emplace_back(&Pool::work, this, i);
    } catch (const std::system_error& error) {
      end_workers();
      throw std::runtime_error("only " + std::to_string(workers.size() + 1) + " of " + std::to_string(threads) +
                               " threads could be started (" + error.what() + "): lower MORI_HOST_THREADS");
    }
  }

  ~Pool() { end_workers(); }

  void end_workers() {
    {
      const std::lock_guard lock(mutex);
      stop = true;
    }
    start.notify_all();
    for (std::thread& worker : workers) worker.join();
  }

  void reserve_scratch(std::size_t bytes) {
    if (bytes <= scratch_bytes) return;
    for (unsigned i = 0; i < places.size(); ++i) {
      scratch[i] = std::make_unique<std::max_align_t[]>(bytes / sizeof(std::max_align_t) + 1);
      places[i].scratch = scratch[i].get();
    }
    scratch_bytes = bytes;
  }

  void wake_workers(unsigned next, const void* next_args) {
    const std::lock_guard lock(mutex);
    kernel = next;
    args = next_args;
    running = unsigned(workers.size());
    ++generation;
    start.notify_all();
  }

  void await_workers() {
    std::unique_lock lock(mutex);
    finished.wait(lock, [this] { return running == 0; });
  }

  void work(unsigned index) {
    unsigned long seen = 0;
    std::unique_lock lock(mutex);
    for (;;) {
      start.wait(lock, [&] { return stop || generation != seen; });
      if (stop) return;
      seen = generation;
      lock.unlock();
      variant.run(kernel, args, &places[index]);
      lock.lock();
      if (--running == 0) finished.notify_one();
    }
  }

  mori_host::Variant variant;
  std::vector<HostPlace> places;
  std::vector<std::unique_ptr<std::max_align_t[]>> scratch;
  std::size_t scratch_bytes = 0;

  std::mutex mutex;
  std::condition_variable start, finished;
  unsigned long generation = 0;
  unsigned running = 0;
  bool stop = false;
  unsigned kernel = 0;
  const void* args = nullptr;
  std::vector<std::thread> workers;
};

HostGrid::HostGrid(mori_host::Variant variant, unsigned threads, u64 spin_ns)
    : pool_(std::make_unique<Pool>(variant, threads, spin_ns)), owner_pid_(getpid()) {}

HostGrid::~HostGrid() {
  // A forked child has the objects but not the threads that wait in them: leaked, for destroying them would hang.
  if (getpid() != owner_pid_) [[maybe_unused]]
    auto* leaked = pool_.release();
}

unsigned HostGrid::threads() const { return unsigned(pool_->places.size()); }

const char* HostGrid::variant_name() const { return pool_->variant.name; }

void HostGrid::run(unsigned kernel, const void* args, std::size_t scratch_bytes) {
  pool_->reserve_scratch(scratch_bytes);
  const bool alone = pool_->workers.empty();
  if (!alone) pool_->wake_workers(kernel, args);
  pool_->variant.run(kernel, args, &pool_->places[0]);
  if (!alone) pool_->await_workers();
}

}  // namespace mori

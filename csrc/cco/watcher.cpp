#include "watcher.hpp"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "../device/target_host.hpp"
#include "../device/wait.hpp"

namespace mori {
namespace {

struct Charge {
  std::shared_ptr<SymmetricMemory> memory;
  u32 peer;
  int descriptor;
  bool is_socket;
};

// A thread and what ends it. Its own, so that one that is being ended and its successor never share anything.
struct Worker {
  Worker() : wake(eventfd(0, EFD_CLOEXEC)) {}
  ~Worker() { close(wake); }

  void ring() const {
    const u64 one = 1;
    [[maybe_unused]] const ssize_t written = write(wake, &one, sizeof one);
  }

  const int wake;
  bool stop = false;  // under the loop's mutex
  std::thread thread;
};

// Lives as long as the process and is never destroyed: threads may still run when statics are.
class Loop {
 public:
  static Loop& instance() {
    static Loop* loop = [] {
      pthread_atfork(nullptr, nullptr, [] { instance().abandon(); });
      return new Loop;
    }();
    return *loop;
  }

  u64 add(Charge charge) {
    const std::lock_guard lock(mutex_);
    charges_.emplace(++last_number_, std::move(charge));
    if (worker_ == nullptr) {
      worker_ = std::make_unique<Worker>();
      worker_->thread = std::thread(&Loop::run, this, worker_.get());
    }
    worker_->ring();
    return last_number_;
  }

  // The worker ends with its last charge; a later one gets a worker of its own.
  void remove(u64 number) {
    std::unique_ptr<Worker> ended;
    {
      const std::lock_guard lock(mutex_);
      const auto found = charges_.find(number);
      if (found != charges_.end()) {  // else its peer ended already
        close(found->second.descriptor);
        charges_.erase(found);
      }
      if (worker_ == nullptr) return;
      worker_->ring();
      if (charges_.empty()) {
        worker_->stop = true;
        ended = std::move(worker_);
      }
    }
    if (ended != nullptr) ended->thread.join();
  }

 private:
  // In a forked child: the thread is gone and the peers are not ours to report. The objects are leaked.
  void abandon() {
    new (&mutex_) std::mutex;
    charges_.clear();
    [[maybe_unused]] Worker* leaked = worker_.release();
  }

  void run(const Worker* self) {
    for (;;) {
      std::vector<pollfd> polled{{self->wake, POLLIN, 0}};
      std::vector<u64> numbers;
      {
        const std::lock_guard lock(mutex_);
        if (self->stop) return;
        for (const auto& [number, charge] : charges_) {
          polled.push_back({charge.descriptor, POLLIN, 0});
          numbers.push_back(number);
        }
      }
      if (poll(polled.data(), polled.size(), -1) < 0) continue;
      if (polled[0].revents != 0) {
        u64 count;
        [[maybe_unused]] const ssize_t got = read(self->wake, &count, sizeof count);
      }
      const std::lock_guard lock(mutex_);
      for (std::size_t i = 1; i < polled.size(); ++i) {
        if (polled[i].revents != 0) examine(numbers[i - 1]);
      }
    }
  }

  // A peer that said farewell first is no fault; then there is nothing left to watch either way.
  void examine(u64 number) {
    const auto found = charges_.find(number);
    if (found == charges_.end()) return;
    const Charge& charge = found->second;
    char byte;
    if (charge.is_socket && recv(charge.descriptor, &byte, 1, MSG_DONTWAIT) > 0) return;
    const Symmetric& symmetric = charge.memory->symmetric();
    const CommControl* own = symmetric.control(symmetric.rank);
    if (is_live<HostTarget>(own, charge.peer) &&
        HostTarget::load_system(&own->peer_state[charge.peer]) != u32(PeerState::left)) {
      abort_all<HostTarget>(symmetric, nullptr,
                            AbortCause{AbortKind::peer_died, Phase::watch, charge.peer, symmetric.rank, 0}.encode(), 0,
                            0);
    }
    close(charge.descriptor);
    charges_.erase(found);  // the thread stays: remove() of the others ends it
  }

  std::mutex mutex_;
  std::map<u64, Charge> charges_;
  std::unique_ptr<Worker> worker_;
  u64 last_number_ = 0;
};

}  // namespace

u64 Watcher::watch(std::shared_ptr<SymmetricMemory> memory, u32 peer, int process_descriptor, int socket) {
  const bool by_socket = process_descriptor < 0;
  const int descriptor = fcntl(by_socket ? socket : process_descriptor, F_DUPFD_CLOEXEC, 0);
  return Loop::instance().add({std::move(memory), peer, descriptor, by_socket});
}

void Watcher::forget(u64 number) { Loop::instance().remove(number); }

}  // namespace mori

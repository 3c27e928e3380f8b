// One thread per process notices dead peers within milliseconds: it sleeps in poll() on a process descriptor per
// peer, or, where the process is not visible, on the Unix socket kept from set-up, which ends with its process.
#pragma once

#include <memory>

#include "symmetric_memory.hpp"

namespace mori {

class Watcher {
 public:
  // Takes duplicates of the descriptors; `process_descriptor` may be -1. Returns a number for forget().
  static u64 watch(std::shared_ptr<SymmetricMemory> memory, u32 peer, int process_descriptor, int socket);
  // After it returns the watcher touches the memory no more. The thread ends with its last charge.
  static void forget(u64 number);
};

}  // namespace mori

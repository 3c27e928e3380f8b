// The native half of a communicator: symmetric memory, the control block in it, and the watch over the peers.
// Rendezvous and resource tracking are Python's (mori/cco).
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "symmetric_memory.hpp"

namespace mori {

// The sticky abort word, decoded.
struct CommFault {
  AbortCause cause;
  u64 expected, seen;
};

class Communicator {
 public:
  explicit Communicator(std::shared_ptr<SymmetricMemory> memory);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const std::shared_ptr<SymmetricMemory>& memory() const { return memory_; }
  const Symmetric& symmetric() const { return memory_->symmetric(); }

  void watch(u32 peer, int process_descriptor, int socket);
  std::optional<CommFault> fault() const;
  void abort(AbortKind kind, Phase phase, u32 peer);
  bool has_left(u32 peer) const;
  void set_live(u32 rank, bool live);

  // Tells every peer that this rank takes no further part. Not a fault by itself.
  void leave();
  // Ends the watch. The memory lives on as long as a view of it does.
  void close();

 private:
  CommControl* own() const { return symmetric().control(symmetric().rank); }

  std::shared_ptr<SymmetricMemory> memory_;
  std::vector<u64> watches_;
  int owner_pid_;
};

}  // namespace mori

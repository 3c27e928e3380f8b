// The native half of a communicator: symmetric memory, the control blocks, and the watch over the peers. Rendezvous and
// resource tracking are Python's (mori/cco).
//
// There is one control block per rank that all processes share in host memory: watchers, leaving ranks and this class
// read and write there. On the host target it lies in the symmetric memory itself. A GPU has a block of its own at
// offset 0 of its slice, where kernels hand on aborts, and maps its page of the shared ones as its *twin*.
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
  // `control` is host memory with a control block per rank; the memory itself on the host target. No peer may have
  // mapped either yet.
  Communicator(std::shared_ptr<SymmetricMemory> memory, std::shared_ptr<SymmetricMemory> control);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const std::shared_ptr<SymmetricMemory>& memory() const { return memory_; }
  const Symmetric& symmetric() const { return memory_->symmetric(); }
  CommControl* twin() const { return twin_ != nullptr ? twin_->device_address() : nullptr; }

  void watch(u32 peer, int process_descriptor, int socket);
  // Looks at host memory only: cheap, and never waits for a device.
  std::optional<CommFault> fault() const;
  bool has_left(u32 peer) const;
  void set_live(u32 rank, bool live);

  // Tells every peer that this rank takes no further part. Not a fault by itself. Its kernels must have ended.
  void leave();
  // Ends the watch. The memory lives on as long as a view of it does.
  void close();

 private:
  const Symmetric& shared() const { return control_->symmetric(); }
  CommControl* block(u32 rank) const { return shared().control(rank); }
  CommControl* own() const { return block(shared().rank); }
  bool on_device() const { return control_ != memory_; }
  std::optional<CommFault> device_fault(u32 rank) const;

  std::shared_ptr<SymmetricMemory> memory_, control_;
  std::unique_ptr<MappedPage> twin_;  // after control_, whose page it is: it goes first
  std::vector<u64> watches_;
  int owner_pid_;
};

}  // namespace mori

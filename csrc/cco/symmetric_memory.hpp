// Symmetric memory: one flat address range in which rank p's slice begins at base + p * stride. An allocation has
// the same offset in every slice, so a peer's copy is found by arithmetic.
#pragma once

#include <memory>
#include <vector>

#include "../layout/comm_control.hpp"

namespace mori {

class SymmetricMemory {
 public:
  SymmetricMemory(u32 rank, u32 world_size) : symmetric_{0, 0, rank, world_size} {}
  virtual ~SymmetricMemory() = default;
  SymmetricMemory(const SymmetricMemory&) = delete;
  SymmetricMemory& operator=(const SymmetricMemory&) = delete;

  const Symmetric& symmetric() const { return symmetric_; }
  u64 bytes_per_rank() const { return symmetric_.stride; }

  virtual int descriptor() const = 0;                     // of the own slice, for the peers
  virtual void map_peer(u32 peer, int descriptor) = 0;    // the descriptor stays the caller's
  virtual void release_pages(u64 offset, u64 bytes) = 0;  // of the own slice; their content is lost

 protected:
  Symmetric symmetric_;
};

// Host memory: a sparse memfd per rank. No name in any file system, so nothing is left when a process dies;
// pages exist once they are touched.
std::shared_ptr<SymmetricMemory> make_host_memory(u32 rank, u32 world_size, u64 bytes_per_rank);

// A block of the own slice. Views of it keep the block, and with it the mapping, alive.
struct MemoryBlock {
  std::shared_ptr<SymmetricMemory> memory;
  u64 offset;
  u64 bytes;
};

}  // namespace mori

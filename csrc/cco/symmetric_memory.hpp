// Symmetric memory: one flat address range in which rank p's slice begins at base + p * stride. An allocation has
// the same offset in every slice, so a peer's copy is found by arithmetic.
#pragma once

#include <memory>
#include <string>

#include "../layout/comm_control.hpp"
#include "../runtime/gpu_driver.hpp"

namespace mori {

// Where memory is, in the words of DLPack.
struct Place {
  int device_type;
  int device_id;
};
constexpr Place host_place{1, 0};
Place place_of(gpu::Api api, int ordinal);

// A page of the host's that the device of a memory may touch too, for as long as this object lives.
class MappedPage {
 public:
  virtual ~MappedPage() = default;
  virtual CommControl* device_address() const = 0;
};

// Memory exists in chunks: chunk i has the same bounds in every slice. All host memory is chunk 0. A GPU's memory grows
// by chunks; each rank extends its own slice, hands a descriptor of the new chunk to the peers and maps theirs.
class SymmetricMemory {
 public:
  SymmetricMemory(u32 rank, u32 world_size) : symmetric_{0, 0, rank, world_size} {}
  virtual ~SymmetricMemory() = default;
  SymmetricMemory(const SymmetricMemory&) = delete;
  SymmetricMemory& operator=(const SymmetricMemory&) = delete;

  const Symmetric& symmetric() const { return symmetric_; }
  u64 bytes_per_rank() const { return symmetric_.stride; }

  virtual Place place() const { return host_place; }
  virtual u32 chunks() const { return 1; }                  // of the own slice
  virtual u64 extent() const { return symmetric_.stride; }  // their end
  virtual void extend(u64) {}                               // own memory exists up to this offset
  virtual void drop_chunks(u32) {}                          // back to so many; the others are not in use yet
  virtual int export_chunk(u32 chunk) = 0;                  // a descriptor that the caller closes
  // Maps what `descriptor` holds from byte `from` on; the descriptor stays the caller's.
  virtual void map_peer(u32 peer, u32 chunk, int descriptor, u64 from) = 0;
  virtual void release_pages(u64 offset, u64 bytes) = 0;  // of the own slice; their content is lost

  // Access to the own slice from the host. On a GPU in the order of `stream`; read and write wait for it.
  virtual void read(void* to, u64 offset, u64 bytes, u64 stream = 0) = 0;
  virtual void write(u64 offset, const void* from, u64 bytes, u64 stream = 0) = 0;
  virtual void zero(u64 offset, u64 bytes, u64 stream = 0) = 0;
  virtual void synchronize() {}  // returns when the device has done all that it was given
  virtual std::unique_ptr<MappedPage> map_page(CommControl*) const { return nullptr; }  // for the device of this memory

 protected:
  Symmetric symmetric_;
};

// Host memory: a sparse memfd per rank. No name in any file system, so nothing is left when a process dies;
// pages exist once they are touched.
std::shared_ptr<SymmetricMemory> make_host_memory(u32 rank, u32 world_size, u64 bytes_per_rank);

// Memory of GPU `ordinal` of "cuda" or "hip". Chunks are shared as handles of type `handle_type` (gpu_abi.hpp).
std::shared_ptr<SymmetricMemory> make_gpu_memory(const std::string& api, u32 rank, u32 world_size, u64 bytes_per_rank,
                                                 int ordinal, int handle_type);

// Memory that somebody else allocated, as a range of its own in which rank p's part begins at base + p * stride. Its
// one chunk is an alias: the owner keeps the memory, and content and lifetime are the owner's as well.
//
// On the host: what `descriptor` holds from byte `from` on, a whole number of pages.
std::shared_ptr<SymmetricMemory> import_host_memory(u32 rank, u32 world_size, u64 bytes, int descriptor, u64 from);
// On a GPU: the allocation of the driver's virtual memory calls that is mapped at `address`. std::invalid_argument if
// there is none, if it begins elsewhere, or if it is smaller.
std::shared_ptr<SymmetricMemory> import_gpu_memory(const std::string& api, u32 rank, u32 world_size, u64 bytes,
                                                   int ordinal, int handle_type, u64 address);

// A block of the own slice. Views of it keep the block, and with it the mapping, alive.
struct MemoryBlock {
  std::shared_ptr<SymmetricMemory> memory;
  u64 offset;
  u64 bytes;
};

}  // namespace mori

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "symmetric_memory.hpp"

namespace mori {
namespace {

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

class HostMemory final : public SymmetricMemory {
 public:
  HostMemory(u32 rank, u32 world_size, u64 bytes_per_rank) : SymmetricMemory(rank, world_size) {
    symmetric_.stride = align_up(bytes_per_rank, 2ull << 20);
    reserve();
    descriptor_ = memfd_create("mori", MFD_CLOEXEC);
    if (descriptor_ < 0 || ftruncate(descriptor_, off_t(symmetric_.stride)) != 0) {
      fail_empty("creating the memory file of the symmetric memory");
    }
    map_own(0);
  }
  HostMemory(u32 rank, u32 world_size, u64 bytes, int descriptor, u64 from) : SymmetricMemory(rank, world_size) {
    symmetric_.stride = align_up(bytes, u64(sysconf(_SC_PAGESIZE)));
    reserve();
    descriptor_ = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
    if (descriptor_ < 0) fail_empty("duplicating the descriptor of the memory to import");
    map_own(from);
  }
  ~HostMemory() override { free_all(); }

  int export_chunk(u32) override {
    const int copy = fcntl(descriptor_, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) fail("duplicating the descriptor of the symmetric memory");
    return copy;
  }
  void map_peer(u32 peer, u32, int descriptor, u64 from) override { map(peer, descriptor, from); }
  void release_pages(u64 offset, u64 bytes) override {
    const u64 page = u64(sysconf(_SC_PAGESIZE));
    const u64 begin = align_up(offset, page), end = (offset + bytes) / page * page;
    if (begin < end) {
      fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(begin), off_t(end - begin));
    }
  }
  void read(void* to, u64 offset, u64 bytes, u64) override { std::memcpy(to, own(offset), bytes); }
  void write(u64 offset, const void* from, u64 bytes, u64) override { std::memcpy(own(offset), from, bytes); }
  void zero(u64 offset, u64 bytes, u64) override { std::memset(own(offset), 0, bytes); }

 private:
  void* own(u64 offset) const { return symmetric_.at<void>(symmetric_.rank, offset); }
  u64 range_bytes() const { return symmetric_.stride * symmetric_.world_size; }

  void reserve() {
    void* range = mmap(nullptr, range_bytes(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) fail("reserving the address range of the symmetric memory");
    symmetric_.base = reinterpret_cast<u64>(range);
  }

  void map(u32 rank, int descriptor, u64 from) {
    void* place = symmetric_.at<void>(rank, 0);
    constexpr int flags = MAP_SHARED | MAP_FIXED | MAP_NORESERVE;
    if (mmap(place, symmetric_.stride, PROT_READ | PROT_WRITE, flags, descriptor, off_t(from)) == MAP_FAILED) {
      fail("mapping a rank's slice of the symmetric memory");
    }
  }

  void map_own(u64 from) {
    try {
      map(symmetric_.rank, descriptor_, from);
    } catch (...) {
      free_all();
      throw;
    }
  }

  [[noreturn]] void fail_empty(const char* what) {
    const int error = errno;
    free_all();
    errno = error;
    fail(what);
  }

  void free_all() {
    if (symmetric_.base != 0) munmap(reinterpret_cast<void*>(symmetric_.base), range_bytes());
    if (descriptor_ >= 0) close(descriptor_);
  }

  int descriptor_ = -1;
};

}  // namespace

std::shared_ptr<SymmetricMemory> make_host_memory(u32 rank, u32 world_size, u64 bytes_per_rank) {
  return std::make_shared<HostMemory>(rank, world_size, bytes_per_rank);
}

std::shared_ptr<SymmetricMemory> import_host_memory(u32 rank, u32 world_size, u64 bytes, int descriptor, u64 from) {
  return std::make_shared<HostMemory>(rank, world_size, bytes, descriptor, from);
}

}  // namespace mori

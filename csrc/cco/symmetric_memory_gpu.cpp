// A GPU's symmetric memory: address space for all slices is reserved once, memory is created chunk by chunk, and each
// chunk is a handle that peers import and map for their own GPU. It stays until the last view of it is gone.
#include <unistd.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "../runtime/gpu_driver.hpp"
#include "symmetric_memory.hpp"

namespace mori {
namespace {

// Growth in small steps would cost a handle, and an exchange among all ranks, for every little allocation.
constexpr u64 growth_step_bytes = 16ull << 20;

class GpuMemory final : public SymmetricMemory {
 public:
  GpuMemory(u32 rank, u32 world_size, u64 bytes_per_rank, const gpu::Gpu& gpu, int handle_type)
      : SymmetricMemory(rank, world_size), gpu_(gpu), driver_(gpu.driver), handle_type_(handle_type) {
    symmetric_.stride = align_up(bytes_per_rank, gpu_.granularity);
    const gpu::DeviceGuard current(gpu_);
    driver_.call(driver_.reserve, &symmetric_.base, range_bytes(), gpu_.granularity, gpu::Address(0), 0ull);
    try {
      extend(1);
    } catch (...) {
      free_all();
      throw;
    }
  }

  // An allocation that somebody else made and mapped at `existing`; as a whole, for drivers map no part of one.
  GpuMemory(u32 rank, u32 world_size, u64 bytes, const gpu::Gpu& gpu, int handle_type, gpu::Address existing)
      : SymmetricMemory(rank, world_size), gpu_(gpu), driver_(gpu.driver), handle_type_(handle_type) {
    const gpu::DeviceGuard current(gpu_);
    symmetric_.stride = allocated_bytes(existing, bytes);
    Chunk chunk{0, symmetric_.stride, handle_of(existing)};
    try {
      driver_.call(driver_.reserve, &symmetric_.base, range_bytes(), gpu_.granularity, gpu::Address(0), 0ull);
      map(address(rank, chunk), chunk.bytes, chunk.handle);
    } catch (...) {
      driver_.release(chunk.handle);
      if (symmetric_.base != 0) driver_.free_range(symmetric_.base, range_bytes());
      throw;
    }
    chunks_.push_back(chunk);
  }

  // Kernels may still use the memory; a driver that is being shut down has ended them and refuses every call.
  ~GpuMemory() override { free_all(); }

  std::unique_ptr<MappedPage> map_page(CommControl* page) const override;
  Place place() const override { return place_of(gpu_.driver.api, gpu_.ordinal); }
  u32 chunks() const override { return u32(chunks_.size()); }

  u64 extent() const override { return chunks_.empty() ? 0 : chunks_.back().end(); }

  void extend(u64 end) override {
    const u64 begin = extent();
    if (end <= begin) return;
    if (end > symmetric_.stride) throw std::out_of_range("the slice ends before " + std::to_string(end) + " bytes");
    const u64 step = chunks_.empty() ? end : larger(end, begin + growth_step_bytes);
    Chunk chunk{begin, smaller(align_up(step, gpu_.granularity), symmetric_.stride) - begin, 0};
    const gpu::DeviceGuard current(gpu_);
    const gpu::RelaxedCapture relaxed(driver_);
    const gpu::AllocationProperties properties = gpu::allocation_properties(gpu_, handle_type_);
    const gpu::Result result = driver_.create(&chunk.handle, chunk.bytes, &properties, 0);
    if (result == gpu::error_out_of_memory) {
      throw std::runtime_error("GPU " + std::to_string(gpu_.ordinal) + " has no " + std::to_string(chunk.bytes) +
                               " bytes of memory left for the symmetric heap, which has " + std::to_string(begin) +
                               " bytes so far: other users of the GPU, torch's cache among them, must leave more");
    }
    if (result != gpu::success) driver_.fail(driver_.create.name, result);
    const gpu::Address place = address(symmetric_.rank, chunk);
    try {
      map(place, chunk.bytes, chunk.handle);
    } catch (...) {
      driver_.release(chunk.handle);
      throw;
    }
    chunks_.push_back(chunk);
    zero(chunk.begin, chunk.bytes, 0);  // what a former user left is nobody's business
    synchronize();
  }

  void drop_chunks(u32 count) override {
    const gpu::DeviceGuard current(gpu_);
    while (chunks_.size() > count) {
      unmap_everywhere(u32(chunks_.size()) - 1);
      driver_.release(chunks_.back().handle);
      chunks_.pop_back();
    }
  }

  int export_chunk(u32 chunk) override {
    int descriptor = -1;
    driver_.call(driver_.export_handle, static_cast<void*>(&descriptor), chunks_.at(chunk).handle, handle_type_, 0ull);
    return descriptor;
  }

  void map_peer(u32 peer, u32 chunk, int descriptor, u64) override {
    const gpu::DeviceGuard current(gpu_);
    gpu::MemoryHandle handle = 0;
    driver_.call(driver_.import_handle, &handle, gpu::importable(descriptor), handle_type_);
    const Chunk& own = chunks_.at(chunk);
    try {
      map(address(peer, own), own.bytes, handle);
    } catch (...) {
      driver_.release(handle);
      throw;
    }
    driver_.call(driver_.release, handle);  // the mapping holds the memory
    mapped_.push_back({peer, chunk});
  }

  void release_pages(u64, u64) override {}  // memory stays until the end: handles are whole chunks

  void read(void* to, u64 offset, u64 bytes, u64 stream) override {
    const gpu::DeviceGuard current(gpu_);
    driver_.call(driver_.copy_to_host, to, own(offset), bytes, gpu::stream_of(stream));
    driver_.call(driver_.stream_synchronize, gpu::stream_of(stream));
  }
  void write(u64 offset, const void* from, u64 bytes, u64 stream) override {
    const gpu::DeviceGuard current(gpu_);
    driver_.call(driver_.copy_to_device, own(offset), from, bytes, gpu::stream_of(stream));
    driver_.call(driver_.stream_synchronize, gpu::stream_of(stream));
  }
  void zero(u64 offset, u64 bytes, u64 stream) override {
    const gpu::DeviceGuard current(gpu_);
    driver_.call(driver_.fill, own(offset), static_cast<unsigned char>(0), bytes, gpu::stream_of(stream));
  }
  void synchronize() override {
    const gpu::DeviceGuard current(gpu_);
    driver_.call(driver_.synchronize);
  }

 private:
  struct Chunk {
    u64 begin, bytes;
    gpu::MemoryHandle handle;
    u64 end() const { return begin + bytes; }
  };
  struct PeerChunk {
    u32 peer, chunk;
  };

  u64 range_bytes() const { return symmetric_.stride * symmetric_.world_size; }
  gpu::Address own(u64 offset) const { return symmetric_.base + symmetric_.rank * symmetric_.stride + offset; }
  gpu::Address address(u32 rank, const Chunk& chunk) const {
    return symmetric_.base + rank * symmetric_.stride + chunk.begin;
  }

  void map(gpu::Address place, u64 bytes, gpu::MemoryHandle handle) {
    driver_.call(driver_.map, place, bytes, 0ull, handle, 0ull);
    const gpu::AccessDescription access{{gpu::location_device, gpu_.ordinal}, gpu::access_read_write};
    const gpu::Result result = driver_.set_access(place, bytes, &access, 1);
    if (result != gpu::success) {
      driver_.unmap(place, bytes);
      driver_.fail(driver_.set_access.name, result);
    }
  }

  [[noreturn]] void refuse(gpu::Address existing, const std::string& what) const {
    throw std::invalid_argument("the memory at " + std::to_string(existing) + " on GPU " +
                                std::to_string(gpu_.ordinal) + " " + what);
  }

  // Of the allocation that begins at `existing`, and has at least `bytes`.
  u64 allocated_bytes(gpu::Address existing, u64 bytes) const {
    gpu::Address begin = 0;
    std::size_t size = 0;
    if (driver_.address_range(&begin, &size, existing) != gpu::success) {
      refuse(existing, "is no device memory of this process");
    }
    if (begin != existing) refuse(existing, "belongs to an allocation that begins at " + std::to_string(begin));
    if (bytes > size) {
      refuse(existing, "has " + std::to_string(size) + " bytes, " + std::to_string(bytes) + " were asked for");
    }
    return size;
  }

  gpu::MemoryHandle handle_of(gpu::Address existing) const {
    gpu::MemoryHandle handle = 0;
    if (driver_.retain_handle(&handle, reinterpret_cast<void*>(existing)) != gpu::success) {
      refuse(existing, std::string("was not made by the driver's virtual memory calls (") + driver_.create.name + ")");
    }
    return handle;
  }

  void unmap_everywhere(u32 chunk) {
    const Chunk& bounds = chunks_[chunk];
    driver_.unmap(address(symmetric_.rank, bounds), bounds.bytes);
    std::erase_if(mapped_, [&](const PeerChunk& each) {
      if (each.chunk == chunk) driver_.unmap(address(each.peer, bounds), bounds.bytes);
      return each.chunk == chunk;
    });
  }

  void free_all() noexcept {
    try {
      const gpu::DeviceGuard current(gpu_);
      driver_.synchronize();
      drop_chunks(0);
      driver_.free_range(symmetric_.base, range_bytes());
    } catch (const std::exception&) {
      // The driver is gone, and the memory with it.
    }
  }

  const gpu::Gpu& gpu_;
  const gpu::Driver& driver_;
  int handle_type_;
  std::vector<Chunk> chunks_;
  std::vector<PeerChunk> mapped_;
};

class GpuPage final : public MappedPage {
 public:
  GpuPage(CommControl* page, const gpu::Gpu& gpu) : page_(page), gpu_(gpu), driver_(gpu.driver) {
    const gpu::DeviceGuard current(gpu_);
    driver_.call(driver_.host_register, static_cast<void*>(page), comm_control_bytes, gpu::host_register_device_map);
    const gpu::Result result = driver_.host_device_pointer(&address_, page, 0);
    if (result != gpu::success) {
      driver_.host_unregister(page);
      driver_.fail(driver_.host_device_pointer.name, result);
    }
  }
  ~GpuPage() override {
    try {
      const gpu::DeviceGuard current(gpu_);
      driver_.synchronize();  // kernels look at the page while they wait
      driver_.host_unregister(page_);
    } catch (const std::exception&) {
    }
  }
  CommControl* device_address() const override { return reinterpret_cast<CommControl*>(address_); }

 private:
  CommControl* page_;
  const gpu::Gpu& gpu_;
  const gpu::Driver& driver_;
  gpu::Address address_ = 0;
};

std::unique_ptr<MappedPage> GpuMemory::map_page(CommControl* page) const {
  return std::make_unique<GpuPage>(page, gpu_);
}

}  // namespace

Place place_of(gpu::Api api, int ordinal) {
  constexpr int cuda_device_type = 2, rocm_device_type = 10;
  return {api == gpu::Api::cuda ? cuda_device_type : rocm_device_type, ordinal};
}

std::shared_ptr<SymmetricMemory> make_gpu_memory(const std::string& api, u32 rank, u32 world_size, u64 bytes_per_rank,
                                                 int ordinal, int handle_type) {
  return std::make_shared<GpuMemory>(rank, world_size, bytes_per_rank, gpu::gpu(gpu::api_of(api), ordinal),
                                     handle_type);
}

std::shared_ptr<SymmetricMemory> import_gpu_memory(const std::string& api, u32 rank, u32 world_size, u64 bytes,
                                                   int ordinal, int handle_type, u64 address) {
  return std::make_shared<GpuMemory>(rank, world_size, bytes, gpu::gpu(gpu::api_of(api), ordinal), handle_type,
                                     gpu::Address(address));
}

}  // namespace mori

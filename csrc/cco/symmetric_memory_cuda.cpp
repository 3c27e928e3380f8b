// A GPU's symmetric memory: address space for all slices is reserved once, memory is created chunk by chunk, and each
// chunk is a handle that peers import and map for their own GPU. It stays until the last view of it is gone.
#include <unistd.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "../runtime/driver_cuda.hpp"
#include "symmetric_memory.hpp"

namespace mori {
namespace {

// Growth in small steps would cost a handle, and an exchange among all ranks, for every little allocation.
constexpr u64 growth_step_bytes = 16ull << 20;

class CudaMemory final : public SymmetricMemory {
 public:
  CudaMemory(u32 rank, u32 world_size, u64 bytes_per_rank, int ordinal, int handle_type)
      : SymmetricMemory(rank, world_size), gpu_(cuda::gpu(ordinal)), handle_type_(handle_type) {
    symmetric_.stride = align_up(bytes_per_rank, gpu_.granularity);
    const cuda::ContextGuard current(gpu_);
    cuda::call(MORI_CUDA(cuMemAddressReserve), &symmetric_.base, range_bytes(), gpu_.granularity, cuda::Address(0),
               0ull);
    try {
      extend(1);
    } catch (...) {
      free_all();
      throw;
    }
  }

  // Kernels may still use the memory; a driver that is being shut down has ended them and refuses every call.
  ~CudaMemory() override { free_all(); }

  Place place() const override { return {cuda_device_type, gpu_.ordinal}; }
  u32 chunks() const override { return u32(chunks_.size()); }

  u64 extent() const override { return chunks_.empty() ? 0 : chunks_.back().end(); }

  void extend(u64 end) override {
    const u64 begin = extent();
    if (end <= begin) return;
    if (end > symmetric_.stride) throw std::out_of_range("the slice ends before " + std::to_string(end) + " bytes");
    const u64 step = chunks_.empty() ? end : larger(end, begin + growth_step_bytes);
    Chunk chunk{begin, smaller(align_up(step, gpu_.granularity), symmetric_.stride) - begin, 0};
    const cuda::ContextGuard current(gpu_);
    const cuda::RelaxedCapture relaxed;
    const cuda::AllocationProperties properties = cuda::allocation_properties(gpu_, handle_type_);
    const cuda::Result result = cuda::driver().cuMemCreate(&chunk.handle, chunk.bytes, &properties, 0);
    if (result == cuda::error_out_of_memory) {
      throw std::runtime_error("GPU " + std::to_string(gpu_.ordinal) + " has no " + std::to_string(chunk.bytes) +
                               " bytes of memory left for the symmetric heap, which has " + std::to_string(begin) +
                               " bytes so far: other users of the GPU, torch's cache among them, must leave more");
    }
    if (result != cuda::success) cuda::fail("cuMemCreate", result);
    const cuda::Address place = address(symmetric_.rank, chunk);
    try {
      map(place, chunk.bytes, chunk.handle);
    } catch (...) {
      cuda::driver().cuMemRelease(chunk.handle);
      throw;
    }
    chunks_.push_back(chunk);
    zero(chunk.begin, chunk.bytes, 0);  // what a former user left is nobody's business
    synchronize();
  }

  void drop_chunks(u32 count) override {
    const cuda::ContextGuard current(gpu_);
    while (chunks_.size() > count) {
      unmap_everywhere(u32(chunks_.size()) - 1);
      cuda::driver().cuMemRelease(chunks_.back().handle);
      chunks_.pop_back();
    }
  }

  int export_chunk(u32 chunk) override {
    int descriptor = -1;
    cuda::call(MORI_CUDA(cuMemExportToShareableHandle), static_cast<void*>(&descriptor), chunks_.at(chunk).handle,
               handle_type_, 0ull);
    return descriptor;
  }

  void map_peer(u32 peer, u32 chunk, int descriptor) override {
    const cuda::ContextGuard current(gpu_);
    cuda::MemoryHandle handle = 0;
    cuda::call(MORI_CUDA(cuMemImportFromShareableHandle), &handle, reinterpret_cast<void*>(u64(descriptor)),
               handle_type_);
    const Chunk& own = chunks_.at(chunk);
    try {
      map(address(peer, own), own.bytes, handle);
    } catch (...) {
      cuda::driver().cuMemRelease(handle);
      throw;
    }
    cuda::call(MORI_CUDA(cuMemRelease), handle);  // the mapping holds the memory
    mapped_.push_back({peer, chunk});
  }

  void release_pages(u64, u64) override {}  // memory stays until the end: handles are whole chunks

  void read(void* to, u64 offset, u64 bytes, u64 stream) override {
    const cuda::ContextGuard current(gpu_);
    cuda::call(MORI_CUDA(cuMemcpyDtoHAsync), to, own(offset), bytes, cuda::stream_of(stream));
    cuda::call(MORI_CUDA(cuStreamSynchronize), cuda::stream_of(stream));
  }
  void write(u64 offset, const void* from, u64 bytes, u64 stream) override {
    const cuda::ContextGuard current(gpu_);
    cuda::call(MORI_CUDA(cuMemcpyHtoDAsync), own(offset), from, bytes, cuda::stream_of(stream));
    cuda::call(MORI_CUDA(cuStreamSynchronize), cuda::stream_of(stream));
  }
  void zero(u64 offset, u64 bytes, u64 stream) override {
    const cuda::ContextGuard current(gpu_);
    cuda::call(MORI_CUDA(cuMemsetD8Async), own(offset), static_cast<unsigned char>(0), bytes, cuda::stream_of(stream));
  }
  void synchronize() override {
    const cuda::ContextGuard current(gpu_);
    cuda::call(MORI_CUDA(cuCtxSynchronize));
  }

 private:
  struct Chunk {
    u64 begin, bytes;
    cuda::MemoryHandle handle;
    u64 end() const { return begin + bytes; }
  };
  struct PeerChunk {
    u32 peer, chunk;
  };

  u64 range_bytes() const { return symmetric_.stride * symmetric_.world_size; }
  cuda::Address own(u64 offset) const { return symmetric_.base + symmetric_.rank * symmetric_.stride + offset; }
  cuda::Address address(u32 rank, const Chunk& chunk) const {
    return symmetric_.base + rank * symmetric_.stride + chunk.begin;
  }

  void map(cuda::Address place, u64 bytes, cuda::MemoryHandle handle) {
    cuda::call(MORI_CUDA(cuMemMap), place, bytes, 0ull, handle, 0ull);
    const cuda::AccessDescription access{{cuda::location_device, gpu_.ordinal}, cuda::access_read_write};
    const cuda::Result result = cuda::driver().cuMemSetAccess(place, bytes, &access, 1);
    if (result != cuda::success) {
      cuda::driver().cuMemUnmap(place, bytes);
      cuda::fail("cuMemSetAccess", result);
    }
  }

  void unmap_everywhere(u32 chunk) {
    const Chunk& bounds = chunks_[chunk];
    cuda::driver().cuMemUnmap(address(symmetric_.rank, bounds), bounds.bytes);
    std::erase_if(mapped_, [&](const PeerChunk& each) {
      if (each.chunk == chunk) cuda::driver().cuMemUnmap(address(each.peer, bounds), bounds.bytes);
      return each.chunk == chunk;
    });
  }

  void free_all() noexcept {
    try {
      const cuda::ContextGuard current(gpu_);
      cuda::driver().cuCtxSynchronize();
      drop_chunks(0);
      cuda::driver().cuMemAddressFree(symmetric_.base, range_bytes());
    } catch (const std::exception&) {
      // The driver is gone, and the memory with it.
    }
  }

  const cuda::Gpu& gpu_;
  int handle_type_;
  std::vector<Chunk> chunks_;
  std::vector<PeerChunk> mapped_;
};

class CudaPage final : public MappedPage {
 public:
  CudaPage(CommControl* page, int ordinal) : page_(page), gpu_(cuda::gpu(ordinal)) {
    const cuda::ContextGuard current(gpu_);
    cuda::call(MORI_CUDA(cuMemHostRegister), static_cast<void*>(page), comm_control_bytes,
               cuda::host_register_device_map);
    const cuda::Result result = cuda::driver().cuMemHostGetDevicePointer(&address_, page, 0);
    if (result != cuda::success) {
      cuda::driver().cuMemHostUnregister(page);
      cuda::fail("cuMemHostGetDevicePointer", result);
    }
  }
  ~CudaPage() override {
    try {
      const cuda::ContextGuard current(gpu_);
      cuda::driver().cuCtxSynchronize();  // kernels look at the page while they wait
      cuda::driver().cuMemHostUnregister(page_);
    } catch (const std::exception&) {
    }
  }
  CommControl* device_address() const override { return reinterpret_cast<CommControl*>(address_); }

 private:
  CommControl* page_;
  const cuda::Gpu& gpu_;
  cuda::Address address_ = 0;
};

}  // namespace

std::shared_ptr<SymmetricMemory> make_cuda_memory(u32 rank, u32 world_size, u64 bytes_per_rank, int ordinal,
                                                  int handle_type) {
  return std::make_shared<CudaMemory>(rank, world_size, bytes_per_rank, ordinal, handle_type);
}

std::unique_ptr<MappedPage> map_page_cuda(CommControl* page, int ordinal) {
  return std::make_unique<CudaPage>(page, ordinal);
}

}  // namespace mori

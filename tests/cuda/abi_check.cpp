// Compares the hand-written ABI with the real header. Compiling is the test; tests/cuda/test_abi.py does it.
#include "runtime/gpu_abi.hpp"

#include <cuda.h>

#include <cstddef>
#include <type_traits>

namespace abi = mori::gpu;

// Two parameter types that a caller passes in the same way: pointers, or numbers of one size.
template <class Ours, class Theirs>
constexpr bool passed_alike = sizeof(Ours) == sizeof(Theirs) && std::is_pointer_v<Ours> == std::is_pointer_v<Theirs>;

template <class Ours, class Theirs>
struct SameCall : std::false_type {};
template <class... Ours, class... Theirs>
struct SameCall<abi::Result(Ours...), CUresult(Theirs...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(Ours) == sizeof...(Theirs)) {
      return (passed_alike<Ours, Theirs> && ...);
    } else {
      return false;
    }
  }();
};

namespace mori::gpu {
#define CHECK_CALL(name, symbol, ...) \
  static_assert(SameCall<Result(__VA_ARGS__), std::remove_pointer_t<decltype(&::symbol)>>::value, #symbol);
#define CHECK_CUDA_CALL(name, symbol, hip, ...) CHECK_CALL(name, symbol, __VA_ARGS__)
MORI_GPU_ENTRY_POINTS(CHECK_CUDA_CALL)
MORI_CUDA_ENTRY_POINTS(CHECK_CALL)
}  // namespace mori::gpu
static_assert(SameCall<abi::GetProcAddress, std::remove_pointer_t<decltype(&::cuGetProcAddress)>>::value);
static_assert(!SameCall<abi::Result(int), CUresult(int, int)>::value &&
                  !SameCall<abi::Result(int), CUresult(int*)>::value,
              "the comparison can fail");

static_assert(sizeof(abi::Result) == sizeof(CUresult) && sizeof(abi::Device) == sizeof(CUdevice));
static_assert(sizeof(abi::Address) == sizeof(CUdeviceptr) &&
              sizeof(abi::MemoryHandle) == sizeof(CUmemGenericAllocationHandle));

static_assert(sizeof(abi::Uuid) == sizeof(CUuuid));
static_assert(sizeof(abi::MemoryLocation) == sizeof(CUmemLocation));
static_assert(offsetof(abi::MemoryLocation, id) == offsetof(CUmemLocation, id));
static_assert(sizeof(abi::AccessDescription) == sizeof(CUmemAccessDesc));
static_assert(offsetof(abi::AccessDescription, flags) == offsetof(CUmemAccessDesc, flags));
using Ours = abi::AllocationProperties;
using Theirs = CUmemAllocationProp;
static_assert(sizeof(Ours) == sizeof(Theirs));
static_assert(offsetof(Ours, requested_handle_types) == offsetof(Theirs, requestedHandleTypes));
static_assert(offsetof(Ours, location) == offsetof(Theirs, location));
static_assert(offsetof(Ours, win32_handle_meta_data) == offsetof(Theirs, win32HandleMetaData));
static_assert(offsetof(Ours, flags) == offsetof(Theirs, allocFlags));
static_assert(offsetof(Ours, flags.gpu_direct_rdma_capable) == offsetof(Theirs, allocFlags.gpuDirectRDMACapable));
static_assert(offsetof(Ours, flags.usage) == offsetof(Theirs, allocFlags.usage));

static_assert(abi::success == CUDA_SUCCESS && abi::error_out_of_memory == CUDA_ERROR_OUT_OF_MEMORY);
constexpr abi::Attributes attributes = abi::cuda_attributes;
static_assert(attributes.multiprocessors == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
static_assert(attributes.lanes == CU_DEVICE_ATTRIBUTE_WARP_SIZE);
static_assert(attributes.block_memory_bytes == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
static_assert(attributes.virtual_memory_management == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
static_assert(attributes.posix_handles == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
static_assert(attributes.rdma_with_virtual_memory == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
static_assert(abi::function_max_dynamic_shared_bytes == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
static_assert(abi::allocation_pinned == CU_MEM_ALLOCATION_TYPE_PINNED);
static_assert(abi::location_device == CU_MEM_LOCATION_TYPE_DEVICE);
static_assert(abi::handle_posix_descriptor == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
static_assert(abi::access_read_write == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
static_assert(abi::granularity_recommended == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
static_assert(abi::host_register_device_map == CU_MEMHOSTREGISTER_DEVICEMAP);
static_assert(abi::capture_mode_relaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(abi::capture_status_none == CU_STREAM_CAPTURE_STATUS_NONE);
static_assert(abi::proc_address_default == CU_GET_PROC_ADDRESS_DEFAULT);

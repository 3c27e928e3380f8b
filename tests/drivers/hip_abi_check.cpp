// Compares the hand-written ABI with HIP's header. Compiling is the test; tests/drivers/test_driver.py does it.
#include "runtime/gpu_abi.hpp"

#include <hip/hip_runtime_api.h>

#include <cstddef>
#include <type_traits>

namespace abi = mori::gpu;

// HIP has pointers where CUDA has numbers for addresses and handles; both travel in the same registers.
template <class Ours, class Theirs>
constexpr bool passed_alike = sizeof(Ours) == sizeof(Theirs) && !std::is_floating_point_v<Theirs> &&
                              !std::is_class_v<Theirs>;

template <class Ours, class Theirs>
struct SameCall : std::false_type {};
template <class... Ours, class... Theirs>
struct SameCall<abi::Result(Ours...), hipError_t(Theirs...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(Ours) == sizeof...(Theirs)) {
      return (passed_alike<Ours, Theirs> && ...);
    } else {
      return false;
    }
  }();
};

// The header overloads a few of these names by templates.
#define CHECK_CALL(name, symbol, ...) \
  static_assert(SameCall<Result(__VA_ARGS__), decltype(symbol)>::value, #symbol);
#define CHECK_HIP_CALL(name, cuda, symbol, ...) CHECK_CALL(name, symbol, __VA_ARGS__)
namespace mori::gpu {
MORI_GPU_ENTRY_POINTS(CHECK_HIP_CALL)
MORI_HIP_ENTRY_POINTS(CHECK_CALL)
}  // namespace mori::gpu
static_assert(!SameCall<abi::Result(int), hipError_t(int, int)>::value, "the comparison can fail");

static_assert(sizeof(abi::Uuid) == sizeof(hipUUID));
static_assert(sizeof(abi::MemoryLocation) == sizeof(hipMemLocation));
static_assert(offsetof(abi::MemoryLocation, id) == offsetof(hipMemLocation, id));
static_assert(sizeof(abi::AccessDescription) == sizeof(hipMemAccessDesc));
static_assert(offsetof(abi::AccessDescription, flags) == offsetof(hipMemAccessDesc, flags));
using Ours = abi::AllocationProperties;
using Theirs = hipMemAllocationProp;
static_assert(sizeof(Ours) == sizeof(Theirs));
static_assert(offsetof(Ours, requested_handle_types) == offsetof(Theirs, requestedHandleType));
static_assert(offsetof(Ours, location) == offsetof(Theirs, location));
static_assert(offsetof(Ours, win32_handle_meta_data) == offsetof(Theirs, win32HandleMetaData));
static_assert(offsetof(Ours, flags) == offsetof(Theirs, allocFlags));
static_assert(offsetof(Ours, flags.gpu_direct_rdma_capable) == offsetof(Theirs, allocFlags.gpuDirectRDMACapable));

static_assert(abi::success == hipSuccess && abi::error_out_of_memory == hipErrorOutOfMemory);
constexpr abi::Attributes attributes = abi::hip_attributes;
static_assert(attributes.multiprocessors == hipDeviceAttributeMultiprocessorCount);
static_assert(attributes.lanes == hipDeviceAttributeWarpSize);
static_assert(attributes.block_memory_bytes == hipDeviceAttributeMaxSharedMemoryPerBlock);
static_assert(attributes.virtual_memory_management == hipDeviceAttributeVirtualMemoryManagementSupported);
static_assert(attributes.wall_clock_khz == hipDeviceAttributeWallClockRate);
static_assert(abi::hip_allocation_uncached == hipMemAllocationTypeUncached);
static_assert(abi::location_device == hipMemLocationTypeDevice);
static_assert(abi::handle_posix_descriptor == hipMemHandleTypePosixFileDescriptor);
static_assert(abi::access_read_write == hipMemAccessFlagsProtReadWrite);
static_assert(abi::granularity_recommended == hipMemAllocationGranularityRecommended);
static_assert(abi::host_register_device_map == hipHostRegisterMapped);
static_assert(abi::capture_mode_relaxed == hipStreamCaptureModeRelaxed);
static_assert(abi::capture_status_none == hipStreamCaptureStatusNone);

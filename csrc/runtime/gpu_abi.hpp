// The parts of the NVIDIA driver's and of the HIP runtime's ABI that are used here, declared by hand so that nothing of
// either is needed to build. HIP follows CUDA's driver so closely that one declaration serves both; what differs are
// the names, the numbers of device attributes and a few calls. tests/cuda/test_abi.py and tests/drivers/test_driver.py
// compare with the real headers where there are any.
#pragma once

#include <cstddef>

namespace mori::gpu {

using Result = int;
using Device = int;
using Address = unsigned long long;
using Context = struct ContextObject*;
using Module = struct ModuleObject*;
using Function = struct FunctionObject*;
using Stream = struct StreamObject*;
using MemoryHandle = unsigned long long;

constexpr Result success = 0;
constexpr Result error_out_of_memory = 2;

// Device attributes; 0 where the API has no such question.
struct Attributes {
  int multiprocessors, lanes, block_memory_bytes, virtual_memory_management, posix_handles, rdma_with_virtual_memory,
      wall_clock_khz;
};
constexpr Attributes cuda_attributes{16, 10, 97, 102, 103, 110, 0};
constexpr Attributes hip_attributes{63, 87, 74, 89, 0, 0, 10017};

constexpr int function_max_dynamic_shared_bytes = 8;

constexpr int allocation_pinned = 1;
constexpr int hip_allocation_uncached = 0x40000000;
constexpr int location_device = 1;
constexpr int handle_posix_descriptor = 1;
constexpr int access_read_write = 3;
constexpr int granularity_recommended = 1;
constexpr unsigned host_register_device_map = 2;
constexpr int capture_mode_relaxed = 2;
constexpr int capture_status_none = 0;
constexpr unsigned long long proc_address_default = 0;

struct Uuid {
  char bytes[16];
};

struct MemoryLocation {
  int type;
  int id;
};

struct AllocationProperties {
  int type;
  int requested_handle_types;
  MemoryLocation location;
  void* win32_handle_meta_data;
  struct {
    unsigned char compression_type;
    unsigned char gpu_direct_rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];  // padding in HIP
  } flags;
};

struct AccessDescription {
  MemoryLocation location;
  int flags;
};

// Entry points of both: our name, CUDA's, HIP's, then the parameters. All return a Result. Of CUDA the newest form that
// release 12.0 had is taken, whatever the driver's age.
constexpr int cuda_interface_version = 12000;
#define MORI_GPU_ENTRY_POINTS(X)                                                                                    \
  X(init, cuInit, hipInit, unsigned)                                                                                \
  X(error_name, cuGetErrorName, hipDrvGetErrorName, Result, const char**)                                           \
  X(error_string, cuGetErrorString, hipDrvGetErrorString, Result, const char**)                                     \
  X(device, cuDeviceGet, hipDeviceGet, Device*, int)                                                                \
  X(device_count, cuDeviceGetCount, hipGetDeviceCount, int*)                                                        \
  X(device_name, cuDeviceGetName, hipDeviceGetName, char*, int, Device)                                             \
  X(device_uuid, cuDeviceGetUuid, hipDeviceGetUuid, Uuid*, Device)                                                  \
  X(device_attribute, cuDeviceGetAttribute, hipDeviceGetAttribute, int*, int, Device)                               \
  X(can_access_peer, cuDeviceCanAccessPeer, hipDeviceCanAccessPeer, int*, Device, Device)                           \
  X(synchronize, cuCtxSynchronize, hipDeviceSynchronize)                                                            \
  X(granularity, cuMemGetAllocationGranularity, hipMemGetAllocationGranularity, std::size_t*,                       \
    const AllocationProperties*, int)                                                                               \
  X(reserve, cuMemAddressReserve, hipMemAddressReserve, Address*, std::size_t, std::size_t, Address,                \
    unsigned long long)                                                                                             \
  X(free_range, cuMemAddressFree, hipMemAddressFree, Address, std::size_t)                                          \
  X(create, cuMemCreate, hipMemCreate, MemoryHandle*, std::size_t, const AllocationProperties*, unsigned long long) \
  X(release, cuMemRelease, hipMemRelease, MemoryHandle)                                                             \
  X(map, cuMemMap, hipMemMap, Address, std::size_t, std::size_t, MemoryHandle, unsigned long long)                  \
  X(unmap, cuMemUnmap, hipMemUnmap, Address, std::size_t)                                                           \
  X(set_access, cuMemSetAccess, hipMemSetAccess, Address, std::size_t, const AccessDescription*, std::size_t)       \
  X(export_handle, cuMemExportToShareableHandle, hipMemExportToShareableHandle, void*, MemoryHandle, int,           \
    unsigned long long)                                                                                             \
  X(import_handle, cuMemImportFromShareableHandle, hipMemImportFromShareableHandle, MemoryHandle*, void*, int)      \
  X(retain_handle, cuMemRetainAllocationHandle, hipMemRetainAllocationHandle, MemoryHandle*, void*)                 \
  X(address_range, cuMemGetAddressRange, hipMemGetAddressRange, Address*, std::size_t*, Address)                    \
  X(host_register, cuMemHostRegister, hipHostRegister, void*, std::size_t, unsigned)                                \
  X(host_unregister, cuMemHostUnregister, hipHostUnregister, void*)                                                 \
  X(host_device_pointer, cuMemHostGetDevicePointer, hipHostGetDevicePointer, Address*, void*, unsigned)             \
  X(fill, cuMemsetD8Async, hipMemsetD8Async, Address, unsigned char, std::size_t, Stream)                           \
  X(copy_to_host, cuMemcpyDtoHAsync, hipMemcpyDtoHAsync, void*, Address, std::size_t, Stream)                       \
  X(copy_to_device, cuMemcpyHtoDAsync, hipMemcpyHtoDAsync, Address, const void*, std::size_t, Stream)               \
  X(stream_synchronize, cuStreamSynchronize, hipStreamSynchronize, Stream)                                          \
  X(stream_is_capturing, cuStreamIsCapturing, hipStreamIsCapturing, Stream, int*)                                   \
  X(exchange_capture_mode, cuThreadExchangeStreamCaptureMode, hipThreadExchangeStreamCaptureMode, int*)             \
  X(load_module, cuModuleLoadData, hipModuleLoadData, Module*, const void*)                                         \
  X(get_function, cuModuleGetFunction, hipModuleGetFunction, Function*, Module, const char*)                        \
  X(launch, cuLaunchKernel, hipModuleLaunchKernel, Function, unsigned, unsigned, unsigned, unsigned, unsigned,      \
    unsigned, unsigned, Stream, void**, void**)

// Those of one alone. What a thread's calls are about is a context in CUDA, a number in HIP.
#define MORI_CUDA_ENTRY_POINTS(X)                               \
  X(retain_context, cuDevicePrimaryCtxRetain, Context*, Device) \
  X(current_context, cuCtxGetCurrent, Context*)                 \
  X(push_context, cuCtxPushCurrent, Context)                    \
  X(pop_context, cuCtxPopCurrent, Context*)                     \
  X(set_function_attribute, cuFuncSetAttribute, Function, int, int)

#define MORI_HIP_ENTRY_POINTS(X)        \
  X(current_device, hipGetDevice, int*) \
  X(set_device, hipSetDevice, int)      \
  X(runtime_version, hipRuntimeGetVersion, int*)

// Symbols of libcuda are not looked up by name: this one, which is, finds all others.
using GetProcAddress = Result(const char* name, void** function, int version, unsigned long long flags, int* status);

}  // namespace mori::gpu

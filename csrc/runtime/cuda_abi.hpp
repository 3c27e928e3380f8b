// The part of the NVIDIA driver's ABI that is used here, declared by hand so that nothing of CUDA is needed to build.
// tests/cuda/test_abi.py compares it with the real header where there is one.
#pragma once

#include <cstddef>

namespace mori::cuda {

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

// Device attributes
constexpr int attribute_multiprocessors = 16;
constexpr int attribute_capability_major = 75;
constexpr int attribute_capability_minor = 76;
constexpr int attribute_shared_memory_optin_bytes = 97;
constexpr int attribute_virtual_memory_management = 102;
constexpr int attribute_posix_handles = 103;
constexpr int attribute_rdma_with_virtual_memory = 110;

// Function attributes
constexpr int function_shared_bytes = 1;
constexpr int function_max_dynamic_shared_bytes = 8;

constexpr int allocation_pinned = 1;
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
    unsigned char reserved[4];
  } flags;
};

struct AccessDescription {
  MemoryLocation location;
  int flags;
};

// Every entry point: name as the driver knows it, then its parameters. All return a Result. The newest form that CUDA
// 12.0 had is taken, whatever the driver's age.
constexpr int interface_version = 12000;
#define MORI_CUDA_ENTRY_POINTS(X)                                                                                   \
  X(cuInit, unsigned)                                                                                               \
  X(cuGetErrorName, Result, const char**)                                                                           \
  X(cuGetErrorString, Result, const char**)                                                                         \
  X(cuDeviceGet, Device*, int)                                                                                      \
  X(cuDeviceGetCount, int*)                                                                                         \
  X(cuDeviceGetName, char*, int, Device)                                                                            \
  X(cuDeviceGetUuid, Uuid*, Device)                                                                                 \
  X(cuDeviceGetAttribute, int*, int, Device)                                                                        \
  X(cuDeviceCanAccessPeer, int*, Device, Device)                                                                    \
  X(cuDevicePrimaryCtxRetain, Context*, Device)                                                                     \
  X(cuDevicePrimaryCtxRelease, Device)                                                                              \
  X(cuCtxGetCurrent, Context*)                                                                                      \
  X(cuCtxPushCurrent, Context)                                                                                      \
  X(cuCtxPopCurrent, Context*)                                                                                      \
  X(cuCtxSynchronize)                                                                                               \
  X(cuMemGetAllocationGranularity, std::size_t*, const AllocationProperties*, int)                                  \
  X(cuMemAddressReserve, Address*, std::size_t, std::size_t, Address, unsigned long long)                           \
  X(cuMemAddressFree, Address, std::size_t)                                                                         \
  X(cuMemCreate, MemoryHandle*, std::size_t, const AllocationProperties*, unsigned long long)                       \
  X(cuMemRelease, MemoryHandle)                                                                                     \
  X(cuMemMap, Address, std::size_t, std::size_t, MemoryHandle, unsigned long long)                                  \
  X(cuMemUnmap, Address, std::size_t)                                                                               \
  X(cuMemSetAccess, Address, std::size_t, const AccessDescription*, std::size_t)                                    \
  X(cuMemExportToShareableHandle, void*, MemoryHandle, int, unsigned long long)                                     \
  X(cuMemImportFromShareableHandle, MemoryHandle*, void*, int)                                                      \
  X(cuMemHostRegister, void*, std::size_t, unsigned)                                                                \
  X(cuMemHostUnregister, void*)                                                                                     \
  X(cuMemHostGetDevicePointer, Address*, void*, unsigned)                                                           \
  X(cuMemsetD8Async, Address, unsigned char, std::size_t, Stream)                                                   \
  X(cuMemcpyDtoHAsync, void*, Address, std::size_t, Stream)                                                         \
  X(cuMemcpyHtoDAsync, Address, const void*, std::size_t, Stream)                                                   \
  X(cuStreamSynchronize, Stream)                                                                                    \
  X(cuStreamIsCapturing, Stream, int*)                                                                              \
  X(cuThreadExchangeStreamCaptureMode, int*)                                                                        \
  X(cuModuleLoadData, Module*, const void*)                                                                         \
  X(cuModuleGetFunction, Function*, Module, const char*)                                                            \
  X(cuFuncGetAttribute, int*, int, Function)                                                                        \
  X(cuFuncSetAttribute, Function, int, int)                                                                         \
  X(cuLaunchKernel, Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**, \
    void**)

// The one symbol that is looked up by name in the library; it finds all others.
using GetProcAddress = Result(const char* name, void** function, int version, unsigned long long flags, int* status);

}  // namespace mori::cuda

// The drivers of GPUs, each loaded when somebody first asks for its target. Nothing here links against CUDA or HIP.
#pragma once

#include <string>

#include "../device/base.hpp"
#include "gpu_abi.hpp"

namespace mori::gpu {

enum class Api { cuda, hip };

// "cuda" or "hip"; std::invalid_argument for anything else.
Api api_of(const std::string& name);

// A function of a driver, by the name that the driver's documentation knows. Null if the driver is of the other API.
template <class... Parameters>
struct EntryPoint {
  Result (*function)(Parameters...) = nullptr;
  const char* name = nullptr;

  Result operator()(Parameters... parameters) const { return function(parameters...); }
};

struct Driver {
  Api api;
  Attributes attributes;
#define MORI_GPU_DECLARE(name, cuda, hip, ...) EntryPoint<__VA_ARGS__> name;
#define MORI_API_DECLARE(name, symbol, ...) EntryPoint<__VA_ARGS__> name;
  MORI_GPU_ENTRY_POINTS(MORI_GPU_DECLARE)
  MORI_CUDA_ENTRY_POINTS(MORI_API_DECLARE)
  MORI_HIP_ENTRY_POINTS(MORI_API_DECLARE)
#undef MORI_GPU_DECLARE
#undef MORI_API_DECLARE

  // Throws for what fails: std::runtime_error with the call, the name of the error and what the driver says about it.
  template <class... Parameters, class... Arguments>
  void call(const EntryPoint<Parameters...>& entry, Arguments... arguments) const {
    const Result result = entry.function(arguments...);
    if (result != success) fail(entry.name, result);
  }
  [[noreturn]] void fail(const char* call, Result result) const;
};

// The initialised driver. std::runtime_error, each time, where it is missing, too old or finds no GPU.
const Driver& driver(Api api);

// A GPU as this process sees it, with its primary context, the one that torch uses too. Kept until the process ends.
struct Gpu {
  const Driver& driver;
  Device device;
  int ordinal;
  Context context;  // of CUDA
  u32 multiprocessors;
  u32 lanes;
  u32 block_memory_bytes;  // that a block may ask for
  bool rdma_capable;       // memory of the VMM calls can be registered with a NIC
  u64 granularity;         // of memory chunks
  std::string name, uuid;
};
const Gpu& gpu(Api api, int ordinal);

// 1 or 0: whether GPU `ordinal` reaches the memory of the GPU with that uuid; -1: this process does not see that one.
int can_access_peer(Api api, int ordinal, const std::string& uuid);

// Of memory that peers map. On AMD GPUs it bypasses caches: others are not coherent while a kernel runs.
AllocationProperties allocation_properties(const Gpu& gpu, int handle_type);

// What `import_handle` takes for a descriptor.
inline void* importable(int descriptor) { return reinterpret_cast<void*>(u64(descriptor)); }

// Makes the GPU the one that this thread's calls are about, for as long as this object lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(const Gpu& gpu);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  const Driver& driver_;
  bool changed_;
  int former_ = 0;  // of HIP
};

// Calls that a capturing thread may not make otherwise are legal while this object lives.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& driver) : driver_(driver) { driver.call(driver.exchange_capture_mode, &mode_); }
  ~RelaxedCapture() { driver_.exchange_capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Driver& driver_;
  int mode_ = capture_mode_relaxed;  // afterwards: the thread's former mode
};

// The kernel `symbol` of a code object, ready to be launched without any further work of the driver's. Its module stays
// until the process ends.
Function load_function(const Gpu& gpu, const char* symbol, const std::string& code);

inline Stream stream_of(u64 handle) { return reinterpret_cast<Stream>(handle); }
bool is_capturing(const Driver& driver, u64 stream);

}  // namespace mori::gpu

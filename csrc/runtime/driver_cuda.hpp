// The NVIDIA driver, loaded when somebody first asks for the cuda target. Nothing here links against CUDA.
#pragma once

#include <string>

#include "../device/base.hpp"
#include "cuda_abi.hpp"

namespace mori::cuda {

// A driver call that failed. `what()` has the call, the name of the error and what the driver says about it.
[[noreturn]] void fail(const char* call, Result result);

struct Driver {
#define MORI_CUDA_DECLARE(name, ...) Result (*name)(__VA_ARGS__) = nullptr;
  MORI_CUDA_ENTRY_POINTS(MORI_CUDA_DECLARE)
#undef MORI_CUDA_DECLARE
};

// The initialised driver. std::runtime_error, each time, where it is missing, too old or finds no GPU.
const Driver& driver();

// Throws for what fails: call(MORI_CUDA(cuMemRelease), handle).
template <class... Parameters, class... Arguments>
void call(Result (*function)(Parameters...), const char* name, Arguments... arguments) {
  const Result result = function(arguments...);
  if (result != success) fail(name, result);
}
#define MORI_CUDA(name) ::mori::cuda::driver().name, #name

// A GPU as this process sees it, with its primary context, the one that torch uses too. Kept until the process ends.
struct Gpu {
  Device device;
  int ordinal;
  Context context;
  u32 multiprocessors;
  u32 shared_memory_bytes;  // that a block may ask for
  int capability_major, capability_minor;
  bool rdma_capable;  // memory of the VMM calls can be registered with a NIC
  u64 granularity;    // of memory chunks
  std::string name, uuid;
};
const Gpu& gpu(int ordinal);

// 1 or 0: whether GPU `ordinal` reaches the memory of the GPU with that uuid; -1: this process does not see that one.
int can_access_peer(int ordinal, const std::string& uuid);

AllocationProperties allocation_properties(const Gpu& gpu, int handle_type);

// Makes the context current for as long as this object lives.
class ContextGuard {
 public:
  explicit ContextGuard(const Gpu& gpu) {
    Context current = nullptr;
    call(MORI_CUDA(cuCtxGetCurrent), &current);
    pushed_ = current != gpu.context;
    if (pushed_) call(MORI_CUDA(cuCtxPushCurrent), gpu.context);
  }
  ~ContextGuard() {
    Context ignored;
    if (pushed_) driver().cuCtxPopCurrent(&ignored);
  }
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  bool pushed_;
};

// Calls that a capturing thread may not make otherwise are legal while this object lives.
class RelaxedCapture {
 public:
  RelaxedCapture() { call(MORI_CUDA(cuThreadExchangeStreamCaptureMode), &mode_); }
  ~RelaxedCapture() { driver().cuThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int mode_ = capture_mode_relaxed;  // afterwards: the thread's former mode
};

inline Stream stream_of(u64 handle) { return reinterpret_cast<Stream>(handle); }
bool is_capturing(u64 stream);

}  // namespace mori::cuda

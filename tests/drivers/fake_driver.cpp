// A HIP runtime, and with FAKE_CUDA an NVIDIA driver, without GPUs: device memory is memfd memory of this process and
// streams are a thread per device. Code objects and launches go to an executor (executor.hpp), so the way from a plan
// through the driver to a result is that of a GPU, whoever executes the kernels.
//
// FAKE_LOG names a file for notes, FAKE_VERSION, FAKE_VMM, FAKE_LANES and FAKE_CLOCK_KHZ replace what it says of
// itself.
#include <sys/mman.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "executor.hpp"
#include "runtime/gpu_abi.hpp"

using namespace mori::gpu;

namespace {

#ifdef FAKE_CUDA
constexpr Attributes attributes = cuda_attributes;
constexpr int lanes = 32;
#else
constexpr Attributes attributes = hip_attributes;
constexpr int lanes = 64;
#endif
constexpr int devices = 2, granularity = 1 << 16, invalid_value = 1;
thread_local int current_device = 0;

void note(const std::string& line) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (const char* file = std::getenv("FAKE_LOG")) std::ofstream(file, std::ios::app) << line << '\n';
}

int number(const char* variable, int usual) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::atoi(text) : usual;
}

// What is enqueued on a device runs here, one after the other, whatever the stream.
class Queue {
 public:
  Queue() : thread_([this] { run(); }) { thread_.detach(); }

  void push(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(work));
    changed_.notify_all();
  }
  void finish() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_.empty(); });
  }

 private:
  void run() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !waiting_.empty(); });
      const auto work = waiting_.front();
      lock.unlock();
      work();
      lock.lock();
      waiting_.pop_front();
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  std::thread thread_;
};

Queue& queue() {
  static auto* const queues = new Queue[devices];
  return queues[current_device];
}

// Memory of the host that kernels reach: what is mapped for a device, and pages that were registered.
class Mapped {
 public:
  void add(const void* address, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    ranges_[std::uint64_t(address)] = bytes;
  }
  void remove(const void* address) {
    const std::lock_guard lock(mutex_);
    ranges_.erase(std::uint64_t(address));
  }
  std::size_t copy(FakeRange* to, std::size_t capacity) {
    const std::lock_guard lock(mutex_);
    std::size_t at = 0;
    for (const auto& [address, bytes] : ranges_) {
      if (at < capacity) to[at] = {address, bytes};
      ++at;
    }
    return at;
  }

 private:
  std::mutex mutex_;
  std::map<std::uint64_t, std::uint64_t> ranges_;
};

Mapped& mapped() {
  static auto* const ranges = new Mapped;
  return *ranges;
}

struct LoadedFunction {
  std::uint64_t number;
  std::string name;
};

FakeExecutor executor{};

// Where memory is mapped, with a descriptor of it. Used by one thread at a time.
struct Mapping {
  std::size_t bytes;
  int descriptor;
};
std::map<Address, Mapping> mappings;

void* at(Address address) { return reinterpret_cast<void*>(address); }

}  // namespace

extern "C" {

void fake_driver_use(const FakeExecutor* chosen) { executor = *chosen; }
std::size_t fake_driver_mapped(FakeRange* ranges, std::size_t capacity) { return mapped().copy(ranges, capacity); }

Result hipInit(unsigned) { return success; }
Result hipDrvGetErrorName(Result, const char** name) { return *name = "fakeError", success; }
Result hipDrvGetErrorString(Result, const char** text) { return *text = "a fault of the fake driver", success; }
Result hipDeviceGet(Device* device, int ordinal) { return *device = ordinal, success; }
Result hipGetDeviceCount(int* count) { return *count = devices, success; }
Result hipDeviceGetName(char* name, int bytes, Device) { return std::strncpy(name, "fake GPU", bytes), success; }
Result hipDeviceGetUuid(Uuid* uuid, Device device) {
  std::memset(uuid->bytes, device, sizeof uuid->bytes);
  return success;
}
Result hipDeviceGetAttribute(int* value, int which, Device) {
  const std::map<int, int> values = {{attributes.multiprocessors, 4},
                                     {attributes.lanes, number("FAKE_LANES", lanes)},
                                     {attributes.block_memory_bytes, 65536},
                                     {attributes.virtual_memory_management, number("FAKE_VMM", 1)},
                                     {attributes.posix_handles, 1},
                                     {attributes.rdma_with_virtual_memory, 1},
                                     {attributes.wall_clock_khz, number("FAKE_CLOCK_KHZ", 100000)}};
  const auto found = values.find(which);
  if (found == values.end()) return invalid_value;
  return *value = found->second, success;
}
Result hipDeviceCanAccessPeer(int* reaches, Device, Device) { return *reaches = 1, success; }
Result hipGetDevice(int* device) { return *device = current_device, success; }
Result hipSetDevice(int device) { return current_device = device, success; }
Result hipRuntimeGetVersion(int* version) { return *version = number("FAKE_VERSION", 70151800), success; }
Result hipDeviceSynchronize() { return queue().finish(), success; }

Result hipMemGetAllocationGranularity(std::size_t* bytes, const AllocationProperties*, int) {
  return *bytes = granularity, success;
}
Result hipMemAddressReserve(Address* address, std::size_t bytes, std::size_t, Address, unsigned long long) {
  void* range = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return *address = reinterpret_cast<Address>(range), range == MAP_FAILED ? error_out_of_memory : success;
}
Result hipMemAddressFree(Address address, std::size_t bytes) { return munmap(at(address), bytes); }
Result hipMemCreate(MemoryHandle* handle, std::size_t bytes, const AllocationProperties* properties,
                    unsigned long long) {
  const int type = properties->type, device = properties->location.id;
  note("create " + std::string(type == hip_allocation_uncached ? "uncached" : "cached") + " on " +
       std::to_string(device) + " by " + std::to_string(current_device));
  const int descriptor = memfd_create("fake_driver", MFD_CLOEXEC);
  if (ftruncate(descriptor, off_t(bytes)) != 0) return error_out_of_memory;
  return *handle = MemoryHandle(descriptor), success;
}
Result hipMemRelease(MemoryHandle handle) { return close(int(handle)); }
Result hipMemMap(Address address, std::size_t bytes, std::size_t, MemoryHandle handle, unsigned long long) {
  void* place = mmap(at(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, int(handle), 0);
  if (place == MAP_FAILED) return invalid_value;
  mappings[address] = {bytes, dup(int(handle))};
  return mapped().add(place, bytes), success;
}
Result hipMemRetainAllocationHandle(MemoryHandle* handle, void* address) {
  const auto found = mappings.find(reinterpret_cast<Address>(address));
  return found == mappings.end() ? invalid_value : (*handle = MemoryHandle(dup(found->second.descriptor)), success);
}
Result hipMemGetAddressRange(Address* begin, std::size_t* bytes, Address address) {
  const auto next = mappings.upper_bound(address);
  if (next == mappings.begin()) return invalid_value;
  const auto& [start, mapping] = *std::prev(next);
  *begin = start, *bytes = mapping.bytes;
  return address < start + mapping.bytes ? success : invalid_value;
}
Result hipMemUnmap(Address address, std::size_t bytes) {
  mapped().remove(at(address));
  close(mappings.at(address).descriptor);
  mappings.erase(address);
  mmap(at(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return success;
}
Result hipMemSetAccess(Address address, std::size_t bytes, const AccessDescription* access, std::size_t) {
  note("access for " + std::to_string(access->location.id));
  return mprotect(at(address), bytes, PROT_READ | PROT_WRITE);
}
Result hipMemExportToShareableHandle(void* descriptor, MemoryHandle handle, int, unsigned long long) {
  return *static_cast<int*>(descriptor) = dup(int(handle)), success;
}
Result hipMemImportFromShareableHandle(MemoryHandle* handle, void* descriptor, int) {
  return *handle = MemoryHandle(dup(int(reinterpret_cast<Address>(descriptor)))), success;
}
Result hipHostRegister(void* page, std::size_t bytes, unsigned) { return mapped().add(page, bytes), success; }
Result hipHostUnregister(void* page) { return mapped().remove(page), success; }
Result hipHostGetDevicePointer(Address* address, void* page, unsigned) {
  return *address = reinterpret_cast<Address>(page), success;
}
Result hipMemsetD8Async(Address to, unsigned char value, std::size_t bytes, Stream) {
  queue().push([=] { std::memset(at(to), value, bytes); });
  return success;
}
Result hipMemcpyDtoHAsync(void* to, Address from, std::size_t bytes, Stream) {
  queue().push([=] { std::memcpy(to, at(from), bytes); });
  return success;
}
Result hipMemcpyHtoDAsync(Address to, const void* from, std::size_t bytes, Stream) {
  queue().push([=] { std::memcpy(at(to), from, bytes); });
  return success;
}
Result hipStreamSynchronize(Stream) { return queue().finish(), success; }
Result hipStreamIsCapturing(Stream, int* status) { return *status = capture_status_none, success; }
Result hipThreadExchangeStreamCaptureMode(int*) { return success; }

Result hipModuleLoadData(Module* module, const void* image) {
  return *module = reinterpret_cast<Module>(executor.load(image)), *module == nullptr ? invalid_value : success;
}
Result hipModuleGetFunction(Function* function, Module module, const char* name) {
  const std::uint64_t number = executor.find(std::uint64_t(module), name);
  if (number == 0) return invalid_value;
  return *function = reinterpret_cast<Function>(new LoadedFunction{number, name}), success;
}
Result hipModuleLaunchKernel(Function function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned,
                             unsigned, unsigned scratch_bytes, Stream, void** parameters, void**) {
  const auto& [number, name] = *reinterpret_cast<LoadedFunction*>(function);
  note("launch " + name + " " + std::to_string(blocks) + "x" + std::to_string(threads) + " on " +
       std::to_string(current_device));
  const FakeLaunch launch{parameters[0], blocks, threads, scratch_bytes};
  queue().push([work = executor.enqueue(number, &launch)] { executor.run(work); });
  return success;
}
}

#ifdef FAKE_CUDA
// A context is a device, plus one so that it is not null.
namespace {
thread_local std::vector<Context> contexts;

Result retain_context(Context* context, Device device) {
  return *context = reinterpret_cast<Context>(Address(device) + 1), success;
}
Result current_context(Context* context) { return *context = contexts.empty() ? nullptr : contexts.back(), success; }
Result push_context(Context context) {
  contexts.push_back(context);
  return hipSetDevice(int(reinterpret_cast<Address>(context)) - 1);
}
Result pop_context(Context* context) {
  *context = contexts.back();
  contexts.pop_back();
  return hipSetDevice(contexts.empty() ? 0 : int(reinterpret_cast<Address>(contexts.back())) - 1);
}
Result set_function_attribute(Function, int attribute, int value) {
  note("attribute " + std::to_string(attribute) + " = " + std::to_string(value));
  return success;
}
}  // namespace

#define FAKE_BOTH(name, cuda, hip, ...) {#cuda, reinterpret_cast<void*>(&hip)},
#define FAKE_ONE(name, cuda, ...) {#cuda, reinterpret_cast<void*>(&name)},
extern "C" Result cuGetProcAddress_v2(const char* name, void** function, int, unsigned long long, int*) {
  static const std::map<std::string, void*> functions = {MORI_GPU_ENTRY_POINTS(FAKE_BOTH)
                                                             MORI_CUDA_ENTRY_POINTS(FAKE_ONE)};
  const auto found = functions.find(name);
  return *function = found == functions.end() ? nullptr : found->second, success;
}
#endif

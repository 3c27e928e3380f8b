#include "gpu_driver.hpp"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

namespace mori::gpu {
namespace {

// What messages and the loader need to know of an API.
struct Library {
  std::vector<const char*> names;
  const char* target;
  const char* owner;
  const char* age;
  const char* variable;  // that hides GPUs
};
const Library cuda_library{{"libcuda.so.1"},
                           "cuda",
                           "the NVIDIA driver",
                           "A driver for CUDA 12.0 (525) or later is needed",
                           "CUDA_VISIBLE_DEVICES"};
// First that which torch has loaded, if it has.
const Library hip_library{{"libamdhip64.so.7", "libamdhip64.so"},
                          "hip",
                          "the HIP runtime",
                          "ROCm 7.1 or later is needed",
                          "HIP_VISIBLE_DEVICES"};
constexpr int oldest_hip = 70'100'000;  // memory that peers map can be uncached from here on

const Library& library_of(Api api) { return api == Api::cuda ? cuda_library : hip_library; }

void* open_library(const Library& library) {
  std::string reason;
  for (const char* name : library.names) {
    if (void* opened = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return opened;
    reason += (reason.empty() ? "" : "; ") + std::string(dlerror());
  }
  throw std::runtime_error(std::string("the ") + library.target + " target needs " + library.owner + ", but " +
                           library.names.front() + " cannot be loaded (" + reason +
                           "): install the driver, give the container its GPUs, or set MORI_TARGET=host");
}

class Symbols {
 public:
  Symbols(Api api, const Library& library) : library_(library), handle_(open_library(library)) {
    if (api == Api::cuda) find_ = reinterpret_cast<GetProcAddress*>(dlsym(handle_, "cuGetProcAddress_v2"));
    if (api == Api::cuda && find_ == nullptr) refuse("cuGetProcAddress_v2");
  }

  template <class... Parameters>
  void look_up(const char* name, EntryPoint<Parameters...>& entry) const {
    void* function = nullptr;
    int status = 0;
    if (find_ == nullptr) {
      function = dlsym(handle_, name);
    } else if (find_(name, &function, cuda_interface_version, proc_address_default, &status) != success) {
      function = nullptr;
    }
    if (function == nullptr) refuse(name);
    entry = {reinterpret_cast<Result (*)(Parameters...)>(function), name};
  }

 private:
  [[noreturn]] void refuse(const char* name) const {
    throw std::runtime_error(std::string(library_.owner) + " of this machine is too old for the " + library_.target +
                             " target: it has no " + name + ". " + library_.age);
  }

  const Library& library_;
  void* handle_;
  GetProcAddress* find_ = nullptr;
};

Driver load(Api api) {
  const Library& library = library_of(api);
  const Symbols symbols(api, library);
  Driver table{};
  table.api = api;
  table.attributes = api == Api::cuda ? cuda_attributes : hip_attributes;
#define MORI_GPU_LOOK_UP(name, of_cuda, of_hip, ...) symbols.look_up(api == Api::cuda ? #of_cuda : #of_hip, table.name);
#define MORI_API_LOOK_UP(name, symbol, ...) symbols.look_up(#symbol, table.name);
  MORI_GPU_ENTRY_POINTS(MORI_GPU_LOOK_UP)
  if (api == Api::cuda) {
    MORI_CUDA_ENTRY_POINTS(MORI_API_LOOK_UP)
  } else {
    MORI_HIP_ENTRY_POINTS(MORI_API_LOOK_UP)
  }
#undef MORI_GPU_LOOK_UP
#undef MORI_API_LOOK_UP
  const Result result = table.init(0);
  if (result != success) {
    const char* meaning = "unknown error";
    table.error_string(result, &meaning);
    throw std::runtime_error(std::string(library.owner) + " does not start (" + table.init.name + ": " + meaning +
                             "): are there visible GPUs (" + library.variable +
                             "), or was this process forked from one that used them?");
  }
  if (api == Api::hip) {
    int version = 0;
    table.call(table.runtime_version, &version);
    if (version < oldest_hip) {
      throw std::runtime_error("the HIP runtime of this machine has version " + std::to_string(version) +
                               ", the hip target needs " + std::to_string(oldest_hip) + ": " + library.age);
    }
  }
  return table;
}

std::string hexadecimal(const Uuid& uuid) {
  static constexpr char digits[] = "0123456789abcdef";
  std::string text;
  for (const char byte : uuid.bytes) {
    text += digits[static_cast<unsigned char>(byte) >> 4];
    text += digits[byte & 15];
  }
  return text;
}

int attribute(const Driver& driver, Device device, int which) {
  int value = 0;
  driver.call(driver.device_attribute, &value, which, device);
  return value;
}

Device device_of(const Driver& driver, int ordinal) {
  int count = 0;
  driver.call(driver.device_count, &count);
  if (ordinal < 0 || ordinal >= count) {
    throw std::runtime_error("GPU " + std::to_string(ordinal) + " does not exist: this process sees " +
                             std::to_string(count) + " (" + library_of(driver.api).variable + ")");
  }
  Device device = 0;
  driver.call(driver.device, &device, ordinal);
  return device;
}

std::string uuid_of(const Driver& driver, Device device) {
  Uuid uuid{};
  driver.call(driver.device_uuid, &uuid, device);
  return hexadecimal(uuid);
}

bool shares_memory(const Driver& driver, Device device) {
  const Attributes& attributes = driver.attributes;
  if (attribute(driver, device, attributes.virtual_memory_management) == 0) return false;
  return attributes.posix_handles == 0 || attribute(driver, device, attributes.posix_handles) != 0;
}

// Kernels know the time by a counter of so many ticks (device/target_hip.hpp).
void check_clock(const Driver& driver, Device device, const std::string& name) {
  constexpr int expected_khz = 100'000;
  if (driver.attributes.wall_clock_khz == 0) return;
  const int khz = attribute(driver, device, driver.attributes.wall_clock_khz);
  if (khz != expected_khz) {
    throw std::runtime_error("the clock of " + name + " runs at " + std::to_string(khz) +
                             " kHz; the hip target knows " + std::to_string(expected_khz) + " only");
  }
}

std::unique_ptr<Gpu> open(Api api, int ordinal) {
  const Driver& used = driver(api);
  const Device device = device_of(used, ordinal);
  char name[96] = {};
  used.call(used.device_name, name, int(sizeof name), device);
  if (!shares_memory(used, device)) {
    throw std::runtime_error("GPU " + std::to_string(ordinal) + " (" + name +
                             ") cannot share memory between processes by file descriptors (virtual memory management "
                             "with POSIX handles), which the " +
                             library_of(api).target + " target needs");
  }
  check_clock(used, device, name);
  const Attributes& attributes = used.attributes;
  const bool rdma =
      attributes.rdma_with_virtual_memory != 0 && attribute(used, device, attributes.rdma_with_virtual_memory) != 0;
  auto found = std::make_unique<Gpu>(
      Gpu{used, device, ordinal, nullptr, u32(attribute(used, device, attributes.multiprocessors)),
          u32(attribute(used, device, attributes.lanes)), u32(attribute(used, device, attributes.block_memory_bytes)),
          rdma, 0, name, uuid_of(used, device)});
  if (api == Api::cuda) used.call(used.retain_context, &found->context, device);
  const AllocationProperties properties = allocation_properties(*found, handle_posix_descriptor);
  std::size_t granularity = 0;
  used.call(used.granularity, &granularity, &properties, granularity_recommended);
  found->granularity = granularity;
  return found;
}

}  // namespace

Api api_of(const std::string& name) {
  if (name == "cuda") return Api::cuda;
  if (name == "hip") return Api::hip;
  throw std::invalid_argument("no GPUs are reached by way of '" + name + "', but of 'cuda' and 'hip'");
}

void Driver::fail(const char* call, Result result) const {
  const char* name = nullptr;
  const char* meaning = nullptr;
  error_name(result, &name);
  error_string(result, &meaning);
  throw std::runtime_error(std::string(call) + " failed: " + (name != nullptr ? name : std::to_string(result)) + ", " +
                           (meaning != nullptr ? meaning : "an error that this driver has no words for"));
}

// Tables are never destroyed: views of memory may die after statics do.
const Driver& driver(Api api) {
  if (api == Api::cuda) {
    static const Driver* cuda = new Driver(load(Api::cuda));
    return *cuda;
  }
  static const Driver* hip = new Driver(load(Api::hip));
  return *hip;
}

const Gpu& gpu(Api api, int ordinal) {
  static auto* const gpus = new std::map<std::pair<Api, int>, std::unique_ptr<Gpu>>;
  static auto* const mutex = new std::mutex;
  const std::lock_guard lock(*mutex);
  auto& found = (*gpus)[{api, ordinal}];
  if (found == nullptr) found = open(api, ordinal);
  return *found;
}

int can_access_peer(Api api, int ordinal, const std::string& uuid) {
  const Driver& used = driver(api);
  const Device own = device_of(used, ordinal);
  int count = 0;
  used.call(used.device_count, &count);
  for (int other = 0; other < count; ++other) {
    const Device device = device_of(used, other);
    if (uuid_of(used, device) != uuid) continue;
    int reaches = device == own;
    if (device != own) used.call(used.can_access_peer, &reaches, own, device);
    return reaches;
  }
  return -1;
}

AllocationProperties allocation_properties(const Gpu& gpu, int handle_type) {
  AllocationProperties properties{};
  properties.type = gpu.driver.api == Api::hip ? hip_allocation_uncached : allocation_pinned;
  properties.requested_handle_types = handle_type;
  properties.location = {location_device, gpu.ordinal};
  properties.flags.gpu_direct_rdma_capable = gpu.rdma_capable;
  return properties;
}

DeviceGuard::DeviceGuard(const Gpu& gpu) : driver_(gpu.driver) {
  if (driver_.api == Api::hip) {
    driver_.call(driver_.current_device, &former_);
    changed_ = former_ != gpu.ordinal;
    if (changed_) driver_.call(driver_.set_device, gpu.ordinal);
    return;
  }
  Context current = nullptr;
  driver_.call(driver_.current_context, &current);
  changed_ = current != gpu.context;
  if (changed_) driver_.call(driver_.push_context, gpu.context);
}

DeviceGuard::~DeviceGuard() {
  if (!changed_) return;
  Context ignored;
  driver_.api == Api::hip ? driver_.set_device(former_) : driver_.pop_context(&ignored);
}

Function load_function(const Gpu& gpu, const char* symbol, const std::string& code) {
  const Driver& driver = gpu.driver;
  const DeviceGuard current(gpu);
  const RelaxedCapture relaxed(driver);
  Module module = nullptr;
  Function function = nullptr;
  driver.call(driver.load_module, &module, static_cast<const void*>(code.data()));
  driver.call(driver.get_function, &function, module, symbol);
  // Setting an attribute makes NVIDIA's driver load the code now. Left to the first launch it might wait for kernels
  // that wait for peers. HIP has loaded it.
  if (driver.api == Api::cuda) {
    driver.call(driver.set_function_attribute, function, function_max_dynamic_shared_bytes,
                int(gpu.block_memory_bytes));
  }
  return function;
}

bool is_capturing(const Driver& driver, u64 stream) {
  int status = capture_status_none;
  // On the legacy stream this fails while another stream captures; that one does not capture itself.
  if (driver.stream_is_capturing(stream_of(stream), &status) != success) return false;
  return status != capture_status_none;
}

}  // namespace mori::gpu

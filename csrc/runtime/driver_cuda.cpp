#include "driver_cuda.hpp"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>

namespace mori::cuda {
namespace {

constexpr const char* library_name = "libcuda.so.1";

Driver load() {
  void* library = dlopen(library_name, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw std::runtime_error(std::string("the cuda target needs the NVIDIA driver, but ") + library_name +
                             " cannot be loaded (" + dlerror() +
                             "): install the driver, give the container its GPUs, or set MORI_TARGET=host");
  }
  auto* find = reinterpret_cast<GetProcAddress*>(dlsym(library, "cuGetProcAddress_v2"));
  Driver table;
  const auto look_up = [&](const char* name, void* place) {
    void* function = nullptr;
    int status = 0;
    if (find == nullptr || find(name, &function, interface_version, proc_address_default, &status) != success ||
        function == nullptr) {
      throw std::runtime_error(
          std::string("the NVIDIA driver of this machine is too old for the cuda target: it has no ") +
          (find == nullptr ? "cuGetProcAddress_v2" : name) + ". A driver for CUDA 12.0 (525) or later is needed");
    }
    *static_cast<void**>(place) = function;
  };
#define MORI_CUDA_LOOK_UP(name, ...) look_up(#name, &table.name);
  MORI_CUDA_ENTRY_POINTS(MORI_CUDA_LOOK_UP)
#undef MORI_CUDA_LOOK_UP
  const Result result = table.cuInit(0);
  if (result != success) {
    const char* meaning = "unknown error";
    table.cuGetErrorString(result, &meaning);
    throw std::runtime_error(std::string("the NVIDIA driver does not start (cuInit: ") + meaning +
                             "): are there visible GPUs (CUDA_VISIBLE_DEVICES), or was this process forked from one "
                             "that used CUDA?");
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

int attribute(Device device, int which) {
  int value = 0;
  call(MORI_CUDA(cuDeviceGetAttribute), &value, which, device);
  return value;
}

Device device_of(int ordinal) {
  int count = 0;
  call(MORI_CUDA(cuDeviceGetCount), &count);
  if (ordinal < 0 || ordinal >= count) {
    throw std::runtime_error("GPU " + std::to_string(ordinal) + " does not exist: this process sees " +
                             std::to_string(count) + " (CUDA_VISIBLE_DEVICES)");
  }
  Device device = 0;
  call(MORI_CUDA(cuDeviceGet), &device, ordinal);
  return device;
}

std::string uuid_of(Device device) {
  Uuid uuid{};
  call(MORI_CUDA(cuDeviceGetUuid), &uuid, device);
  return hexadecimal(uuid);
}

std::unique_ptr<Gpu> open(int ordinal) {
  auto found = std::make_unique<Gpu>();
  found->ordinal = ordinal;
  found->device = device_of(ordinal);
  char name[96] = {};
  call(MORI_CUDA(cuDeviceGetName), name, int(sizeof name), found->device);
  found->name = name;
  found->uuid = uuid_of(found->device);
  if (attribute(found->device, attribute_virtual_memory_management) == 0 ||
      attribute(found->device, attribute_posix_handles) == 0) {
    throw std::runtime_error("GPU " + std::to_string(ordinal) + " (" + found->name +
                             ") cannot share memory between processes by file descriptors (virtual memory management "
                             "with POSIX handles), which the cuda target needs");
  }
  found->multiprocessors = u32(attribute(found->device, attribute_multiprocessors));
  found->shared_memory_bytes = u32(attribute(found->device, attribute_shared_memory_optin_bytes));
  found->capability_major = attribute(found->device, attribute_capability_major);
  found->capability_minor = attribute(found->device, attribute_capability_minor);
  found->rdma_capable = attribute(found->device, attribute_rdma_with_virtual_memory) != 0;
  call(MORI_CUDA(cuDevicePrimaryCtxRetain), &found->context, found->device);
  const AllocationProperties properties = allocation_properties(*found, handle_posix_descriptor);
  std::size_t granularity = 0;
  call(MORI_CUDA(cuMemGetAllocationGranularity), &granularity, &properties, granularity_recommended);
  found->granularity = granularity;
  return found;
}

}  // namespace

void fail(const char* call, Result result) {
  const char* name = nullptr;
  const char* meaning = nullptr;
  driver().cuGetErrorName(result, &name);
  driver().cuGetErrorString(result, &meaning);
  throw std::runtime_error(std::string(call) + " failed: " + (name != nullptr ? name : std::to_string(result)) + ", " +
                           (meaning != nullptr ? meaning : "an error that this driver has no words for"));
}

// Tables are never destroyed: views of memory may die after statics do.
const Driver& driver() {
  static const Driver* table = new Driver(load());
  return *table;
}

const Gpu& gpu(int ordinal) {
  static auto* const gpus = new std::map<int, std::unique_ptr<Gpu>>;
  static auto* const mutex = new std::mutex;
  const std::lock_guard lock(*mutex);
  auto& found = (*gpus)[ordinal];
  if (found == nullptr) found = open(ordinal);
  return *found;
}

int can_access_peer(int ordinal, const std::string& uuid) {
  const Device own = device_of(ordinal);
  int count = 0;
  call(MORI_CUDA(cuDeviceGetCount), &count);
  for (int other = 0; other < count; ++other) {
    const Device device = device_of(other);
    if (uuid_of(device) != uuid) continue;
    int reaches = device == own;
    if (device != own) call(MORI_CUDA(cuDeviceCanAccessPeer), &reaches, own, device);
    return reaches;
  }
  return -1;
}

AllocationProperties allocation_properties(const Gpu& gpu, int handle_type) {
  AllocationProperties properties{};
  properties.type = allocation_pinned;
  properties.requested_handle_types = handle_type;
  properties.location = {location_device, gpu.ordinal};
  properties.flags.gpu_direct_rdma_capable = gpu.rdma_capable;
  return properties;
}

bool is_capturing(u64 stream) {
  int status = capture_status_none;
  // On the legacy stream this fails while another stream captures; that one does not capture itself.
  if (driver().cuStreamIsCapturing(stream_of(stream), &status) != success) return false;
  return status != capture_status_none;
}

}  // namespace mori::cuda

// The structures of DLPack, as its specification lays them out.
#pragma once

#include <cstdint>

namespace mori::dlpack {

struct Device {
  std::int32_t device_type;
  std::int32_t device_id;
};
struct DataType {
  std::uint8_t code, bits;
  std::uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
struct ManagedTensor {
  Tensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(ManagedTensor*);
};

// What a framework's tensor type offers under `__dlpack_c_exchange_api__`: functions instead of methods.
struct ExchangeApi {
  std::uint32_t major, minor;
  const void* previous;
  const void* managed_tensor_allocator;
  const void* managed_tensor_from_object;
  const void* managed_tensor_to_object;
  int (*tensor_from_object)(void* object, Tensor* out);  // may be null; the result is valid as long as the object
  const void* current_work_stream;
};
constexpr const char* exchange_api_name = "dlpack_exchange_api";
constexpr std::uint32_t exchange_api_major = 1;

}  // namespace mori::dlpack

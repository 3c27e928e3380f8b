#include "dlpack.hpp"

#include <cstdint>

namespace mori {
namespace {

// The DLPack structures, as its specification lays them out.
struct DLDevice {
  std::int32_t device_type;
  std::int32_t device_id;
};
struct DLDataType {
  std::uint8_t code, bits;
  std::uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t ndim;
  DLDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor*);
};

constexpr DLDataType uint8_type{1, 8, 1};

struct ByteTensor {
  DLManagedTensor managed;
  std::int64_t shape;
  std::shared_ptr<void> owner;
};

// A consumer renames the capsule and takes over; a capsule that was never consumed still carries its name.
void drop_unused(PyObject* capsule) {
  if (!PyCapsule_IsValid(capsule, "dltensor")) return;
  auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  managed->deleter(managed);
}

}  // namespace

pybind11::capsule byte_tensor(std::shared_ptr<void> owner, u64 address, u64 bytes, Place place) {
  auto* tensor = new ByteTensor{{}, std::int64_t(bytes), std::move(owner)};
  const DLDevice device{place.device_type, place.device_id};
  tensor->managed = {{reinterpret_cast<void*>(address), device, 1, uint8_type, &tensor->shape, nullptr, 0},
                     tensor,
                     [](DLManagedTensor* self) { delete static_cast<ByteTensor*>(self->manager_ctx); }};
  return pybind11::capsule(&tensor->managed, "dltensor", &drop_unused);
}

}  // namespace mori

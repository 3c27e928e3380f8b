#include "dlpack.hpp"

#include <cstdint>

#include "dlpack_abi.hpp"

namespace mori {
namespace {

constexpr dlpack::DataType uint8_type{1, 8, 1};

struct ByteTensor {
  dlpack::ManagedTensor managed;
  std::int64_t shape;
  std::shared_ptr<void> owner;
};

// A consumer renames the capsule and takes over; a capsule that was never consumed still carries its name.
void drop_unused(PyObject* capsule) {
  if (!PyCapsule_IsValid(capsule, "dltensor")) return;
  auto* managed = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  managed->deleter(managed);
}

}  // namespace

pybind11::capsule byte_tensor(std::shared_ptr<void> owner, u64 address, u64 bytes, Place place) {
  auto* tensor = new ByteTensor{{}, std::int64_t(bytes), std::move(owner)};
  const dlpack::Device device{place.device_type, place.device_id};
  tensor->managed = {{reinterpret_cast<void*>(address), device, 1, uint8_type, &tensor->shape, nullptr, 0},
                     tensor,
                     [](dlpack::ManagedTensor* self) { delete static_cast<ByteTensor*>(self->manager_ctx); }};
  return pybind11::capsule(&tensor->managed, "dltensor", &drop_unused);
}

}  // namespace mori

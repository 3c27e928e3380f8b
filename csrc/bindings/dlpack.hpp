// Tensors without linking torch: a DLPack capsule (ABI version 0.x, the one every framework reads) whose deleter
// holds the memory block, so that a view stays valid memory until it dies, whatever happened to the op by then.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "../cco/symmetric_memory.hpp"

namespace mori {

// A one-dimensional uint8 tensor over `bytes` bytes at `address` of `place`; `owner` lives as long as the tensor.
pybind11::capsule byte_tensor(std::shared_ptr<void> owner, u64 address, u64 bytes, Place place);

}  // namespace mori

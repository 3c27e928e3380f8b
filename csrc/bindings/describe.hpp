// The tensors of a call in one look: what a description of the call depends on, and where their elements are.
#pragma once

#include <pybind11/pybind11.h>

namespace mori {

void bind_describe(pybind11::module_& module);

}  // namespace mori

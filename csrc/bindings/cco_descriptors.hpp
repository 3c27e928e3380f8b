// What kernels of users get from a communicator, as bytes: include/mori/cco.hpp is the one place that knows the layout.
#pragma once

#include <pybind11/pybind11.h>

namespace mori {

void bind_cco(pybind11::module_& module);

}  // namespace mori

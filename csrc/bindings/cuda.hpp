// What Python asks of the NVIDIA driver.
#pragma once

#include <pybind11/pybind11.h>

namespace mori {

void bind_cuda(pybind11::module_& module);

}  // namespace mori

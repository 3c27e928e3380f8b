// What Python asks of the drivers of GPUs.
#pragma once

#include <pybind11/pybind11.h>

namespace mori {

void bind_gpu(pybind11::module_& module);

}  // namespace mori

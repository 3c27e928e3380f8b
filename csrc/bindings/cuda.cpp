#include "cuda.hpp"

#include <pybind11/stl.h>

#include "../cco/symmetric_memory.hpp"
#include "../ops/choose_grid.hpp"
#include "../runtime/driver_cuda.hpp"
#include "dlpack.hpp"

namespace mori {
namespace {

namespace py = pybind11;

py::dict describe(int ordinal) {
  const cuda::Gpu& gpu = cuda::gpu(ordinal);
  py::dict facts;
  facts["ordinal"] = gpu.ordinal;
  facts["uuid"] = gpu.uuid;
  facts["name"] = gpu.name;
  facts["multiprocessors"] = gpu.multiprocessors;
  facts["granularity"] = gpu.granularity;
  return facts;
}

py::tuple grid(u32 tokens, u32 row_bytes, int block_num, int warps, u32 multiprocessors) {
  const Grid found = choose_grid(tokens, row_bytes, block_num, warps, multiprocessors);
  return py::make_tuple(found.blocks, found.warps, found.parts, found.stagers);
}

}  // namespace

void bind_cuda(py::module_& module) {
  module.def("cuda_device", &describe, py::arg("ordinal"), "Facts about a GPU; starts the driver.");
  module.def(
      "cuda_can_access",
      [](int ordinal, const std::string& uuid) -> py::object {
        const int reaches = cuda::can_access_peer(ordinal, uuid);
        return reaches < 0 ? py::object(py::none()) : py::object(py::bool_(reaches != 0));
      },
      py::arg("ordinal"), py::arg("uuid"));
  module.def(
      "cuda_memory",
      [](u64 address, u64 bytes, int ordinal) {
        return byte_tensor(nullptr, address, bytes, {cuda_device_type, ordinal});
      },
      py::arg("address"), py::arg("bytes"), py::arg("ordinal"), "A view of memory that nothing keeps alive.");
  module.def("choose_grid", &grid, py::arg("tokens"), py::arg("row_bytes"), py::kw_only(), py::arg("block_num"),
             py::arg("warps"), py::arg("multiprocessors"));
  module.attr("CUDA_HANDLE_POSIX_DESCRIPTOR") = int(cuda::handle_posix_descriptor);
}

}  // namespace mori

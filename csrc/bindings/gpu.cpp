#include "gpu.hpp"

#include <pybind11/stl.h>

#include "../cco/symmetric_memory.hpp"
#include "../ops/choose_grid.hpp"
#include "../runtime/gpu_driver.hpp"
#include "dlpack.hpp"

namespace mori {
namespace {

namespace py = pybind11;

py::dict describe(const std::string& api, int ordinal) {
  const gpu::Gpu& gpu = gpu::gpu(gpu::api_of(api), ordinal);
  py::dict facts;
  facts["ordinal"] = gpu.ordinal;
  facts["uuid"] = gpu.uuid;
  facts["name"] = gpu.name;
  facts["multiprocessors"] = gpu.multiprocessors;
  facts["granularity"] = gpu.granularity;
  return facts;
}

py::tuple grid(u32 tokens, u32 row_bytes, int block_num, int warps, u32 multiprocessors, u32 lanes) {
  const Grid found = choose_grid(tokens, row_bytes, block_num, warps, multiprocessors, lanes);
  return py::make_tuple(found.blocks, found.warps, found.parts, found.stagers);
}

}  // namespace

void bind_gpu(py::module_& module) {
  module.def("gpu_device", &describe, py::arg("api"), py::arg("ordinal"), "Facts about a GPU; starts the driver.");
  module.def(
      "gpu_can_access",
      [](const std::string& api, int ordinal, const std::string& uuid) -> py::object {
        const int reaches = gpu::can_access_peer(gpu::api_of(api), ordinal, uuid);
        return reaches < 0 ? py::object(py::none()) : py::object(py::bool_(reaches != 0));
      },
      py::arg("api"), py::arg("ordinal"), py::arg("uuid"));
  module.def(
      "gpu_memory",
      [](const std::string& api, u64 address, u64 bytes, int ordinal) {
        return byte_tensor(nullptr, address, bytes, place_of(gpu::api_of(api), ordinal));
      },
      py::arg("api"), py::arg("address"), py::arg("bytes"), py::arg("ordinal"),
      "A view of memory that nothing keeps alive.");
  module.def("choose_grid", &grid, py::arg("tokens"), py::arg("row_bytes"), py::kw_only(), py::arg("block_num"),
             py::arg("warps"), py::arg("multiprocessors"), py::arg("lanes") = 32);
  module.attr("HANDLE_POSIX_DESCRIPTOR") = int(gpu::handle_posix_descriptor);
}

}  // namespace mori

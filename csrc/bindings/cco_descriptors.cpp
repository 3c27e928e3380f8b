#include "cco_descriptors.hpp"

#include <pybind11/stl.h>

#include <cstddef>

#include "../include/mori/cco.hpp"
#include "../runtime/gpu_driver.hpp"

namespace mori {
namespace {

namespace py = pybind11;

template <class Descriptor>
py::bytes bytes_of(const Descriptor& descriptor) {
  return py::bytes(reinterpret_cast<const char*>(&descriptor), sizeof descriptor);
}

py::bytes window(u64 base, u64 stride, u64 size, u32 rank, u32 ranks) {
  return bytes_of(cco::ccoWindow{base, stride, size, rank, ranks});
}

// `barriers` are pairs (offset in the resource window, count): standalone and hybrid. All ranks are on one node.
py::bytes device_communicator(u32 rank, u32 ranks, u64 base, u64 stride, u64 windows, u64 control, u64 resource_offset,
                              u64 resource_bytes, std::pair<u64, u32> barriers, std::pair<u64, u32> hybrid_barriers) {
  cco::ccoDevComm comm{};
  comm.version = MORI_CCO_VERSION;
  comm.bytes = sizeof comm;
  comm.rank = comm.lsaRank = rank;
  comm.worldSize = comm.lsaSize = ranks;
  comm.flatBase = base;
  comm.perRankSize = stride;
  comm.windows = reinterpret_cast<const cco::ccoWindowTable*>(windows);
  comm.control = reinterpret_cast<const CommControl*>(control);
  comm.resourceWindow = {base + resource_offset, stride, resource_bytes, rank, ranks};
  comm.lsaBarrier = {barriers.first, barriers.second, 0};
  comm.hybridLsaBarrier = {hybrid_barriers.first, hybrid_barriers.second, 0};
  return bytes_of(comm);
}

void launch(const std::string& api, int ordinal, u64 function, u32 blocks, u32 threads, u32 scratch_bytes, u64 stream,
            const py::bytes& arguments) {
  const std::string copy = arguments;  // the driver copies it once more before the call returns
  const py::gil_scoped_release unlocked;
  const gpu::Gpu& gpu = gpu::gpu(gpu::api_of(api), ordinal);
  const gpu::DeviceGuard current(gpu);
  void* parameters[] = {const_cast<char*>(copy.data())};
  gpu.driver.call(gpu.driver.launch, reinterpret_cast<gpu::Function>(function), blocks, 1u, 1u, threads, 1u, 1u,
                  scratch_bytes, gpu::stream_of(stream), &parameters[0], nullptr);
}

}  // namespace

void bind_cco(py::module_& module) {
  module.def("cco_window", &window, py::arg("base"), py::arg("stride"), py::arg("size"), py::arg("rank"),
             py::arg("ranks"));
  module.def("cco_device_communicator", &device_communicator, py::kw_only(), py::arg("rank"), py::arg("ranks"),
             py::arg("base"), py::arg("stride"), py::arg("windows"), py::arg("control"), py::arg("resource_offset"),
             py::arg("resource_bytes"), py::arg("barriers"), py::arg("hybrid_barriers"));
  module.def(
      "gpu_function",
      [](const std::string& api, int ordinal, const std::string& symbol, const py::bytes& code) {
        const std::string copy = code;
        const py::gil_scoped_release unlocked;
        return u64(gpu::load_function(gpu::gpu(gpu::api_of(api), ordinal), symbol.c_str(), copy));
      },
      py::arg("api"), py::arg("ordinal"), py::arg("symbol"), py::arg("code"),
      "A kernel of a code object, loaded; it stays until the process ends.");
  module.def("gpu_launch", &launch, py::arg("api"), py::arg("ordinal"), py::arg("function"), py::arg("blocks"),
             py::arg("threads"), py::arg("scratch_bytes"), py::arg("stream"), py::arg("arguments"));
  module.attr("CCO_VERSION") = MORI_CCO_VERSION;
  module.attr("CCO_WINDOW_BYTES") = sizeof(cco::ccoWindow);
  module.attr("CCO_MAX_WINDOWS") = cco::ccoMaxWindows;
  module.attr("CCO_FIRST_WINDOW") = offsetof(cco::ccoWindowTable, window);
  module.attr("CCO_WINDOW_TABLE_BYTES") = sizeof(cco::ccoWindowTable);
  module.attr("CCO_DEVICE_COMMUNICATOR_BYTES") = sizeof(cco::ccoDevComm);
}

}  // namespace mori

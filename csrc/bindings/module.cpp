// The Python module mori._core: thin. Messages, names and policy are Python's.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>

#include "../cco/communicator.hpp"
#include "../ops/ep_plan.hpp"
#include "../runtime/host_variant.hpp"
#include "cco_descriptors.hpp"
#include "describe.hpp"
#include "dlpack.hpp"
#include "gpu.hpp"
#include "hot_calls.hpp"

namespace py = pybind11;
using namespace mori;

namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

bool signal_raised() {
  const py::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() != 0;
}

const char* const region_names[] = {
    "control",         "dispatch_rows",   "dispatch_weights", "dispatch_scales",    "dispatch_indices",
    "dispatch_source", "received_count",  "combine_in_rows",  "combine_in_weights", "combine_in_scales",
    "combine_rows",    "combine_weights", "sender_map",       "expert_places",      "expert_counts",
    "stats",           "landing_rows",    "landing_weights",  "landing_scales",     "landing_indices",
    "landing_source",
};
static_assert(sizeof(region_names) / sizeof(region_names[0]) == u32(RegionId::count), "a name for every region");

EpShape make_shape(u32 world_size, u32 rank, u32 max_tokens, u32 hidden_dim, u32 max_element_bytes, u32 scale_dim,
                   u32 scale_element_bytes, u32 experts_per_rank, u32 topk, u32 max_recv_tokens, bool may_stage,
                   u32 block_scales, u32 slot_stride, u32 source_stride) {
  return {
      world_size,       rank, max_tokens,      hidden_dim,          max_element_bytes, scale_dim,   scale_element_bytes,
      experts_per_rank, topk, max_recv_tokens, may_stage ? 1u : 0u, block_scales,      slot_stride, source_stride};
}

py::tuple layout_regions(const EpShape& shape) {
  const EpLayout layout = ep_layout(shape);
  py::list regions;
  for (u32 id = 0; id < u32(RegionId::count); ++id) {
    regions.append(py::make_tuple(region_names[id], layout.offset[id], layout.bytes[id], region_alignment));
  }
  return py::make_tuple(regions, layout.total_bytes);
}

py::object fault_tuple(const Communicator& communicator) {
  const auto fault = communicator.fault();
  if (!fault) return py::none();
  const AbortCause& cause = fault->cause;
  return py::make_tuple(u32(cause.kind), u32(cause.phase), cause.peer, cause.origin, cause.call, fault->expected,
                        fault->seen);
}

std::vector<u64> read_stats(const EpPlan& plan, u64 stream) {
  const py::gil_scoped_release unlocked;
  return plan.stats(stream);
}

py::dict stats_dict(const EpPlan& plan, u32 world_size, u64 stream) {
  const std::vector<u64> words = read_stats(plan, stream);
  OpStats stats;
  std::memcpy(&stats, words.data(), sizeof stats);
  const u64* rows = words.data() + sizeof stats / sizeof(u64);
  py::dict result;
  result["dispatches"] = stats.dispatches;
  result["combines"] = stats.combines;
  result["no_expert_ids"] = stats.no_expert_ids;
  result["out_of_range_ids"] = stats.out_of_range_ids;
  result["bytes_sent"] = stats.bytes_sent;
  result["bytes_received"] = stats.bytes_received;
  result["rows_sent"] = std::vector<u64>(rows, rows + world_size);
  result["rows_received"] = std::vector<u64>(rows + world_size, rows + 2 * world_size);
  result["last_received"] = std::vector<u64>(rows + 2 * world_size, rows + 3 * world_size);
  return result;
}

// (rows received by the last dispatch, number of the last call, (kind, call, rank, expected, seen) of the last fault)
py::tuple state_tuple(const EpPlan& plan, u64 stream) {
  OpState state;
  {
    const py::gil_scoped_release unlocked;
    state = plan.state(stream);
  }
  const CallFault& fault = state.fault;
  return py::make_tuple(state.last.received, state.last.call,
                        py::make_tuple(u32(fault.kind), fault.call, fault.rank, fault.expected, fault.seen));
}

void bind_memory(py::module_& module) {
  py::class_<SymmetricMemory, std::shared_ptr<SymmetricMemory>>(module, "SymmetricMemory")
      .def_static("create_host", &make_host_memory, py::arg("rank"), py::arg("world_size"), py::arg("bytes_per_rank"))
      .def_static("create_gpu", &make_gpu_memory, py::arg("api"), py::arg("rank"), py::arg("world_size"),
                  py::arg("bytes_per_rank"), py::arg("ordinal"), py::arg("handle_type"))
      .def_static("import_host", &import_host_memory, py::arg("rank"), py::arg("world_size"), py::arg("bytes"),
                  py::arg("descriptor"), py::arg("begin"))
      .def_static("import_gpu", &import_gpu_memory, py::arg("api"), py::arg("rank"), py::arg("world_size"),
                  py::arg("bytes"), py::arg("ordinal"), py::arg("handle_type"), py::arg("address"))
      .def("extend", &SymmetricMemory::extend, py::arg("end"), Unlocked())
      .def("drop_chunks", &SymmetricMemory::drop_chunks, py::arg("count"), Unlocked())
      .def("export_chunk", &SymmetricMemory::export_chunk, py::arg("chunk"))
      .def("map_peer", &SymmetricMemory::map_peer, py::arg("peer"), py::arg("chunk"), py::arg("descriptor"),
           py::arg("begin") = 0)
      .def("synchronize", &SymmetricMemory::synchronize, Unlocked())
      .def("release_pages", &SymmetricMemory::release_pages)
      .def(
          "write",
          [](SymmetricMemory& self, u64 offset, const py::bytes& content) {
            const std::string copy = content;
            const py::gil_scoped_release unlocked;
            self.write(offset, copy.data(), copy.size());
          },
          py::arg("offset"), py::arg("content"))
      .def(
          "zero",
          [](SymmetricMemory& self, u64 offset, u64 bytes) {
            const py::gil_scoped_release unlocked;
            self.zero(offset, bytes);
            self.synchronize();
          },
          py::arg("offset"), py::arg("bytes"))
      .def("address", [](const SymmetricMemory& self, u32 peer,
                         u64 offset) { return u64(self.symmetric().at<void>(peer, offset)); })
      .def_property_readonly("chunks", &SymmetricMemory::chunks)
      .def_property_readonly("extent", &SymmetricMemory::extent)
      .def_property_readonly("base", [](const SymmetricMemory& self) { return self.symmetric().base; })
      .def_property_readonly("bytes_per_rank", &SymmetricMemory::bytes_per_rank);

  // A holder that lives while any view of the block does: `views` tells how many there are.
  py::class_<MemoryBlock, std::shared_ptr<MemoryBlock>>(module, "MemoryBlock")
      .def(py::init([](std::shared_ptr<SymmetricMemory> memory, u64 offset, u64 bytes) {
             return std::make_shared<MemoryBlock>(MemoryBlock{std::move(memory), offset, bytes});
           }),
           py::arg("memory"), py::arg("offset"), py::arg("bytes"))
      .def_readonly("offset", &MemoryBlock::offset)
      .def_readonly("bytes", &MemoryBlock::bytes)
      .def_property_readonly(
          "users", [](const std::shared_ptr<MemoryBlock>& self) { return self.use_count() - 2; },
          "Views and plans that hold this block, this object aside.")
      .def(
          "view",
          [](const std::shared_ptr<MemoryBlock>& self, u64 offset, u64 bytes, u32 peer) {
            const u64 address = u64(self->memory->symmetric().at<void>(peer, self->offset + offset));
            return byte_tensor(self, address, bytes, self->memory->place());
          },
          py::arg("offset"), py::arg("bytes"), py::arg("peer"));
}

void bind_communicator(py::module_& module) {
  py::class_<Communicator, std::shared_ptr<Communicator>>(module, "Communicator")
      .def(py::init<std::shared_ptr<SymmetricMemory>, std::shared_ptr<SymmetricMemory>>(), py::arg("memory"),
           py::arg("control"))
      .def("watch", &Communicator::watch, py::arg("peer"), py::arg("process_descriptor"), py::arg("socket"))
      .def("fault", &fault_tuple)
      .def("has_left", &Communicator::has_left)
      .def("set_live", &Communicator::set_live, py::arg("rank"), py::arg("live"))
      .def_property_readonly(
          "control",
          [](const Communicator& self) {
            const Symmetric& symmetric = self.symmetric();
            return u64(self.twin() != nullptr ? self.twin() : symmetric.control(symmetric.rank));
          },
          "Address for the device of the control block that is shared with watchers and leaving peers.")
      .def("leave", &Communicator::leave)
      .def("close", &Communicator::close, Unlocked());
}

void bind_plan(py::module_& module) {
  py::class_<EpShape>(module, "EpShape")
      .def(py::init(&make_shape), py::kw_only(), py::arg("world_size"), py::arg("rank"), py::arg("max_tokens"),
           py::arg("hidden_dim"), py::arg("max_element_bytes"), py::arg("scale_dim"), py::arg("scale_element_bytes"),
           py::arg("experts_per_rank"), py::arg("topk"), py::arg("max_recv_tokens"), py::arg("may_stage") = false,
           py::arg("block_scales") = 0, py::arg("slot_stride") = 0, py::arg("source_stride") = 0)
      .def("regions", &layout_regions);

  // How kernels are run, for one plan.
  py::class_<Launcher, std::shared_ptr<Launcher>>(module, "Launcher")
      .def_static(
          "host",
          [](const std::string& isa, unsigned threads, u64 spin_ns) {
            return make_host_launcher({isa, threads, spin_ns});
          },
          py::arg("isa"), py::arg("threads"), py::arg("spin_ns"))
      .def_static("gpu", &make_gpu_launcher, py::arg("api"), py::arg("ordinal"), py::arg("shape"), Unlocked());

  py::class_<CallExtras>(module, "CallExtras")
      .def(py::init(
               [](u64 sender_map, u64 received_count, u64 summary, u64 packed_rows, u64 packed_sources, bool split) {
                 return CallExtras{sender_map, received_count, summary, packed_rows, packed_sources, split};
               }),
           py::kw_only(), py::arg("sender_map") = 0, py::arg("received_count") = 0, py::arg("summary") = 0,
           py::arg("packed_rows") = 0, py::arg("packed_sources") = 0, py::arg("split") = false);

  py::class_<EpPlan> plan(module, "EpPlan");
  plan.def(py::init([](std::shared_ptr<Communicator> communicator, std::shared_ptr<MemoryBlock> memory,
                       const EpShape& shape, std::shared_ptr<Launcher> launcher, u64 timeout_ns) {
             return std::make_unique<EpPlan>(std::move(communicator), std::move(memory), shape, std::move(launcher),
                                             timeout_ns);
           }),
           py::arg("communicator"), py::arg("memory"), py::arg("shape"), py::arg("launcher"), py::arg("timeout_ns"))
      .def("prepare", &EpPlan::prepare, Unlocked())
      .def(
          "load",
          [](EpPlan& self, u32 kernel, const py::bytes& code) {
            const std::string copy = code;
            const py::gil_scoped_release unlocked;
            self.load(KernelId(kernel), copy);
          },
          py::arg("kernel"), py::arg("code"))
      .def("receive", [](EpPlan& self, u64 stream) { return unlocked([&] { return self.receive(stream); }); })
      .def("convert",
           [](EpPlan& self, u32 kernel, u32 row_bytes, u64 rows, u64 indices, u64 packed_rows, u64 packed_sources,
              int block_num, int warps, u64 stream) {
             return unlocked([&] {
               return self.convert({KernelId(kernel), rows, indices, packed_rows, packed_sources, row_bytes},
                                   {block_num, warps, stream});
             });
           })
      .def_property_readonly("synchronous", [](const EpPlan& self) { return self.launcher().synchronous(); })
      .def_property_readonly("runs_on", [](const EpPlan& self) { return self.launcher().description(); })
      .def("capturing", [](const EpPlan& self, u64 stream) { return self.launcher().capturing(stream); })
      .def("state", &state_tuple, py::arg("stream"))
      .def("synchronize", &EpPlan::synchronize, Unlocked())
      .def("stats", &stats_dict, py::arg("world_size"), py::arg("stream"))
      .def("clear_stats", &EpPlan::clear_stats, py::arg("stream"))
      .def("set_staged_tokens", &EpPlan::set_staged_tokens, py::arg("most"))
      .def("set_call_number", &EpPlan::set_call_number)
      .def("set_test_delays", &EpPlan::set_test_delays, py::arg("seed"), py::arg("longest_us"));
  bind_hot_calls(plan);
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() = "Native core of mori.";
  mori_host::interrupted = signal_raised;
  bind_memory(module);
  bind_communicator(module);
  bind_plan(module);
  bind_gpu(module);
  bind_cco(module);
  bind_describe(module);
  module.def("host_variant", [](const std::string& name) { return mori_host::select_variant(name.c_str()).name; });
#define MORI_KERNEL_NAME(name, ...) kernels.append(#name);
  py::list kernels;
  MORI_KERNEL_TABLE(MORI_KERNEL_NAME)
#undef MORI_KERNEL_NAME
  module.attr("KERNELS") = py::tuple(kernels);
  module.attr("MAX_WORLD_SIZE") = max_world_size;
  module.attr("MAX_BLOCKS") = max_blocks;
  module.attr("COMM_CONTROL_BYTES") = comm_control_bytes;
}

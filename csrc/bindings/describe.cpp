#include "describe.hpp"

#include <cstring>

#include "dlpack_abi.hpp"

namespace mori {
namespace {

namespace py = pybind11;

constexpr int most_dimensions = 4;
constexpr int most_tensors = 4;

// Everything of a tensor but its address, in a form that compares and hashes as bytes.
struct Metadata {
  dlpack::Device device{};
  dlpack::DataType dtype{};
  std::int32_t dimensions = 0;
  std::int32_t present = 0;
  std::int64_t shape[most_dimensions] = {};
  std::int64_t strides[most_dimensions] = {};
};

// Asking a tensor for shape, strides, dtype, device and address by attributes takes about a microsecond; torch's C
// interface to DLPack gives all of them in a tenth of that.
class Describer {
 public:
  Describer(py::type tensor_type, const py::capsule& api) : type_(std::move(tensor_type)) {
    const auto* found =
        static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(api.ptr(), dlpack::exchange_api_name));
    if (found == nullptr) throw py::error_already_set();
    if (found->major != dlpack::exchange_api_major || found->tensor_from_object == nullptr) {
      throw py::value_error("this DLPack exchange interface is of another version");
    }
    tensor_of_ = found->tensor_from_object;
  }

  // (key, address, address, ...), an address per argument, 0 for None; or None if an argument is no dense tensor.
  py::object operator()(const py::args& arguments) const {
    const auto count = arguments.size();
    if (count > most_tensors) return py::none();
    Metadata metadata[most_tensors];
    py::tuple result(1 + count);
    for (std::size_t i = 0; i < count; ++i) {
      std::uint64_t address = 0;
      if (!describe(PyTuple_GET_ITEM(arguments.ptr(), py::ssize_t(i)), metadata[i], address)) return py::none();
      PyTuple_SET_ITEM(result.ptr(), py::ssize_t(1 + i), PyLong_FromUnsignedLongLong(address));
    }
    PyTuple_SET_ITEM(
        result.ptr(), 0,
        PyBytes_FromStringAndSize(reinterpret_cast<const char*>(metadata), py::ssize_t(count * sizeof(Metadata))));
    return result;
  }

 private:
  bool describe(PyObject* object, Metadata& metadata, std::uint64_t& address) const {
    if (object == Py_None) return true;
    if (!PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(type_.ptr()))) return false;
    dlpack::Tensor tensor;
    if (tensor_of_(object, &tensor) != 0) {
      PyErr_Clear();  // sparse, without memory, ...: the caller finds out what is wrong
      return false;
    }
    if (tensor.ndim > most_dimensions) return false;
    metadata.device = tensor.device;
    metadata.dtype = tensor.dtype;
    metadata.dimensions = tensor.ndim;
    metadata.present = 1;
    for (int d = 0; d < tensor.ndim; ++d) {
      metadata.shape[d] = tensor.shape[d];
      metadata.strides[d] = tensor.strides != nullptr ? tensor.strides[d] : -1;
    }
    address = reinterpret_cast<std::uint64_t>(tensor.data) + tensor.byte_offset;
    return true;
  }

  py::type type_;
  int (*tensor_of_)(void*, dlpack::Tensor*) = nullptr;
};

}  // namespace

void bind_describe(py::module_& module) {
  py::class_<Describer>(module, "Describer")
      .def(py::init<py::type, py::capsule>(), py::arg("tensor_type"), py::arg("exchange_api"))
      .def("__call__", &Describer::operator());
}

}  // namespace mori

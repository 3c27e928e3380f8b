#include "describe.hpp"

#include <cstring>

#include "dlpack_abi.hpp"

namespace mori {
namespace {

namespace py = pybind11;

constexpr int most_dimensions = 3;
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
  PyObject* operator()(PyObject* const* arguments, Py_ssize_t count) const {
    if (count > most_tensors) Py_RETURN_NONE;
    Metadata metadata[most_tensors];
    std::uint64_t address[most_tensors] = {};
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!describe(arguments[i], metadata[i], address[i])) Py_RETURN_NONE;
    }
    PyObject* result = PyTuple_New(1 + count);
    if (result == nullptr) return nullptr;
    PyTuple_SET_ITEM(
        result, 0,
        PyBytes_FromStringAndSize(reinterpret_cast<const char*>(metadata), count * Py_ssize_t(sizeof(Metadata))));
    for (Py_ssize_t i = 0; i < count; ++i) PyTuple_SET_ITEM(result, 1 + i, PyLong_FromUnsignedLongLong(address[i]));
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
    bool has_elements = true;
    for (int d = 0; d < tensor.ndim; ++d) {
      has_elements = has_elements && tensor.shape[d] > 0;
      metadata.shape[d] = tensor.shape[d];
      metadata.strides[d] = tensor.strides != nullptr ? tensor.strides[d] : -1;
    }
    address = reinterpret_cast<std::uint64_t>(tensor.data) + tensor.byte_offset;
    // A fake tensor looks like a real one but for its address, which is no part of the key.
    return address != 0 || !has_elements;
  }

  py::type type_;
  int (*tensor_of_)(void*, dlpack::Tensor*) = nullptr;
};

PyObject* call(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  return (*static_cast<const Describer*>(PyCapsule_GetPointer(self, nullptr)))(arguments, count);
}

PyMethodDef method = {"describe", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call)), METH_FASTCALL,
                      nullptr};

// A function with the interpreter's fastest calling convention; a capsule keeps the describer.
py::object make_describer(py::type tensor_type, const py::capsule& api) {
  const py::capsule holder(new Describer(std::move(tensor_type), api),
                           [](void* describer) { delete static_cast<Describer*>(describer); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, holder.ptr()));
}

}  // namespace

void bind_describe(py::module_& module) {
  module.def("describer", &make_describer, py::arg("tensor_type"), py::arg("exchange_api"));
}

}  // namespace mori

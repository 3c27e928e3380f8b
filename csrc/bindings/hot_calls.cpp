#include "hot_calls.hpp"

#include <exception>
#include <stdexcept>

namespace mori {
namespace {

namespace py = pybind11;

// Positional arguments, taken one after the other.
class Arguments {
 public:
  Arguments(PyObject* const* values, Py_ssize_t count, Py_ssize_t expected) : next_(values) {
    if (count != expected) throw std::invalid_argument("wrong number of arguments");
  }
  u64 number() {
    const u64 value = PyLong_AsUnsignedLongLong(*next_++);
    if (value == ~0ull && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return value;
  }
  u32 small() { return u32(number()); }
  int size() {  // may be negative
    const long value = PyLong_AsLong(*next_++);
    if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return int(value);
  }
  const CallExtras& extras() { return py::handle(*next_++).cast<const CallExtras&>(); }

 private:
  PyObject* const* next_;
};

// An exception of C++ as one of Python; the result that says so.
template <class Call>
PyObject* guarded(Call call) {
  try {
    return PyLong_FromLong(call());
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// (kernel, tokens, row_bytes, scale_bytes, dtype, input, weights, scales, indices, extras, block_num, warps, stream)
PyObject* dispatch(PyObject* self, PyObject* const* values, Py_ssize_t count) {
  return guarded([&] {
    EpPlan& plan = py::handle(self).cast<EpPlan&>();
    Arguments next(values, count, 13);
    DispatchCall call{};
    call.kernel = KernelId(next.small());
    call.tokens = next.small();
    call.row_bytes = next.small();
    call.scale_bytes = next.small();
    call.dtype = next.small();
    call.input = next.number();
    call.weights = next.number();
    call.scales = next.number();
    call.indices = next.number();
    const CallExtras& extras = next.extras();
    LaunchHints hints{};
    hints.block_num = next.size();
    hints.warps = next.size();
    hints.stream = next.number();
    return unlocked([&] { return plan.dispatch(call, extras, hints); });
  });
}

// (kernel, input_rows, weight_rows, row_bytes, dtype, tokens, input, weights, extras, block_num, warps, stream)
PyObject* combine(PyObject* self, PyObject* const* values, Py_ssize_t count) {
  return guarded([&] {
    EpPlan& plan = py::handle(self).cast<EpPlan&>();
    Arguments next(values, count, 12);
    CombineCall call{};
    call.kernel = KernelId(next.small());
    call.input_rows = next.small();
    call.weight_rows = next.small();
    call.row_bytes = next.small();
    call.dtype = next.small();
    call.tokens = next.small();
    call.input = next.number();
    call.weights = next.number();
    const CallExtras& extras = next.extras();
    LaunchHints hints{};
    hints.block_num = next.size();
    hints.warps = next.size();
    hints.stream = next.number();
    return unlocked([&] { return plan.combine(call, extras, hints); });
  });
}

PyMethodDef methods[] = {
    {"dispatch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&dispatch)), METH_FASTCALL, nullptr},
    {"combine", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&combine)), METH_FASTCALL, nullptr},
};

}  // namespace

void bind_hot_calls(py::class_<EpPlan>& plan) {
  for (PyMethodDef& method : methods) {
    const auto descriptor =
        py::reinterpret_steal<py::object>(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(plan.ptr()), &method));
    plan.attr(method.ml_name) = descriptor;
  }
}

}  // namespace mori

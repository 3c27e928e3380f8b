// The two calls that programs make thousands of times a second, with the interpreter's fastest calling convention.
#pragma once

#include <pybind11/pybind11.h>

#include "../ops/ep_plan.hpp"

namespace mori {

// Runs a call without the interpreter's lock. If a signal handler raised meanwhile, that is what the call raises.
template <class Call>
int unlocked(Call call) {
  Outcome outcome;
  {
    const pybind11::gil_scoped_release release;
    outcome = call();
  }
  if (PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
  return int(outcome);
}

// Adds the methods `dispatch` and `combine`; their arguments are listed in hot_calls.cpp.
void bind_hot_calls(pybind11::class_<EpPlan>& plan);

}  // namespace mori

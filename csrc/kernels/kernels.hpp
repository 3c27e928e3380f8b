// All kernels, and how a name of the table becomes a type.
#pragma once

#include "combine.hpp"
#include "dispatch.hpp"
#include "plain_rows.hpp"
#include "quantised_rows.hpp"
#include "standard_moe.hpp"
#include "table.hpp"

namespace mori {
inline namespace MORI_VARIANT {

template <class T, KernelId id>
struct KernelOf;

#define MORI_KERNEL_OF(name, Launch, ...) \
  template <class T>                      \
  struct KernelOf<T, KernelId::name> {    \
    using Args = Launch;                  \
    using Type = __VA_ARGS__;             \
  };
MORI_KERNEL_TABLE(MORI_KERNEL_OF)
#undef MORI_KERNEL_OF

template <class T, KernelId id>
MORI_DEVICE void run_kernel(T& target, const typename KernelOf<T, id>::Args& args) {
  typename KernelOf<T, id>::Type(target, args).run();
}

}  // namespace MORI_VARIANT
}  // namespace mori

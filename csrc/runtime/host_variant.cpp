// The kernels for one host instruction set. Compiled once per variant, with -DMORI_VARIANT=<name> and its flags;
// everything it instantiates lies in a namespace of that name, and only the C entry point is visible outside.
#include "host_variant.hpp"

#include "../device/target_host.hpp"
#include "../kernels/kernels.hpp"

#define MORI_JOIN_(a, b) a##b
#define MORI_JOIN(a, b) MORI_JOIN_(a, b)

extern "C" void MORI_JOIN(mori_host_kernel_, MORI_VARIANT)(unsigned kernel, const void* args, const void* place) {
  using namespace mori;
  HostTarget target(*static_cast<const HostPlace*>(place));
#define MORI_CASE(name, Args, ...) \
  case KernelId::name: return run_kernel<HostTarget, KernelId::name>(target, *static_cast<const Args*>(args));
  switch (KernelId(kernel)) {
    MORI_KERNEL_TABLE(MORI_CASE)
    case KernelId::count: break;
  }
#undef MORI_CASE
}

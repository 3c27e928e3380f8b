// The kernels for one host instruction set. Compiled once per variant, with -DMORI_VARIANT=<name> and its flags;
// everything it instantiates lies in a namespace of that name, and only the C entry point is visible outside.
#include "../device/target_host.hpp"
#include "../kernels/combine.hpp"
#include "../kernels/dispatch.hpp"
#include "host_variant.hpp"

#define MORI_JOIN_(a, b) a##b
#define MORI_JOIN(a, b) MORI_JOIN_(a, b)

namespace mori {
inline namespace MORI_VARIANT {
namespace {

template <class Codec>
void combine_with(HostTarget& target, const CombineArgs& args) {
  Combine<HostTarget, Codec>(target, args).run();
}

}  // namespace
}  // namespace MORI_VARIANT
}  // namespace mori

extern "C" void MORI_JOIN(mori_host_kernel_, MORI_VARIANT)(unsigned kernel, const void* args, const void* place) {
  using namespace mori;
  HostTarget target(*static_cast<const HostPlace*>(place));
  if (kernel == unsigned(mori_host::Kernel::dispatch)) {
    Dispatch<HostTarget>(target, *static_cast<const DispatchArgs*>(args)).run();
    return;
  }
  const CombineArgs& combine = *static_cast<const CombineArgs*>(args);
  combine.arithmetic == Arithmetic::float32 ? combine_with<Float32>(target, combine)
                                            : combine_with<BFloat16>(target, combine);
}

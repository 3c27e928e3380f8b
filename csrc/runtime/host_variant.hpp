// The seam between code that knows no instruction set and the variants compiled for one. Plain types only.
#pragma once

namespace mori_host {

// `kernel` is a KernelId, `args` points to the launch struct, `place` to a HostPlace; both have one layout in all
// variants.
using KernelFunction = void (*)(unsigned kernel, const void* args, const void* place);

struct Variant {
  const char* name;
  KernelFunction run;
};

// Asked now and then by waits: does the calling thread want to break off? Set once, by the binding.
extern bool (*interrupted)();

// The best variant this CPU can run, or the one named ("auto", "baseline", "avx2", "avx512").
// Throws std::invalid_argument for a name that was not built or that the CPU lacks.
Variant select_variant(const char* name);

}  // namespace mori_host

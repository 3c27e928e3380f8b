// Runs the host's kernel of the same name, by a thread per block, with the launch struct that the driver was given.
// What the instructions of GPUs do is not its subject.
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "device/target_host.hpp"
#include "executor.hpp"
#include "kernels/kernels.hpp"

// runtime/host_support.cpp, which waits for this, chooses among the builds of all kernels as well.
extern "C" void mori_host_kernel_baseline(unsigned, const void*, const void*) {}

namespace {

struct Kernel {
  void (*run)(const void* arguments, unsigned blocks, std::size_t scratch_bytes);
  std::size_t argument_bytes;
};

template <mori::KernelId id>
void run_grid(const void* arguments, unsigned blocks, std::size_t scratch_bytes) {
  std::vector<std::thread> threads;
  for (unsigned block = 0; block < blocks; ++block) {
    threads.emplace_back([=] {
      std::vector<mori::u64> scratch(scratch_bytes / 8 + 1);
      mori::HostTarget target({block, blocks, scratch.data(), 0});
      using Args = typename mori::KernelOf<mori::HostTarget, id>::Args;
      mori::run_kernel<mori::HostTarget, id>(target, *static_cast<const Args*>(arguments));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

template <mori::KernelId id>
Kernel kernel() {
  return {&run_grid<id>, sizeof(typename mori::KernelOf<mori::HostTarget, id>::Args)};
}
const std::map<std::string, Kernel> kernels = {
    {"mori_dispatch", kernel<mori::KernelId::dispatch>()},
    {"mori_combine_bf16", kernel<mori::KernelId::combine_bf16>()},
};

struct Work {
  const Kernel& kernel;
  std::vector<mori::u8> arguments;
  unsigned blocks;
  std::size_t scratch_bytes;
};

// The image must be a code object; its instructions are not executed.
std::uint64_t load(const void* image) {
  return std::memcmp(image,
                     "\x7f"
                     "ELF",
                     4) == 0
             ? 1
             : 0;
}
std::uint64_t find(std::uint64_t, const char* name) {
  const auto found = kernels.find(name);
  return found == kernels.end() ? 0 : std::uint64_t(&found->second);
}
std::uint64_t enqueue(std::uint64_t number, const FakeLaunch* launch) {
  const Kernel& kernel = *reinterpret_cast<const Kernel*>(number);
  const auto* bytes = static_cast<const mori::u8*>(launch->arguments);
  return std::uint64_t(new Work{kernel, {bytes, bytes + kernel.argument_bytes}, launch->blocks, launch->scratch_bytes});
}
void run(std::uint64_t number) {
  const std::unique_ptr<const Work> work(reinterpret_cast<const Work*>(number));
  work->kernel.run(work->arguments.data(), work->blocks, work->scratch_bytes);
}

[[maybe_unused]] const bool in_use = [] {
  const FakeExecutor executor{&load, &find, &enqueue, &run};
  fake_driver_use(&executor);
  return true;
}();

}  // namespace

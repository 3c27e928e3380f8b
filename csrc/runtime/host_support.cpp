// System calls for the host target, compiled without instruction-set flags, and the choice of variant.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <stdexcept>
#include <string>

#include "host_variant.hpp"

namespace mori_host {
bool (*interrupted)() = nullptr;
}

extern "C" {

void mori_host_kernel_baseline(unsigned, const void*, const void*);
void mori_host_kernel_avx2(unsigned, const void*, const void*);
void mori_host_kernel_avx512(unsigned, const void*, const void*);

unsigned long long mori_host_clock_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return 1000000000ull * static_cast<unsigned long long>(now.tv_sec) + static_cast<unsigned long long>(now.tv_nsec);
}

static timespec timespec_of(unsigned long long ns) {
  return {static_cast<time_t>(ns / 1000000000ull), static_cast<long>(ns % 1000000000ull)};
}

// Not PRIVATE: the doorbell lies in memory shared between processes.
void mori_host_futex_wait(unsigned int* word, unsigned int value, unsigned long long timeout_ns) {
  const timespec timeout = timespec_of(timeout_ns);
  syscall(SYS_futex, word, FUTEX_WAIT, value, &timeout, nullptr, 0);
}

void mori_host_futex_wake_all(unsigned int* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool mori_host_interrupted() { return mori_host::interrupted != nullptr && mori_host::interrupted(); }

void mori_host_sleep_ns(unsigned long long ns) {
  const timespec duration = timespec_of(ns);
  nanosleep(&duration, nullptr);
}
}

namespace mori_host {
namespace {

struct Candidate {
  Variant variant;
  bool usable;
};

}  // namespace

Variant select_variant(const char* name) {
  const Candidate candidates[] = {
#ifdef MORI_HAVE_AVX512
      {{"avx512", mori_host_kernel_avx512}, __builtin_cpu_supports("x86-64-v4") != 0},
#endif
#ifdef MORI_HAVE_AVX2
      {{"avx2", mori_host_kernel_avx2}, __builtin_cpu_supports("x86-64-v3") != 0},
#endif
      {{"baseline", mori_host_kernel_baseline}, true},
  };
  const std::string wanted = name;
  for (const Candidate& candidate : candidates) {
    if (wanted == "auto" ? candidate.usable : wanted == candidate.variant.name) {
      if (candidate.usable) return candidate.variant;
      throw std::invalid_argument("MORI_HOST_ISA=" + wanted + ": this CPU cannot run it; use auto");
    }
  }
  throw std::invalid_argument("MORI_HOST_ISA=" + wanted + ": not built; use auto, baseline, avx2 or avx512");
}

}  // namespace mori_host

// What the stand-in driver leaves to others: loading code objects and running their kernels.
#pragma once

#include <cstddef>
#include <cstdint>

struct FakeLaunch {
  const void* arguments;  // as many bytes as the kernel takes
  std::uint32_t blocks, threads, scratch_bytes;
};

struct FakeRange {
  std::uint64_t address, bytes;
};

// Numbers that these functions give are handed back later; 0 says that there is no such thing.
struct FakeExecutor {
  std::uint64_t (*load)(const void* image);
  std::uint64_t (*find)(std::uint64_t module, const char* kernel);
  std::uint64_t (*enqueue)(std::uint64_t kernel, const FakeLaunch* launch);  // by the thread that launches
  void (*run)(std::uint64_t work);                                           // by the device's own, in order
};

extern "C" {
void fake_driver_use(const FakeExecutor* executor);

// How many ranges of memory kernels reach; as many as there is room for are written.
std::size_t fake_driver_mapped(FakeRange* ranges, std::size_t capacity);
}

// Small kernels with what the simulator has to get right: grids, LDS, calls, spinning, and faults for it to find.
#include "device/target_hip.hpp"

using namespace mori;
using T = HipTarget;

#define KERNEL extern "C" __attribute__((global)) void

KERNEL add_arrays(const float* a, const float* b, float* sum, u32 count) {
  const u32 i = T::block() * T::threads() + T::thread();
  if (i < count) sum[i] = a[i] + b[i];
}

// Numbers of the items that equal `wanted`, in any order: a ballot and one atomic per wave.
KERNEL compact(const u32* items, u32 count, u32 wanted, u32* taken, u32* out) {
  const u32 i = T::block() * T::threads() + T::thread();
  const bool chosen = i < count && items[i] == wanted;
  const T::Mask mask = T::ballot(chosen);
  u32 base = 0;
  if (T::lane() == 0) base = T::add_device(taken, population(mask));
  base = u32(__builtin_amdgcn_readfirstlane(i32(base)));
  if (chosen) out[base + population(mask & bits_below<T::Mask>(T::lane()))] = i;
}

KERNEL prefix_sums(const u32* values, u32* sums) {
  u32* held = T::scratch<u32>();
  const u32 t = T::thread();
  held[t] = values[t];
  T::sync_block();
  for (u32 distance = 1; distance < T::threads(); distance *= 2) {
    const u32 left = t >= distance ? held[t - distance] : 0;
    T::sync_block();
    held[t] += left;
    T::sync_block();
  }
  sums[t] = held[t];
}

KERNEL divide(const float* a, const float* b, float* quotients, const u32* x, const u32* y, u32* rests) {
  const u32 i = T::thread();
  quotients[i] = a[i] / b[i];
  rests[i] = x[i] % y[i];
}

KERNEL largest(const u32* values, u32* out, u32 width) {
  out[T::thread()] = T::largest_of_group(values[T::thread()], width);
}

// A real call, with its argument on the stack, and a table in the code object.
__attribute__((device, noinline)) void look_up(const u32* numbers, u32* out) {
  static constexpr u32 powers[8] = {1, 10, 100, 1000, 10000, 100000, 1000000, 10000000};
  for (u32 i = 0; i < 4; ++i) out[i] = powers[numbers[i] % 8];
}
KERNEL call_function(u32* out) {
  u32 numbers[4], found[4];
  for (u32 i = 0; i < 4; ++i) numbers[i] = T::thread() + i;
  look_up(numbers, found);
  for (u32 i = 0; i < 4; ++i) out[4 * T::thread() + i] = found[i];
}

KERNEL meet_all_blocks(u32* arrived) {
  if (T::thread() != 0) return;
  T::add_device(arrived, 1);
  while (T::add_device(arrived, 0) < T::blocks()) T::relax();
}

// One wave stays away from the barrier that the others wait at.
KERNEL uneven_barrier(u32* out, u64* word) {
  if (T::warp() == 0) {
    while (T::load_system(word) == 0) T::relax();
  }
  T::sync_block();
  out[T::thread()] = 1;
}

KERNEL trap_at(u32 thread) {
  if (T::thread() == thread) __builtin_trap();
}

// Rows for a peer, then a flag; and the other side. A bit of `left_out` leaves out one thing that this needs.
enum LeftOut : u32 {
  release_of_waves = 1,
  release = 2,
  wait = 4,
  acquire = 8,
  barrier = 16,
  far_release = 32,
  far_acquire = 64
};

template <u32 left_out>
MORI_DEVICE void send(u32* rows, u64* flag, u32 value) {
  rows[T::thread()] = value + T::thread();
  if (!(left_out & release_of_waves)) T::release_wave();
  if (!(left_out & barrier)) T::sync_block();
  if (T::thread() != 0) return;
  if (left_out & wait) {
    asm volatile("buffer_wbl2 sc0 sc1" ::: "memory");
  } else if (left_out & far_release) {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
  } else if (!(left_out & release)) {
    T::release_system();
  }
  T::store_system(flag, value);
}

template <u32 left_out>
MORI_DEVICE void receive(const u32* rows, const u64* flag, u32 value, u32* out) {
  out[T::thread()] = rows[T::thread()];  // so that something stale may be at hand
  while (T::load_system(flag) != value) T::relax();
  if (left_out & far_acquire) {
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
  } else if (!(left_out & acquire)) {
    T::acquire_system();
  } else {
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
  }
  out[T::thread()] = rows[T::thread()];
}

#define EXCHANGE(name, left_out)                                                             \
  KERNEL send_##name(u32* rows, u64* flag, u32 value) { send<left_out>(rows, flag, value); } \
  KERNEL receive_##name(const u32* rows, const u64* flag, u32 value, u32* out) {             \
    receive<left_out>(rows, flag, value, out);                                               \
  }

EXCHANGE(complete, 0)
EXCHANGE(without_release, release_of_waves | release)
EXCHANGE(without_barrier, barrier)
EXCHANGE(without_acquire, acquire)
EXCHANGE(with_near_release, release_of_waves | far_release)
EXCHANGE(with_near_acquire, far_acquire)
#if defined(__GFX9__)
EXCHANGE(without_release_of_waves, release_of_waves)
EXCHANGE(without_wait, release_of_waves | wait)
#endif

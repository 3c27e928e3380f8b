// The NVIDIA target, sm_90 and later: 32 lanes, relaxed 64-bit words, fences where ranks meet. See target_host.hpp
// for what a target offers.
//
// Memory order. A fence by one thread behind a block barrier is cumulative in the PTX model: bar.sync orders the
// other threads' earlier stores before it, and fence.acq_rel.sys extends that order to the system. So release_wave()
// is empty here, and one release_system() after the barrier covers the block; likewise a poller's acquire before the
// barrier covers the reads of the threads behind it, which share its first-level cache.
#pragma once

#include "../layout/comm_control.hpp"
#include "gpu.hpp"

namespace mori {
inline namespace MORI_VARIANT {

extern __shared__ __align__(16) u8 mori_block_scratch[];

class CudaTarget {
 public:
  static constexpr u32 lanes = 32;
  using Mask = u32;
  static constexpr u32 vector_bytes = 16;
  static constexpr u32 vector_alignment = 16;
  static constexpr u32 vectors_in_flight = 4;  // loads that a lane has under way before it uses the first

  __device__ u32 block() const { return blockIdx.x; }
  __device__ u32 blocks() const { return gridDim.x; }
  __device__ u32 warp() const { return threadIdx.x / lanes; }
  __device__ u32 warps() const { return blockDim.x / lanes; }
  __device__ u32 lane() const { return threadIdx.x % lanes; }
  __device__ u32 thread() const { return threadIdx.x; }
  __device__ u32 threads() const { return blockDim.x; }
  MORI_DEVICE static Mask ballot(bool predicate) { return __ballot_sync(~0u, predicate); }
  // The largest value among groups of `width` lanes, a power of two.
  MORI_DEVICE static u32 largest_of_group(u32 value, u32 width) {
    MORI_ROLLED
    for (u32 distance = width / 2; distance > 0; distance /= 2) {
      value = larger(value, __shfl_xor_sync(~0u, value, distance));
    }
    return value;
  }
  MORI_DEVICE static void sync_warp() { __syncwarp(); }
  MORI_DEVICE static void sync_block() { __syncthreads(); }
  template <class Type>
  MORI_DEVICE static Type* scratch() {
    return reinterpret_cast<Type*>(mori_block_scratch);
  }

  MORI_DEVICE static u64 load_system(const u64* word) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
  }
  // An acquiring load invalidates this SM's first-level cache; a fence would also wait for earlier stores' round trips.
  MORI_DEVICE static u64 load_acquire(const u64* word) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
  }
  MORI_DEVICE static void acquire_loaded() {}
  MORI_DEVICE static u32 load_system(const u32* word) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
  }
  MORI_DEVICE static void store_system(u64* word, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
  }
  MORI_DEVICE static void store_system(u32* word, u32 value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
  }
  MORI_DEVICE static u32 add_device(u32* word, u32 value) {
    u32 old;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(word), "r"(value) : "memory");
    return old;
  }
  MORI_DEVICE static void count(u64* word, u64 value) {
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
  }
  MORI_DEVICE static void add_block(u32* word, u32 value) { atomicAdd_block(word, value); }
  MORI_DEVICE static bool exchange_zero(u64* word, u64 desired) {
    u64 old;
    asm volatile("atom.acq_rel.sys.global.cas.b64 %0, [%1], 0, %2;" : "=l"(old) : "l"(word), "l"(desired) : "memory");
    return old == 0;
  }

  MORI_DEVICE static void release_wave() {}
  MORI_DEVICE static void acquire_wave() {}
  MORI_DEVICE static void release_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
  MORI_DEVICE static void acquire_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

  MORI_DEVICE static void notify(CommControl*) {}  // pollers see the word itself

  class Waiter : public PollingWaiter<CudaTarget> {
   public:
    MORI_DEVICE Waiter(const CudaTarget&, CommControl*, u64 timeout_ns) : PollingWaiter(timeout_ns) {}
  };
  MORI_DEVICE static void relax() {}

  // Up to four of the `left` ids at `from`; the rest become -1. Ids are not written during a kernel.
  MORI_DEVICE static void load_indices(i32 (&to)[4], const i32* from, u32 left) {
    if (left >= 4 && reinterpret_cast<u64>(from) % 16 == 0) {
      asm("ld.global.nc.v4.s32 {%0,%1,%2,%3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
      return;
    }
    MORI_UNROLL
    for (u32 i = 0; i < 4; ++i) to[i] = i < left ? __ldg(from + i) : -1;
  }

  // Part of a row.
  template <class Stored>
  struct Vector : PackedBytes<Stored, vector_bytes> {
    using PackedBytes<Stored, vector_bytes>::word;

    // A row that peers wrote before a word that this thread has acquired: volatile keeps the load behind the acquire.
    MORI_DEVICE void load(const u8* from) {
      asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                   : "l"(from));
    }
    // A row that nobody writes during this kernel.
    MORI_DEVICE void load_once(const u8* from) {
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                   : "l"(from));
    }
    MORI_DEVICE void store(u8* to, bool = false) const {
      asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(word[0]), "r"(word[1]),
                   "r"(word[2]), "r"(word[3])
                   : "memory");
    }
  };

  // A few bytes of a row, in registers. Their loads stay behind an acquire: its asm statement clobbers memory.
  template <u32 count>
  struct Bytes : PackedBytes<u8, count> {
    MORI_DEVICE void load(const u8* from) { *this = *reinterpret_cast<const Bytes*>(from); }
    MORI_DEVICE void store(u8* to) const { *reinterpret_cast<Bytes*>(to) = *this; }
  };

  MORI_DEVICE static u64 clock_ns() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
  }
  MORI_DEVICE static u64 ticks() { return u64(clock64()); }
  MORI_DEVICE static void pause_for_test(u64 ns) {
    const u64 end = clock_ns() + ns;
    while (clock_ns() < end) {
    }
  }

  MORI_DEVICE void fan_out(const RowTarget* targets, u32 count, const u8* row, u64 begin, u64 end, bool) const {
    copy_to_all(*this, targets, count, row, begin, end);
  }
};

}  // namespace MORI_VARIANT
}  // namespace mori

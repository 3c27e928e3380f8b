// The AMD target: waves of 64 lanes on gfx942 and gfx950, of 32 on gfx1250. Compiled by hipRTC, hipcc or any clang that
// knows the arch: it needs none of ROCm's headers. See target_host.hpp for what a target offers.
//
// Memory order. A fence orders the accesses of the wave that executes it. What other waves of the block stored may
// still be on its way when they reach the block barrier, so every wave that stored rows releases before the barrier
// (release_wave), and one thread's release behind it stands for none of them. Likewise a block may span two first-level
// caches, so every wave that reads rows acquires behind the barrier (acquire_wave).
//
//   word                       written                                    taken
//   counts, block count,       relaxed: it carries all it says. As        relaxed. The stores that they permit are
//   dispatch header            credit it says that earlier kernels of     issued behind a block barrier that every
//                              this stream ended, and a kernel ends       poll's value had to be back for, and no
//                              when all its loads are back                store is performed before it is issued
//   entered                    relaxed, as credit for the same reason     relaxed, likewise
//   rows                       release_wave, barrier, release_system      acquire by the poller, then acquire_wave; the
//                                                                         last block's poll is for the next kernel
//   ready                      release_wave, barrier, release_system      acquire by the poller, then acquire_wave
//   combine header             release_system at entry: the rows are an   acquire by the poller, then acquire_wave
//                              earlier kernel's, written back by then or
//                              by this fence
//   abort word                 release before the compare-and-swap, for   acquire behind it
//                              the details stored before
//   live, peer state, twin     one relaxed store each                     relaxed; details behind an acquire
#pragma once

#include "../layout/comm_control.hpp"
#include "gpu.hpp"

#if !defined(__gfx942__) && !defined(__gfx950__) && !defined(__gfx1250__)
#error "the AMD target knows gfx942, gfx950 and gfx1250"
#endif

namespace mori {
inline namespace MORI_VARIANT {

extern __attribute__((shared)) __attribute__((aligned(16))) u8 mori_block_scratch[];

class HipTarget {
  template <u32 count>
  using Words = u32 __attribute__((ext_vector_type(count)));

 public:
#if defined(__GFX9__)
  static constexpr u32 lanes = 64;
  using Mask = u64;
#else
  static constexpr u32 lanes = 32;
  using Mask = u32;
#endif
  static constexpr u32 vector_bytes = 16;
  static constexpr u32 vector_alignment = 16;
  // Loads that a lane has under way before it uses the first: 2 KiB per wave. More would not fit into the registers
  // that a lane has when a block has the most waves.
  static constexpr u32 vectors_in_flight = 2048 / (lanes * vector_bytes);

  MORI_DEVICE static u32 block() { return __builtin_amdgcn_workgroup_id_x(); }
  // The first of the values that a launch appends to a kernel's arguments, from code object version 5 on.
  MORI_DEVICE static u32 blocks() {
    return *(const __attribute__((address_space(4))) u32*)__builtin_amdgcn_implicitarg_ptr();
  }
  MORI_DEVICE static u32 warp() { return __builtin_amdgcn_readfirstlane(thread() / lanes); }  // alike in all its lanes
  MORI_DEVICE static u32 warps() { return threads() / lanes; }
  MORI_DEVICE static u32 lane() { return thread() % lanes; }
  MORI_DEVICE static u32 thread() { return __builtin_amdgcn_workitem_id_x(); }
  MORI_DEVICE static u32 threads() { return __builtin_amdgcn_workgroup_size_x(); }
  MORI_DEVICE static Mask ballot(bool predicate) {
#if defined(__GFX9__)
    return __builtin_amdgcn_ballot_w64(predicate);
#else
    return __builtin_amdgcn_ballot_w32(predicate);
#endif
  }
  // The largest value among groups of `width` lanes, a power of two.
  MORI_DEVICE static u32 largest_of_group(u32 value, u32 width) {
    MORI_ROLLED
    for (u32 distance = width / 2; distance > 0; distance /= 2) {
      value = larger(value, u32(__builtin_amdgcn_ds_bpermute(i32((lane() ^ distance) * 4), i32(value))));
    }
    return value;
  }
  // Lanes step together and their accesses stay in order; only the compiler has to be kept from moving them.
  MORI_DEVICE static void sync_warp() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
  }
  MORI_DEVICE static void sync_block() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
  }
  template <class Type>
  MORI_DEVICE static Type* scratch() {
    return (Type*)mori_block_scratch;
  }

  MORI_DEVICE static u64 load_system(const u64* word) {
    return __hip_atomic_load(in_memory(word), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  }
  MORI_DEVICE static u32 load_system(const u32* word) {
    return __hip_atomic_load(in_memory(word), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  }
  // An acquire invalidates caches, so there is one behind the poll that succeeded and none in those before.
  MORI_DEVICE static u64 load_acquire(const u64* word) { return load_system(word); }
  MORI_DEVICE static void acquire_loaded() { acquire_system(); }
  MORI_DEVICE static void store_system(u64* word, u64 value) {
    __hip_atomic_store(in_memory(word), value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  }
  MORI_DEVICE static void store_system(u32* word, u32 value) {
    __hip_atomic_store(in_memory(word), value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  }
  MORI_DEVICE static u32 add_device(u32* word, u32 value) {
    return __hip_atomic_fetch_add(in_memory(word), value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  }
  MORI_DEVICE static void count(u64* word, u64 value) {
    __hip_atomic_fetch_add(in_memory(word), value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  }
  MORI_DEVICE static void add_block(u32* word, u32 value) {
    __hip_atomic_fetch_add(word, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
  }
  MORI_DEVICE static bool exchange_zero(u64* word, u64 desired) {
    u64 expected = 0;
    release_system();
    const bool exchanged = __hip_atomic_compare_exchange_strong(in_memory(word), &expected, desired, __ATOMIC_RELAXED,
                                                                __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
    acquire_system();
    return exchanged;
  }

  MORI_DEVICE static void release_wave() { release_system(); }
  MORI_DEVICE static void acquire_wave() { acquire_system(); }
  // gfx9 writes its second-level cache back, and only a wait for that keeps the flag behind it. Compilers up to LLVM 22
  // drop their own wait where this wave has nothing under way; this one they keep.
  MORI_DEVICE static void release_system() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
#if defined(__GFX9__)
    __builtin_amdgcn_s_waitcnt(0x0f70);  // vmcnt(0), the other counters as they may be
#endif
  }
  MORI_DEVICE static void acquire_system() { __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, ""); }

  MORI_DEVICE static void notify(CommControl*) {}  // pollers see the word itself

  class Waiter : public PollingWaiter<HipTarget> {
   public:
    MORI_DEVICE Waiter(const HipTarget&, CommControl*, u64 timeout_ns) : PollingWaiter(timeout_ns) {}
  };
  MORI_DEVICE static void relax() { __builtin_amdgcn_s_sleep(1); }  // 64 clocks for the block's other waves

  // Up to four of the `left` ids at `from`; the rest become -1. Ids are not written during a kernel.
  MORI_DEVICE static void load_indices(i32 (&to)[4], const i32* from, u32 left) {
    if (left >= 4 && reinterpret_cast<u64>(from) % 16 == 0) {
      const Words<4> ids = *in_memory(reinterpret_cast<const Words<4>*>(from));
      MORI_UNROLL
      for (u32 i = 0; i < 4; ++i) to[i] = i32(ids[i]);
      return;
    }
    MORI_UNROLL
    for (u32 i = 0; i < 4; ++i) to[i] = i < left ? *in_memory(from + i) : -1;
  }

  // Part of a row. Rows are read and written once: they need no place in a cache.
  template <class Stored>
  struct Vector : PackedBytes<Stored, vector_bytes> {
    // A row that peers wrote before a word that this wave has acquired: the fence keeps the load behind it.
    MORI_DEVICE void load(const u8* from) {
      const auto held = __builtin_nontemporal_load(in_memory(reinterpret_cast<const Words<4>*>(from)));
      MORI_UNROLL
      for (u32 i = 0; i < 4; ++i) this->word[i] = held[i];
    }
    MORI_DEVICE void load_once(const u8* from) { load(from); }
    MORI_DEVICE void store(u8* to, bool = false) const {
      const Words<4> held = {this->word[0], this->word[1], this->word[2], this->word[3]};
      __builtin_nontemporal_store(held, in_memory(reinterpret_cast<Words<4>*>(to)));
    }
  };

  template <u32 count>
  struct Bytes : PackedBytes<u8, count> {
    MORI_DEVICE void load(const u8* from) {
      const Words<count / 4> held = *in_memory(reinterpret_cast<const Words<count / 4>*>(from));
      MORI_UNROLL
      for (u32 i = 0; i < count / 4; ++i) this->word[i] = held[i];
    }
    MORI_DEVICE void store(u8* to) const {
      Words<count / 4> held;
      MORI_UNROLL
      for (u32 i = 0; i < count / 4; ++i) held[i] = this->word[i];
      *in_memory(reinterpret_cast<Words<count / 4>*>(to)) = held;
    }
  };

  static constexpr u32 ns_per_tick = 10;  // of the counter that all blocks share
  MORI_DEVICE static u64 ticks() { return __builtin_readsteadycounter(); }
  MORI_DEVICE static u64 clock_ns() { return ticks() * ns_per_tick; }
  MORI_DEVICE static void pause_for_test(u64 ns) {
    const u64 end = clock_ns() + ns;
    while (clock_ns() < end) relax();
  }

  MORI_DEVICE void fan_out(const RowTarget* targets, u32 count, const u8* row, u64 begin, u64 end, bool) const {
    copy_to_all(*this, targets, count, row, begin, end);
  }

 private:
  template <class Type>
  MORI_DEVICE static Type* in_memory(Type* pointer) {
    return device_pointer<Type>(reinterpret_cast<u64>(pointer));
  }
};

}  // namespace MORI_VARIANT
}  // namespace mori

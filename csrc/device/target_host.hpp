// The host target: one lane per warp, one warp per block, one thread per block.
//
// A target is what a kernel needs from the machine, and all it needs. Every target offers:
//   lanes, Mask                        threads that step together, and an integer with at least a bit for each
//   block() blocks() warp() warps() lane() thread() threads()     where am I
//   ballot(p) largest_of_group(v, n) sync_warp() sync_block() scratch()   inside a block
//   load/store_system, exchange_zero   single words that peers touch; relaxed
//   load_acquire() acquire_loaded()    a word, and what to call before anything is read that it guards
//   add_device, count, add_block       atomics inside this rank / inside this block; relaxed
//   release_system() acquire_system()  fences; what they order is argued at each use
//   release_wave() acquire_wave()      what every wave adds before (behind) a block barrier, so that one thread's
//                                      release behind (acquire before) it covers the whole block
//   Vector<Stored>                     part of a row, as elements
//   Bytes<n>                           n bytes of a row
//   load_indices()                     a few router ids at once
//   notify(control) / Waiter           how a waiter learns of a word, and gives up the core meanwhile
//   fan_out(...)                       one row to several places
//   ticks() pause_for_test(...)        a clock for traces, artificial delays for tests
#pragma once

#include "../layout/comm_control.hpp"
#include "base.hpp"

#if defined(__x86_64__)
#include <immintrin.h>  // compiler header, not a system header: only intrinsics
#endif

// Provided by runtime/host_support.cpp, compiled without any instruction-set flags.
extern "C" {
unsigned long long mori_host_clock_ns();
void mori_host_futex_wait(unsigned int* word, unsigned int value, unsigned long long timeout_ns);
void mori_host_futex_wake_all(unsigned int* word);
void mori_host_sleep_ns(unsigned long long ns);
bool mori_host_interrupted();
}

namespace mori {
inline namespace MORI_VARIANT {

struct HostPlace {
  u32 block;
  u32 blocks;
  void* scratch;
  u64 spin_ns;  // how long a waiter polls before it sleeps; 0 when threads outnumber cores
};

class HostTarget {
 public:
  static constexpr u32 lanes = 1;
  using Mask = u64;
  static constexpr u32 vector_bytes = 128;  // what a lane adds up at once; the compiler vectorises over it
  static constexpr u32 vector_alignment = 1;
  static constexpr u32 vectors_in_flight = 1;

  explicit HostTarget(const HostPlace& place) : place_(place) {}

  u32 block() const { return place_.block; }
  u32 blocks() const { return place_.blocks; }
  u32 warp() const { return 0; }
  u32 warps() const { return 1; }
  u32 lane() const { return 0; }
  u32 thread() const { return 0; }
  u32 threads() const { return 1; }
  static Mask ballot(bool predicate) { return predicate ? 1 : 0; }
  static u32 largest_of_group(u32 value, u32) { return value; }
  static void sync_warp() {}
  static void sync_block() {}
  template <class Type>
  Type* scratch() const {
    return static_cast<Type*>(place_.scratch);
  }

  static u64 load_system(const u64* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
  static u64 load_acquire(const u64* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
  static void acquire_loaded() {}
  static u32 load_system(const u32* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
  static void store_system(u64* word, u64 value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }
  static void store_system(u32* word, u32 value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }
  static u32 add_device(u32* word, u32 value) { return __atomic_fetch_add(word, value, __ATOMIC_RELAXED); }
  static void count(u64* word, u64 value) { __atomic_fetch_add(word, value, __ATOMIC_RELAXED); }
  static void add_block(u32* word, u32 value) { *word += value; }  // a block is one thread
  static bool exchange_zero(u64* word, u64 desired) {
    u64 expected = 0;
    return __atomic_compare_exchange_n(word, &expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  }

  // x86 keeps ordinary stores in order, but not the non-temporal ones that fan_out may use: those sit in
  // write-combining buffers until an sfence. On arm64 the C++ fence is a full dmb.
  static void release_wave() {}  // a block is one thread
  static void acquire_wave() {}
  static void release_system() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
    __atomic_thread_fence(__ATOMIC_RELEASE);
  }
  static void acquire_system() { __atomic_thread_fence(__ATOMIC_ACQUIRE); }

  // The word was stored before this call. The addition is a sequentially consistent read-modify-write, and so
  // are the waiter's `waiters + 1` and its read of the value: either the waiter's re-check of the word comes
  // after our store, or we see its entry in `waiters` and wake it.
  static void notify(CommControl* peer) {
    __atomic_fetch_add(&peer->doorbell_value, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&peer->doorbell_waiters, __ATOMIC_SEQ_CST) != 0) {
      mori_host_futex_wake_all(&peer->doorbell_value);
    }
  }

  // The rhythm of a wait: arm(); look at the word; rest(). Between arm and rest no doorbell is lost.
  class Waiter {
   public:
    Waiter(const HostTarget& target, CommControl* own, u64 timeout_ns)
        : own_(own), start_ns_(0), spin_ns_(target.place_.spin_ns), timeout_ns_(timeout_ns) {}
    Waiter(const Waiter&) = delete;
    Waiter& operator=(const Waiter&) = delete;
    ~Waiter() { disarm(); }

    void arm() {
      if (!sleepy_) return;
      __atomic_fetch_add(&own_->doorbell_waiters, 1, __ATOMIC_SEQ_CST);
      value_ = __atomic_load_n(&own_->doorbell_value, __ATOMIC_SEQ_CST);
      armed_ = true;
    }

    void rest() {
      if (armed_) {
        mori_host_futex_wait(&own_->doorbell_value, value_, longest_nap_ns);
        disarm();
      } else if (++turns_ % 16 != 0 && spin_ns_ != 0) {
        relax();
        return;
      }
      const u64 now = mori_host_clock_ns();
      if (start_ns_ == 0) start_ns_ = now;
      waited_ns_ = now - start_ns_;
      sleepy_ = waited_ns_ >= spin_ns_;
      if (waited_ns_ >= next_look_ns_) {  // a signal handler of the caller's language may want to end the call
        next_look_ns_ = waited_ns_ + longest_nap_ns;
        interrupted_ = waited_ns_ != 0 && mori_host_interrupted();
      }
    }

    bool patient() const { return sleepy_; }  // waited long enough for the rarer checks
    bool expired() const { return waited_ns_ > timeout_ns_; }
    bool interrupted() const { return interrupted_; }

   private:
    static constexpr u64 longest_nap_ns = 100'000'000;  // bounds the cost of a doorbell lost with its ringer

    static void relax() {
#if defined(__x86_64__)
      _mm_pause();
#endif
    }
    void disarm() {
      if (armed_) __atomic_fetch_sub(&own_->doorbell_waiters, 1, __ATOMIC_SEQ_CST);
      armed_ = false;
    }

    CommControl* own_;
    u64 start_ns_, spin_ns_, timeout_ns_;
    u64 waited_ns_ = 0, next_look_ns_ = longest_nap_ns;
    u32 value_ = 0, turns_ = 0;
    bool armed_ = false, sleepy_ = false, interrupted_ = false;
  };

  // Bytes [begin, end) of one row to every target. The row comes from memory once: for the second target it is
  // in the first-level cache. Streaming stores save reading the lines that are about to be overwritten.
  void fan_out(const RowTarget* targets, u32 count, const u8* row, u64 begin, u64 end, bool streaming) const {
    for (u32 i = 0; i < count; ++i) {
      if (streaming) {
        copy_streaming(targets[i].address + begin, row + begin, end - begin);
      } else {
        __builtin_memcpy(targets[i].address + begin, row + begin, end - begin);
      }
    }
  }

  // Up to four of the `left` ids at `from`; the rest become -1.
  static void load_indices(i32 (&to)[4], const i32* from, u32 left) {
    for (u32 i = 0; i < 4; ++i) to[i] = i < left ? from[i] : -1;
  }

  // A row being read is left where it is: copying it first would only cost stores and their forwarding.
  template <class Stored>
  struct Vector {
    static constexpr u32 elements = vector_bytes / sizeof(Stored);
    const u8* source = nullptr;
    alignas(64) Stored element[elements];

    void load(const u8* from) { source = from; }
    Stored get(u32 e) const {
      Stored value;
      __builtin_memcpy(&value, source + e * sizeof(Stored), sizeof value);
      return value;
    }
    void set(u32 e, Stored value) { element[e] = value; }
    void store(u8* to, bool streaming) const {
      const u8* from = reinterpret_cast<const u8*>(element);
      streaming ? copy_streaming(to, from, vector_bytes) : void(__builtin_memcpy(to, from, vector_bytes));
    }
  };

  template <u32 count>
  struct Bytes {
    alignas(64) u8 element[count];

    u8 get(u32 e) const { return element[e]; }
    void set(u32 e, u8 value) { element[e] = value; }
    void load(const u8* from) { __builtin_memcpy(element, from, count); }
    void store(u8* to) const { __builtin_memcpy(to, element, count); }
  };

  static u64 ticks() { return mori_host_clock_ns(); }
  static void pause_for_test(u64 ns) { mori_host_sleep_ns(ns); }

 private:
  static void copy_streaming(u8* to, const u8* from, u64 bytes) {
#if defined(__x86_64__)
    const u64 head = smaller<u64>((64 - (reinterpret_cast<u64>(to) & 63)) & 63, bytes);
    __builtin_memcpy(to, from, head);
    to += head, from += head, bytes -= head;
    for (; bytes >= 64; to += 64, from += 64, bytes -= 64) {
#if defined(__AVX512F__)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#elif defined(__AVX2__)
      const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32));
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to), low);
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), high);
#else
      for (u32 part = 0; part < 64; part += 16) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + part),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + part)));
      }
#endif
    }
#endif
    __builtin_memcpy(to, from, bytes);
  }

  HostPlace place_;
};

}  // namespace MORI_VARIANT
}  // namespace mori

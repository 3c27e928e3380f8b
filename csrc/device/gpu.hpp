// What the targets of all GPUs have in common.
#pragma once

#include "base.hpp"

namespace mori {
inline namespace MORI_VARIANT {

// A waiter that polls; now and then it looks at the clock. Pollers see the word itself, so nobody rings for them.
template <class T>
class PollingWaiter {
 public:
  MORI_DEVICE explicit PollingWaiter(u64 timeout_ns) : timeout_ns_(timeout_ns) {}
  MORI_DEVICE void arm() {}
  MORI_DEVICE void rest() {
    T::relax();
    patient_ = false;
    if (++turns_ % 32 != 0) return;
    const u64 now = T::clock_ns();
    if (start_ns_ == 0) start_ns_ = last_ns_ = now;
    patient_ = now - last_ns_ > check_interval_ns;
    if (patient_) last_ns_ = now;
    waited_ns_ = now - start_ns_;
  }
  // True about every millisecond: time for the checks that reach beyond this GPU. Not sooner, for the host's memory
  // is far, and ten thousand threads may be waiting.
  MORI_DEVICE bool patient() const { return patient_; }
  MORI_DEVICE bool expired() const { return waited_ns_ > timeout_ns_; }
  MORI_DEVICE static bool interrupted() { return false; }

 private:
  static constexpr u64 check_interval_ns = 1'000'000;

  u64 timeout_ns_, start_ns_ = 0, last_ns_ = 0, waited_ns_ = 0;
  u32 turns_ = 0;
  bool patient_ = false;
};

// Elements packed as they lie in memory: one register per four bytes.
template <class Stored, u32 bytes>
struct alignas(bytes) PackedBytes {
  static constexpr u32 elements = bytes / sizeof(Stored), per_word = 4 / sizeof(Stored);
  u32 word[bytes / 4] = {};

  MORI_DEVICE Stored get(u32 e) const { return Stored(word[e / per_word] >> (e % per_word * 8 * sizeof(Stored))); }
  MORI_DEVICE void set(u32 e, Stored value) {  // where it is zero
    word[e / per_word] |= u32(value) << (e % per_word * 8 * sizeof(Stored));
  }
};

template <class Unit, class T>
MORI_RARE void copy_units(const T& target, const RowTarget* targets, u32 count, const u8* row, u64 begin, u64 end) {
  MORI_ROLLED
  for (u64 at = begin + target.lane() * sizeof(Unit); at < end; at += T::lanes * sizeof(Unit)) {
    const Unit held = *device_pointer<const Unit>(reinterpret_cast<u64>(row) + at);
    MORI_ROLLED
    for (u32 i = 0; i < count; ++i) *device_pointer<Unit>(reinterpret_cast<u64>(targets[i].address) + at) = held;
  }
}

// Bytes [begin, end) of a row to every target; the row is read once. Several loads per lane are under way at a time.
template <class T>
MORI_DEVICE void copy_to_all(const T& target, const RowTarget* targets, u32 count, const u8* row, u64 begin, u64 end) {
  using Vector = typename T::template Vector<u32>;
  u64 all = reinterpret_cast<u64>(row) | begin | end;
  MORI_ROLLED
  for (u32 i = 0; i < count; ++i) all |= reinterpret_cast<u64>(targets[i].address);
  if (all % T::vector_bytes != 0) {
    all % 4 == 0 ? copy_units<u32>(target, targets, count, row, begin, end)
                 : copy_units<u8>(target, targets, count, row, begin, end);
    return;
  }
  constexpr u64 stride = T::lanes * T::vector_bytes;
  MORI_ROLLED
  for (u64 at = begin + target.lane() * T::vector_bytes; at < end; at += T::vectors_in_flight * stride) {
    Vector held[T::vectors_in_flight];
    MORI_UNROLL
    for (u32 v = 0; v < T::vectors_in_flight; ++v) {
      if (at + v * stride < end) held[v].load_once(row + at + v * stride);
    }
    MORI_ROLLED
    for (u32 i = 0; i < count; ++i) {
      u8* to = targets[i].address + at;
      MORI_UNROLL
      for (u32 v = 0; v < T::vectors_in_flight; ++v) {
        if (at + v * stride < end) held[v].store(to + v * stride);
      }
    }
  }
}

}  // namespace MORI_VARIANT
}  // namespace mori

// The control block at offset 0 of every rank's slice of symmetric memory, and how peers are addressed.
#pragma once

#include "../device/base.hpp"

namespace mori {
inline namespace MORI_VARIANT {

constexpr u32 max_world_size = 512;
constexpr u64 comm_control_bytes = 4096;

enum class PeerState : u32 { joined = 0, left = 1 };

enum class AbortKind : u32 { none = 0, peer_died = 1, peer_left = 2, peer_timeout = 3, out_of_step = 4 };

// What a rank was waiting for when it gave up; names for messages are in mori/ops/faults.py.
enum class Phase : u32 { none = 0, counts = 1, rows = 2, entered = 3, combine_ready = 4, watch = 5, barrier = 6 };

// The sticky abort word: kind:4 | phase:4 | peer:12 | origin:12 | call:32. Zero means that all is well. `peer` is the
// rank that failed, `origin` the one that noticed.
struct AbortCause {
  AbortKind kind;
  Phase phase;
  u32 peer;
  u32 origin;
  u64 call;

  MORI_SHARED_CODE constexpr u64 encode() const {
    return u64(kind) << 60 | u64(phase) << 56 | u64(peer & 0xfff) << 44 | u64(origin & 0xfff) << 32 |
           (call & 0xffffffffull);
  }
  MORI_SHARED_CODE static constexpr AbortCause decode(u64 word) {
    return {AbortKind(word >> 60), Phase(word >> 56 & 0xf), u32(word >> 44 & 0xfff), u32(word >> 32 & 0xfff),
            word & 0xffffffffull};
  }
};

// Written by this rank, by its peers' kernels and by watcher threads. Fields that different writers touch
// lie on different cache lines. A rank on a GPU has a second one, the *twin*, in host memory that its GPU maps and
// its peers' processes share: watchers and leaving ranks write there, and kernels look at it while they wait.
struct CommControl {
  // Moves from 0 once, by compare-and-swap, so that no death between two steps can leave it half set.
  alignas(64) u64 abort_cause;
  // What this rank expected and found when it gave up itself; stored before any abort word that names it as origin.
  u64 abort_expected;
  u64 abort_seen;
  // In the twin only: the abort word of this rank's own GPU, mirrored for the host to see.
  alignas(64) u64 device_cause;
  u64 device_expected;
  u64 device_seen;
  // Host doorbell: whoever stores a word this rank may wait for adds 1 to the value and wakes waiters.
  alignas(64) u32 doorbell_value;
  u32 doorbell_waiters;
  // Bit p: rank p takes part. Read by kernels, so that captured graphs survive a masked rank.
  alignas(64) u64 live[max_world_size / 64];
  // peer_state[p] is written by rank p when it leaves.
  alignas(64) u32 peer_state[max_world_size];
};
static_assert(sizeof(CommControl) <= comm_control_bytes, "the control block fits its page");

// One flat range holds the slices of all ranks; an allocation has the same offset in each.
struct Symmetric {
  u64 base;
  u64 stride;
  u32 rank;
  u32 world_size;

  template <class Type>
  MORI_SHARED_CODE Type* at(u32 peer, u64 offset) const {
    return device_pointer<Type>(base + peer * stride + offset);
  }
  MORI_SHARED_CODE CommControl* control(u32 peer) const { return at<CommControl>(peer, 0); }
};

}  // namespace MORI_VARIANT
}  // namespace mori

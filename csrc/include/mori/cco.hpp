// mori.cco for kernels: windows of symmetric memory, teams of ranks, barriers among ranks that reach each other by load
// and store. Stands alone: it serves g++, NVRTC, nvcc, hipRTC and clang for AMD. docs/cco.md is the guide.
//
// Symmetric memory is one range of addresses per process. In each, rank p's bytes of a window begin at base + p *
// stride, so the address of a peer's bytes is arithmetic. A kernel gets two descriptors, which the library wrote into
// memory of its device: of a window (`RegisteredWindow.handle`) and of a device communicator (`DevCommHandle.ptr`).
#pragma once

#if defined(__HIP__)
#include "../../device/target_hip.hpp"
#elif defined(__CUDACC__)
#include "../../device/target_cuda.hpp"
#else
#include "../../device/target_host.hpp"
#endif

// Of the descriptors below. The library stores its own in every device communicator; raise it with any change of them.
#define MORI_CCO_VERSION 1
#if defined(MORI_CCO_LIBRARY_VERSION) && MORI_CCO_LIBRARY_VERSION != MORI_CCO_VERSION
#error \
    "this mori/cco.hpp is not of the release of mori that is imported: MORI_SOURCE_ROOT or an include path names another"
#endif

#if !defined(__HIP__) && !defined(__CUDACC__)
extern "C" int sched_yield() noexcept;
#endif

namespace mori {
inline namespace MORI_VARIANT {
namespace cco {

#if defined(__HIP__)
using Target = HipTarget;
#elif defined(__CUDACC__)
using Target = CudaTarget;
#else
using Target = HostTarget;
#endif

// ---- Descriptors

struct ccoWindow {
  u64 winBase;  // of LSA rank 0's bytes
  u64 stride;   // from one LSA rank's bytes to those of the next
  u64 size;     // of one rank's bytes; 0: no window
  u32 lsaRank;
  u32 lsaSize;
};
using ccoWindow_t = const ccoWindow*;

constexpr u32 ccoMaxWindows = 1024;

struct ccoWindowTable {
  u64 used;  // windows beyond were never there
  ccoWindow window[ccoMaxWindows];
};

// A slab in the resource window: u32 epoch[nBarriers], then u32 inbox[nBarriers][lsaSize].
struct ccoLsaBarrierHandle {
  u64 offset;
  u32 nBarriers;
  u32 unused;
};

struct ccoDevComm {
  u32 version;  // MORI_CCO_VERSION of the library
  u32 bytes;    // of this descriptor
  u32 rank, worldSize;
  u32 lsaRank, lsaSize;
  u32 myNodeStart;  // the world rank of LSA rank 0
  u32 gdaConnType;  // 0: none, for no rank is on another node
  u64 flatBase, perRankSize;
  const ccoWindowTable* windows;
  const CommControl* control;  // who has died or left, as the host sees it
  ccoWindow resourceWindow;
  ccoLsaBarrierHandle lsaBarrier;        // `lsa_barrier_count` of the requirements
  ccoLsaBarrierHandle hybridLsaBarrier;  // `barrier_count`
};

// Whether code compiled from this header may read the descriptor. Ask once, before anything else, where a kernel's code
// is older than the process that launches it; what mori.cco.device compiles is of the release that runs it.
MORI_SHARED_CODE bool ccoIsCompatible(const ccoDevComm& comm) {
  return comm.version == MORI_CCO_VERSION && comm.bytes == sizeof(ccoDevComm);
}

// ---- Teams: ranks of the world by position, `rank` being the own one, -1 for a team that one is not in

struct ccoTeam {
  i32 nRanks;
  i32 rank;
  i32 stride;
};

MORI_SHARED_CODE ccoTeam ccoTeamWorld(const ccoDevComm& comm) { return {i32(comm.worldSize), i32(comm.rank), 1}; }
MORI_SHARED_CODE ccoTeam ccoTeamLsa(const ccoDevComm& comm) { return {i32(comm.lsaSize), i32(comm.lsaRank), 1}; }
// All ranks of other nodes.
MORI_SHARED_CODE ccoTeam ccoTeamCrossNode(const ccoDevComm& comm) {
  return {i32(comm.worldSize - comm.lsaSize), -1, 1};
}
// The rank of the own position on each other node.
MORI_SHARED_CODE ccoTeam ccoTeamRail(const ccoDevComm& comm) {
  return {i32(comm.worldSize / comm.lsaSize) - 1, -1, i32(comm.lsaSize)};
}

// World rank of member `i`. Teams without the own rank skip its node; where a node is one rank, both such are the same.
MORI_SHARED_CODE i32 ccoTeamRankToWorld(const ccoDevComm& comm, const ccoTeam& team, i32 i) {
  if (team.rank >= 0) return i32(comm.rank) + (i - team.rank) * team.stride;
  const i32 start = i32(comm.myNodeStart), size = i32(comm.lsaSize);
  if (team.stride == 1) return i < start ? i : i + size;
  const i32 node = i < start / size ? i : i + 1;
  return node * size + i32(comm.lsaRank);
}

// ---- Addresses. A peer is an LSA rank

MORI_SHARED_CODE void* ccoLsaPtr(ccoWindow_t window, u32 peer, u64 offset = 0) {
  return device_pointer<void>(window->winBase + peer * window->stride + offset);
}
MORI_SHARED_CODE void* ccoLocalPtr(ccoWindow_t window, u64 offset = 0) {
  return ccoLsaPtr(window, window->lsaRank, offset);
}

// The window that this rank's address lies in; null if it lies in none that was registered before the launch.
MORI_SHARED_CODE ccoWindow_t findWindow(const ccoDevComm* comm, const void* address) {
  for (u32 i = 0; i < comm->windows->used; ++i) {
    const ccoWindow_t window = &comm->windows->window[i];
    const u64 offset = reinterpret_cast<u64>(address) - reinterpret_cast<u64>(ccoLocalPtr(window));
    if (offset < window->size) return window;
  }
  return nullptr;
}

// ---- Who takes part in an operation. On a CPU a block is one thread, so the three are the same there

struct ccoCoopThread {
  MORI_DEVICE static u32 thread_rank() { return 0; }
  MORI_DEVICE static u32 size() { return 1; }
  MORI_DEVICE static void sync() {}
  MORI_DEVICE static bool any(bool mine) { return mine; }
};

#if defined(__HIP__) || defined(__CUDACC__)
struct ccoCoopWarp {
  MORI_DEVICE static u32 thread_rank() { return Target().lane(); }
  MORI_DEVICE static u32 size() { return Target::lanes; }
  MORI_DEVICE static void sync() { Target::sync_warp(); }
  MORI_DEVICE static bool any(bool mine) { return Target::ballot(mine) != 0; }
};

struct ccoCoopBlock {
  MORI_DEVICE static u32 thread_rank() { return Target().thread(); }
  MORI_DEVICE static u32 size() { return Target().threads(); }
  MORI_DEVICE static void sync() { Target::sync_block(); }
  MORI_DEVICE static bool any(bool mine) {
#if defined(__HIP__)
    static __attribute__((shared)) u32 answer;
    if (thread_rank() == 0) answer = 0;
    sync();
    if (mine) answer = 1;  // all write one value, so it does not matter who is last
    sync();
    const bool found = answer != 0;
    sync();  // the next call may reset it
    return found;
#else
    return __syncthreads_or(mine) != 0;
#endif
  }
};
#else
struct ccoCoopWarp : ccoCoopThread {};
struct ccoCoopBlock : ccoCoopThread {};
#endif

// ---- Time

// The clock of time limits: cycles of the multiprocessor (CUDA), 10 ns (HIP), of the time-stamp counter (CPUs).
MORI_DEVICE u64 ccoClock() {
#if defined(__HIP__) || defined(__CUDACC__)
  return Target::ticks();
#elif defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#else
  u64 now;
  asm volatile("mrs %0, cntvct_el0" : "=r"(now));
  return now;
#endif
}

// Between two looks at a word that a peer will store. On a CPU the peer may need this very core.
MORI_DEVICE void ccoRelax(u32 turn) {
#if defined(__HIP__) || defined(__CUDACC__)
  (void)turn;
  Target::relax();
#else
  if (turn % 64 == 0) sched_yield();
#if defined(__x86_64__)
  _mm_pause();
#endif
#endif
}

// ---- Barrier among the ranks of a team that reach each other's memory

// Ranks that use one index of one handle make the same calls in one order. An index belongs to one group (thread, warp
// or block, as Coop says) at a time; groups with different indices are independent. What the group wrote before
// `arrive`, on whatever rank's memory, every group that returns from `wait` may read.
//
// One word per pair of ranks: inbox[index][p] of this rank is written by rank p alone and says how many times p has
// arrived. Nobody resets anything: the count goes on in the next session and the next launch, and wraps around at 2^32.
// A word that is ahead of what is waited for counts as arrival: its rank has arrived there, and once more since.
template <class Coop>
class ccoLsaBarrierSession {
 public:
  MORI_DEVICE ccoLsaBarrierSession(Coop coop, const ccoDevComm* comm, const ccoTeam& team,
                                   const ccoLsaBarrierHandle& handle, u32 index)
      : coop_(coop),
        window_(&comm->resourceWindow),
        control_(comm->control),
        team_(team),
        own_(comm->lsaRank),
        first_(comm->myNodeStart) {
    epochs_ = handle.offset + index * sizeof(u32);
    inbox_ = handle.offset + (handle.nBarriers + u64(index) * comm->lsaSize) * sizeof(u32);
    epoch_ = *static_cast<const u32*>(ccoLocalPtr(window_, epochs_));
  }
  ccoLsaBarrierSession(const ccoLsaBarrierSession&) = delete;
  ccoLsaBarrierSession& operator=(const ccoLsaBarrierSession&) = delete;

  // Only this rank's groups read the epoch, one after the other: the group's sync, or the end of the kernel, orders
  // that.
  MORI_DEVICE ~ccoLsaBarrierSession() {
    coop_.sync();
    if (coop_.thread_rank() == 0) *static_cast<u32*>(ccoLocalPtr(window_, epochs_)) = epoch_;
    coop_.sync();
  }

  // The flag is a release of everything that the group stored. CUDA: the group's sync orders the other threads' stores
  // before the fence of each thread that stores a flag, and the fence is cumulative. AMD: a fence orders its own wave's
  // stores only, so every wave has one before the sync; the one behind it keeps the flag behind the sync. CPU: the
  // group is this thread.
  MORI_DEVICE void arrive(Coop coop) {
    if (team_.nRanks <= 1) return coop.sync();
    Target::release_wave();
    coop.sync();
    Target::release_system();
    for (i32 i = i32(coop.thread_rank()); i < team_.nRanks; i += i32(coop.size())) {
      if (i == team_.rank) continue;
      Target::store_system(static_cast<u32*>(ccoLsaPtr(window_, peer(i), inbox_ + own_ * sizeof(u32))), epoch_ + 1);
    }
  }

  // 0 when all have arrived; 1, for the whole group, if one of them has ended and never will: the host's
  // `raise_if_faulted` or `barrier` says who. Then the session is where it was: wait again, or `sync` again, which
  // repeats the arrival to no effect.
  MORI_DEVICE int wait(Coop coop) { return finish(coop, coop.any(poll(coop, Forever{}))); }
  // 1, too, if a rank has not arrived `cycles` of ccoClock() from now.
  MORI_DEVICE int wait(Coop coop, u64 cycles) { return finish(coop, coop.any(poll(coop, Until{ccoClock(), cycles}))); }

  MORI_DEVICE int sync(Coop coop) {
    arrive(coop);
    return wait(coop);
  }
  MORI_DEVICE int sync(Coop coop, u64 cycles) {
    arrive(coop);
    return wait(coop, cycles);
  }

 private:
  struct Forever {
    MORI_DEVICE static bool over() { return false; }
  };
  struct Until {
    u64 start, cycles;
    MORI_DEVICE bool over() const { return ccoClock() - start > cycles; }
  };

  MORI_DEVICE u32 peer(i32 i) const { return u32(i32(own_) + (i - team_.rank) * team_.stride); }

  // A peer's last arrival was stored before its farewell: having seen that, the word is looked at once more.
  MORI_DEVICE bool lost(u32 peer, const u32* word) const {
    const bool left = Target::load_system(&control_->peer_state[first_ + peer]) == u32(PeerState::left);
    if (!left && Target::load_system(&control_->abort_cause) == 0) return false;
    Target::acquire_system();
    return !arrived(word);
  }
  MORI_DEVICE bool arrived(const u32* word) const { return Target::load_system(word) - (epoch_ + 1) <= 0x7fffffffu; }

  // Polls relaxed; one fence behind the last word acquires for all of them. Whether one of them did not come. Whether
  // its rank still exists is asked rarely, for on a GPU the answer is in the host's memory.
  template <class Limit>
  MORI_DEVICE bool poll(Coop coop, Limit limit) const {
    bool missing = false;
    for (i32 i = i32(coop.thread_rank()); i < team_.nRanks && !missing; i += i32(coop.size())) {
      if (i == team_.rank) continue;
      const u32* word = static_cast<const u32*>(ccoLocalPtr(window_, inbox_ + peer(i) * sizeof(u32)));
      for (u32 turn = 1; !missing && !arrived(word); ++turn) {
        missing = limit.over() || (turn % 1024 == 0 && lost(peer(i), word));
        ccoRelax(turn);
      }
    }
    Target::acquire_system();
    return missing;
  }

  // The sync hands the pollers' acquire on to the group. CUDA: that is enough, the group shares a first-level cache and
  // the fence is cumulative. AMD: a block may span two such caches, so every wave acquires behind the sync.
  MORI_DEVICE int finish(Coop coop, bool missing) {
    coop.sync();
    Target::acquire_wave();
    if (missing) return 1;
    epoch_ += 1;
    return 0;
  }

  Coop coop_;
  ccoWindow_t window_;
  const CommControl* control_;
  ccoTeam team_;
  u32 own_, first_, epoch_;
  u64 epochs_, inbox_;
};

// ---- Kernels, on all targets in one spelling

// Where in its launch a thread is. On a CPU every block is one thread.
struct ccoGrid {
#if defined(__HIP__) || defined(__CUDACC__)
  MORI_DEVICE static u32 block() { return Target().block(); }
  MORI_DEVICE static u32 blocks() { return Target().blocks(); }
  MORI_DEVICE static u32 thread() { return Target().thread(); }
  MORI_DEVICE static u32 threads() { return Target().threads(); }
#else
  u32 block_, blocks_;
  u32 block() const { return block_; }
  u32 blocks() const { return blocks_; }
  static u32 thread() { return 0; }
  static u32 threads() { return 1; }
#endif
};

}  // namespace cco
}  // namespace MORI_VARIANT
}  // namespace mori

// `CCO_KERNEL(name, Arguments) { ... }` defines a kernel that mori.cco.device can compile and launch. The body sees
// `const ccoGrid& grid` and `const Arguments& arguments`, a struct that is passed by value.
#if defined(__HIP__)
#define CCO_KERNEL_ENTRY_(name, Arguments)                                  \
  extern "C" __attribute__((global)) void name(const Arguments arguments) { \
    name##_body(mori::cco::ccoGrid{}, arguments);                           \
  }
#elif defined(__CUDACC__)
#define CCO_KERNEL_ENTRY_(name, Arguments)                                       \
  extern "C" __global__ void name(const __grid_constant__ Arguments arguments) { \
    name##_body(mori::cco::ccoGrid{}, arguments);                                \
  }
#else
#define CCO_KERNEL_ENTRY_(name, Arguments)                                                           \
  extern "C" __attribute__((visibility("default"))) void name(const void* arguments, unsigned block, \
                                                              unsigned blocks) {                     \
    name##_body(mori::cco::ccoGrid{block, blocks}, *static_cast<const Arguments*>(arguments));       \
  }
#endif
#define CCO_KERNEL(name, Arguments)                                                         \
  MORI_DEVICE void name##_body(const mori::cco::ccoGrid& grid, const Arguments& arguments); \
  CCO_KERNEL_ENTRY_(name, Arguments)                                                        \
  MORI_DEVICE void name##_body([[maybe_unused]] const mori::cco::ccoGrid& grid, const Arguments& arguments)

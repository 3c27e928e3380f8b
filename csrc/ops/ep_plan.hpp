// The one engine behind both façades: a resolved configuration, turned into launches. It allocates nothing in
// symmetric memory and validates nothing: tensors were checked, memory was agreed on and is handed in.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "../cco/communicator.hpp"
#include "launcher.hpp"

namespace mori {

// How a call ended; positive values are failures. `enqueued`, or `captured` into a graph: on a GPU, whose state tells
// more once the stream has got there. From `overlap` on: so many arguments come before the one that lies in memory
// which the call overwrites. Numbers are mirrored in mori/ops/engine.py.
enum class Outcome : int { captured = -2, enqueued = -1, done = 0, call_fault = 1, aborted = 2, busy = 3, overlap = 4 };

// How and where to launch; of no concern to the host target.
struct LaunchHints {
  int block_num, warps;  // upper bounds; 0 or less: free choice
  u64 stream;            // handle
};

// What few calls have. Addresses; 0 stands for the op's own or for none.
struct CallExtras {
  u64 sender_map = 0, received_count = 0, summary = 0;  // of a routing handle
  u64 packed_rows = 0, packed_sources = 0;              // standard-MoE layout
  bool split = false;                                   // the first half only; receive() does the second
};

struct DispatchCall {
  KernelId kernel;
  u64 input, weights, scales, indices;  // addresses; weights and scales may be 0
  u32 tokens, row_bytes, scale_bytes, dtype;
};

struct CombineCall {
  KernelId kernel;
  u64 input, weights;  // input 0: zero copy; weights may be 0
  u32 input_rows, weight_rows, tokens, row_bytes, dtype;
};

// Between rows as received and rows in the places of their experts, on this rank alone.
struct ConvertCall {
  KernelId kernel;
  u64 rows, indices;  // only read by `pack`
  u64 packed_rows, packed_sources;
  u32 row_bytes;
};

class EpPlan {
 public:
  EpPlan(std::shared_ptr<Communicator> communicator, std::shared_ptr<MemoryBlock> memory, const EpShape& shape,
         std::shared_ptr<Launcher> launcher, u64 timeout_ns);

  // Zeroes what the protocol reads before anybody wrote it. No peer may call before all have prepared.
  void prepare();

  // A kernel must have been loaded before a call names it.
  void load(KernelId kernel, const std::string& code) { launcher_->load(kernel, code); }

  Outcome dispatch(const DispatchCall& call, const CallExtras& extras, const LaunchHints& hints);
  Outcome combine(const CombineCall& call, const CallExtras& extras, const LaunchHints& hints);
  // The second half of the last call, which was split.
  Outcome receive(u64 stream);
  Outcome convert(const ConvertCall& call, const LaunchHints& hints);

  // What kernels left behind; waits for `stream`.
  OpState state(u64 stream) const;
  // OpStats and what follows it.
  std::vector<u64> stats(u64 stream) const;
  void clear_stats(u64 stream);
  void synchronize() { memory_->memory->synchronize(); }

  const Launcher& launcher() const { return *launcher_; }

  // On all ranks between two barriers: as if `call` had been the last call. Words keep their meaning because the
  // incoming ones are rewritten to carry that number.
  void set_call_number(u64 call);
  void set_test_delays(u32 seed, u32 longest_us);
  // Dispatches of at most so many tokens take the staged path; -1: none. Needs landing areas in the layout.
  void set_staged_tokens(i64 most) { staged_tokens_ = args_.shape.may_stage != 0 ? most : -1; }

 private:
  // A launch that may have to be followed by another one for the same call.
  struct Launch {
    KernelId kernel{};
    Grid grid{};
    DispatchArgs dispatch{};
    CombineArgs combine{};
  };

  u64 offset(RegionId id) const { return args_.window + args_.layout.of(id); }
  Routing routing(const CallExtras& extras) const;
  // A span of this rank's own memory that a kernel writes while it reads its arguments.
  struct Span {
    u64 begin, end;
    bool holds(u64 address, u64 bytes) const { return bytes != 0 && address < end && address + bytes > begin; }
  };
  Span span(RegionId first, RegionId last) const;
  Outcome launch(KernelId kernel, const void* args, const Grid& grid, u64 stream);

  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<MemoryBlock> memory_;
  std::shared_ptr<Launcher> launcher_;
  EpArgs args_{};
  i64 staged_tokens_ = -1;
  Span receive_, results_;
  Launch sent_;  // of the last split call
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
};

}  // namespace mori

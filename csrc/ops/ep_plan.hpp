// The one engine behind both façades: a resolved configuration, turned into launches. It allocates nothing in
// symmetric memory and validates nothing: tensors were checked, memory was agreed on and is handed in.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "../cco/communicator.hpp"
#include "launcher.hpp"

namespace mori {

// How a call ended; positive values are failures. `enqueued`: on a GPU, whose state tells more once the stream has got
// there. Numbers are mirrored in mori/ops/engine.py.
enum class Outcome : int { enqueued = -1, done = 0, call_fault = 1, aborted = 2, busy = 3 };

// How and where to launch; of no concern to the host target.
struct LaunchHints {
  int block_num, warps;  // upper bounds; 0 or less: free choice
  u64 stream;            // handle
};

struct DispatchCall {
  u64 input, weights, scales, indices;  // addresses; weights and scales may be 0
  u32 tokens, row_bytes, scale_bytes, dtype;
};

struct CombineCall {
  u64 input, weights;  // input 0: zero copy; weights may be 0
  u32 input_rows, weight_rows, tokens, row_bytes, dtype;
  Arithmetic arithmetic;
};

class EpPlan {
 public:
  EpPlan(std::shared_ptr<Communicator> communicator, std::shared_ptr<MemoryBlock> memory, const EpShape& shape,
         std::shared_ptr<Launcher> launcher, u64 timeout_ns);

  // Zeroes what the protocol reads before anybody wrote it. No peer may call before all have prepared.
  void prepare();

  Outcome dispatch(const DispatchCall& call, const LaunchHints& hints);
  Outcome combine(const CombineCall& call, const LaunchHints& hints);

  // Tokens of the last dispatch. Nothing before any, nor once one was captured: a replay tells the host nothing.
  std::optional<u32> dispatched_tokens() const { return captured_ ? std::nullopt : last_tokens_; }
  // What kernels left behind; waits for `stream`.
  OpState state(u64 stream) const;
  // OpStats, then rows_sent[W] and rows_received[W].
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
  u64 offset(RegionId id) const { return args_.window + args_.layout.of(id); }
  Outcome launch(KernelId kernel, const void* args, const Grid& grid, u64 scratch_bytes, u64 stream);

  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<MemoryBlock> memory_;
  std::shared_ptr<Launcher> launcher_;
  EpArgs args_{};
  std::optional<u32> last_tokens_;
  i64 staged_tokens_ = -1;
  bool captured_ = false;  // a dispatch, at any time
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
};

}  // namespace mori

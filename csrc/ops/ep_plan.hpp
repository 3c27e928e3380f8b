// The one engine behind both façades: a resolved configuration, turned into launches. It allocates nothing in
// symmetric memory and validates nothing: tensors were checked, memory was agreed on and is handed in.
#pragma once

#include <atomic>
#include <memory>

#include "../cco/communicator.hpp"
#include "../layout/launch.hpp"
#include "../runtime/host_grid.hpp"

namespace mori {

enum class Outcome { done, call_fault, aborted, busy };

struct PlanOptions {
  std::string isa = "auto";
  unsigned threads = 1;
  u64 spin_ns = 20'000;
  u64 timeout_ns = 300'000'000'000;
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
         const PlanOptions& options);

  // Zeroes what the protocol reads before anybody wrote it. No peer may call before all have prepared.
  void prepare();

  Outcome dispatch(const DispatchCall& call);
  Outcome combine(const CombineCall& call);

  u32 received() const { return state()->last.received; }
  u32 dispatched_tokens() const { return state()->last.tokens; }
  bool has_dispatched() const { return state()->last.dispatched != 0; }
  u64 call_number() const { return state()->last.call; }
  CallFault last_fault() const { return state()->fault; }
  unsigned threads() const { return grid_.threads(); }
  const char* variant_name() const { return grid_.variant_name(); }
  OpStats* stats() const { return args_.own<OpStats>(RegionId::stats); }
  void clear_stats();

  // On all ranks between two barriers: as if `call` had been the last call. Words keep their meaning because the
  // incoming ones are rewritten to carry that number.
  void set_call_number(u64 call);
  void set_test_delays(u32 seed, u32 longest_us);

 private:
  OpState* state() const { return args_.own<OpState>(RegionId::control); }
  u32 parts_of(u32 tokens, u32 row_bytes) const;
  u32 streaming(u64 bytes) const;
  Outcome launch(mori_host::Kernel kernel, const void* args, u64 scratch_bytes);

  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<MemoryBlock> memory_;
  EpArgs args_{};
  HostGrid grid_;
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
};

}  // namespace mori

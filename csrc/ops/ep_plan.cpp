#include "ep_plan.hpp"

#include <cstring>
#include <stdexcept>

#include "../kernels/combine.hpp"
#include "../kernels/dispatch.hpp"

namespace mori {
namespace {

// Rows that bypass the cache save the reading of their destination lines, but are far away for who reads them
// next; worth it once a call moves more than the caches hold anyway. Measured in benchmarks/NOTES.md.
constexpr u64 streaming_threshold_bytes = 4ull << 20;
constexpr u32 smallest_part_bytes = 2048;

template <class Pointer>
Pointer* pointer(u64 address) {
  return reinterpret_cast<Pointer*>(address);
}

}  // namespace

EpPlan::EpPlan(std::shared_ptr<Communicator> communicator, std::shared_ptr<MemoryBlock> memory, const EpShape& shape,
               const PlanOptions& options)
    : communicator_(std::move(communicator)),
      memory_(std::move(memory)),
      grid_(mori_host::select_variant(options.isa.c_str()), options.threads, options.spin_ns) {
  args_.symmetric = communicator_->symmetric();
  args_.window = memory_->offset;
  args_.shape = shape;
  args_.layout = ep_layout(shape);
  args_.experts = Divider::by(shape.experts_per_rank);
  args_.timeout_ns = options.timeout_ns;
  const u64 experts = u64(shape.world_size) * shape.experts_per_rank;
  if (experts >= 1ull << 24 || experts * shape.experts_per_rank >= 1ull << 40) {
    throw std::invalid_argument(std::to_string(experts) + " experts are too many: at most 16777215 in all, and their " +
                                "number times experts_per_rank below 2^40");
  }
  if (memory_->bytes < args_.layout.total_bytes) {
    throw std::invalid_argument("the window has " + std::to_string(memory_->bytes) + " bytes, the layout needs " +
                                std::to_string(args_.layout.total_bytes));
  }
}

void EpPlan::prepare() {
  for (const RegionId id : {RegionId::control, RegionId::received_count, RegionId::stats}) {
    std::memset(args_.own<void>(id), 0, args_.layout.size(id));
  }
}

Outcome EpPlan::dispatch(const DispatchCall& call) {
  DispatchArgs args{};
  args.ep = args_;
  args.input = pointer<const u8>(call.input);
  args.weights = pointer<const float>(call.weights);
  args.scales = pointer<const u8>(call.scales);
  args.indices = pointer<const i32>(call.indices);
  args.tokens = call.tokens;
  args.row_bytes = call.row_bytes;
  args.scale_bytes = call.scale_bytes;
  args.dtype = call.dtype;
  args.parts = parts_of(call.tokens, call.row_bytes);
  args.streaming = streaming(u64(call.tokens) * call.row_bytes);
  return launch(mori_host::Kernel::dispatch, &args, DispatchScratch::bytes(args_.shape.world_size, 1));
}

Outcome EpPlan::combine(const CombineCall& call) {
  CombineArgs args{};
  args.ep = args_;
  args.input = pointer<const u8>(call.input);
  args.weights = pointer<const float>(call.weights);
  args.input_rows = call.input_rows;
  args.weight_rows = call.weight_rows;
  args.tokens = call.tokens;
  args.row_bytes = call.row_bytes;
  args.dtype = call.dtype;
  args.arithmetic = call.arithmetic;
  args.parts = parts_of(call.tokens, call.row_bytes);
  args.stagers = grid_.threads();
  args.streaming = streaming(u64(state()->last.received) * call.row_bytes);
  return launch(mori_host::Kernel::combine, &args, CombineScratch::bytes(args_.shape.world_size, args_.shape.topk, 1));
}

Outcome EpPlan::launch(mori_host::Kernel kernel, const void* args, u64 scratch_bytes) {
  if (busy_.test_and_set(std::memory_order_acquire)) return Outcome::busy;
  Outcome outcome = Outcome::aborted;
  if (!communicator_->fault()) {
    const u64 call = state()->last.call + 1;
    grid_.run(kernel, args, scratch_bytes);
    if (!communicator_->fault()) outcome = state()->fault.call == call ? Outcome::call_fault : Outcome::done;
  }
  busy_.clear(std::memory_order_release);
  return outcome;
}

// Threads without a token of their own share the row of another's.
u32 EpPlan::parts_of(u32 tokens, u32 row_bytes) const {
  if (tokens == 0 || tokens >= grid_.threads()) return 1;
  const u32 most = larger<u32>(1, row_bytes / smallest_part_bytes);
  return smaller<u32>(most, u32(divide_up(grid_.threads(), tokens)));
}

u32 EpPlan::streaming(u64 bytes) const { return bytes > streaming_threshold_bytes ? 1 : 0; }

void EpPlan::clear_stats() { std::memset(stats(), 0, args_.layout.size(RegionId::stats)); }

void EpPlan::set_call_number(u64 call) {
  const ControlWords words(args_.shape.world_size);
  u64* const begin = args_.word(args_.symmetric.rank, ControlWords::first);
  u64* const headers = args_.word(args_.symmetric.rank, words.header(0, 0));
  u64* const flags = args_.word(args_.symmetric.rank, words.blocks(0, 0));
  u64* const end = args_.word(args_.symmetric.rank, words.received(0));
  for (u64* word = begin; word < end; ++word) {
    const bool is_header = word >= headers && word < flags;
    *word = is_header ? HeaderWord::encode(call, {0, 0, CallKind::dispatch, 0}) : CountWord::encode(call, 0);
  }
  state()->last.call = call;
}

void EpPlan::set_test_delays(u32 seed, u32 longest_us) {
  args_.test_delay_seed = seed;
  args_.test_delay_us = longest_us;
}

}  // namespace mori

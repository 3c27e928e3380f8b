#include "ep_plan.hpp"

#include <cstddef>
#include <stdexcept>

namespace mori {
namespace {

constexpr u32 tokens_if_unknown = 64;  // a rank without tokens of its own may still have many rows to stage

template <class Pointer>
Pointer* pointer(u64 address) {
  return reinterpret_cast<Pointer*>(address);
}

class BusyFlag {
 public:
  explicit BusyFlag(std::atomic_flag& flag) : flag_(flag), taken_(!flag.test_and_set(std::memory_order_acquire)) {}
  ~BusyFlag() {
    if (taken_) flag_.clear(std::memory_order_release);
  }
  BusyFlag(const BusyFlag&) = delete;
  BusyFlag& operator=(const BusyFlag&) = delete;
  bool taken() const { return taken_; }

 private:
  std::atomic_flag& flag_;
  bool taken_;
};

}  // namespace

EpPlan::EpPlan(std::shared_ptr<Communicator> communicator, std::shared_ptr<MemoryBlock> memory, const EpShape& shape,
               std::shared_ptr<Launcher> launcher, u64 timeout_ns)
    : communicator_(std::move(communicator)), memory_(std::move(memory)), launcher_(std::move(launcher)) {
  args_.symmetric = communicator_->symmetric();
  args_.window = memory_->offset;
  args_.shape = shape;
  args_.layout = ep_layout(shape);
  args_.experts = Divider::by(shape.experts_per_rank);
  args_.twin = communicator_->twin();
  args_.timeout_ns = timeout_ns;
  // Regions that a call writes are neighbours in the layout.
  receive_ = span(RegionId::dispatch_rows, RegionId::received_count);
  results_ = span(RegionId::combine_rows, RegionId::combine_weights);
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
    memory_->memory->zero(offset(id), args_.layout.size(id));
  }
  synchronize();
}

Routing EpPlan::routing(const CallExtras& extras) const {
  const u64 summary = ControlWords(args_.shape.world_size).summary();
  Routing own{args_.own<u32>(RegionId::sender_map), args_.own<u32>(RegionId::received_count),
              args_.own<RoutingSummary>(RegionId::control, summary)};
  if (extras.sender_map != 0) own.sender_map = pointer<u32>(extras.sender_map);
  if (extras.received_count != 0) own.received_count = pointer<u32>(extras.received_count);
  if (extras.summary != 0) own.summary = pointer<RoutingSummary>(extras.summary);
  return own;
}

EpPlan::Span EpPlan::span(RegionId first, RegionId last) const {
  const u64 end = args_.layout.of(last) + args_.layout.size(last);
  return {u64(args_.own<u8>(first)), u64(args_.own<u8>(RegionId(0))) + end};
}

Outcome EpPlan::dispatch(const DispatchCall& call, const CallExtras& extras, const LaunchHints& hints) {
  const u64 tokens = call.tokens, small = tokens * args_.shape.topk * 4;
  const u64 arguments[4][2] = {{call.input, tokens * call.row_bytes},
                               {call.weights, call.weights != 0 ? small : 0},
                               {call.scales, tokens * call.scale_bytes},
                               {call.indices, small}};
  for (int i = 0; i < 4; ++i) {
    if (receive_.holds(arguments[i][0], arguments[i][1])) return Outcome(int(Outcome::overlap) + i);
  }
  const Grid grid = launcher_->grid(call.tokens, call.row_bytes, hints.block_num, hints.warps);
  DispatchArgs args{};
  args.ep = args_;
  args.routing = routing(extras);
  args.packed = {pointer<u8>(extras.packed_rows), pointer<u32>(extras.packed_sources)};
  args.input = pointer<const u8>(call.input);
  args.weights = pointer<const float>(call.weights);
  args.scales = pointer<const u8>(call.scales);
  args.indices = pointer<const i32>(call.indices);
  args.tokens = call.tokens;
  args.row_bytes = call.row_bytes;
  args.scale_bytes = call.scale_bytes;
  args.dtype = call.dtype;
  args.staged = extras.split || i64(call.tokens) <= staged_tokens_ ? 1 : 0;
  args.parts = grid.parts;
  args.streaming = launcher_->streams(u64(call.tokens) * call.row_bytes) ? 1 : 0;
  args.halves = extras.split ? half_send : whole_call;
  const Outcome outcome = launch(call.kernel, &args, grid, hints.stream);
  if (extras.split && outcome != Outcome::busy && outcome != Outcome::aborted) sent_ = {call.kernel, grid, args, {}};
  return outcome == Outcome::enqueued && launcher_->capturing(hints.stream) ? Outcome::captured : outcome;
}

Outcome EpPlan::combine(const CombineCall& call, const CallExtras& extras, const LaunchHints& hints) {
  if (results_.holds(call.input, u64(call.input_rows) * call.row_bytes)) return Outcome::overlap;
  if (results_.holds(call.weights, u64(call.weight_rows) * args_.shape.topk * 4)) {
    return Outcome(int(Outcome::overlap) + 1);
  }
  const bool stages_only = call.tokens == 0 && (call.input != 0 || extras.packed_rows != 0);
  const Grid grid =
      launcher_->grid(stages_only ? tokens_if_unknown : call.tokens, call.row_bytes, hints.block_num, hints.warps);
  CombineArgs args{};
  args.ep = args_;
  args.routing = routing(extras);
  args.packed = {pointer<u8>(extras.packed_rows), nullptr};
  args.input = pointer<const u8>(call.input);
  args.weights = pointer<const float>(call.weights);
  args.input_rows = call.input_rows;
  args.weight_rows = call.weight_rows;
  args.tokens = call.tokens;
  args.row_bytes = call.row_bytes;
  args.dtype = call.dtype;
  args.parts = grid.parts;
  args.stagers = grid.stagers;
  args.halves = extras.split ? half_send : whole_call;
  if (launcher_->synchronous()) {
    args.streaming = launcher_->streams(u64(state(hints.stream).last.received) * call.row_bytes) ? 1 : 0;
  }
  const Outcome outcome = launch(call.kernel, &args, grid, hints.stream);
  if (extras.split && outcome != Outcome::busy && outcome != Outcome::aborted) sent_ = {call.kernel, grid, {}, args};
  return outcome;
}

Outcome EpPlan::receive(u64 stream) {
  sent_.dispatch.halves = sent_.combine.halves = half_receive;
  const bool dispatches = sent_.kernel == KernelId::dispatch;
  return launch(sent_.kernel, dispatches ? static_cast<const void*>(&sent_.dispatch) : &sent_.combine, sent_.grid,
                stream);
}

Outcome EpPlan::convert(const ConvertCall& call, const LaunchHints& hints) {
  const Grid grid = launcher_->grid(args_.shape.max_recv_tokens, call.row_bytes, hints.block_num, hints.warps);
  ConvertArgs args{};
  args.ep = args_;
  args.packed = {pointer<u8>(call.packed_rows), pointer<u32>(call.packed_sources)};
  args.received = {pointer<const u8>(call.rows), pointer<const i32>(call.indices), 0, call.row_bytes, grid.parts};
  return launch(call.kernel, &args, grid, hints.stream);
}

Outcome EpPlan::launch(KernelId kernel, const void* args, const Grid& grid, u64 stream) {
  const BusyFlag busy(busy_);
  if (!busy.taken()) return Outcome::busy;
  if (communicator_->fault()) return Outcome::aborted;
  const u64 scratch = scratch_bytes(kernel, args_.shape, grid.warps);
  if (!launcher_->synchronous()) {
    launcher_->run(kernel, args, grid, scratch, stream);
    return Outcome::enqueued;
  }
  const u64 call = state(stream).last.call + 1;
  launcher_->run(kernel, args, grid, scratch, stream);
  if (communicator_->fault()) return Outcome::aborted;
  return state(stream).fault.call == call ? Outcome::call_fault : Outcome::done;
}

OpState EpPlan::state(u64 stream) const {
  OpState found;
  memory_->memory->read(&found, offset(RegionId::control), sizeof found, stream);
  return found;
}

std::vector<u64> EpPlan::stats(u64 stream) const {
  std::vector<u64> found(args_.layout.size(RegionId::stats) / sizeof(u64));
  memory_->memory->read(found.data(), offset(RegionId::stats), found.size() * sizeof(u64), stream);
  return found;
}

void EpPlan::clear_stats(u64 stream) {
  memory_->memory->zero(offset(RegionId::stats), args_.layout.size(RegionId::stats), stream);
}

void EpPlan::set_call_number(u64 call) {
  const ControlWords words(args_.shape.world_size);
  std::vector<u64> values;
  for (u64 at = ControlWords::first; at < words.end(); at += sizeof(u64)) {
    const bool is_header = at >= words.header(0, 0) && at < words.blocks(0, 0);
    values.push_back(is_header ? HeaderWord::encode(call, {0, 0, CallKind::dispatch, 0}) : CountWord::encode(call, 0));
  }
  const u64 control = offset(RegionId::control);
  synchronize();
  memory_->memory->write(control + ControlWords::first, values.data(), values.size() * sizeof(u64));
  memory_->memory->write(control + offsetof(OpState, last) + offsetof(LastCall, call), &call, sizeof call);
}

void EpPlan::set_test_delays(u32 seed, u32 longest_us) {
  args_.test_delay_seed = seed;
  args_.test_delay_us = longest_us;
}

}  // namespace mori

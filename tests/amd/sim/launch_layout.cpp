// What the host side of a launch needs from the C++ headers, for a test that has no GPU driver to launch through:
// where the fields of the launch structs are, and the few values that the core computes.
#include <cstddef>

#include "device/target_host.hpp"
#include "kernels/combine.hpp"
#include "kernels/dispatch.hpp"

using namespace mori;

struct Field {
  const char* launch;
  const char* name;
  u64 offset;
  u64 bytes;
};

#define FIELD(launch, name) {#launch, #name, offsetof(launch, name), sizeof(launch::name)}
#define NESTED(launch, outer, type, name) \
  {#launch, #outer "." #name, offsetof(launch, outer) + offsetof(type, name), sizeof(type::name)}
#define IN_EP(launch, type, member, name)                                                                    \
  {#launch, "ep." #member "." #name, offsetof(launch, ep) + offsetof(EpArgs, member) + offsetof(type, name), \
   sizeof(type::name)}
#define SHAPE(launch)                                                                                      \
  IN_EP(launch, EpShape, shape, world_size), IN_EP(launch, EpShape, shape, rank),                          \
      IN_EP(launch, EpShape, shape, max_tokens), IN_EP(launch, EpShape, shape, hidden_dim),                \
      IN_EP(launch, EpShape, shape, max_element_bytes), IN_EP(launch, EpShape, shape, scale_dim),          \
      IN_EP(launch, EpShape, shape, scale_element_bytes), IN_EP(launch, EpShape, shape, experts_per_rank), \
      IN_EP(launch, EpShape, shape, topk), IN_EP(launch, EpShape, shape, max_recv_tokens),                 \
      IN_EP(launch, EpShape, shape, may_stage), IN_EP(launch, EpShape, shape, block_scales),               \
      IN_EP(launch, EpShape, shape, slot_stride), IN_EP(launch, EpShape, shape, source_stride)
#define COMMON(launch)                                                                                              \
  SHAPE(launch), IN_EP(launch, Symmetric, symmetric, base), IN_EP(launch, Symmetric, symmetric, stride),            \
      IN_EP(launch, Symmetric, symmetric, rank), IN_EP(launch, Symmetric, symmetric, world_size),                   \
      IN_EP(launch, EpLayout, layout, offset), IN_EP(launch, EpLayout, layout, bytes),                              \
      IN_EP(launch, EpLayout, layout, total_bytes), IN_EP(launch, Divider, experts, multiplier),                    \
      NESTED(launch, ep, EpArgs, window), NESTED(launch, ep, EpArgs, twin), NESTED(launch, ep, EpArgs, timeout_ns), \
      NESTED(launch, ep, EpArgs, profiler), NESTED(launch, ep, EpArgs, test_delay_us),                              \
      NESTED(launch, ep, EpArgs, test_delay_seed), NESTED(launch, routing, Routing, sender_map),                    \
      NESTED(launch, routing, Routing, received_count), NESTED(launch, routing, Routing, summary),                  \
      NESTED(launch, packed, Packed, rows), NESTED(launch, packed, Packed, sources), FIELD(launch, input),          \
      FIELD(launch, weights), FIELD(launch, tokens), FIELD(launch, row_bytes), FIELD(launch, dtype),                \
      FIELD(launch, parts), FIELD(launch, streaming), FIELD(launch, halves)

static const Field fields[] = {
    COMMON(DispatchArgs),           FIELD(DispatchArgs, scales),
    FIELD(DispatchArgs, indices),   FIELD(DispatchArgs, scale_bytes),
    FIELD(DispatchArgs, staged),    COMMON(CombineArgs),
    FIELD(CombineArgs, input_rows), FIELD(CombineArgs, weight_rows),
    FIELD(CombineArgs, stagers),
};

extern "C" {
const Field* launch_fields() { return fields; }
u64 launch_field_count() { return sizeof fields / sizeof fields[0]; }
u64 launch_bytes(bool combines) { return combines ? sizeof(CombineArgs) : sizeof(DispatchArgs); }

u64 division_by(u32 divisor) { return Divider::by(divisor).multiplier; }
u64 summary_offset(u32 world) { return ControlWords(world).summary(); }
u64 live_offset() { return offsetof(CommControl, live); }
u64 control_bytes() { return comm_control_bytes; }
u64 lds_bytes(u32 world, u32 topk, u32 warps, bool combines) {
  return combines ? CombineScratch::bytes(world, topk, warps) : DispatchScratch::bytes(world, warps);
}
}

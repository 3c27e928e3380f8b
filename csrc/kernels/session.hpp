// What every EP kernel does first and last: learn the call number, count blocks in and out, advance the counters.
#pragma once

#include "../device/wait.hpp"
#include "../layout/launch.hpp"

namespace mori {
inline namespace MORI_VARIANT {

// Points of a kernel at which a test may delay a block, to shake the interleavings loose.
enum class DelayPoint : u32 {
  entered = 1,
  counted = 2,
  announced = 3,
  copied = 4,
  flagged = 5,
  staged = 6,
  folded = 7
};

// Head of a block's scratch memory; the arrays of each kernel follow it.
struct BlockFlags {
  u32 is_first;  // this block took ticket 0: it speaks to the peers
  u32 failed;    // some thread's wait ended by an abort
  u32 chunk;     // what thread 0 drew for the block: a staging chunk, a count
  u32 unused;
};

template <class T>
class Session {
 public:
  MORI_DEVICE Session(T& target, const EpArgs& args)
      : target(target),
        ep(args),
        state(args.own<OpState>(RegionId::control)),
        comm(args.symmetric.control(args.symmetric.rank)),
        words(args.shape.world_size),
        flags(target.template scratch<BlockFlags>()),
        // Written by the last block of the previous call, an earlier kernel of this stream: read plainly.
        call(state->call + 1),
        parity(u32(call & 1)),
        wait{args.symmetric, args.twin, args.timeout_ns, call} {}

  MORI_DEVICE u32 rank() const { return ep.symmetric.rank; }
  MORI_DEVICE u32 world() const { return ep.symmetric.world_size; }
  MORI_DEVICE bool live(u32 peer) const { return is_live<T>(comm, peer); }

  // The first block to start, whichever that is, sends what peers wait for: no word depends on a block that may
  // not be resident. The atomic is issued here and its result used only after the counting, which hides it.
  MORI_DEVICE void enter() {
    if (target.thread() == 0) {
      flags->is_first = T::add_device(&state->ticket, 1) == 0;
      flags->failed = 0;
    }
    target.sync_block();
    delay(DelayPoint::entered);
  }

  // Counts this block into `counter` and returns the new count in all threads. Every storing wave has released its
  // stores before the barrier and thread 0 releases the block's before it counts; whoever finds the count complete
  // acquires, so that what it sends then comes after every block's stores.
  MORI_DEVICE u32 count_in(u32* counter) {
    T::release_wave();
    target.sync_block();
    if (target.thread() == 0) {
      T::release_system();
      flags->chunk = T::add_device(counter, 1) + 1;
      T::acquire_system();
    }
    target.sync_block();
    return flags->chunk;
  }

  // By one thread of the last block, when no other block of this call runs any more.
  MORI_DEVICE void close_call(CallKind kind) {
    state->ticket = 0;
    state->arrived = 0;
    state->stage_ticket = 0;
    state->staged = 0;
    state->last_kind = kind;
    state->call = call;
  }

  // True in all threads if no thread of the block saw its wait fail.
  MORI_DEVICE bool agree(bool succeeded) {
    if (!succeeded) flags->failed = 1;
    target.sync_block();
    return flags->failed == 0;
  }

  MORI_DEVICE void send_word(u32 peer, u64 control_offset, u64 value) {
    T::store_system(ep.word(peer, control_offset), value);
    T::notify(ep.symmetric.control(peer));
  }

  MORI_DEVICE void delay(DelayPoint point) {
    if (ep.test_delay_us == 0) return;
    u32 hash = ep.test_delay_seed * 2654435761u ^ u32(call) * 2246822519u ^ rank() * 3266489917u;
    hash ^= target.block() * 668265263u ^ u32(point) * 374761393u;
    hash = (hash ^ hash >> 15) * 2246822519u;
    hash ^= hash >> 13;
    if (hash % 4 == 0) T::pause_for_test(1000ull * (hash / 4 % ep.test_delay_us));
  }

  T& target;
  const EpArgs& ep;
  OpState* state;
  CommControl* comm;
  ControlWords words;
  BlockFlags* flags;
  u64 call;
  u32 parity;
  WaitContext wait;
};

// The part of the work items [0, items) that one block does: a contiguous run, so that a row's source rows and
// its neighbours' stay together.
struct BlockShare {
  u64 begin, end;
  MORI_DEVICE BlockShare(u64 items, u32 block, u32 blocks)
      : begin(items * block / blocks), end(items * (block + 1) / blocks) {}
};

// Bytes of a row that one of `parts` work items handles; starts stay 64-byte aligned inside the row.
struct RowPart {
  u64 begin, end;
  MORI_DEVICE RowPart(u32 row_bytes, u32 part, u32 parts) {
    const u64 size = align_up(divide_up(row_bytes, parts), 64);
    begin = smaller<u64>(part * size, row_bytes);
    end = smaller<u64>(begin + size, row_bytes);
  }
};

}  // namespace MORI_VARIANT
}  // namespace mori

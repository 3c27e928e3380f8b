// What every EP kernel does first and last: learn the call number, count blocks in and out, advance the counters.
#pragma once

#include "../device/wait.hpp"
#include "../layout/launch.hpp"

namespace mori {
inline namespace MORI_VARIANT {

// Points that every block of a kernel passes; `pass` says what for.
enum class Point : u32 { entered, counted, announced, heard, copied, arrived, staged, folded, count };

// Head of a block's scratch memory; the arrays of each kernel follow it.
struct BlockFlags {
  u32 is_first;  // this block took ticket 0: it speaks to the peers
  u32 failed;    // some thread's wait ended by an abort
  u32 drawn;     // what thread 0 drew for the block: a staging chunk, a count
  u32 unused;
};

// Sleeps at every fourth place or so, by the hash of where it is.
template <class T>
MORI_RARE void delay_for_test(u32 longest_us, u32 hash) {
  hash = (hash ^ hash >> 15) * 2246822519u;
  hash ^= hash >> 13;
  if (hash % 4 == 0) T::pause_for_test(1000ull * (hash / 4 % longest_us));
}

template <class T>
class Session {
 public:
  // The state was written by the last block of the previous call, an earlier kernel of this stream: read plainly, once,
  // because this call's last block may rewrite it while other blocks still work.
  MORI_DEVICE Session(T& target, const EpArgs& args)
      : target(target),
        ep(args),
        state(args.own<OpState>(RegionId::control)),
        comm(args.symmetric.control(args.symmetric.rank)),
        words(args.shape.world_size),
        flags(target.template scratch<BlockFlags>()),
        before(state->last),
        live_low(T::load_system(&comm->live[0])),
        aborted(is_aborted<T>(comm)),
        call(before.call + 1),
        parity(u32(call & 1)),
        wait{args.symmetric, args.twin, args.timeout_ns, call} {
    if (target.thread() == 0) {
      flags->failed = 0;
      ticket = T::add_device(&state->ticket, 1);
    }
  }

  MORI_DEVICE u32 rank() const { return ep.symmetric.rank; }
  MORI_DEVICE u32 world() const { return ep.symmetric.world_size; }
  // Bit i: rank first + i takes part. `first` is a multiple of the mask's width.
  MORI_DEVICE typename T::Mask live_from(u32 first) const {
    const u64 word = first < 64 ? live_low : T::load_system(&comm->live[first / 64]);
    return typename T::Mask(word >> (first % 64));
  }
  MORI_DEVICE bool live(u32 peer) const {
    const u64 word = peer < 64 ? live_low : T::load_system(&comm->live[peer / 64]);
    return (word >> (peer % 64) & 1) != 0;
  }

  // The first block to start, whichever that is, sends what peers wait for: no word depends on a block that may
  // not be resident. The ticket was drawn at the very start; its latency is spent on other work until here.
  MORI_DEVICE bool is_first() {
    if (target.thread() == 0) flags->is_first = ticket == 0;
    target.sync_block();
    return flags->is_first != 0;
  }

  // Counts this block into `counter` and returns the new count in all threads. Every storing wave has released its
  // stores before the barrier, and thread 0 releases the block's before it counts. If the count is `complete`, thread 0
  // fences once more: acquiring the other blocks' stores and releasing them for what `send` stores.
  template <class Send>
  MORI_DEVICE u32 count_in(u32* counter, u32 complete, Send send) {
    T::release_wave();
    target.sync_block();
    if (target.thread() == 0) {
      T::release_system();
      flags->drawn = T::add_device(counter, 1) + 1;
      if (flags->drawn == complete) {
        T::release_system();
        send();
      }
    }
    target.sync_block();
    return flags->drawn;
  }

  // By one thread, when every block of this call has read the state and drawn its tickets for the last time.
  MORI_DEVICE void close_call(CallKind kind) {
    state->ticket = 0;
    state->arrived = 0;
    state->stage_ticket = 0;
    state->staged = 0;
    state->last.kind = kind;
    state->last.call = call;
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

  // Marks the passing of a point: for traces, and for tests that delay blocks at random.
  MORI_DEVICE void pass(Point point) {
    if (ep.profiler != nullptr && target.thread() == 0) {
      ep.profiler[target.block() * u32(Point::count) + u32(point)] = T::ticks();
    }
    if (ep.test_delay_us != 0) {
      delay_for_test<T>(ep.test_delay_us, ep.test_delay_seed ^ u32(call) * 2246822519u ^ rank() * 3266489917u ^
                                              target.block() * 668265263u ^ u32(point) * 374761393u);
    }
  }

  T& target;
  const EpArgs& ep;
  OpState* state;
  CommControl* comm;
  ControlWords words;
  BlockFlags* flags;
  LastCall before;  // what the previous call left behind
  u64 live_low;     // live ranks below 64
  bool aborted;     // an earlier call failed for good: send nothing, or peers might take a word for its meaning
  u64 call;
  u32 parity;
  u32 ticket = 0;  // thread 0's
  WaitContext wait;
};

// The part of the work items [0, items) that one block does: a contiguous run, as even as it gets.
struct BlockShare {
  u32 begin, end;
  MORI_DEVICE BlockShare(u32 items, u32 block, u32 blocks) {
    const u32 each = items / blocks, left = items % blocks;
    begin = block * each + smaller(block, left);
    end = begin + each + (block < left ? 1 : 0);
  }
};

// Bytes of a row that one of `parts` work items handles; starts stay 64-byte aligned inside the row.
struct RowPart {
  u32 begin, end;
  MORI_DEVICE RowPart(u32 row_bytes, u32 part, u32 parts) {
    const u32 size = parts == 1 ? row_bytes : (row_bytes / parts + 64) & ~63u;
    begin = smaller(part * size, row_bytes);
    end = smaller(begin + size, row_bytes);
  }
};

}  // namespace MORI_VARIANT
}  // namespace mori

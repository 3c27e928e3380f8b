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
  u32 ticket;   // how many blocks of this launch started before this one
  u32 failed;   // some thread's wait ended by an abort
  u32 suspect;  // some peer's header differs from this rank's
  u32 drawn;    // what thread 0 drew for the block: a staging chunk, a count
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
  // `releases`: thread 0 makes this rank's earlier writes visible to the system first. The fence takes as long as
  // several loads, which the other warps issue meanwhile.
  MORI_DEVICE Session(T& target, const EpArgs& args, bool releases)
      : target(target),
        ep(args),
        state(args.own<OpState>(RegionId::control)),
        comm(args.symmetric.control(args.symmetric.rank)),
        words(args.world()),
        flags(target.template scratch<BlockFlags>()),
        before(state->last),
        live_low(T::load_system(&comm->live[0])),
        aborted(is_aborted<T>(comm)),
        call(before.call + 1),
        parity(u32(call & 1)) {
    if (target.thread() == 0) {
      flags->failed = flags->suspect = 0;
      ticket = T::add_device(&state->ticket, 1);
      if (releases) T::release_system();
    }
    target.sync_block();  // before any thread raises a flag
  }

  MORI_DEVICE u32 rank() const { return ep.symmetric.rank; }
  MORI_DEVICE u32 world() const { return ep.world(); }
  MORI_DEVICE WaitContext wait() const { return {ep.symmetric, ep.twin, ep.timeout_ns, call}; }

  // Bit i: rank first + i takes part. `first` is a multiple of the mask's width.
  MORI_DEVICE typename T::Mask live_from(u32 first) const {
    const u64 word = first < 64 ? live_low : T::load_system(&comm->live[first / 64]);
    return typename T::Mask(word >> (first % 64));
  }
  MORI_DEVICE bool live(u32 peer) const {
    const u64 word = peer < 64 ? live_low : T::load_system(&comm->live[peer / 64]);
    return (word >> (peer % 64) & 1) != 0;
  }

  // How many blocks started before this one. The first, whichever that is, sends what peers wait for: no word depends
  // on a block that may not be resident. Drawn at the very start; the latency is spent on other work until here.
  MORI_DEVICE u32 draw() {
    if (target.thread() == 0) flags->ticket = ticket;
    target.sync_block();
    return flags->ticket;
  }

  // The next chunk of work that is claimed, not tied to block numbers; by all threads of a block. Drawn ahead, the
  // claim's latency passes behind other work; whoever draws takes what it drew.
  MORI_DEVICE void draw_ahead(u32* counter) {
    if (target.thread() == 0) ahead = T::add_device(counter, 1);
  }
  MORI_DEVICE u32 drawn() {
    target.sync_block();
    if (target.thread() == 0) flags->drawn = ahead;
    target.sync_block();
    return flags->drawn;
  }
  MORI_DEVICE u32 claim() {
    draw_ahead(&state->stage_ticket);
    return drawn();
  }

  // By one thread, when every block of this launch has read the state and drawn its tickets for the last time.
  MORI_DEVICE void close_launch() {
    state->ticket = 0;
    state->arrived = 0;
    state->stage_ticket = 0;
    state->count_ticket = 0;
  }
  MORI_DEVICE void close_call(CallKind kind) {
    close_launch();
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

  // The same word to every live peer, this rank included; by one thread.
  MORI_DEVICE void tell_all(u64 control_offset, u64 value) {
    MORI_ROLLED
    for (u32 peer = 0; peer < world(); ++peer) {
      if (live(peer)) send_word(peer, control_offset, value);
    }
  }

  // Ends a launch that sends only: the call goes on in another one.
  MORI_DEVICE void leave() {
    if (target.thread() == 0 && T::add_device(&state->arrived, 1) == target.blocks() - 1) close_launch();
  }

  // Marks the passing of a point: for traces, and for tests that delay blocks at random.
  MORI_DEVICE void pass(Point point) {
    if (MORI_TRACED == 0) return;
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
  u32 ahead = 0;   // thread 0's
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
    const u32 size = parts == 1 ? row_bytes : ((row_bytes + parts - 1) / parts + 63) & ~63u;
    begin = smaller(part * size, row_bytes);
    end = smaller(begin + size, row_bytes);
  }
};

}  // namespace MORI_VARIANT
}  // namespace mori

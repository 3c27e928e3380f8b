// Steps 1 and 2 of a dispatch: where tokens go, how many rows that makes, and the words that tell the peers.
#pragma once

#include "dispatch_scratch.hpp"
#include "rendezvous.hpp"

namespace mori {
inline namespace MORI_VARIANT {

// plain: by expert ids. replay: by the sender map of an earlier dispatch. packed: by ids, and the rows received are put
// into the order of their experts as well.
enum class DispatchKind { plain, replay, packed };

// A dispatch as far as its own rank alone is concerned.
template <class T, DispatchKind kind>
class CountedDispatch {
 protected:
  using Mask = typename T::Mask;
  static constexpr u32 span = 8 * sizeof(Mask);  // destinations per mask

  // A token is `parts` work items for its row and one for its small data, which a warp of its own takes along.
  MORI_DEVICE CountedDispatch(T& target, const DispatchArgs& args)
      : t(target),
        a(args),
        s(target, args.ep, false),
        scratch(target.template scratch<void>(), args.ep.world(), target.warps()),
        items(args.parts + 1),
        share(args.tokens * items, target.block(), target.blocks()),
        experts(args.ep.world() * args.ep.experts_per_rank()) {}

  MORI_DEVICE static constexpr bool replays() { return kind == DispatchKind::replay; }
  MORI_DEVICE u32 first_token() const { return share.begin / items; }
  MORI_DEVICE u32 last_token() const { return (share.end + items - 1) / items; }

  MORI_DEVICE void clear_counters() {
    MORI_ROLLED
    for (u32 d = t.thread(); d < s.world(); d += t.threads()) {
      scratch.total[d] = scratch.before[d] = scratch.next[d] = 0;
      scratch.base[d] = scratch.received[d] = scratch.from[d] = scratch.blocks[d] = 0;
    }
    t.sync_block();
  }

  // Fills scratch.before, and has every peer told what this rank sends. False if the call cannot go on.
  MORI_DEVICE bool count(const Header& header) {
    if (!counts_alone()) s.draw_ahead(&s.state->count_ticket);
    clear_counters();
    s.pass(Point::entered);
    return counts_alone() ? count_alone(header) : count_chunks(header);
  }

  // The rank that a route leads to; for one that leads nowhere, a number no mask word reaches.
  MORI_DEVICE u32 rank_of(i32 route) const {
    if (replays()) return u32(route) < a.ep.null_index() ? u32(route) / a.ep.slot_stride() : ~0u;
    return u32(route) < experts ? a.ep.owner(u32(route)) : ~0u;
  }

  // Bit d: some expert of the token lives on live rank first + d. Ids outside the experts name nobody.
  MORI_DEVICE Mask destinations(u32 token, u32 first) const {
    const u32 topk = a.ep.topk();
    const i32* ids = given() + u64(token) * topk;
    Mask mask = 0;
    MORI_UNROLL_TWICE
    for (u32 k = 0; k < topk; k += 4) {
      i32 four[4];
      T::load_indices(four, ids + k, topk - k);
      MORI_UNROLL
      for (u32 i = 0; i < 4; ++i) {
        const u32 d = rank_of(four[i]) - first;
        if (d < span) mask |= Mask(1) << d;
      }
    }
    return mask & s.live_from(first);
  }

 private:
  // What says where each token goes: its ids, or, in a replay, what became of them.
  MORI_DEVICE const i32* given() const {
    return replays() ? reinterpret_cast<const i32*>(a.routing.sender_map) : a.indices;
  }

  // As many tokens as a block has threads are counted by every block, while the draw's answer is under way.
  MORI_DEVICE bool counts_alone() const { return a.tokens <= t.warps() * T::lanes; }
  MORI_DEVICE bool count_alone(const Header& header) {
    count_tokens(0, a.tokens, first_token());
    s.pass(Point::counted);
    if (s.draw() == 0 && !s.aborted) {
      announce_launch(header);
      MORI_ROLLED
      for (u32 d = t.thread(); d < s.world(); d += t.threads()) announce_count(d, scratch.total[d]);
    }
    return !s.aborted;
  }

  // Chunks are claimed, and no block waits before all are taken: none depends on a block that may not be resident.
  MORI_DEVICE bool count_chunks(const Header& header) {
    const u32 size = counted_chunk_tokens(a.tokens), chunks = (a.tokens + size - 1) / size;
    const u32 own_chunk = first_token() / size;
    count_tokens(own_chunk * size, first_token(), first_token());
    if (s.draw() == 0 && !s.aborted) announce_launch(header);
    MORI_ROLLED
    for (u32 chunk = s.drawn(); chunk < chunks; chunk = s.drawn()) {
      s.draw_ahead(&s.state->count_ticket);
      MORI_ROLLED
      for (u32 d = t.thread(); d < s.world(); d += t.threads()) scratch.total[d] = 0;
      t.sync_block();
      count_tokens(chunk * size, smaller(a.tokens, (chunk + 1) * size), 0);
      t.sync_block();
      MORI_ROLLED
      for (u32 d = t.thread(); d < s.world(); d += t.threads()) publish(chunk, chunks, d);
    }
    s.pass(Point::counted);
    return !s.aborted && add_counted(own_chunk);
  }

  // Words and sums carry their values: relaxed. Who adds the last chunk to a destination's sum knows the total.
  MORI_DEVICE void publish(u32 chunk, u32 chunks, u32 d) {
    const u32 rows = scratch.total[d];
    s.send_word(s.rank(), s.words.counted(chunk, d), CountWord::encode(s.call, rows));
    u32* sum = s.ep.template own<u32>(RegionId::control, s.words.sum(d));
    const u32 added = T::add_device(sum, CountedSum::encode(rows)) + CountedSum::encode(rows);
    if (CountedSum::chunks(added) != chunks) return;
    *sum = 0;  // nobody adds to it any more
    if (!s.aborted) announce_count(d, CountedSum::rows(added));
  }

  // The rows of all chunks before the own one. Those chunks were claimed by blocks that run.
  MORI_DEVICE bool add_counted(u32 chunks) {
    MORI_ROLLED
    for (u32 i = t.thread(); i < chunks * s.world(); i += t.threads()) {
      const u32 d = i % s.world();
      u64 word = 0;
      if (!await_tagged<Order::relaxed>(s, s.words.counted(i / s.world(), d), s.rank(), Phase::counts, word))
        return false;
      t.add_block(&scratch.before[d], CountWord::value(word));
    }
    return true;
  }

  // Rows of tokens [begin, end) to each rank, and of those among them that come before `split`. One warp looks at
  // `lanes` tokens at a time; lane i keeps the sums of destinations i, i + lanes, ...
  MORI_DEVICE void count_tokens(u32 begin, u32 end, u32 split) {
    constexpr u32 sums = span / T::lanes;
    MORI_ROLLED
    for (u32 first = 0; first < s.world(); first += span) {
      u32 total[sums] = {}, before[sums] = {};
      MORI_ROLLED
      for (u32 group = begin + t.warp() * T::lanes; group < end; group += t.warps() * T::lanes) {
        const u32 token = group + t.lane();
        const Mask mask = token < end ? destinations(token, first) : 0;
        const Mask earlier = split > group ? bits_below<Mask>(split - group) : 0;
        MORI_ROLLED
        for (u32 d = 0; d < smaller(span, s.world() - first); ++d) {
          const Mask chosen = t.ballot((mask >> d & 1) != 0);
          if (t.lane() != d % T::lanes) continue;
          total[d / T::lanes] += population(chosen);
          before[d / T::lanes] += population(chosen & earlier);
        }
      }
      MORI_UNROLL
      for (u32 sum = 0; sum < sums; ++sum) {
        const u32 d = first + sum * T::lanes + t.lane();
        if (d >= s.world()) continue;
        t.add_block(&scratch.total[d], total[sum]);
        t.add_block(&scratch.before[d], before[sum]);
      }
    }
  }

  // Count words, block count and header carry their own call number and no data hangs on them: relaxed stores, no
  // fence. As credit they say that this rank has ended its earlier calls; those are earlier kernels of this stream,
  // whose reads were complete before this kernel began.
  MORI_DEVICE void announce_count(u32 destination, u32 rows) {
    MORI_ROLLED
    for (u32 peer = 0; peer < s.world(); ++peer) {
      if (!s.live(peer)) continue;
      s.send_word(peer, s.words.count(s.parity, s.rank(), destination), CountWord::encode(s.call, rows));
    }
  }
  MORI_DEVICE void announce_launch(const Header& header) {
    MORI_ROLLED
    for (u32 peer = t.thread(); peer < s.world(); peer += t.threads()) {
      if (!s.live(peer)) continue;
      T::store_system(s.ep.word(peer, s.words.blocks(s.parity, s.rank())), CountWord::encode(s.call, t.blocks()));
      s.send_word(peer, s.words.header(s.parity, s.rank()), HeaderWord::encode(s.call, header));
    }
  }

 protected:
  T& t;
  const DispatchArgs& a;
  Session<T> s;
  DispatchScratch scratch;
  u32 items;  // work items per token
  BlockShare share;
  u32 experts;
};

}  // namespace MORI_VARIANT
}  // namespace mori

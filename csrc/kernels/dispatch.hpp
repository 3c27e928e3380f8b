// Dispatch, counts first:
//   1. this rank's rows to each rank are counted: few tokens by every block, many in chunks that running blocks claim;
//      every block learns how many rows precede its own share;
//   2. the first block to start, or who counted last, sends the whole row of counts to every peer, and a header;
//   3. every block waits for all counts of this call: they are the credit (each peer has left its earlier calls, so
//      nothing it may still read is overwritten), they fix every row's final slot, and they show an overflow early;
//   4. direct: rows go straight to their slots, ordered by (source rank, token). Staged: before step 3 and without any
//      wait, rows went to this rank's landing area at the destination; after step 3 the destination moves them;
//   5. every block tells every peer that its rows are there; the last one waits to be told by all blocks of all peers.
// Each source chooses its path for each call and says so in its header; a receiver takes any mix. A staged dispatch may
// be two launches, the first of which ends before step 3. A replay sends new rows the way an earlier dispatch noted.
#pragma once

#include "dispatch_count.hpp"
#include "pack.hpp"

namespace mori {
inline namespace MORI_VARIANT {

constexpr u32 move_chunk_rows = 8;  // landed rows that a block moves before it claims more

template <class T, DispatchKind kind = DispatchKind::plain>
class Dispatch : CountedDispatch<T, kind> {
  using Counted = CountedDispatch<T, kind>;
  using Counted::a, Counted::s, Counted::t, Counted::scratch, Counted::items, Counted::share, Counted::span;
  using Counted::first_token, Counted::last_token, Counted::destinations, Counted::rank_of, Counted::replays;
  using typename Counted::Mask;

 public:
  MORI_DEVICE Dispatch(T& target, const DispatchArgs& args)
      : Counted(target, args), words((args.ep.world() + span - 1) / span) {}

  MORI_DEVICE void run() {
    bool sound = !s.aborted;
    if (half(half_send)) {
      sound = Counted::count(header());
      s.pass(Point::announced);
      place_tile(first_token());
      if (staged() && s.agree(sound)) send_share<Pass::landing>();
    } else {
      Counted::clear_counters();
    }
    half(half_receive) ? receive(sound) : s.leave();
  }

 private:
  // Where a pass over the block's share puts rows and small data: into their slots, or into the landing areas.
  enum class Pass { direct, landing };

  MORI_DEVICE bool half(Half which) const { return !may_stage || (a.halves & which) != 0; }

  MORI_DEVICE void receive(bool sound) {
    const bool heard = s.agree(sound && await_peers());
    s.pass(Point::heard);
    CallFault fault{};
    if (heard) fault = find_fault();
    const bool delivers = heard && fault.kind == CallFaultKind::none;
    const bool goes_on = delivers && (packs() || some_landed());
    // Unless rows are to be moved on, the block needs the call's state no more: the arrival's latency passes behind the
    // copying.
    u32 arrived = 0;
    if (t.thread() == 0 && !goes_on) arrived = T::add_device(&s.state->arrived, 1);
    if (delivers) staged() ? place_map() : send_share<Pass::direct>();
    s.pass(Point::copied);
    if (!staged() && heard) flag_rows();
    if (goes_on && all_started()) packs() ? pack_received() : move_landed();
    if (t.thread() == 0 && goes_on) arrived = T::add_device(&s.state->arrived, 1);
    finish(arrived, heard, fault);
  }

  MORI_DEVICE static constexpr bool packs() { return kind == DispatchKind::packed; }
  MORI_DEVICE bool staged() const { return may_stage && !packs() && a.staged != 0; }
  MORI_DEVICE Header header() const {
    const u32 flags = (staged() ? u32(header_staged_path) : 0u) | (a.scale_bytes != 0 ? u32(header_scales) : 0u);
    return {a.row_bytes, a.dtype, CallKind::dispatch, flags | (packs() ? u32(header_packed) : 0u)};
  }

  // Nothing is read through these words, so no acquire. They are a credit for the stores of step 4: those depend
  // on the slots computed from the words' values and on the block barrier behind the polls, so no target may
  // perform them before the polls have returned.
  MORI_DEVICE bool await_peers() {
    MORI_ROLLED
    for (u32 i = t.thread(); i < s.world() * (s.world() + 2); i += t.threads()) {
      const u32 source = i % s.world(), column = i / s.world();
      if (!s.live(source)) continue;
      u64 word = 0;
      if (column == s.world()) {
        if (!await_header<Order::relaxed>(s, source, header(), Phase::counts, word)) return false;
        scratch.header[source] = word;
        continue;
      }
      const bool is_count = column < s.world();
      const u64 at = is_count ? s.words.count(s.parity, source, column) : s.words.blocks(s.parity, source);
      if (!await_tagged<Order::relaxed>(s, at, source, Phase::counts, word)) return false;
      const u32 value = CountWord::value(word);
      if (!is_count) {
        scratch.blocks[source] = value;
        continue;
      }
      t.add_block(&scratch.received[column], value);
      if (source == s.rank()) scratch.total[column] = value;  // as counted by another block, or launch
      if (source < s.rank()) t.add_block(&scratch.base[column], value);
      if (column == s.rank()) scratch.from[source] = value;
    }
    return true;
  }

  // From words that every rank has seen alike.
  MORI_DEVICE CallFault find_fault() {
    if (s.flags->suspect != 0) return first_mismatch<T>(scratch.header, s.comm, s.world(), s.call);
    CallFault fault{};
    MORI_ROLLED
    for (u32 d = 0; d < s.world(); ++d) {
      if (scratch.received[d] <= a.ep.max_recv_tokens() || fault.kind != CallFaultKind::none) continue;
      fault = {s.call, CallFaultKind::receive_overflow, d, a.ep.max_recv_tokens(), scratch.received[d]};
    }
    return fault;
  }

  template <Pass pass>
  MORI_DEVICE void send_share() {
    MORI_ROLLED
    for (u32 tile = first_token(); tile < last_token(); tile += dispatch_tile) {
      const u32 tokens = smaller(dispatch_tile, last_token() - tile);
      if (tile != first_token()) {
        place_tile(tile);
        t.sync_block();
      }
      const u32 begin = larger(share.begin, tile * items), end = smaller(share.end, (tile + tokens) * items);
      MORI_ROLLED
      for (u32 item = begin + t.warp(); item < end; item += t.warps()) do_item<pass>(tile, item / items, item % items);
      t.sync_block();
    }
    if (pass == Pass::landing) flag_rows();
  }

  // One warp numbers the tile's rows per destination, from those of the share's first token on. Of the first tile
  // before peers are waited for: by the last warp, which has no words to look for then.
  MORI_DEVICE void place_tile(u32 tile) {
    if (t.warp() != t.warps() - 1) return;
    const u32 tokens = smaller(dispatch_tile, last_token() - tile);
    MORI_ROLLED
    for (u32 group = 0; group < tokens; group += T::lanes) {
      const u32 i = group + t.lane();
      MORI_ROLLED
      for (u32 first = 0; first < s.world(); first += span) {
        const Mask mask = i < tokens ? destinations(tile + i, first) : 0;
        if (i < tokens) mask_of(i, first) = mask;
        MORI_ROLLED
        for (u32 d = first; d < smaller(first + span, s.world()); ++d) {
          const Mask chosen = t.ballot((mask >> (d - first) & 1) != 0);
          const u32 start = scratch.next[d];
          if (i < tokens) scratch.position[i * s.world() + d] = start + population(chosen & bits_below<Mask>(t.lane()));
          t.sync_warp();
          if (t.lane() == 0) scratch.next[d] = start + population(chosen);
          t.sync_warp();
        }
      }
    }
  }

  MORI_DEVICE Mask& mask_of(u32 i, u32 first) const {
    return reinterpret_cast<Mask*>(scratch.mask)[i * words + first / span];
  }
  // The row's number among all that this rank sends to d.
  MORI_DEVICE u32 row_at(u32 i, u32 d) const { return scratch.before[d] + scratch.position[i * s.world() + d]; }
  MORI_DEVICE u32 slot_at(u32 i, u32 d) const { return scratch.base[d] + row_at(i, d); }

  // Where a landing region's rows of one source begin. Two areas, by call parity: the destination has moved the rows of
  // the call before last before it sent its words of the last one, which this rank has seen.
  MORI_DEVICE u32 landing_slot(u32 source, u32 row) const {
    return (s.parity * s.world() + source) * a.ep.max_tokens() + row;
  }

  // One work item of one token: a part of its row, or its small data, to all its destinations.
  template <Pass pass>
  MORI_DEVICE void do_item(u32 tile, u32 token, u32 item) {
    const u32 i = token - tile;
    Slot* slots = scratch.slots + t.warp() * s.world();
    u32 count = 0;
    MORI_ROLLED
    for (u32 first = 0; first < s.world(); first += span) {
      const Mask mask = mask_of(i, first);
      MORI_ROLLED
      for (u32 bit = t.lane(); bit < smaller(span, s.world() - first); bit += T::lanes) {
        if ((mask >> bit & 1) == 0) continue;
        const u32 d = first + bit;
        const u32 slot = pass == Pass::landing ? landing_slot(s.rank(), row_at(i, d)) : slot_at(i, d);
        slots[count + population(mask & bits_below<Mask>(bit))] = {d, slot};
      }
      count += population(mask);
    }
    t.sync_warp();
    if (item == a.parts) {
      send_small_data<pass>(token, slots, count);
      if (!replays()) write_sender_map(i, token);
    } else {
      const RowPart part(a.row_bytes, item, a.parts);
      send_bytes(slots, count, in(pass, RegionId::dispatch_rows), a.row_bytes, a.input + u64(token) * a.row_bytes,
                 part);
    }
    t.sync_warp();
  }

  // The region that a pass writes instead of a dispatch region.
  MORI_SHARED_CODE static constexpr RegionId in(Pass pass, RegionId id) {
    const u32 distance = u32(RegionId::landing_rows) - u32(RegionId::dispatch_rows);
    return pass == Pass::landing ? RegionId(u32(id) + distance) : id;
  }

  // Part of one record to its slot in the same region at every destination.
  MORI_DEVICE void send_bytes(const Slot* slots, u32 count, RegionId region, u32 bytes, const u8* from, RowPart part) {
    RowTarget* targets = scratch.targets + t.warp() * s.world();
    MORI_ROLLED
    for (u32 index = t.lane(); index < count; index += T::lanes) {
      targets[index] = {s.ep.template at<u8>(slots[index].rank, region, u64(slots[index].slot) * bytes)};
    }
    t.sync_warp();
    t.fan_out(targets, count, from, part.begin, part.end, a.streaming != 0);
    t.sync_warp();
  }

  template <Pass pass>
  MORI_DEVICE void send_small_data(u32 token, const Slot* slots, u32 count) {
    const u32 topk = a.ep.topk();
    MORI_ROLLED
    for (u32 k = t.lane(); k < topk; k += T::lanes) {
      const i32 id = a.indices[u64(token) * topk + k];
      const float weight = a.weights != nullptr ? a.weights[u64(token) * topk + k] : 0.0f;
      MORI_ROLLED
      for (u32 index = 0; index < count; ++index) {
        const u64 at = (u64(slots[index].slot) * topk + k) * 4;
        *s.ep.template at<i32>(slots[index].rank, in(pass, RegionId::dispatch_indices), at) = id;
        *s.ep.template at<float>(slots[index].rank, in(pass, RegionId::dispatch_weights), at) = weight;
      }
    }
    MORI_ROLLED
    for (u32 index = t.lane(); index < count; index += T::lanes) {
      *s.ep.template at<u32>(slots[index].rank, in(pass, RegionId::dispatch_source), u64(slots[index].slot) * 4) =
          s.rank() * a.ep.source_stride() + token;
    }
    if (a.scale_bytes == 0) return;
    send_bytes(slots, count, in(pass, RegionId::dispatch_scales), a.scale_bytes, a.scales + u64(token) * a.scale_bytes,
               RowPart(a.scale_bytes, 0, 1));
  }

  // Before the counts of all ranks are known, slots are still numbers among this rank's own rows.
  MORI_DEVICE void write_sender_map(u32 i, u32 token) {
    const u32 topk = a.ep.topk();
    const i32* ids = a.indices + u64(token) * topk;
    u32* map = a.routing.sender_map + u64(token) * topk;
    OpStats* stats = s.ep.template own<OpStats>(RegionId::stats);
    MORI_ROLLED
    for (u32 k = t.lane(); k < topk; k += T::lanes) {
      const u32 d = rank_of(ids[k]);
      bool kept = d < s.world() && (mask_of(i, d / span * span) >> (d % span) & 1) != 0;
      MORI_ROLLED
      for (u32 lower = 0; lower < k && kept; ++lower) kept = rank_of(ids[lower]) != d;
      map[k] = kept ? d * a.ep.slot_stride() + slot_at(i, d) : a.ep.null_index();
      if (d == ~0u) T::count(ids[k] == -1 ? &stats->no_expert_ids : &stats->out_of_range_ids, 1);
    }
  }

  // Turns those numbers into slots: the entries that this block wrote, or would have written in a launch like this one.
  MORI_DEVICE void place_map() {
    if (replays()) return;
    const u32 topk = a.ep.topk(), end = share.end / items * topk;
    MORI_ROLLED
    for (u32 entry = first_token() * topk + t.thread(); entry < end; entry += t.threads()) {
      const u32 flat = a.routing.sender_map[entry];
      if (flat < a.ep.null_index()) a.routing.sender_map[entry] = flat + scratch.base[flat / a.ep.slot_stride()];
    }
  }

  // Rows words: one per block, stored by its thread 0 behind a block barrier and a release, so after all the block's
  // rows. Read by whoever moves landed rows, and by the last block of the peer's kernel; both acquire, the latter so
  // that later kernels read the rows plainly. A block that gave up sends none.
  MORI_DEVICE void flag_rows() {
    T::release_wave();
    t.sync_block();
    if (t.thread() != 0) return;
    T::release_system();
    s.tell_all(s.words.rows(s.parity, s.rank(), t.block()), FlagWord::encode(s.call));
  }

  // Waits for the rows words of one source: by all threads of a block, each for some of them.
  MORI_DEVICE bool await_rows(u32 source) {
    MORI_ROLLED
    for (u32 block = t.thread(); block < scratch.blocks[source]; block += t.threads()) {
      const u64 at = s.words.rows(s.parity, source, block);
      u64 word = 0;
      if (!await_tagged<Order::acquire>(s, at, source, Phase::rows, word)) return false;
    }
    return true;
  }

  MORI_DEVICE bool some_landed() const {
    bool some = false;
    MORI_ROLLED
    for (u32 source = 0; source < s.world() && may_stage; ++source) {
      some |= s.live(source) && HeaderWord::has(scratch.header[source], header_staged_path);
    }
    return some;
  }

  // What waits for peers' rows and then works on them is done in claimed chunks, by the blocks that find every block of
  // this launch started. Only those may wait: the words they wait for come from blocks that run, or from peers that owe
  // nothing to blocks of this rank which could not start. The last block to start always finds it so.
  MORI_DEVICE bool all_started() {
    t.sync_block();
    if (t.thread() == 0) s.flags->drawn = T::add_device(&s.state->ticket, 0);
    t.sync_block();
    return s.flags->drawn == t.blocks();
  }

  // Rows that staged sources have landed here, into their slots.
  MORI_DEVICE void move_landed() {
    u32 base = 0, chunks_before = 0, chunk = s.claim();
    MORI_ROLLED
    for (u32 source = 0; source < s.world(); base += scratch.from[source], ++source) {
      if (!s.live(source) || !HeaderWord::has(scratch.header[source], header_staged_path)) continue;
      const u32 rows = scratch.from[source], chunks = (rows + move_chunk_rows - 1) / move_chunk_rows;
      if (chunk - chunks_before < chunks) {
        if (!s.agree(await_rows(source))) return;
        T::acquire_wave();
      }
      MORI_ROLLED
      for (; chunk - chunks_before < chunks; chunk = s.claim()) {
        const u32 begin = (chunk - chunks_before) * move_chunk_rows, end = smaller(rows, begin + move_chunk_rows);
        MORI_ROLLED
        for (u32 item = begin * items + t.warp(); item < end * items; item += t.warps()) {
          move_item(landing_slot(source, item / items), base + item / items, item % items);
        }
      }
      chunks_before += chunks;
    }
  }

  // Rows as they lie in their slots, into the places of their experts. All sources are direct, for headers are
  // compared.
  MORI_DEVICE void pack_received() {
    bool arrived = true;
    MORI_ROLLED
    for (u32 source = 0; source < s.world() && arrived; ++source) {
      if (s.live(source)) arrived = await_rows(source);
    }
    if (!s.agree(arrived)) return;
    T::acquire_wave();
    const ReceivedRows rows{s.ep.template own<u8>(RegionId::dispatch_rows),
                            s.ep.template own<i32>(RegionId::dispatch_indices), scratch.received[s.rank()], a.row_bytes,
                            a.parts};
    Packer<T> packer(t, a.ep, a.packed, rows, scratch.end);
    u32 chunk = s.claim();
    MORI_ROLLED
    for (; chunk < packer.chunks(); chunk = s.claim()) packer.pack(chunk);
    if (chunk == packer.chunks()) packer.write_counts();
  }

  MORI_DEVICE void move_item(u32 from, u32 to, u32 item) {
    if (item < a.parts) {
      move_bytes(RegionId::dispatch_rows, from, to, a.row_bytes, RowPart(a.row_bytes, item, a.parts));
      return;
    }
    const u32 small = a.ep.topk() * 4;
    move_bytes(RegionId::dispatch_weights, from, to, small, RowPart(small, 0, 1));
    move_bytes(RegionId::dispatch_indices, from, to, small, RowPart(small, 0, 1));
    move_bytes(RegionId::dispatch_source, from, to, 4, RowPart(4, 0, 1));
    move_bytes(RegionId::dispatch_scales, from, to, a.scale_bytes, RowPart(a.scale_bytes, 0, 1));
  }

  MORI_DEVICE void move_bytes(RegionId region, u32 from, u32 to, u32 bytes, RowPart part) {
    const u8* row = s.ep.template own<u8>(in(Pass::landing, region), u64(from) * bytes);
    const RowTarget target{s.ep.template own<u8>(region, u64(to) * bytes)};
    t.fan_out(&target, 1, row, part.begin, part.end, false);
  }

  // The last block to arrive ends the call once all peers' rows are there. Its own rank's rows, and landed rows that
  // other blocks moved, are ordered by the end of this kernel.
  MORI_DEVICE void finish(u32 arrived, bool heard, const CallFault& fault) {
    t.sync_block();  // a slow warp may still be about to read what was drawn last
    if (t.thread() == 0) s.flags->drawn = arrived + 1;
    t.sync_block();
    s.pass(Point::arrived);
    if (s.flags->drawn != t.blocks()) return;
    bool complete = heard;
    MORI_ROLLED
    for (u32 source = 0; source < s.world() && complete; ++source) {
      if (source != s.rank() && s.live(source)) complete = await_rows(source);
    }
    complete = s.agree(complete && !is_aborted<T>(s.comm));
    if (t.thread() == 0) record(complete && fault.kind == CallFaultKind::none, fault);
    if (complete && fault.kind == CallFaultKind::none) count_stats();
    s.pass(Point::folded);
  }

  MORI_DEVICE void record(bool delivered, const CallFault& fault) {
    const u32 received = delivered ? scratch.received[s.rank()] : 0;
    if (!replays()) {
      RoutingSummary* summary = a.routing.summary;
      *summary = {delivered ? a.tokens : 0, received, scratch.base[s.rank()], delivered ? scratch.from[s.rank()] : 0};
      MORI_ROLLED
      for (u32 peer = 0; peer < s.world(); ++peer) {
        summary->received_by()[peer] = delivered ? scratch.received[peer] : 0;
      }
      *a.routing.received_count = received;
    }
    s.state->last.received = received;
    if (fault.kind != CallFaultKind::none) s.state->fault = fault;
    s.close_call(CallKind::dispatch);
  }

  MORI_DEVICE void count_stats() {
    OpStats* stats = s.ep.template own<OpStats>(RegionId::stats);
    u64* rows_sent = reinterpret_cast<u64*>(stats + 1);
    const u64 bytes = a.row_bytes + a.scale_bytes + 8 * a.ep.topk() + 4;
    if (t.thread() == 0) T::count(&stats->dispatches, 1);
    MORI_ROLLED
    for (u32 peer = t.thread(); peer < s.world(); peer += t.threads()) {
      if (!s.live(peer)) continue;
      T::count(&rows_sent[peer], scratch.total[peer]);
      T::count(&rows_sent[s.world() + peer], scratch.from[peer]);
      T::count(&stats->bytes_sent, scratch.total[peer] * bytes);
      T::count(&stats->bytes_received, scratch.from[peer] * bytes);
      rows_sent[2 * s.world() + peer] = scratch.received[peer];
    }
  }

  u32 words;  // masks per token
};

}  // namespace MORI_VARIANT
}  // namespace mori

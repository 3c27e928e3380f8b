// Combine, gather: every rank leaves its rows where it is, their owners fetch and add them.
//   1. after another combine only: tell every peer that this call was entered and wait for all, so that nobody
//      overwrites rows that a peer still reads for the previous one (after a dispatch, its counts said as much);
//   2. the first block to start sends a header to every peer;
//   3. a few blocks stage the rows for peers (external input, and weight rows) in chunks and flag each chunk; some
//   kinds
//      of rows are not what was passed, and then a rank's own rows are staged as well;
//   4. every block waits for the headers of all peers, then fetches its tokens' rows as their chunks become ready;
//   5. a token's rows are added in ascending k, in f32 from +0.0, and rounded once.
// Two launches may share a call: the first does steps 1 to 3 and waits for nobody after a dispatch, the second the
// rest.
#pragma once

#include "plain_rows.hpp"
#include "rendezvous.hpp"

namespace mori {
inline namespace MORI_VARIANT {

struct CombineScratch {
  u64* header;         // [W]
  RowSource* sources;  // [warps][K] rows of the token in hand

  MORI_SHARED_CODE CombineScratch(void* memory, u32 world) {
    header = reinterpret_cast<u64*>(static_cast<u8*>(memory) + sizeof(BlockFlags));
    sources = reinterpret_cast<RowSource*>(header + world);
  }
  MORI_SHARED_CODE static u64 bytes(u32 world, u32 topk, u32 warps) {
    return sizeof(BlockFlags) + world * sizeof(u64) + u64(warps) * topk * sizeof(RowSource);
  }
};

template <class T, class Rows>
class Combine {
  using Mask = typename T::Mask;

 public:
  MORI_DEVICE Combine(T& target, const CombineArgs& args)
      : t(target),
        a(args),
        s(target, args.ep, !stages()),
        summary(*args.routing.summary),
        scratch(target.template scratch<void>(), args.ep.world()) {}

  MORI_DEVICE void run() {
    s.pass(Point::entered);
    bool sound = !s.aborted;
    if (half(half_send)) {
      sound = send(sound);
      s.pass(Point::staged);
    }
    if (!half(half_receive)) return s.leave();
    reduce_share(sound);
    s.pass(Point::folded);
  }

 private:
  MORI_DEVICE bool half(Half which) const { return !may_stage || (a.halves & which) != 0; }
  MORI_DEVICE bool stages() const { return Rows::packed || a.input != nullptr || a.weights != nullptr; }
  // The rows that this rank passes to itself are staged like all others, or read where they are.
  MORI_DEVICE bool stages_own() const { return Rows::stages_own || !half(half_send) || !half(half_receive); }
  MORI_DEVICE Header header() const {
    const u32 flags = (a.weights != nullptr ? u32(header_weights) : 0) | (stages() ? u32(header_chunked) : 0) |
                      (Rows::quantised ? u32(header_quantised) : 0);
    return {a.row_bytes, a.dtype, CallKind::combine, flags};
  }

  MORI_DEVICE bool send(bool sound) {
    if (s.before.kind == CallKind::combine) {
      const bool is_first = s.draw() == 0;
      sound = s.agree(sound && await_entered(is_first));
    }
    if (sound && t.thread() == 0) send_header();
    if (!stages()) return sound;
    const u32 ticket = s.draw();
    sound = s.agree(sound);
    if (sound && ticket < a.stagers) stage_chunks(ticket);
    return sound;
  }

  // The entered word guards no data: a relaxed store tells that this rank ended its previous combine, an earlier
  // kernel of this stream. The staging stores behind the wait cannot pass it: a block barrier lies between.
  MORI_DEVICE bool await_entered(bool is_first) {
    if (is_first && t.thread() == 0) s.tell_all(s.words.entered(s.parity, s.rank()), FlagWord::encode(s.call));
    bool heard = true;
    MORI_ROLLED
    for (u32 source = t.thread(); source < s.world() && heard; source += t.threads()) {
      if (s.live(source)) heard = await_entered_from(source);
    }
    return heard;
  }

  // A peer that dispatches sends no entered word, but at once a header of the other kind.
  MORI_DEVICE bool await_entered_from(u32 source) {
    u64* header_word = s.ep.word(s.rank(), s.words.header(s.parity, source));
    const auto verdict = [&](u64& word) {
      const Verdict by_tag = judge(CountWord::tag(word), CountWord::tag_of(s.call), call_tag_mask);
      const u64 other = T::load_system(header_word);
      if (by_tag == Verdict::pending && HeaderWord::tag(other) == HeaderWord::tag_of(s.call) &&
          HeaderWord::kind(other) == CallKind::dispatch) {
        word = other;
        return Verdict::ahead;
      }
      return by_tag;
    };
    u64 word = 0;
    return wait_word<Order::relaxed>(t, s.wait(), s.ep.word(s.rank(), s.words.entered(s.parity, source)), source,
                                     Phase::entered, verdict, HeaderWord::encode(s.call, header()), word);
  }

  // Thread 0 of the first block. If nothing is staged, the header says that the rows are there. They are writes of
  // an earlier kernel; the session has released them all the same.
  MORI_DEVICE void send_header() {
    if (s.ticket == 0) s.tell_all(s.words.header(s.parity, s.rank()), HeaderWord::encode(s.call, header()));
  }

  // Chunks are claimed, not tied to block numbers, and no block that stages waits before all are taken: one resident
  // block per rank is enough. The tickets of the first blocks to start are the first chunks, the others have a counter
  // of their own.
  MORI_DEVICE void stage_chunks(u32 chunk) {
    const u32 rows = summary.received, shift = chunk_shift(rows), chunks = (rows + (1u << shift) - 1) >> shift;
    const u32 own_begin = stages_own() ? rows : summary.own_first;  // to be left out
    const u32 own_end = stages_own() ? rows : own_begin + summary.own_rows;
    const u32 started = t.thread() == 0 ? T::load_system(&s.state->ticket) : 0;
    MORI_ROLLED
    while (chunk < chunks) {
      const u32 begin = chunk << shift, end = smaller(rows, begin + (1u << shift));
      if (begin < own_begin || end > own_end) {
        stage_rows(begin, end, own_begin, own_end);
        // Ready word: behind a block barrier and a release, so after all rows of the chunk; the reader acquires.
        T::release_wave();
        t.sync_block();
        if (t.thread() == 0) {
          T::release_system();
          s.tell_all(s.words.ready(s.parity, s.rank(), chunk), FlagWord::encode(s.call));
        }
      }
      chunk = next_chunk(chunks, started);
    }
  }

  // Behind all other chunks come those of blocks that have not started: their tickets are drawn for them.
  MORI_DEVICE u32 next_chunk(u32 chunks, u32 started) {
    u32 next = chunks;
    if (t.thread() == 0) {
      const u32 by_ticket = smaller(chunks, a.stagers);
      if (chunks > a.stagers) next = a.stagers + T::add_device(&s.state->stage_ticket, 1);
      if (next >= chunks && started < by_ticket) {
        next = T::add_device(&s.state->ticket, 1);
        if (next >= by_ticket) next = chunks;
      }
    }
    t.sync_block();
    if (t.thread() == 0) s.flags->drawn = next;
    t.sync_block();
    return s.flags->drawn;
  }

  // Rows [begin, end) but for the own ones; when they are few, a row is split over several warps.
  MORI_DEVICE void stage_rows(u32 begin, u32 end, u32 own_begin, u32 own_end) {
    const u32 topk = a.ep.topk(), parts = Rows::splits_rows ? (t.warps() + end - begin - 1) / (end - begin) : 1;
    MORI_ROLLED
    for (u32 item = t.warp(); item < (end - begin) * parts; item += t.warps()) {
      const u32 row = begin + item / parts, part = item % parts;
      if (row >= own_begin && row < own_end) continue;
      if (Rows::packed || a.input != nullptr) Rows::stage(t, a, row, RowPart(a.row_bytes, part, parts));
      if (a.weights == nullptr || part != 0) continue;
      float* to = s.ep.template own<float>(RegionId::combine_in_weights, u64(row) * topk * 4);
      MORI_ROLLED
      for (u32 k = t.lane(); k < topk; k += T::lanes) {
        to[k] = row < a.weight_rows ? a.weights[u64(row) * topk + k] : 0.0f;
      }
    }
  }

  MORI_DEVICE bool await_peers() {
    MORI_ROLLED
    for (u32 i = t.thread(); i < s.world(); i += t.threads()) {
      const u32 source = s.world() - 1 - i;
      if (!s.live(source)) continue;
      u64 word = 0;
      // Acquires the rows of a peer that stages none.
      if (!await_header<Order::acquire>(s, source, header(), Phase::combine_ready, word)) return false;
      scratch.header[source] = word;
    }
    return true;
  }

  // Without the peers' rows (abort, fault) the result is zeros. A warp looks up its first token's rows before the block
  // waits for the peers, so the look-up costs no time.
  MORI_DEVICE void reduce_share(bool sound) {
    const BlockShare share(a.tokens * a.parts, t.block(), t.blocks());
    RowSource* sources = scratch.sources + u64(t.warp()) * a.ep.topk();
    u32 arrived = 0;
    CallFault fault{};
    bool waited = false;
    MORI_ROLLED
    for (u32 item = share.begin + t.warp();; item += t.warps()) {
      const bool has_item = item < share.end;
      if (waited && !has_item) break;
      const u32 token = item / a.parts;
      u32 count = has_item && token < summary.tokens ? find_sources(token, sources) : 0;
      t.sync_warp();
      if (!waited) {
        waited = true;
        sound = hear(sound, fault, arrived);
      }
      if (!has_item) continue;
      if (!sound || !await_rows(sources, count)) count = 0;
      const u32 part = item % a.parts;
      u8* out = s.ep.template own<u8>(RegionId::combine_rows, u64(token) * a.row_bytes);
      Rows::add(t, a, sources, count, out, RowPart(a.row_bytes, part, a.parts));
      if (part == 0 && a.weights != nullptr) add_weights(sources, count, token);
      t.sync_warp();
    }
    if (t.thread() == 0 && arrived == t.blocks() - 1) record(sound, fault);
  }

  // A block that has heard from all peers needs the call's state no more. So the last one to come here may end the call
  // while rows are still being added, which is of no concern to any peer; the draw's latency hides behind them.
  MORI_DEVICE bool hear(bool sound, CallFault& fault, u32& arrived) {
    sound = s.agree(sound && await_peers());
    T::acquire_wave();
    if (t.thread() == 0) arrived = T::add_device(&s.state->arrived, 1);
    s.pass(Point::heard);
    if (!sound || s.flags->suspect == 0) return sound;
    fault = first_mismatch<T>(scratch.header, s.comm, s.world(), s.call);
    return false;
  }

  // Where the token's rows are, in ascending k.
  MORI_DEVICE u32 find_sources(u32 token, RowSource* sources) {
    const u32 topk = a.ep.topk();
    const u32* map = a.routing.sender_map + u64(token) * topk;
    const u32* received_by = a.routing.summary->received_by();
    u32 count = 0;
    MORI_ROLLED
    for (u32 start = 0; start < topk; start += T::lanes) {
      const u32 k = start + t.lane();
      const u32 flat = k < topk ? map[k] : a.ep.null_index();
      const u32 rank = flat / a.ep.slot_stride(), slot = flat % a.ep.slot_stride();
      const bool valid = rank < s.world() && s.live(rank);
      const Mask chosen = t.ballot(valid);
      if (valid) {
        sources[count + population(chosen & bits_below<Mask>(t.lane()))] =
            rank == s.rank() && !stages_own() ? own_source(slot)
                                              : staged_source(rank, slot, chunk_shift(received_by[rank]));
      }
      count += population(chosen);
    }
    return count;
  }

  MORI_DEVICE RowSource staged_source(u32 rank, u32 slot, u32 shift) {
    const u32 scales = Rows::quantised ? a.ep.block_scales() : 0;
    return {s.ep.template at<u8>(rank, RegionId::combine_in_rows, u64(slot) * Rows::staged_bytes(a.row_bytes)),
            s.ep.word(s.rank(), s.words.ready(s.parity, rank, slot >> shift)),
            s.ep.template at<float>(rank, RegionId::combine_in_weights, u64(slot) * a.ep.topk() * 4),
            s.ep.template at<float>(rank, RegionId::combine_in_scales, u64(slot) * scales * 4)};
  }

  // A row that this rank passes to itself, where it is; null beyond the rows that were passed.
  MORI_DEVICE RowSource own_source(u32 slot) {
    const u8* row = s.ep.template own<u8>(RegionId::combine_in_rows, u64(slot) * a.row_bytes);
    if (a.input != nullptr) row = slot < a.input_rows ? a.input + u64(slot) * a.row_bytes : nullptr;
    const bool weighted = a.weights != nullptr && slot < a.weight_rows;
    return {row, nullptr, weighted ? a.weights + u64(slot) * a.ep.topk() : nullptr, nullptr};
  }

  // Waits until the chunks of all rows are ready, each lane for one row; a row beyond those passed is dropped.
  MORI_DEVICE bool await_rows(RowSource* sources, u32 count) {
    bool ready = true;
    MORI_ROLLED
    for (u32 i = t.lane(); i < count; i += T::lanes) {
      const u64* word = sources[i].ready;
      if (word == nullptr) continue;
      const u32 source = source_of(word);
      const u64 peer = scratch.header[source];
      if (!HeaderWord::has(peer, header_weights)) sources[i].weights = nullptr;
      if (!HeaderWord::has(peer, header_chunked)) continue;
      const u64 wanted = CountWord::tag_of(s.call);
      const auto verdict = [&](u64& found) { return judge(CountWord::tag(found), wanted, call_tag_mask); };
      u64 found = 0;
      ready = wait_word<Order::acquire>(t, s.wait(), word, source, Phase::combine_ready, verdict,
                                        FlagWord::encode(s.call), found) &&
              ready;
    }
    const bool all = t.ballot(!ready) == 0;
    t.sync_warp();
    T::acquire_wave();
    return all;
  }

  MORI_DEVICE u32 source_of(const u64* ready) const {
    const u64 index = u64(ready - s.ep.word(s.rank(), s.words.ready(s.parity, 0, 0)));
    return u32(index) / max_staging_chunks;
  }

  MORI_DEVICE void add_weights(const RowSource* sources, u32 count, u32 token) {
    const u32 topk = a.ep.topk();
    float* out = s.ep.template own<float>(RegionId::combine_weights, u64(token) * topk * 4);
    MORI_ROLLED
    for (u32 k = t.lane(); k < topk; k += T::lanes) {
      float sum = 0.0f;
      MORI_ROLLED
      for (u32 i = 0; i < count; ++i) {
        if (sources[i].weights != nullptr) sum += sources[i].weights[k];
      }
      out[k] = float_of_bits(Float32::encode(sum));
    }
  }

  MORI_DEVICE void record(bool sound, const CallFault& fault) {
    if (fault.kind != CallFaultKind::none) s.state->fault = fault;
    if (sound) T::count(&s.ep.template own<OpStats>(RegionId::stats)->combines, 1);
    s.close_call(CallKind::combine);
  }

  T& t;
  const CombineArgs& a;
  Session<T> s;
  RoutingSummary summary;  // of the dispatch that this combine belongs to
  CombineScratch scratch;
};

}  // namespace MORI_VARIANT
}  // namespace mori

// Combine, gather: every rank leaves its rows where it is, their owners fetch and add them.
//   1. after another combine only: tell every peer that this call was entered and wait for all, so that nobody
//      overwrites rows that a peer still reads for the previous one (after a dispatch, its counts said as much);
//   2. stage own rows (external input) and weight rows in this rank's combine-in memory;
//   3. the block that finishes the last chunk sends the header: everything this rank gives is there;
//   4. every block waits for the headers of all peers;
//   5. each own token's rows are added in ascending k, in f32 from +0.0, and rounded once.
#pragma once

#include "../device/numeric.hpp"
#include "dispatch.hpp"

namespace mori {
inline namespace MORI_VARIANT {

constexpr u32 stage_chunk_rows = 16;

struct RowSource {
  const u8* row;
  const float* weights;  // null: the rank that gives the row gives no weights
};

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

template <class T, class Codec>
class Combine {
  using Stored = typename Codec::Stored;

 public:
  MORI_DEVICE Combine(T& target, const CombineArgs& args)
      : t(target), a(args), s(target, args.ep), scratch(target.template scratch<void>(), args.ep.shape.world_size) {}

  MORI_DEVICE void run() {
    s.pass(Point::entered);
    const bool is_first = s.is_first();
    bool heard = s.agree(!s.aborted && enter_after_combine(is_first));
    if (heard) {
      stage_and_publish();
      s.pass(Point::staged);
      heard = s.agree(await_peers());
    }
    T::acquire_wave();
    s.pass(Point::heard);
    CallFault fault{};
    if (heard) fault = compare_headers(s, scratch.header);
    // A block that has heard from all peers needs the call's state no more. So the last one to come here may end the
    // call while rows are still being added, which is of no concern to any peer; the draw's latency hides behind them.
    u32 arrived = 0;
    if (t.thread() == 0) arrived = T::add_device(&s.state->arrived, 1) + 1;
    s.pass(Point::arrived);
    reduce_share(heard && fault.kind == CallFaultKind::none);
    if (arrived == t.blocks()) record(heard, fault);
    s.pass(Point::folded);
  }

 private:
  MORI_DEVICE bool stages_rows() const { return a.input != nullptr; }

  // The entered word guards no data: a relaxed store tells that this rank ended its previous combine, an earlier
  // kernel of this stream. The staging stores behind the wait cannot pass it: a block barrier lies between.
  MORI_DEVICE bool enter_after_combine(bool is_first) {
    if (s.before.kind != CallKind::combine) return true;
    if (is_first) {
      MORI_ROLLED
      for (u32 peer = t.thread(); peer < s.world(); peer += t.threads()) {
        if (s.live(peer)) s.send_word(peer, s.words.entered(s.parity, s.rank()), FlagWord::encode(s.call));
      }
    }
    bool heard = true;
    MORI_ROLLED
    for (u32 source = t.thread(); source < s.world() && heard; source += t.threads()) {
      if (s.live(source)) heard = await_entered(source);
    }
    return heard;
  }

  // A peer that dispatches sends no entered word, but at once a header of the other kind.
  MORI_DEVICE bool await_entered(u32 source) {
    u64* header = s.ep.word(s.rank(), s.words.header(s.parity, source));
    const auto verdict = [&](u64& word) {
      const Verdict by_tag = judge(CountWord::tag(word), CountWord::tag_of(s.call), call_tag_mask);
      const u64 other = T::load_system(header);
      if (by_tag == Verdict::pending && HeaderWord::tag(other) == HeaderWord::tag_of(s.call) &&
          HeaderWord::decode(other).kind == CallKind::dispatch) {
        word = other;
        return Verdict::ahead;
      }
      return by_tag;
    };
    u64 word = 0;
    return wait_word(t, s.wait, s.ep.word(s.rank(), s.words.entered(s.parity, source)), source, Phase::entered, verdict,
                     HeaderWord::encode(s.call, {0, 0, CallKind::combine, false, 0}), word);
  }

  // Chunks are claimed, not tied to block numbers, and nobody waits for a peer before all are taken: one
  // resident block per rank is enough for the header to be sent.
  MORI_DEVICE void stage_and_publish() {
    const u32 rows = stages_rows() || a.weights != nullptr ? s.before.received : 0;
    const u32 chunks = (rows + stage_chunk_rows - 1) / stage_chunk_rows;
    // In zero copy without weights nothing is staged. The rows are an earlier kernel's writes: released all the same.
    if (chunks == 0 && s.flags->is_first != 0 && t.thread() == 0) {
      T::release_system();
      publish();
    }
    if (chunks == 0) return;
    // Staged rows: released by the waves that wrote them, counted in `staged` (device scope), and released once more by
    // the thread that finds the count complete, before the header.
    MORI_ROLLED
    for (u32 chunk = claim(); chunk < chunks; chunk = claim()) {
      stage_rows(chunk * stage_chunk_rows, smaller(rows, (chunk + 1) * stage_chunk_rows));
      s.count_in(&s.state->staged, chunks, [&] { publish(); });
    }
  }

  MORI_DEVICE void publish() {
    const u64 word = HeaderWord::encode(s.call, {a.row_bytes, a.dtype, CallKind::combine, a.weights != nullptr, 0});
    MORI_ROLLED
    for (u32 peer = 0; peer < s.world(); ++peer) {
      if (s.live(peer)) s.send_word(peer, s.words.header(s.parity, s.rank()), word);
    }
  }

  MORI_DEVICE u32 claim() {
    t.sync_block();
    if (t.thread() == 0) s.flags->drawn = T::add_device(&s.state->stage_ticket, 1);
    t.sync_block();
    return s.flags->drawn;
  }

  // Rows beyond those that were passed become zeros: never an earlier call's rows.
  MORI_DEVICE void stage_rows(u32 begin, u32 end) {
    const u32 topk = a.ep.shape.topk;
    MORI_ROLLED
    for (u32 row = begin + t.warp(); row < end; row += t.warps()) {
      if (stages_rows()) {
        u8* to = s.ep.template own<u8>(RegionId::combine_in_rows, u64(row) * a.row_bytes);
        const RowTarget target{to};
        if (row < a.input_rows) {
          t.fan_out(&target, 1, a.input + u64(row) * a.row_bytes, 0, a.row_bytes, a.streaming != 0);
        } else {
          MORI_ROLLED
          for (u32 byte = t.lane(); byte < a.row_bytes; byte += T::lanes) to[byte] = 0;
        }
      }
      if (a.weights == nullptr) continue;
      float* to = s.ep.template own<float>(RegionId::combine_in_weights, u64(row) * topk * 4);
      MORI_ROLLED
      for (u32 k = t.lane(); k < topk; k += T::lanes) {
        to[k] = row < a.weight_rows ? a.weights[u64(row) * topk + k] : 0.0f;
      }
    }
  }

  MORI_DEVICE bool await_peers() {
    bool heard = true;
    MORI_ROLLED
    for (u32 source = t.thread(); source < s.world() && heard; source += t.threads()) {
      if (!s.live(source)) continue;
      u64 word = 0;
      heard = await_header(s, source, CallKind::combine, Phase::combine_ready, word);
      scratch.header[source] = word;
      T::acquire_system();  // pairs with the release before the header
    }
    return heard;
  }

  // Without the peers' rows (abort, fault) the result is zeros.
  MORI_DEVICE void reduce_share(bool heard) {
    const BlockShare share(a.tokens * a.parts, t.block(), t.blocks());
    RowSource* sources = scratch.sources + u64(t.warp()) * a.ep.shape.topk;
    MORI_ROLLED
    for (u32 item = share.begin + t.warp(); item < share.end; item += t.warps()) {
      const u32 token = item / a.parts, part = item % a.parts;
      const u32 count = heard && token < s.before.tokens ? find_sources(token, sources) : 0;
      t.sync_warp();
      const RowPart bytes(a.row_bytes, part, a.parts);
      u8* out = s.ep.template own<u8>(RegionId::combine_rows, u64(token) * a.row_bytes);
      add_rows(sources, count, out, bytes.begin, bytes.end);
      if (part == 0 && a.weights != nullptr) add_weights(sources, count, token);
      t.sync_warp();
    }
  }

  // The token's rows in ascending k.
  MORI_DEVICE u32 find_sources(u32 token, RowSource* sources) {
    const EpShape& shape = a.ep.shape;
    const u32* map = s.ep.template own<u32>(RegionId::sender_map, u64(token) * shape.topk * 4);
    u32 count = 0;
    MORI_ROLLED
    for (u32 start = 0; start < shape.topk; start += T::lanes) {
      const u32 k = start + t.lane();
      const u32 flat = k < shape.topk ? map[k] : shape.null_index();
      const bool valid = flat != shape.null_index() && s.live(flat / shape.flat_stride());
      const typename T::Mask chosen = t.ballot(valid);
      if (valid) {
        const u32 rank = flat / shape.flat_stride();
        const u64 slot = flat % shape.flat_stride();
        const bool weighted = HeaderWord::decode(scratch.header[rank]).flag;
        sources[count + population(chosen & bits_below<typename T::Mask>(t.lane()))] = {
            s.ep.template at<u8>(rank, RegionId::combine_in_rows, slot * a.row_bytes),
            weighted ? s.ep.template at<float>(rank, RegionId::combine_in_weights, slot * shape.topk * 4) : nullptr};
      }
      count += population(chosen);
    }
    return count;
  }

  // Bytes [begin, end) of the rows: whole vectors first, what is left by single elements.
  MORI_DEVICE void add_rows(const RowSource* sources, u32 count, u8* out, u64 begin, u64 end) {
    constexpr u64 vector = T::vector_bytes, stride = T::lanes * vector;
    u64 rest = begin;
    if (a.row_bytes % T::vector_alignment == 0) {
      rest = end - (end - begin) % vector;
      MORI_ROLLED
      for (u64 at = begin + t.lane() * vector; at < rest; at += T::vectors_in_flight * stride) {
        add_vectors(sources, count, out, at, rest, stride);
      }
    }
    MORI_ROLLED
    for (u64 at = rest + t.lane() * sizeof(Stored); at < end; at += T::lanes * sizeof(Stored)) {
      float sum = 0.0f;
      MORI_ROLLED
      for (u32 i = 0; i < count; ++i) sum += Codec::decode(*reinterpret_cast<const Stored*>(sources[i].row + at));
      *reinterpret_cast<Stored*>(out + at) = Codec::encode(sum);
    }
  }

  // Several vectors of a lane at once, and two rows at once, keep loads under way; the order of addition stays.
  MORI_DEVICE void add_vectors(const RowSource* sources, u32 count, u8* out, u64 at, u64 end, u64 stride) {
    constexpr u32 flight = T::vectors_in_flight, elements = T::vector_bytes / sizeof(Stored);
    float sum[flight][elements] = {};
    Stored first[flight][elements], second[flight][elements];
    u32 i = 0;
    MORI_ROLLED
    for (; i + 2 <= count; i += 2) {
      fetch(first, sources[i].row, at, end, stride);
      fetch(second, sources[i + 1].row, at, end, stride);
      add(sum, first);
      add(sum, second);
    }
    if (i < count) {
      fetch(first, sources[i].row, at, end, stride);
      add(sum, first);
    }
    MORI_UNROLL
    for (u32 v = 0; v < flight; ++v) {
      if (at + v * stride >= end) break;
      Stored rounded[elements];
      MORI_UNROLL
      for (u32 e = 0; e < elements; ++e) rounded[e] = Codec::encode(sum[v][e]);
      T::store_vector(out + at + v * stride, rounded);
    }
  }

  template <u32 flight, u32 elements>
  MORI_DEVICE void fetch(Stored (&held)[flight][elements], const u8* row, u64 at, u64 end, u64 stride) {
    MORI_UNROLL
    for (u32 v = 0; v < flight; ++v) {
      if (at + v * stride < end) T::load_vector(held[v], row + at + v * stride);
    }
  }

  template <u32 flight, u32 elements>
  MORI_DEVICE void add(float (&sum)[flight][elements], const Stored (&held)[flight][elements]) {
    MORI_UNROLL
    for (u32 v = 0; v < flight; ++v) {
      MORI_UNROLL
      for (u32 e = 0; e < elements; ++e) sum[v][e] += Codec::decode(held[v][e]);
    }
  }

  MORI_DEVICE void add_weights(const RowSource* sources, u32 count, u32 token) {
    const u32 topk = a.ep.shape.topk;
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

  MORI_DEVICE void record(bool heard, const CallFault& fault) {
    if (fault.kind != CallFaultKind::none) s.state->fault = fault;
    if (heard) T::count(&s.ep.template own<OpStats>(RegionId::stats)->combines, 1);
    s.close_call(CallKind::combine);
  }

  T& t;
  const CombineArgs& a;
  Session<T> s;
  CombineScratch scratch;
};

}  // namespace MORI_VARIANT
}  // namespace mori

// The one wait of the product, and the one way to give up. Every wait is bounded, ends at once when the sticky
// abort word is set, and names the peer that is missing.
#pragma once

#include "../layout/comm_control.hpp"
#include "../layout/words.hpp"
#include "base.hpp"

namespace mori {
inline namespace MORI_VARIANT {

struct WaitContext {
  Symmetric symmetric;
  CommControl* twin;
  u64 timeout_ns;
  u64 call;
};

template <class T>
MORI_DEVICE bool is_live(const CommControl* control, u32 rank) {
  return (T::load_system(&control->live[rank / 64]) >> (rank % 64) & 1) != 0;
}

template <class T>
MORI_DEVICE bool is_aborted(const CommControl* control) {
  return T::load_system(&control->abort_cause) != 0;
}

// Sets this rank's abort word unless it is set, then hands the first cause to every live peer that has none. The
// details lie with the origin; they are stored before the word (the compare-and-swap releases), so whoever acquires
// after it saw the word may read them.
template <class T>
MORI_RARE void abort_all(Symmetric symmetric, CommControl* twin, u64 cause, u64 expected, u64 seen) {
  CommControl* own = symmetric.control(symmetric.rank);
  if (!is_aborted<T>(own) && AbortCause::decode(cause).origin == symmetric.rank) {
    T::store_system(&own->abort_expected, expected);
    T::store_system(&own->abort_seen, seen);
    if (twin != nullptr) {
      T::store_system(&twin->device_expected, expected);
      T::store_system(&twin->device_seen, seen);
    }
  }
  if (!T::exchange_zero(&own->abort_cause, cause)) cause = T::load_system(&own->abort_cause);
  T::notify(own);
  if (twin != nullptr) {
    T::release_system();
    T::store_system(&twin->device_cause, cause);
  }
  MORI_ROLLED
  for (u32 peer = 0; peer < symmetric.world_size; ++peer) {
    if (peer == symmetric.rank || !is_live<T>(own, peer)) continue;
    CommControl* control = symmetric.control(peer);
    T::exchange_zero(&control->abort_cause, cause);
    T::notify(control);
  }
}

enum class Outlook : u32 { hopeful, farewell, hopeless };

// The rarer checks of a wait, once in a while: has the watcher noticed a death, has the peer left, is time up? A peer
// stores its last words before its farewell, so after seeing that the caller looks at the word once more.
template <class T>
MORI_RARE Outlook examine(WaitContext context, u32 peer, Phase phase, u64 expected, u64 found, bool expired,
                          bool interrupted, Verdict verdict, bool farewell_seen) {
  CommControl* own = context.symmetric.control(context.symmetric.rank);
  if (is_aborted<T>(own)) return Outlook::hopeless;
  if (context.twin != nullptr) {
    const u64 cause = T::load_system(&context.twin->abort_cause);
    if (cause != 0) {
      abort_all<T>(context.symmetric, context.twin, cause, 0, 0);
      return Outlook::hopeless;
    }
  }
  AbortKind trouble = AbortKind::none;
  const CommControl* told = context.twin != nullptr ? context.twin : own;
  if (verdict == Verdict::ahead) {
    trouble = AbortKind::out_of_step;
  } else if (interrupted) {  // this rank breaks off: to its peers it has left
    trouble = AbortKind::peer_left;
    peer = context.symmetric.rank;
  } else if (farewell_seen) {
    trouble = AbortKind::peer_left;
  } else if (T::load_system(&told->peer_state[peer]) == u32(PeerState::left)) {
    T::acquire_system();
    return Outlook::farewell;
  } else if (expired) {
    trouble = AbortKind::peer_timeout;
  } else {
    return Outlook::hopeful;
  }
  const u64 cause = AbortCause{trouble, phase, peer, context.symmetric.rank, context.call}.encode();
  abort_all<T>(context.symmetric, context.twin, cause, expected, found);
  return Outlook::hopeless;
}

// Waits until `judge_word(found)` is ready, `found` being the word loaded; the judge may replace it by another word
// that explains its verdict better. `peer` is who stores it. With `Order::acquire` this thread may afterwards read the
// data that the word guards; with `Order::relaxed` nothing hangs on the word but its value.
enum class Order { relaxed, acquire };

template <Order order, class T, class Judge>
MORI_DEVICE bool wait_word(const T& target, const WaitContext& context, const u64* word, u32 peer, Phase phase,
                           Judge judge_word, u64 expected, u64& found) {
  CommControl* own = context.symmetric.control(context.symmetric.rank);
  typename T::Waiter waiter(target, own, context.timeout_ns);
  bool farewell = false;
  for (;;) {
    waiter.arm();
    found = order == Order::acquire ? T::load_acquire(word) : T::load_system(word);
    const bool aborted = is_aborted<T>(own);
    const Verdict verdict = judge_word(found);
    if (verdict == Verdict::ready) {
      if (order == Order::acquire) T::acquire_loaded();
      return true;
    }
    if (aborted) {  // look once more: a word that came before the abort counts, for other blocks may have taken it
      T::acquire_system();
      if (context.twin != nullptr) T::store_system(&context.twin->device_cause, T::load_system(&own->abort_cause));
      found = order == Order::acquire ? T::load_acquire(word) : T::load_system(word);
      if (order == Order::acquire) T::acquire_loaded();
      return judge_word(found) == Verdict::ready;
    }
    if (verdict == Verdict::ahead || farewell || waiter.patient()) {
      const Outlook outlook =
          examine<T>(context, peer, phase, expected, found, waiter.expired(), waiter.interrupted(), verdict, farewell);
      if (outlook == Outlook::hopeless) return false;
      farewell = outlook == Outlook::farewell;
      if (farewell) continue;
    }
    waiter.rest();
  }
}

}  // namespace MORI_VARIANT
}  // namespace mori

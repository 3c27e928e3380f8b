#include "communicator.hpp"

#include <unistd.h>

#include <stdexcept>
#include <string>

#include "../device/target_host.hpp"
#include "../device/wait.hpp"
#include "watcher.hpp"

namespace mori {

// Runs before any peer has mapped this slice, so plain stores do.
Communicator::Communicator(std::shared_ptr<SymmetricMemory> memory) : memory_(std::move(memory)), owner_pid_(getpid()) {
  if (symmetric().world_size > max_world_size) {
    throw std::invalid_argument("a communicator has at most " + std::to_string(max_world_size) + " ranks, not " +
                                std::to_string(symmetric().world_size));
  }
  *own() = CommControl{};
  for (u32 rank = 0; rank < symmetric().world_size; ++rank) own()->live[rank / 64] |= 1ull << (rank % 64);
}

Communicator::~Communicator() { close(); }

void Communicator::watch(u32 peer, int process_descriptor, int socket) {
  watches_.push_back(Watcher::watch(memory_, peer, process_descriptor, socket));
}

std::optional<CommFault> Communicator::fault() const {
  const u64 word = HostTarget::load_system(&own()->abort_cause);
  if (word == 0) return std::nullopt;
  HostTarget::acquire_system();  // the origin's details were released before the word
  const AbortCause cause = AbortCause::decode(word);
  const CommControl* origin = symmetric().control(cause.origin);
  return CommFault{cause, HostTarget::load_system(&origin->abort_expected),
                   HostTarget::load_system(&origin->abort_seen)};
}

void Communicator::abort(AbortKind kind, Phase phase, u32 peer) {
  abort_all<HostTarget>(symmetric(), nullptr, AbortCause{kind, phase, peer, symmetric().rank, 0}.encode(), 0, 0);
}

bool Communicator::has_left(u32 peer) const {
  return HostTarget::load_system(&own()->peer_state[peer]) == u32(PeerState::left);
}

void Communicator::set_live(u32 rank, bool live) {
  const u64 bit = 1ull << (rank % 64);
  u64* word = &own()->live[rank / 64];
  live ? __atomic_fetch_or(word, bit, __ATOMIC_SEQ_CST) : __atomic_fetch_and(word, ~bit, __ATOMIC_SEQ_CST);
}

// The farewell is released after all words this rank ever stored: a peer that sees it has seen those.
void Communicator::leave() {
  if (getpid() != owner_pid_) return;
  for (u32 peer = 0; peer < symmetric().world_size; ++peer) {
    CommControl* control = symmetric().control(peer);
    __atomic_store_n(&control->peer_state[symmetric().rank], u32(PeerState::left), __ATOMIC_RELEASE);
    HostTarget::notify(control);
  }
}

void Communicator::close() {
  if (getpid() == owner_pid_) {
    for (const u64 number : watches_) Watcher::forget(number);
  }
  watches_.clear();
}

}  // namespace mori

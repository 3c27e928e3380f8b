#include "communicator.hpp"

#include <unistd.h>

#include <cstddef>
#include <stdexcept>
#include <string>

#include "../device/target_host.hpp"
#include "../device/wait.hpp"
#include "watcher.hpp"

namespace mori {

// Runs before any peer has mapped this slice, so plain stores do.
Communicator::Communicator(std::shared_ptr<SymmetricMemory> memory, std::shared_ptr<SymmetricMemory> control)
    : memory_(std::move(memory)), control_(std::move(control)), owner_pid_(getpid()) {
  const u32 world = symmetric().world_size;
  if (world > max_world_size) {
    throw std::invalid_argument("a communicator has at most " + std::to_string(max_world_size) + " ranks, not " +
                                std::to_string(world));
  }
  *own() = CommControl{};
  for (u32 rank = 0; rank < world; ++rank) own()->live[rank / 64] |= 1ull << (rank % 64);
  if (!on_device()) return;
  memory_->write(0, own(), sizeof(CommControl));
  twin_ = memory_->map_page(own());
}

Communicator::~Communicator() { close(); }

void Communicator::watch(u32 peer, int process_descriptor, int socket) {
  watches_.push_back(Watcher::watch(control_, peer, process_descriptor, socket));
}

// What the GPU of `rank` mirrored when it gave up.
std::optional<CommFault> Communicator::device_fault(u32 rank) const {
  const u64 word = HostTarget::load_system(&block(rank)->device_cause);
  if (word == 0) return std::nullopt;
  HostTarget::acquire_system();  // the origin's details were released before the word
  const AbortCause cause = AbortCause::decode(word);
  const CommControl* origin = block(cause.origin);
  return CommFault{cause, HostTarget::load_system(&origin->device_expected),
                   HostTarget::load_system(&origin->device_seen)};
}

std::optional<CommFault> Communicator::fault() const {
  if (on_device()) {
    if (const auto found = device_fault(shared().rank)) return found;
  }
  const u64 word = HostTarget::load_system(&own()->abort_cause);
  if (word != 0) {
    HostTarget::acquire_system();
    const AbortCause cause = AbortCause::decode(word);
    const CommControl* origin = block(cause.origin);
    return CommFault{cause, HostTarget::load_system(&origin->abort_expected),
                     HostTarget::load_system(&origin->abort_seen)};
  }
  // A GPU that finds its abort word set by a peer does not mirror it: the peer that set it did.
  for (u32 peer = 0; on_device() && peer < shared().world_size; ++peer) {
    if (!is_live<HostTarget>(own(), peer)) continue;
    if (const auto found = device_fault(peer)) return found;
  }
  return std::nullopt;
}

bool Communicator::has_left(u32 peer) const {
  return HostTarget::load_system(&own()->peer_state[peer]) == u32(PeerState::left);
}

void Communicator::set_live(u32 rank, bool live) {
  const u64 bit = 1ull << (rank % 64);
  u64* word = &own()->live[rank / 64];
  live ? __atomic_fetch_or(word, bit, __ATOMIC_SEQ_CST) : __atomic_fetch_and(word, ~bit, __ATOMIC_SEQ_CST);
  if (!on_device()) return;
  const u64 value = HostTarget::load_system(word);
  memory_->write(offsetof(CommControl, live) + rank / 64 * sizeof(u64), &value, sizeof value);
}

// The farewell is released after all words this rank ever stored: a peer that sees it has seen those.
void Communicator::leave() {
  if (getpid() != owner_pid_) return;
  for (u32 peer = 0; peer < shared().world_size; ++peer) {
    CommControl* control = block(peer);
    __atomic_store_n(&control->peer_state[shared().rank], u32(PeerState::left), __ATOMIC_RELEASE);
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

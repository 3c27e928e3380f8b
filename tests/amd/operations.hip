// Every operation of the target that has to do with memory order or with rows, in a kernel of its own. Pointers differ
// by lane, as they do in use, for else loads would be scalar.
#include "device/target_hip.hpp"

using namespace mori;
using T = HipTarget;

#define OPERATION(name, ...)                                                                    \
  extern "C" __attribute__((global)) void name(u64* words, u32* counts, u8* to, const u8* from) { \
    u64* word = words + T::lane();                                                              \
    u32* count = counts + T::lane();                                                            \
    to += 16 * T::lane();                                                                       \
    from += 16 * T::lane();                                                                     \
    __VA_ARGS__;                                                                                \
  }

OPERATION(load_system, *word = T::load_system(word + 1))
OPERATION(store_system, T::store_system(word, 7))
OPERATION(add_device, count[1] = T::add_device(count, 7))
OPERATION(count_device, T::count(word, 7))
OPERATION(exchange_zero, *count = T::exchange_zero(word, 7))
OPERATION(publish, *to = 1; T::release_wave(); T::sync_block(); T::release_system(); T::store_system(word, 7))
OPERATION(publish_nothing, T::release_system(); T::store_system(word, 7))
OPERATION(take, u64 found = T::load_acquire(word); T::acquire_loaded(); T::sync_block(); T::acquire_wave(); *to = *from + u8(found))
OPERATION(move_vector, T::Vector<u32> held; held.load(from); held.store(to))
OPERATION(move_bytes, T::Bytes<8> held; held.load(from); held.store(to))
OPERATION(move_few_bytes, T::Bytes<4> held; held.load(from); held.store(to))

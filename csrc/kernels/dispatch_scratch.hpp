// What a block of a dispatch keeps in its scratch memory.
#pragma once

#include "session.hpp"

namespace mori {
inline namespace MORI_VARIANT {

constexpr u32 dispatch_tile = 128;  // tokens whose positions a block keeps at once

struct Slot {
  u32 rank;
  u32 slot;
};

// A block's scratch memory. Sizes depend on the world, so the arrays are carved, not declared.
struct DispatchScratch {
  u32* total;          // [W] rows this rank sends to each; before that is known, those of some of its tokens
  u32* before;         // [W] of them, those of tokens before the block's share
  u32* next;           // [W] of the share's rows, those of the tiles so far
  u32* base;           // [W] slot of this rank's first row at each
  u32* received;       // [W] rows each rank receives in all
  u32* from;           // [W] rows this rank receives from each
  u32* blocks;         // [W] blocks that send them
  u64* header;         // [W]
  u64* mask;           // [tile][mask words] destinations of a token
  u32* position;       // [tile][W] row number of the token among the share's rows for that destination
  Slot* slots;         // [warps][W] where the row in hand goes
  RowTarget* targets;  // [warps][W]

  MORI_SHARED_CODE DispatchScratch(void* memory, u32 world, u32 warps) {
    u8* cursor = static_cast<u8*>(memory) + sizeof(BlockFlags);
    take(cursor, header, world);
    take(cursor, mask, dispatch_tile * ((world + 63) / 64));
    take(cursor, targets, warps * world);
    take(cursor, slots, warps * world);
    take(cursor, total, world);
    take(cursor, before, world);
    take(cursor, next, world);
    take(cursor, base, world);
    take(cursor, received, world);
    take(cursor, from, world);
    take(cursor, blocks, world);
    take(cursor, position, dispatch_tile * world);
    end = cursor;
  }
  MORI_SHARED_CODE static u64 bytes(u32 world, u32 warps) {
    return reinterpret_cast<u64>(DispatchScratch(nullptr, world, warps).end);
  }

  u8* end;

 private:
  template <class Type>
  MORI_SHARED_CODE static void take(u8*& cursor, Type*& array, u64 count) {
    array = reinterpret_cast<Type*>(cursor);
    cursor += count * sizeof(Type);
  }
};

}  // namespace MORI_VARIANT
}  // namespace mori

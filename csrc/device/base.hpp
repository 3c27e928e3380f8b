// Types and function qualifiers shared by every target. Nothing under device/, layout/ or kernels/
// includes a system header, so that one source serves g++, NVRTC, nvcc and clang for AMD alike.
#pragma once

// Every host instruction-set variant is compiled into a namespace of its own: an inline function shared
// between variants could be emitted once, with the wrong instructions, and kill an older CPU.
#ifndef MORI_VARIANT
#define MORI_VARIANT common
#endif

#if defined(__HIP__)
// By attribute: what declares __host__ and __device__ for AMD is a header, and not every compiler has it. Nothing stays
// a call: a callee would have to save registers in scratch memory.
#define MORI_SHARED_CODE __attribute__((host, device)) inline
#define MORI_DEVICE __attribute__((device, always_inline)) inline
#define MORI_RARE MORI_DEVICE
#elif defined(__CUDACC__)
#define MORI_SHARED_CODE __host__ __device__ inline  // layout arithmetic: runs on both sides
#define MORI_DEVICE __device__ __forceinline__       // kernels and what they call
#define MORI_RARE __device__ __noinline__            // ... on paths that are not worth their room
#else
#define MORI_SHARED_CODE inline
#define MORI_DEVICE inline
#define MORI_RARE inline __attribute__((noinline, cold))
#endif

#if defined(__CUDACC__) || defined(__clang__)
#define MORI_UNROLL _Pragma("unroll")
#define MORI_UNROLL_TWICE _Pragma("unroll 2")
#define MORI_ROLLED \
  _Pragma("unroll 1")  // a loop that is not worth its room: kernels must stay in the instruction cache
#else
#define MORI_UNROLL_TWICE
#define MORI_ROLLED
#define MORI_UNROLL  // g++ vectorises instead
#endif

// What AMD's archs convert by instruction. mori/archs.py has the same as a table.
#if defined(__gfx942__)
#define MORI_AMD_FP8_FNUZ
#elif defined(__gfx950__)
#define MORI_AMD_FP8_OCP
#define MORI_AMD_BFLOAT16
#define MORI_AMD_FP4_PAIRS  // two at a time
#elif defined(__gfx1250__)
#define MORI_AMD_FP8_OCP
#define MORI_AMD_BFLOAT16
#define MORI_AMD_FP4_EIGHTS
#endif

namespace mori {
inline namespace MORI_VARIANT {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

static_assert(sizeof(u32) == 4 && sizeof(u64) == 8, "fixed-width types");

template <class Integer>
MORI_SHARED_CODE constexpr Integer smaller(Integer a, Integer b) {
  return a < b ? a : b;
}

template <class Integer>
MORI_SHARED_CODE constexpr Integer larger(Integer a, Integer b) {
  return a > b ? a : b;
}

MORI_SHARED_CODE constexpr u64 align_up(u64 value, u64 alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// Masks have one bit per lane, or per destination rank: 32 or 64, by the target's wave.
MORI_DEVICE u32 population(u32 mask) {
#if defined(__CUDA_ARCH__)
  return u32(__popc(mask));
#else
  return u32(__builtin_popcount(mask));
#endif
}
MORI_DEVICE u32 population(u64 mask) {
#if defined(__CUDA_ARCH__)
  return u32(__popcll(mask));
#else
  return u32(__builtin_popcountll(mask));
#endif
}
template <class Mask>
MORI_DEVICE Mask bits_below(u32 bit) {
  return bit >= 8 * sizeof(Mask) ? ~Mask(0) : (Mask(1) << bit) - 1;
}

MORI_SHARED_CODE constexpr u64 divide_up(u64 value, u64 divisor) { return (value + divisor - 1) / divisor; }

// A pointer into memory that every block sees. AMD's compilers have to be told that it leads neither into a block's
// scratch memory nor to a stack, or else they take slower instructions that look there as well.
template <class Type>
MORI_SHARED_CODE Type* device_pointer(u64 address) {
#if defined(__HIP__)
  return (Type*)(__attribute__((address_space(1))) Type*)address;
#else
  return reinterpret_cast<Type*>(address);
#endif
}

// Where one row goes: the address of its copy at one destination.
struct RowTarget {
  u8* address;
};

}  // namespace MORI_VARIANT
}  // namespace mori

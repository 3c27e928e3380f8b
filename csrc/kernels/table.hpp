// Every kernel by name, with its launch struct and its type for a target T. Launchers, host variants and device code
// are made from this table; mori/ops/kernels.py chooses from it.
#pragma once

#define MORI_KERNEL_TABLE(KERNEL)                                                              \
  KERNEL(dispatch, DispatchArgs, Dispatch<T>)                                                  \
  KERNEL(dispatch_replay, DispatchArgs, Dispatch<T, DispatchKind::replay>)                     \
  KERNEL(dispatch_packed, DispatchArgs, Dispatch<T, DispatchKind::packed>)                     \
  KERNEL(combine_f32, CombineArgs, Combine<T, PlainRows<T, Float32>>)                          \
  KERNEL(combine_bf16, CombineArgs, Combine<T, PlainRows<T, BFloat16>>)                        \
  KERNEL(combine_fp8_ocp, CombineArgs, Combine<T, PlainRows<T, Fp8E4M3>>)                      \
  KERNEL(combine_fp8_fnuz, CombineArgs, Combine<T, PlainRows<T, Fp8E4M3Fnuz>>)                 \
  KERNEL(combine_fp4, CombineArgs, Combine<T, PlainRows<T, Fp4E2M1Pair>>)                      \
  KERNEL(combine_fp8_direct_cast, CombineArgs, Combine<T, QuantisedRows<T, Fp8Cast<WireFp8>>>) \
  KERNEL(combine_fp8_blockwise, CombineArgs, Combine<T, QuantisedRows<T, Fp8Blocks<WireFp8>>>) \
  KERNEL(combine_fp4_blockwise, CombineArgs, Combine<T, QuantisedRows<T, Fp4Blocks>>)          \
  KERNEL(combine_packed_f32, CombineArgs, Combine<T, PackedRows<T, Float32>>)                  \
  KERNEL(combine_packed_bf16, CombineArgs, Combine<T, PackedRows<T, BFloat16>>)                \
  KERNEL(combine_packed_fp8_ocp, CombineArgs, Combine<T, PackedRows<T, Fp8E4M3>>)              \
  KERNEL(combine_packed_fp8_fnuz, CombineArgs, Combine<T, PackedRows<T, Fp8E4M3Fnuz>>)         \
  KERNEL(combine_packed_fp4, CombineArgs, Combine<T, PackedRows<T, Fp4E2M1Pair>>)              \
  KERNEL(pack, ConvertArgs, Pack<T>)                                                           \
  KERNEL(unpack_f32, ConvertArgs, Unpack<T, Float32>)                                          \
  KERNEL(unpack_bf16, ConvertArgs, Unpack<T, BFloat16>)                                        \
  KERNEL(unpack_fp8_ocp, ConvertArgs, Unpack<T, Fp8E4M3>)                                      \
  KERNEL(unpack_fp8_fnuz, ConvertArgs, Unpack<T, Fp8E4M3Fnuz>)                                 \
  KERNEL(unpack_fp4, ConvertArgs, Unpack<T, Fp4E2M1Pair>)

namespace mori {

#define MORI_KERNEL_NAME(name, ...) name,
enum class KernelId : unsigned { MORI_KERNEL_TABLE(MORI_KERNEL_NAME) count };
#undef MORI_KERNEL_NAME

}  // namespace mori

// Elements: conversion to and from fp32, loads of eight, and the order of floats as integers.
#pragma once
#include <cuda_bf16.h>

#include "../operator.h"

namespace kdtree::cuda {

using bf16 = __nv_bfloat16;

// Calls f with an element of the type.
template <class F>
auto with_type(int32_t type, F&& f) {
  return type == kBFloat16 ? f(bf16{}) : f(float{});
}

__host__ __device__ inline float to_float(float v) { return v; }
__host__ __device__ inline float to_float(bf16 v) { return __bfloat162float(v); }
template <class T>
__host__ __device__ T rounded(float v);
template <>
__host__ __device__ inline float rounded<float>(float v) {
  return v;
}
template <>
__host__ __device__ inline bf16 rounded<bf16>(float v) {
  return __float2bfloat16_rn(v);
}

// For operands whose type is not worth an instance of a kernel: one access an output.
__device__ inline float load_as(const void* base, int64_t i, int32_t type) {
  return type == kBFloat16 ? to_float(static_cast<const bf16*>(base)[i]) : static_cast<const float*>(base)[i];
}
__device__ inline void store_as(void* base, int64_t i, int32_t type, float v) {
  if (type == kBFloat16)
    static_cast<bf16*>(base)[i] = rounded<bf16>(v);
  else
    static_cast<float*>(base)[i] = v;
}

// Eight elements in 16-byte accesses; p is 16-byte aligned.
__device__ inline void load8(const float* p, float (&v)[8]) {
  const float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
  v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
__device__ inline void load8(const bf16* p, float (&v)[8]) {
  const uint4 a = *reinterpret_cast<const uint4*>(p);
  const uint32_t pairs[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[2 * i] = __uint_as_float(pairs[i] << 16);
    v[2 * i + 1] = __uint_as_float(pairs[i] & 0xFFFF0000u);
  }
}

// Four elements in one 8-byte access; p is 8-byte aligned.
__device__ inline void load4(const bf16* p, float (&v)[4]) {
  const uint2 pairs = *reinterpret_cast<const uint2*>(p);
  v[0] = __uint_as_float(pairs.x << 16), v[1] = __uint_as_float(pairs.x & 0xFFFF0000u);
  v[2] = __uint_as_float(pairs.y << 16), v[3] = __uint_as_float(pairs.y & 0xFFFF0000u);
}
__device__ inline void store4(bf16* p, const float (&v)[4]) {
  __align__(8) bf16 four[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) four[i] = rounded<bf16>(v[i]);
  *reinterpret_cast<uint2*>(p) = *reinterpret_cast<const uint2*>(four);
}

// Larger value, larger integer; −0 equals +0; NaN is below everything.
__device__ inline uint32_t ordered(float v) {
  if (v != v) return 0;
  const uint32_t bits = __float_as_uint(v + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
// The value that `ordered` came from; NaN for 0.
__device__ inline float value_of(uint32_t order) {
  if (order == 0) return __uint_as_float(0x7FC00000u);
  return __uint_as_float(order & 0x80000000u ? order & 0x7FFFFFFFu : ~order);
}

// A value and its index as one integer: the larger key is the larger value, of equal values the lower index. Never 0.
__device__ inline uint64_t key_of(float v, int32_t index) {
  return uint64_t{ordered(v)} << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(index));
}
__device__ inline int32_t index_of(uint64_t key) { return static_cast<int32_t>(0xFFFFFFFFu - static_cast<uint32_t>(key)); }

}  // namespace kdtree::cuda

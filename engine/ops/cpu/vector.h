// Sixteen fp32 lanes in the registers of the path being compiled: four of SSE2, two of AVX2, one of AVX-512. Lanes,
// order and tails are the same on every path, and so are the bits, but for fma(), which the portable path rounds twice.
// Tails run through the same lanes, padded, so that an element's bits never depend on where it stands.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__FMA__)
#include <immintrin.h>
#endif

#include "operator_cpu.h"

namespace kdtree::KDTREE_PATH {

#define KDTREE_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int kRegisterLanes = 16;
#elif defined(__AVX2__)
constexpr int kRegisterLanes = 8;
#else
constexpr int kRegisterLanes = 4;
#endif
constexpr int kLanes = 16;
constexpr int kParts = kLanes / kRegisterLanes;

template <class T, int lanes>
struct VectorOf {
  using type __attribute__((vector_size(sizeof(T) * lanes))) = T;
};
using F32s = VectorOf<float, kRegisterLanes>::type;
using I32s = VectorOf<int32_t, kRegisterLanes>::type;
using U32s = VectorOf<uint32_t, kRegisterLanes>::type;
using U16s = VectorOf<uint16_t, kRegisterLanes>::type;

struct F32x16 {
  F32s part[kParts];
};
struct I32x16 {
  I32s part[kParts];
};

// ---- scalars -----------------------------------------------------------------------------------------------------
// bf16 storage; arithmetic is always fp32.
struct BFloat16 {
  uint16_t bits;
};

KDTREE_INLINE float to_float(float x) { return x; }
KDTREE_INLINE float to_float(BFloat16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Round to nearest, ties to even; NaN stays NaN.
KDTREE_INLINE BFloat16 to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

KDTREE_INLINE void store(float* to, float x) { *to = x; }
KDTREE_INLINE void store(BFloat16* to, float x) { *to = to_bfloat16(x); }

// ---- one register ------------------------------------------------------------------------------------------------
// a · b + c; rounded once where the path has FMA, else after the product too.
KDTREE_INLINE F32s fma(F32s a, F32s b, F32s c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}
KDTREE_INLINE F32s all(float x) { return x - F32s{}; }  // a broadcast: subtracting 0 changes nothing
KDTREE_INLINE F32s as_floats(I32s bits) { return (F32s)bits; }
KDTREE_INLINE I32s as_ints(F32s x) { return (I32s)x; }

KDTREE_INLINE F32s load_part(const float* from) {
  F32s x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
KDTREE_INLINE F32s load_part(const BFloat16* from) {
  // One instruction loads and widens; GCC 12 makes more of __builtin_convertvector. (The mask spares a false warning.)
#if defined(__AVX512F__)
  return (F32s)((U32s)_mm512_maskz_cvtepu16_epi32(0xffff, *reinterpret_cast<const __m256i_u*>(from)) << 16);
#elif defined(__AVX2__)
  return (F32s)((U32s)_mm256_cvtepu16_epi32(*reinterpret_cast<const __m128i_u*>(from)) << 16);
#else
  // Zeros below, bits above: one interleaving.
  using U16x8 = VectorOf<uint16_t, 8>::type;
  U16x8 bits = {};
  std::memcpy(&bits, from, sizeof(U16s));
  return (F32s)__builtin_shuffle(U16x8{}, bits, U16x8{0, 8, 1, 9, 2, 10, 3, 11});
#endif
}
KDTREE_INLINE void store_part(float* to, F32s x) { std::memcpy(to, &x, sizeof x); }
KDTREE_INLINE void store_part(BFloat16* to, F32s x) {
  const U32s bits = (U32s)x;
  const U32s rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const U32s nan = (bits >> 16) | 0x40u;
  const U16s half = __builtin_convertvector((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded, U16s);
  std::memcpy(to, &half, sizeof half);
}

// exp(x) to about 1 ulp: 2^n · p(r), r = x − n·ln 2 in [−ln2/2, ln2/2] (ln 2 in two parts, after Cody and Waite), p the
// Taylor polynomial of degree 7. Below −87.33 the result is 0 (no subnormals), above 88.72 it is inf; NaN stays.
KDTREE_INLINE F32s exp(F32s x) {
  const I32s too_low = x < all(-87.33f), too_high = x > all(88.72f);
  const I32s inside = ~(too_low | too_high);
  const F32s y = as_floats(as_ints(x) & inside);
  const F32s magic = all(12582912.0f);  // 1.5 · 2^23: adding it rounds to the nearest integer
  const F32s n = fma(y, all(1.44269504f), magic) - magic;
  const F32s r = fma(n, all(2.12194440e-4f), fma(n, all(-0.693359375f), y));
  F32s p = all(1.0f / 5040);
  p = fma(p, r, all(1.0f / 720));
  p = fma(p, r, all(1.0f / 120));
  p = fma(p, r, all(1.0f / 24));
  p = fma(p, r, all(1.0f / 6));
  p = fma(p, r, all(0.5f));
  p = fma(p * r, r, r) + all(1.0f);
  // 2^n in two factors, so that n = 128 does not overflow on the way.
  const I32s exponent = __builtin_convertvector(n, I32s);
  const I32s half = exponent >> 1;
  const F32s first = as_floats((half + 127) << 23);
  const F32s second = as_floats((exponent - half + 127) << 23);
  const I32s infinity = as_ints(all(__builtin_inff()));
  return as_floats((as_ints(p * first * second) & inside) | (infinity & too_high));
}

// ---- sixteen lanes -----------------------------------------------------------------------------------------------
// f(part) for every part: with lanes numbered 0 … 15, part p holds lanes p·kRegisterLanes and following.
template <class F>
KDTREE_INLINE F32x16 each_part(F&& f) {
  F32x16 y;
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) y.part[p] = f(p);
  return y;
}

KDTREE_INLINE F32x16 splat(float x) {
  return each_part([&](int) { return all(x); });
}
KDTREE_INLINE F32x16 operator+(F32x16 a, F32x16 b) {
  return each_part([&](int p) { return a.part[p] + b.part[p]; });
}
KDTREE_INLINE F32x16 operator-(F32x16 a, F32x16 b) {
  return each_part([&](int p) { return a.part[p] - b.part[p]; });
}
KDTREE_INLINE F32x16 operator*(F32x16 a, F32x16 b) {
  return each_part([&](int p) { return a.part[p] * b.part[p]; });
}
KDTREE_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return each_part([&](int p) { return fma(a.part[p], b.part[p], c.part[p]); });
}
KDTREE_INLINE F32x16 exp(F32x16 x) {
  return each_part([&](int p) { return exp(x.part[p]); });
}
KDTREE_INLINE F32x16 sigmoid(F32x16 x) {
  return each_part([&](int p) { return all(1.0f) / (all(1.0f) + exp(-x.part[p])); });
}
// The larger; a NaN in b does not count.
KDTREE_INLINE F32x16 larger(F32x16 a, F32x16 b) {
  return each_part([&](int p) { return b.part[p] > a.part[p] ? b.part[p] : a.part[p]; });
}

template <class T>
KDTREE_INLINE F32x16 load(const T* from) {
  return each_part([&](int p) { return load_part(from + p * kRegisterLanes); });
}
KDTREE_INLINE I32x16 load(const uint32_t* from) {
  I32x16 x;
  for (int p = 0; p < kParts; ++p) std::memcpy(&x.part[p], from + p * kRegisterLanes, sizeof x.part[p]);
  return x;
}
// The first `count` lanes; the others are 0.
template <class T>
KDTREE_INLINE F32x16 load(const T* from, int64_t count) {
  if (count == kLanes) return load(from);
  T lanes[kLanes] = {};
  std::memcpy(lanes, from, static_cast<size_t>(count) * sizeof(T));
  return load(lanes);
}
template <class T>
KDTREE_INLINE void store(T* to, F32x16 x) {
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) store_part(to + p * kRegisterLanes, x.part[p]);
}
template <class T>
KDTREE_INLINE void store(T* to, F32x16 x, int64_t count) {
  if (count == kLanes) return store(to, x);
  T lanes[kLanes];
  store(lanes, x);
  std::memcpy(to, lanes, static_cast<size_t>(count) * sizeof(T));
}

// f(first element, lanes) for n elements, sixteen at a time; the last call may have fewer lanes.
template <class F>
KDTREE_INLINE void each_sixteen(int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, int64_t{kLanes});
  if (i < n) f(i, n - i);
}

// x rounded to T, as fp32.
KDTREE_INLINE F32x16 rounded(float*, F32x16 x) { return x; }
KDTREE_INLINE F32x16 rounded(BFloat16*, F32x16 x) {
  BFloat16 lanes[kLanes];
  store(lanes, x);
  return load(lanes);
}

// Lanes are added in halves: (i, i+8), (i, i+4), (i, i+2), (i, i+1).
KDTREE_INLINE float sum(F32x16 x) {
  using F32x4 = VectorOf<float, 4>::type;
  float lanes[kLanes];  // copied from registers: a copy of the struct's bytes would keep x in memory all the time
  store(lanes, x);
  F32x4 quarter[4];
  std::memcpy(quarter, lanes, sizeof quarter);
  F32x4 s = (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
  s += __builtin_shuffle(s, VectorOf<int32_t, 4>::type{2, 3, 0, 1});
  return s[0] + s[1];
}

// The largest lane.
KDTREE_INLINE float max_of(F32x16 x) {
  float lanes[kLanes];
  store(lanes, x);
  return *std::max_element(lanes, lanes + kLanes);
}

template <class A, class B>
KDTREE_INLINE float dot(const A* a, const B* b, int64_t n) {
  F32x16 acc = {};
  each_sixteen(n, [&](int64_t i, int64_t lanes) { acc = fma(load(a + i, lanes), load(b + i, lanes), acc); });
  return sum(acc);
}

template <class T>
KDTREE_INLINE void convert(const T* from, float* to, int64_t n) {
  each_sixteen(n, [&](int64_t i, int64_t lanes) { store(to + i, load(from + i, lanes), lanes); });
}

// Calls f with a null pointer of the element type that `type` names.
template <class F>
KDTREE_INLINE auto with_type(int32_t type, F&& f) {
  return type == kBFloat16 ? f(static_cast<BFloat16*>(nullptr)) : f(static_cast<float*>(nullptr));
}

}  // namespace kdtree::KDTREE_PATH

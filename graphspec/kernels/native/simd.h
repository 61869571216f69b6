// Vectors of 8 and of 16 floats, for the kernels in this folder.

#pragma once

#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#if defined(__FMA__) || defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));

inline f8 load8(const float* p) {
  f8 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store8(float* p, f8 v) { std::memcpy(p, &v, sizeof v); }

// The same for the first `count` of at most 8 numbers; `rest`: what the others read as.
inline f8 load8(const float* p, int64_t count, float rest) {
  if (count >= 8) return load8(p);
  f8 v = f8{} + rest;
  std::memcpy(&v, p, count * sizeof(float));
  return v;
}

inline void store8(float* p, f8 v, int64_t count) {
  if (count >= 8)
    store8(p, v);
  else
    std::memcpy(p, &v, count * sizeof(float));
}

inline f8 splat(float x) { return f8{x, x, x, x, x, x, x, x}; }

// Fused where the hardware does it, and then always: compiled with -ffp-contract=off, because a compiler that picks which products to fuse
// picks differently for one row and for two.
inline f8 fmadd(f8 a, f8 b, f8 c) {
#ifdef __FMA__
  return reinterpret_cast<f8>(_mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#else
  return a * b + c;
#endif
}

// The widest register there is, where the width does not matter.
#ifdef __AVX512F__
typedef float widest __attribute__((vector_size(64)));
typedef int32_t widest_int __attribute__((vector_size(64)));
inline widest fmadd(widest a, widest b, widest c) {
  return reinterpret_cast<widest>(_mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
}
constexpr widest_int LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
typedef f8 widest;
typedef i8 widest_int;
constexpr widest_int LANE = {0, 1, 2, 3, 4, 5, 6, 7};
#endif
constexpr int WIDTH = sizeof(widest) / sizeof(float);

// exp(x) for x <= 0: Cody-Waite reduction by ln 2 and the degree-6 minimax polynomial of Cephes' expf (about 1 ulp); 0 below -87. V is a vector of
// floats, I one of as many int32.
template <class V, class I>
inline V exp_of(V x) {
  const V magic = V{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const V clipped = x < V{} - 87.0f ? V{} - 87.0f : x;
  const V whole = fmadd(clipped, V{} + 1.44269504088896341f, magic);
  I power;
  std::memcpy(&power, &whole, sizeof power);
  const V n = whole - magic;
  V r = fmadd(n, V{} - 0.693359375f, clipped);
  r = fmadd(n, V{} + 2.12194440e-4f, r);
  V p = V{} + 1.9875691500e-4f;
  p = fmadd(p, r, V{} + 1.3981999507e-3f);
  p = fmadd(p, r, V{} + 8.3334519073e-3f);
  p = fmadd(p, r, V{} + 4.1665795894e-2f);
  p = fmadd(p, r, V{} + 1.6666665459e-1f);
  p = fmadd(p, r, V{} + 5.0000001201e-1f);
  p = fmadd(p, r * r, r) + 1.0f;
  I bits;
  std::memcpy(&bits, &p, sizeof bits);
  bits += power << 23;  // the low bits of the rounded sum are n; its high bits leave the word
  std::memcpy(&p, &bits, sizeof p);
  return x < V{} - 87.0f ? V{} : p;
}

inline f8 exp8(f8 x) { return exp_of<f8, i8>(x); }

// 1 / (1 + exp(-x)).
template <class V, class I>
inline V sigmoid_of(V x) {
  const V zero = V{}, one = V{} + 1.0f, e = exp_of<V, I>(x < zero ? x : zero - x);
  return (x < zero ? e : one) / (one + e);
}

inline f8 sigmoid8(f8 x) { return sigmoid_of<f8, i8>(x); }

// x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), the tanh approximation of GELU (arXiv 1606.08415).
template <class V, class I>
inline V gelu_of(V x) {
  return x * sigmoid_of<V, I>((V{} + 1.5957691216f) * (x + (V{} + 0.044715f) * x * x * x));
}

// Sixteen floats: one register of AVX-512, two of AVX2.
#ifdef __AVX512F__
struct f16 {
  __m512 v;
};
inline f16 load16(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store16(float* p, f16 x) { _mm512_storeu_ps(p, x.v); }
inline f16 splat16(float x) { return {_mm512_set1_ps(x)}; }
inline f16 fma16(f16 a, f16 b, f16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline f16 add16(f16 a, f16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline f16 sub16(f16 a, f16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline f16 mul16(f16 a, f16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
#else
struct f16 {
  f8 low, high;
};
inline f16 load16(const float* p) { return {load8(p), load8(p + 8)}; }
inline void store16(float* p, f16 x) {
  store8(p, x.low);
  store8(p + 8, x.high);
}
inline f16 splat16(float x) { return {splat(x), splat(x)}; }
inline f16 fma16(f16 a, f16 b, f16 c) { return {fmadd(a.low, b.low, c.low), fmadd(a.high, b.high, c.high)}; }
inline f16 add16(f16 a, f16 b) { return {a.low + b.low, a.high + b.high}; }
inline f16 sub16(f16 a, f16 b) { return {a.low - b.low, a.high - b.high}; }
inline f16 mul16(f16 a, f16 b) { return {a.low * b.low, a.high * b.high}; }
#endif

// Memory in which no vector lies across two cache lines: those cost two loads each.
template <class T>
struct CacheLines {
  using value_type = T;
  CacheLines() = default;
  template <class U>
  CacheLines(const CacheLines<U>&) {}
  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{64})); }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t{64}); }
  bool operator==(const CacheLines&) const { return true; }
  bool operator!=(const CacheLines&) const { return false; }
};
using Floats = std::vector<float, CacheLines<float>>;

// Weights as they are stored; load16 widens sixteen of them, which changes no value.
struct bfloat {
  uint16_t bits;
};
struct half {
  uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(bfloat x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}
inline float widen(half x) {
#ifdef __F16C__
  return _cvtsh_ss(x.bits);
#else
  const uint32_t magnitude = x.bits & 0x7fffu, sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  float out;
  if (magnitude < 0x400u) {
    out = static_cast<float>(magnitude) * 5.9604644775390625e-8f;  // below the smallest normal number: units of 2^-24
  } else {
    const uint32_t bits = magnitude >= 0x7c00u ? 0x7f800000u | (magnitude & 0x3ffu) << 13 : (magnitude << 13) + (112u << 23);
    std::memcpy(&out, &bits, sizeof out);
  }
  uint32_t bits;
  std::memcpy(&bits, &out, sizeof bits);
  bits |= sign;
  std::memcpy(&out, &bits, sizeof out);
  return out;
#endif
}

// To the nearest, of two equally near to the even one, as torch rounds.
inline void narrow(float x, float& to) { to = x; }
inline void narrow(float x, bfloat& to) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  to.bits = x != x ? 0x7fc0u : static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
inline void narrow(float x, half& to) {
#ifdef __F16C__
  to.bits = _cvtss_sh(x, 0);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t out;
  if (magnitude > 0x7f800000u) {
    out = 0x7e00u;
  } else if (magnitude >= 0x47800000u) {
    out = 0x7c00u;
  } else if (magnitude < 0x38800000u) {
    // Below the smallest normal number: adding 1/2 leaves units of 2^-24 in the low bits, rounded.
    float sum;
    std::memcpy(&sum, &magnitude, sizeof sum);
    sum += 0.5f;
    std::memcpy(&out, &sum, sizeof out);
    out -= 0x3f000000u;
  } else {
    out = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1)) >> 13;
  }
  to.bits = static_cast<uint16_t>(out | (bits >> 16 & 0x8000u));
#endif
}

#ifdef __AVX512F__
// GCC 12 makes five instructions of __builtin_convertvector where there is one.
inline f16 load16(const bfloat* p) {
  const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_maskz_cvtepu16_epi32(0xffff, narrow), 16))};
}
inline f16 load16(const half* p) { return {_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
#else
inline f8 widen8(const bfloat* p) {
  typedef uint16_t h8 __attribute__((vector_size(16)));
  typedef uint32_t w8 __attribute__((vector_size(32)));
  h8 narrow;
  std::memcpy(&narrow, p, sizeof narrow);
  return reinterpret_cast<f8>(__builtin_convertvector(narrow, w8) << 16);
}
inline f8 widen8(const half* p) {
#ifdef __F16C__
  return reinterpret_cast<f8>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  return f8{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3]), widen(p[4]), widen(p[5]), widen(p[6]), widen(p[7])};
#endif
}
inline f16 load16(const bfloat* p) { return {widen8(p), widen8(p + 8)}; }
inline f16 load16(const half* p) {
  return {widen8(p), widen8(p + 8)};
}
#endif

// Sixteen words of two numbers each, in two parts: those of the lower halves, and those of the upper halves.
inline void widen_pairs(const bfloat* from, float* lower, float* upper) {
  for (int i = 0; i < 16; ++i) {
    uint32_t word;
    std::memcpy(&word, from + 2 * i, sizeof word);
    const uint32_t low = word << 16, high = word & 0xffff0000u;
    std::memcpy(lower + i, &low, sizeof low);
    std::memcpy(upper + i, &high, sizeof high);
  }
}
inline void widen_pairs(const half* from, float* lower, float* upper) {
#ifdef __AVX512F__
  const __m512i words = _mm512_loadu_si512(from);
  _mm512_storeu_ps(lower, _mm512_maskz_cvtph_ps(0xffff, _mm512_maskz_cvtepi32_epi16(0xffff, words)));
  _mm512_storeu_ps(upper, _mm512_maskz_cvtph_ps(0xffff, _mm512_maskz_cvtepi32_epi16(0xffff, _mm512_srli_epi32(words, 16))));
#else
  half halves[2][16];
  for (int i = 0; i < 16; ++i) halves[0][i] = from[2 * i], halves[1][i] = from[2 * i + 1];
  store16(lower, load16(halves[0]));
  store16(upper, load16(halves[1]));
#endif
}

}  // namespace

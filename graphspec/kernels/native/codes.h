// Weights as they are stored, and the float32 they stand for: sixteen outputs of a channel at a time, exact.
//
// A format reads a channel of a block of 32 outputs in halves: HALF 0 the first sixteen, HALF 1 the others. STEP: bytes of a channel.
// graphspec/kernels/native/__init__.py writes what is read here.

#pragma once

#include <cstdint>
#include <cstring>

#include "product.h"
#include "simd.h"

namespace {

constexpr int64_t HALF_BLOCK = 16;

// Sixteen integers of 32 bits.
#ifdef __AVX512F__
typedef int32_t n16 __attribute__((vector_size(64)));
inline n16 words16(const char* p) { return reinterpret_cast<n16>(_mm512_loadu_si512(p)); }
inline n16 unsigned16(const char* p) {
  return reinterpret_cast<n16>(_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline n16 signed16(const char* p) {
  return reinterpret_cast<n16>(_mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline f16 floats_of(n16 x) { return {_mm512_maskz_cvtepi32_ps(0xffff, reinterpret_cast<__m512i>(x))}; }
inline f16 bits_as_floats(n16 x) { return {reinterpret_cast<__m512>(x)}; }
#else
struct n16 {
  i8 low, high;
};
inline n16 operator<<(n16 x, int by) { return {x.low << by, x.high << by}; }
inline n16 operator>>(n16 x, int by) { return {x.low >> by, x.high >> by}; }
inline n16 operator&(n16 x, int32_t mask) { return {x.low & mask, x.high & mask}; }
inline n16 words16(const char* p) {
  // Half by half: as one object GCC copies it through the stack in other pieces than it reads.
  i8 low, high;
  std::memcpy(&low, p, sizeof low);
  std::memcpy(&high, p + sizeof low, sizeof high);
  return {low, high};
}
// Eight bytes, widened; T is their type.
template <class T>
inline i8 widened8(const char* p) {
#ifdef __AVX2__
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return reinterpret_cast<i8>(T(-1) < T(0) ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
  typedef T b8 __attribute__((vector_size(8)));
  b8 bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, i8);
#endif
}
inline n16 unsigned16(const char* p) { return {widened8<uint8_t>(p), widened8<uint8_t>(p + 8)}; }
inline n16 signed16(const char* p) { return {widened8<int8_t>(p), widened8<int8_t>(p + 8)}; }
inline f16 floats_of(n16 x) { return {__builtin_convertvector(x.low, f8), __builtin_convertvector(x.high, f8)}; }
inline f16 bits_as_floats(n16 x) { return {reinterpret_cast<f8>(x.low), reinterpret_cast<f8>(x.high)}; }
#endif

struct Float32 {
  static constexpr int STEP = 128;
  template <int HALF>
  static f16 read(const char* p) {
    return load16(reinterpret_cast<const float*>(p) + HALF * HALF_BLOCK);
  }
};

struct Float16 {
  static constexpr int STEP = 64;
  template <int HALF>
  static f16 read(const char* p) {
    return load16(reinterpret_cast<const half*>(p) + HALF * HALF_BLOCK);
  }
};

// Sixteen words: the lower half of a word is of the first sixteen outputs, the upper half of the others.
struct Bfloat16 {
  static constexpr int STEP = 64;
  template <int HALF>
  static f16 read(const char* p) {
    const n16 words = words16(p);
    return bits_as_floats(HALF == 0 ? words << 16 : words & static_cast<int32_t>(0xffff0000));
  }
};

// Sixteen bytes, halved likewise.
template <int HALF>
inline n16 nibbles(const char* p) {
  const n16 bytes = unsigned16(p);
#ifdef __AVX512F__
  // A look-up reads the lower four bits only.
  return HALF == 0 ? bytes : bytes >> 4;
#else
  return HALF == 0 ? bytes & 15 : bytes >> 4;
#endif
}

template <int ZERO>
struct Integer4 {
  static constexpr int STEP = 16;
  template <int HALF>
  static f16 read(const char* p) {
#ifdef __AVX512F__
    const __m512 values = _mm512_setr_ps(0 - ZERO, 1 - ZERO, 2 - ZERO, 3 - ZERO, 4 - ZERO, 5 - ZERO, 6 - ZERO, 7 - ZERO, 8 - ZERO, 9 - ZERO, 10 - ZERO,
                                         11 - ZERO, 12 - ZERO, 13 - ZERO, 14 - ZERO, 15 - ZERO);
    return {_mm512_maskz_permutexvar_ps(0xffff, reinterpret_cast<__m512i>(nibbles<HALF>(p)), values)};
#else
    const f16 value = floats_of(nibbles<HALF>(p));
    return ZERO == 0 ? value : sub16(value, splat16(ZERO));
#endif
  }
};

struct E2m1 {
  static constexpr int STEP = 16;
  template <int HALF>
  static f16 read(const char* p) {
#ifdef __AVX512F__
    const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
    return {_mm512_maskz_permutexvar_ps(0xffff, reinterpret_cast<__m512i>(nibbles<HALF>(p)), values)};
#else
    const n16 code = nibbles<HALF>(p);
    return {value(code.low), value(code.high)};
#endif
  }
#ifndef __AVX512F__
  static f8 value(i8 code) {
    const f8 magnitudes = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    return reinterpret_cast<f8>(reinterpret_cast<i8>(__builtin_shuffle(magnitudes, code & 7)) | (code & 8) << 28);
  }
#endif
};

struct Int8 {
  static constexpr int STEP = 32;
  template <int HALF>
  static f16 read(const char* p) {
    return floats_of(signed16(p + HALF * HALF_BLOCK));
  }
};

struct Uint8 {
  static constexpr int STEP = 32;
  template <int HALF>
  static f16 read(const char* p) {
    return floats_of(unsigned16(p + HALF * HALF_BLOCK));
  }
};

// As float16, whose bits are those of the code moved: 2^-8 of the value. Scales hold the factor.
struct E4m3 {
  static constexpr int STEP = 32;
  template <int HALF>
  static f16 read(const char* p) {
    p += HALF * HALF_BLOCK;
    half halves[HALF_BLOCK];
#ifdef __AVX2__
    const __m256i code = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 8);
    const __m256i moved = _mm256_and_si256(_mm256_srai_epi16(code, 1), _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
#ifdef __AVX512F__
    return {_mm512_maskz_cvtph_ps(0xffff, moved)};
#endif
    std::memcpy(halves, &moved, sizeof moved);
#else
    for (int i = 0; i < HALF_BLOCK; ++i) {
      const uint16_t code = static_cast<uint8_t>(p[i]);
      halves[i].bits = static_cast<uint16_t>((code & 0x7f) << 7 | (code & 0x80) << 8);
    }
#endif
    return load16(halves);
  }
};

// What a segment's blocks have in common.
struct Format {
  explicit Format(const graphspec::Segment& segment, int64_t channels, int64_t step, int64_t tables) : channels(channels), group(segment.group), scale(segment.scale) {
    const int64_t groups = (channels + group - 1) / group;
    scale_bytes = scale == graphspec::FLOAT32 ? 4 * BLOCK : 2 * BLOCK;
    block_bytes = channels * step + groups * scale_bytes * tables;
  }
  int64_t channels, group, scale, scale_bytes, block_bytes;
};

inline f16 load_scale(const char* p, int64_t code) {
  if (code == graphspec::FLOAT16) return load16(reinterpret_cast<const half*>(p));
  if (code == graphspec::BFLOAT16) return load16(reinterpret_cast<const bfloat*>(p));
  return load16(reinterpret_cast<const float*>(p));
}

}  // namespace

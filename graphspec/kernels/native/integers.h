// Codes as unsigned bytes, four channels at a time, and their dot products with activations of 8 bits: sixteen outputs at once, exact in 32 bits.
//
// A format reads four channels of a block of 32 outputs: w[0] for the first sixteen outputs, w[1] for the others. A byte stands for
// FACTOR * (byte - BIAS). STEP: bytes of a channel.

#pragma once

#include <cstdint>
#include <cstring>

#include "codes.h"

namespace {

// 64 bytes: the four channels of an output lie next to each other.
#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
struct b64 {
  __m512i v;
};
inline __m512i places(const uint8_t (&channel)[4]) {
  // Lane i holds byte i of each channel, which begins at `channel`.
  const __m512i lanes = _mm512_setr_epi32(0x00000000, 0x01010101, 0x02020202, 0x03030303, 0x04040404, 0x05050505, 0x06060606, 0x07070707, 0x08080808,
                                          0x09090909, 0x0a0a0a0a, 0x0b0b0b0b, 0x0c0c0c0c, 0x0d0d0d0d, 0x0e0e0e0e, 0x0f0f0f0f);
  return _mm512_or_si512(lanes, _mm512_set1_epi32(channel[0] | channel[1] << 8 | channel[2] << 16 | channel[3] << 24));
}
// Sixteen bytes of each channel; `step` bytes, 16 or 32, lie between channels.
template <int STEP, int HALF>
inline b64 four_channels(const char* p) {
  if (STEP == 16) return {_mm512_permutexvar_epi8(places({0, 16, 32, 48}), _mm512_loadu_si512(p))};
  constexpr uint8_t at = HALF * HALF_BLOCK;
  return {_mm512_permutex2var_epi8(_mm512_loadu_si512(p), places({at, at + 32, at + 64, at + 96}), _mm512_loadu_si512(p + 64))};
}
inline b64 low_nibbles(b64 x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
inline b64 high_nibbles(b64 x) { return {_mm512_and_si512(_mm512_srli_epi16(x.v, 4), _mm512_set1_epi8(15))}; }
inline b64 flipped(b64 x) { return {_mm512_xor_si512(x.v, _mm512_set1_epi8(-128))}; }
inline b64 looked_up(b64 x, const uint8_t (&table)[16]) {
  __m128i entries;
  std::memcpy(&entries, table, sizeof entries);
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), x.v)};
}
inline n16 all16(int32_t x) { return reinterpret_cast<n16>(_mm512_set1_epi32(x)); }
// sum + the products of each output's four bytes, unsigned, with the four signed ones of x. BITS: of the bytes.
template <int BITS>
inline n16 dot4(n16 sum, b64 w, int32_t x) {
  return reinterpret_cast<n16>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), w.v, _mm512_set1_epi32(x)));
}

#else
#ifdef __AVX512F__
// The instructions for bytes are missing: halves of 256 bits.
struct halves16 {
  __m256i low, high;
};
inline halves16 halves_of(n16 x) {
  const __m512i v = reinterpret_cast<__m512i>(x);
  return {_mm512_maskz_extracti64x4_epi64(0xff, v, 0), _mm512_maskz_extracti64x4_epi64(0xff, v, 1)};
}
inline n16 joined(halves16 x) { return reinterpret_cast<n16>(_mm512_maskz_inserti64x4(0xff, _mm512_zextsi256_si512(x.low), x.high, 1)); }
inline n16 all16(int32_t x) { return reinterpret_cast<n16>(_mm512_set1_epi32(x)); }
#elif defined(__AVX2__)
struct halves16 {
  __m256i low, high;
};
inline halves16 halves_of(n16 x) { return {reinterpret_cast<__m256i>(x.low), reinterpret_cast<__m256i>(x.high)}; }
inline n16 joined(halves16 x) { return {reinterpret_cast<i8>(x.low), reinterpret_cast<i8>(x.high)}; }
inline n16 all16(int32_t x) { return {i8{} + x, i8{} + x}; }
#else
inline n16 all16(int32_t x) { return {i8{} + x, i8{} + x}; }
#endif

#ifdef __AVX2__
struct b64 {
  __m256i low, high;
};
template <int STEP, int HALF>
inline b64 four_channels(const char* p) {
  __m128i channel[4];
  for (int c = 0; c < 4; ++c) channel[c] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + c * STEP + HALF * HALF_BLOCK));
  const __m128i first_low = _mm_unpacklo_epi8(channel[0], channel[1]), first_high = _mm_unpackhi_epi8(channel[0], channel[1]);
  const __m128i last_low = _mm_unpacklo_epi8(channel[2], channel[3]), last_high = _mm_unpackhi_epi8(channel[2], channel[3]);
  return {_mm256_set_m128i(_mm_unpackhi_epi16(first_low, last_low), _mm_unpacklo_epi16(first_low, last_low)),
          _mm256_set_m128i(_mm_unpackhi_epi16(first_high, last_high), _mm_unpacklo_epi16(first_high, last_high))};
}
inline b64 low_nibbles(b64 x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.low, mask), _mm256_and_si256(x.high, mask)};
}
inline b64 high_nibbles(b64 x) { return low_nibbles({_mm256_srli_epi16(x.low, 4), _mm256_srli_epi16(x.high, 4)}); }
inline b64 flipped(b64 x) {
  const __m256i sign = _mm256_set1_epi8(-128);
  return {_mm256_xor_si256(x.low, sign), _mm256_xor_si256(x.high, sign)};
}
inline b64 looked_up(b64 x, const uint8_t (&table)[16]) {
  __m128i entries;
  std::memcpy(&entries, table, sizeof entries);
  const __m256i both = _mm256_broadcastsi128_si256(entries);
  return {_mm256_shuffle_epi8(both, x.low), _mm256_shuffle_epi8(both, x.high)};
}
template <int BITS>
inline __m256i dot4(__m256i sum, __m256i w, __m256i x) {
#if defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(sum, w, x);
#elif defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return _mm256_dpbusd_epi32(sum, w, x);
#else
  // Sums of two products must fit into 16 bits: bytes of 8 bits go in two pieces.
  if (BITS <= 5) return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
  const __m256i mask = _mm256_set1_epi8(15), low = _mm256_and_si256(w, mask), high = _mm256_and_si256(_mm256_srli_epi16(w, 4), mask);
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(low, x), _mm256_set1_epi16(1)));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(high, x), _mm256_set1_epi16(16)));
#endif
}
template <int BITS>
inline n16 dot4(n16 sum, b64 w, int32_t x) {
  const halves16 sums = halves_of(sum);
  const __m256i four = _mm256_set1_epi32(x);
  return joined({dot4<BITS>(sums.low, w.low, four), dot4<BITS>(sums.high, w.high, four)});
}

#else
struct b64 {
  uint8_t v[64];
};
template <int STEP, int HALF>
inline b64 four_channels(const char* p) {
  b64 out;
  for (int i = 0; i < 64; ++i) out.v[i] = static_cast<uint8_t>(p[i % 4 * STEP + HALF * HALF_BLOCK + i / 4]);
  return out;
}
template <class F>
inline b64 each_byte(b64 x, F f) {
  for (auto& byte : x.v) byte = static_cast<uint8_t>(f(byte));
  return x;
}
inline b64 low_nibbles(b64 x) {
  return each_byte(x, [](int byte) { return byte & 15; });
}
inline b64 high_nibbles(b64 x) {
  return each_byte(x, [](int byte) { return byte >> 4; });
}
inline b64 flipped(b64 x) {
  return each_byte(x, [](int byte) { return byte ^ 0x80; });
}
inline b64 looked_up(b64 x, const uint8_t (&table)[16]) {
  return each_byte(x, [&](int byte) { return table[byte]; });
}
template <int BITS>
inline n16 dot4(n16 sum, b64 w, int32_t x) {
  int8_t four[4];
  std::memcpy(four, &x, sizeof four);
  for (int i = 0; i < 16; ++i) {
    int32_t total = 0;
    for (int c = 0; c < 4; ++c) total += w.v[4 * i + c] * four[c];
    if (i < 8)
      sum.low[i] += total;
    else
      sum.high[i - 8] += total;
  }
  return sum;
}
#endif
#endif

template <int ZERO>
struct IntegerBytes4 {
  static constexpr int STEP = 16, BITS = 4, BIAS = ZERO;
  static constexpr float FACTOR = 1.0f;
  static void read(const char* p, b64* w) {
    const b64 both = four_channels<STEP, 0>(p);
    w[0] = low_nibbles(both);
    w[1] = high_nibbles(both);
  }
};

// Twice the values and 12 more, which are not negative.
struct E2m1Bytes {
  static constexpr int STEP = 16, BITS = 5, BIAS = 12;
  static constexpr float FACTOR = 0.5f;
  static void read(const char* p, b64* w) {
    constexpr uint8_t VALUES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    const b64 both = four_channels<STEP, 0>(p);
    w[0] = looked_up(low_nibbles(both), VALUES);
    w[1] = looked_up(high_nibbles(both), VALUES);
  }
};

template <bool SIGNED>
struct IntegerBytes8 {
  static constexpr int STEP = 32, BITS = 8, BIAS = SIGNED ? 128 : 0;
  static constexpr float FACTOR = 1.0f;
  static void read(const char* p, b64* w) {
    w[0] = four_channels<STEP, 0>(p);
    w[1] = four_channels<STEP, 1>(p);
    if (SIGNED) w[0] = flipped(w[0]), w[1] = flipped(w[1]);
  }
};

}  // namespace

// What rounded.h declares.

#include "rounded.h"

#include <cstring>
#include <limits>

#include "integers.h"

namespace graphspec {
namespace {

// Rows handled together: their integer sums fill the registers.
#ifdef __AVX512F__
constexpr int TILE = 8;
#else
constexpr int TILE = 2;
#endif
constexpr int WIDE = GROUP * BLOCK;

// 32 channels as integers from -127 to 127, to the nearest, of two equally near to the even one, and the sum of each half. Returns the scale.
float round32(const float* x, int8_t* to, int32_t* sums) {
#ifdef __AVX512F__
  const __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + 16);
  // Compared as integers, so that NaN is the largest.
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const __m512i both = _mm512_maskz_max_epi32(0xffff, _mm512_and_si512(_mm512_castps_si512(low), magnitude),
                                              _mm512_and_si512(_mm512_castps_si512(high), magnitude));
  const int32_t largest = _mm512_reduce_max_epi32(both);
#else
  int32_t bits[ROUNDED], largest = 0;
  std::memcpy(bits, x, sizeof bits);
  for (int32_t b : bits) largest = std::max(largest, b & 0x7fffffff);
#endif
  float most;
  std::memcpy(&most, &largest, sizeof most);
  const float by = 127.0f / most;
  // Numbers too small for a scale are zeros. Those that are none make a scale that is none, and products with it.
  if (!(most <= std::numeric_limits<float>::max() && by <= std::numeric_limits<float>::max())) {
    std::memset(to, 0, ROUNDED);
    sums[0] = sums[1] = 0;
    return most / 127.0f;
  }
#ifdef __AVX512F__
  for (int half = 0; half < 2; ++half) {
    const __m512i rounded = _mm512_maskz_cvtps_epi32(0xffff, _mm512_mul_ps(half == 0 ? low : high, _mm512_set1_ps(by)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16 * half), _mm512_maskz_cvtepi32_epi8(0xffff, rounded));
    sums[half] = _mm512_reduce_add_epi32(rounded);
  }
#else
  // Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits.
  for (int i = 0; i < ROUNDED; ++i) {
    const float rounded = x[i] * by + 12582912.0f;
    std::memcpy(&bits[i], &rounded, sizeof rounded);
    bits[i] -= 0x4b400000;
  }
  for (int half = 0; half < 2; ++half) {
    sums[half] = 0;
    for (int i = 16 * half; i < 16 * half + 16; ++i) sums[half] += bits[i];
  }
  for (int i = 0; i < ROUNDED; ++i) to[i] = static_cast<int8_t>(bits[i]);
#endif
  return most / 127.0f;
}

// out[ROWS][32], row stride WIDE. RUN: channels whose products are summed as integers.
template <class C, Offset OFFSET, int RUN, int ROWS>
[[gnu::noinline]] void tile(const Format& format, const char* weight, const RoundedRows& x, int64_t row, float* out, int64_t ahead) {
  const Format f = format;
  const int64_t runs = f.channels / RUN, scales = f.channels / ROUNDED;
  const int8_t* values = x.values.data() + row * f.channels;
  const float* x_scale = x.scale.data() + row * scales;
  const int32_t* x_sum = (RUN == ROUNDED ? x.sums.data() : x.half_sums.data()) + row * runs;
  f16 sum[ROWS][2];
  for (auto& halves : sum) halves[0] = halves[1] = splat16(0.0f);
  for (int64_t k = 0; k < f.channels;) {
    const int64_t end = std::min(f.channels, k + f.group);
    const char* tables = weight;
    weight += (OFFSET == NONE ? 1 : 2) * f.scale_bytes;
    for (; k < end; k += RUN) {
      n16 dots[ROWS][2];
      for (int r = 0; r < ROWS; ++r) dots[r][0] = dots[r][1] = all16(-C::BIAS * x_sum[r * runs + k / RUN]);
#pragma GCC unroll 4
      for (int c = 0; c < RUN; c += 4) {
        __builtin_prefetch(weight + ahead);
        if (C::STEP == 32) __builtin_prefetch(weight + ahead + 64);
        b64 w[2];
        C::read(weight, w);
        weight += 4 * C::STEP;
        for (int r = 0; r < ROWS; ++r) {
          int32_t four;
          std::memcpy(&four, values + r * f.channels + k + c, sizeof four);
          for (int half = 0; half < 2; ++half) dots[r][half] = dot4<C::BITS>(dots[r][half], w[half], four);
        }
      }
      for (int half = 0; half < 2; ++half) {
        const f16 scale = load_scale(tables + half * (f.scale_bytes / 2), f.scale);
        const f16 offset = OFFSET == NONE ? scale : load_scale(tables + f.scale_bytes + half * (f.scale_bytes / 2), f.scale);
        for (int r = 0; r < ROWS; ++r) {
          const f16 own_sum = splat16(static_cast<float>(x_sum[r * runs + k / RUN]));
          f16 v = floats_of(dots[r][half]);
          if (C::FACTOR != 1.0f) v = mul16(v, splat16(C::FACTOR));
          if (OFFSET == ZERO) v = sub16(v, mul16(offset, own_sum));
          v = mul16(v, scale);
          if (OFFSET == MINIMUM) v = fma16(offset, own_sum, v);
          sum[r][half] = fma16(splat16(x_scale[r * scales + k / ROUNDED]), v, sum[r][half]);
        }
      }
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int half = 0; half < 2; ++half) store16(out + r * WIDE + half * HALF_BLOCK, sum[r][half]);
}

template <class C, Offset OFFSET, int RUN>
void block_product(const Format& f, const char* weight, const RoundedRows& x, int64_t row, int rows, float* out, int64_t ahead) {
  switch (rows) {
    case 1: return tile<C, OFFSET, RUN, 1>(f, weight, x, row, out, ahead);
#ifdef __AVX512F__
    case 2: return tile<C, OFFSET, RUN, 2>(f, weight, x, row, out, ahead);
    case 3: return tile<C, OFFSET, RUN, 3>(f, weight, x, row, out, ahead);
    case 4: return tile<C, OFFSET, RUN, 4>(f, weight, x, row, out, ahead);
    case 5: return tile<C, OFFSET, RUN, 5>(f, weight, x, row, out, ahead);
    case 6: return tile<C, OFFSET, RUN, 6>(f, weight, x, row, out, ahead);
    case 7: return tile<C, OFFSET, RUN, 7>(f, weight, x, row, out, ahead);
#endif
    default: return tile<C, OFFSET, RUN, TILE>(f, weight, x, row, out, ahead);
  }
}

template <class C, Offset OFFSET, int RUN>
void product_of(const Segment& segment, const char* weight, int64_t from, int64_t first, int64_t last, const RoundedRows& x, int64_t rows,
                const Finish& finish) {
  const Format f(segment, x.channels, C::STEP, OFFSET == NONE ? 1 : 2);
  in_tiles<TILE>(segment, from, first, last, rows, finish, [&](int64_t block, int blocks, int64_t row, int count, float* out, int64_t ahead) {
    for (int b = 0; b < blocks; ++b) block_product<C, OFFSET, RUN>(f, weight + (block + b) * f.block_bytes, x, row, count, out + b * BLOCK, ahead);
  });
}

template <class C, Offset OFFSET, class... Rest>
void with_run(const Segment& segment, const Rest&... rest) {
  if (segment.group % ROUNDED == 0) return product_of<C, OFFSET, ROUNDED>(segment, rest...);
  product_of<C, OFFSET, ROUNDED / 2>(segment, rest...);
}

template <class C, class... Rest>
void with_offset(const Segment& segment, const Rest&... rest) {
  switch (segment.offset) {
    case NONE: return with_run<C, NONE>(segment, rest...);
    case ZERO: return with_run<C, ZERO>(segment, rest...);
    default: return with_run<C, MINIMUM>(segment, rest...);
  }
}

}  // namespace

void RoundedRows::round(const float* x, int64_t stride, int64_t rows, int64_t count) {
  channels = count;
  const auto grow = [](auto& v, int64_t size) {
    if (static_cast<int64_t>(v.size()) < size) v.resize(size);
  };
  grow(values, rows * channels);
  grow(scale, rows * channels / ROUNDED);
  grow(sums, rows * channels / ROUNDED);
  grow(half_sums, 2 * rows * channels / ROUNDED);
  int64_t group = 0;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t k = 0; k < channels; k += ROUNDED, ++group) {
      int32_t* halves = half_sums.data() + 2 * group;
      scale[group] = round32(x + row * stride + k, values.data() + row * channels + k, halves);
      sums[group] = halves[0] + halves[1];
    }
}

void rounded_product(const Segment& segment, const char* weight, int64_t from, int64_t first, int64_t last, const RoundedRows& x, int64_t rows,
                     const Finish& finish) {
  const auto run = [&](auto code) { with_offset<decltype(code)>(segment, weight, from, first, last, x, rows, finish); };
  switch (segment.code) {
    case INT4: return run(IntegerBytes4<8>());
    case UINT4: return run(IntegerBytes4<0>());
    case E2M1: return run(E2m1Bytes());
    case INT8: return run(IntegerBytes8<true>());
    default: return run(IntegerBytes8<false>());
  }
}

}  // namespace graphspec

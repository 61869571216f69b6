// Products of bfloat16 with activations in bfloat16, which rounded.h declares.
//
// A block of 32 outputs is stored pair of channels after pair of channels: sixteen words of the first sixteen outputs, then those of the others. The
// lower half of a word is of the even channel. One instruction of AVX512_BF16 multiplies and adds both channels of sixteen outputs, the odd one first.
// Elsewhere two fused multiply-adds do, with the same bits unless a number is smaller than 2^-126, which that instruction takes for zero.

#include <cstring>

#include "codes.h"
#include "rounded.h"

namespace graphspec {
namespace {

// Rows, and halves of a block, handled together: their sums fill the registers.
#ifdef __AVX512F__
constexpr int TILE = 8, HALVES = 2;
#else
constexpr int TILE = 4, HALVES = 1;
#endif
constexpr int WIDE = GROUP * BLOCK;
constexpr int64_t STEP = 4 * BLOCK;  // bytes of a pair

inline f16 dot2(f16 sum, n16 w, uint32_t x) {
#ifdef __AVX512BF16__
  return {_mm512_dpbf16_ps(sum.v, (__m512bh)w, (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(x)))};
#else
  const uint32_t halves[2] = {x & 0xffff0000u, x << 16};
  float odd, even;
  std::memcpy(&odd, halves, sizeof odd);
  std::memcpy(&even, halves + 1, sizeof even);
  sum = fma16(bits_as_floats(w & static_cast<int32_t>(0xffff0000)), splat16(odd), sum);
  return fma16(bits_as_floats(w << 16), splat16(even), sum);
#endif
}

// out[ROWS][HALVES * 16], row stride WIDE.
template <int ROWS>
[[gnu::noinline]] void tile(const char* weight, const uint16_t* x, int64_t pairs, float* out, int64_t ahead) {
  f16 sum[ROWS][HALVES];
  for (auto& row : sum)
    for (auto& s : row) s = splat16(0.0f);
#pragma GCC unroll 2
  for (int64_t p = 0; p < pairs; ++p, weight += STEP) {
    n16 w[HALVES];
    for (int half = 0; half < HALVES; ++half) {
      __builtin_prefetch(weight + ahead + half * STEP / 2);
      w[half] = words16(weight + half * STEP / 2);
    }
    for (int r = 0; r < ROWS; ++r) {
      uint32_t pair;
      std::memcpy(&pair, x + 2 * (r * pairs + p), sizeof pair);
      for (int half = 0; half < HALVES; ++half) sum[r][half] = dot2(sum[r][half], w[half], pair);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int half = 0; half < HALVES; ++half) store16(out + r * WIDE + half * HALF_BLOCK, sum[r][half]);
}

void rows_product(const char* weight, const uint16_t* x, int64_t pairs, int rows, float* out, int64_t ahead) {
  switch (rows) {
    case 1: return tile<1>(weight, x, pairs, out, ahead);
    case 2: return tile<2>(weight, x, pairs, out, ahead);
    case 3: return tile<3>(weight, x, pairs, out, ahead);
#ifdef __AVX512F__
    case 4: return tile<4>(weight, x, pairs, out, ahead);
    case 5: return tile<5>(weight, x, pairs, out, ahead);
    case 6: return tile<6>(weight, x, pairs, out, ahead);
    case 7: return tile<7>(weight, x, pairs, out, ahead);
#endif
    default: return tile<TILE>(weight, x, pairs, out, ahead);
  }
}

}  // namespace

void PairedRows::round(const float* x, int64_t stride, int64_t rows, int64_t channels) {
  pairs = (channels + 1) / 2;
  if (static_cast<int64_t>(values.size()) < 2 * rows * pairs) values.resize(2 * rows * pairs);
  for (int64_t row = 0; row < rows; ++row) {
    const float* from = x + row * stride;
    uint16_t* to = values.data() + 2 * row * pairs;
    for (int64_t k = 0; k < channels; ++k) {
      bfloat rounded;
      narrow(from[k], rounded);
      to[k] = rounded.bits;
    }
    if (channels % 2 == 1) to[channels] = 0;
  }
}

void paired_product(const Segment& segment, const char* weight, int64_t from, int64_t first, int64_t last, const PairedRows& x, int64_t rows,
                    const Finish& finish) {
  in_tiles<TILE>(segment, from, first, last, rows, finish, [&](int64_t block, int blocks, int64_t row, int count, float* out, int64_t ahead) {
    for (int half = 0; half < 2 * blocks; half += HALVES) {
      const char* begin = weight + (block + half / 2) * x.pairs * STEP + half % 2 * (STEP / 2);
      rows_product(begin, x.values.data() + 2 * row * x.pairs, x.pairs, count, out + half * HALF_BLOCK, ahead);
    }
  });
}

void take_paired(const char* weight, int64_t channels, int64_t output, float* to) {
  const int64_t pairs = (channels + 1) / 2;
  weight += output / BLOCK * pairs * STEP + output % BLOCK * sizeof(uint32_t);
  for (int64_t k = 0; k < channels; ++k) {
    bfloat value;
    std::memcpy(&value, weight + k / 2 * STEP + k % 2 * sizeof value, sizeof value);
    to[k] = widen(value);
  }
}

}  // namespace graphspec

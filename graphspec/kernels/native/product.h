// Products of a few rows with a packed weight: blocks of 16 outputs, channel after channel, so that weights stream through the cache once and
// every load is whole. Each output is one chain of fused multiply-adds over the channels in order, whatever the number of rows, threads or
// blocks: a row gets the same bits alone and among others, and from weights kept in 16 bits the same as from the float32 they stand for.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "simd.h"

namespace {

constexpr int64_t BLOCK = 16;
constexpr int GROUP = 4;  // blocks handled together
#ifdef __AVX512F__
constexpr int TILE = 8;  // rows handled together
constexpr int blocks_at_once(int rows) { return rows <= 2 ? 4 : 2; }
#else
constexpr int TILE = 6;
constexpr int blocks_at_once(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#endif

constexpr int64_t MANY = 4 * TILE;  // rows from which on weights are widened once, in a buffer

// A packed weight [blocks][channels][16]; the last block is padded with zeros.
struct Matrix {
  const void* data;
  int64_t bits;  // 32: float32; 16: bfloat16; -16: float16
  int64_t channels, blocks;
};

// out[ROWS][BLOCKS * 16], row stride GROUP * 16. AHEAD: the weights that come next are fetched meanwhile. Not inlined: GCC then keeps the sums
// of every size in registers.
template <class W, int ROWS, int BLOCKS, bool AHEAD>
[[gnu::noinline]] void tile(const W* weight, int64_t channels, const float* x, int64_t stride, float* out) {
  f16 sum[ROWS][BLOCKS];
  for (auto& row : sum)
    for (auto& s : row) s = splat16(0.0f);
  for (int64_t k = 0; k < channels; ++k) {
    f16 w[BLOCKS];
    for (int b = 0; b < BLOCKS; ++b) w[b] = load16(weight + (b * channels + k) * BLOCK);
    if (AHEAD)
      for (int b = 0; b < BLOCKS; b += sizeof(float) / sizeof(W)) __builtin_prefetch(weight + ((channels + k) * BLOCKS + b) * BLOCK);
    for (int r = 0; r < ROWS; ++r) {
      const f16 v = splat16(x[r * stride + k]);
      for (int b = 0; b < BLOCKS; ++b) sum[r][b] = fma16(v, w[b], sum[r][b]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int b = 0; b < BLOCKS; ++b) store16(out + r * GROUP * BLOCK + b * BLOCK, sum[r][b]);
}

template <class W, bool AHEAD, int ROWS>
void rows_of_group(const W* weight, int blocks, int64_t channels, const float* x, int64_t stride, float* out) {
  constexpr int MOST = blocks_at_once(ROWS);
  // One or two rows compute nothing that could hide a fetch.
  constexpr bool FETCH = AHEAD && ROWS > 2;
  int b = 0;
  for (; b + MOST <= blocks; b += MOST) tile<W, ROWS, MOST, FETCH>(weight + b * channels * BLOCK, channels, x, stride, out + b * BLOCK);
  for (; b < blocks; ++b) tile<W, ROWS, 1, FETCH>(weight + b * channels * BLOCK, channels, x, stride, out + b * BLOCK);
}

template <class W, bool AHEAD>
void group_product(const W* weight, int blocks, int64_t channels, const float* x, int64_t stride, int rows, float* out) {
  switch (rows) {
    case 1: return rows_of_group<W, AHEAD, 1>(weight, blocks, channels, x, stride, out);
    case 2: return rows_of_group<W, AHEAD, 2>(weight, blocks, channels, x, stride, out);
    case 3: return rows_of_group<W, AHEAD, 3>(weight, blocks, channels, x, stride, out);
    case 4: return rows_of_group<W, AHEAD, 4>(weight, blocks, channels, x, stride, out);
    case 5: return rows_of_group<W, AHEAD, 5>(weight, blocks, channels, x, stride, out);
#ifdef __AVX512F__
    case 6: return rows_of_group<W, AHEAD, 6>(weight, blocks, channels, x, stride, out);
    case 7: return rows_of_group<W, AHEAD, 7>(weight, blocks, channels, x, stride, out);
#endif
    default: return rows_of_group<W, AHEAD, TILE>(weight, blocks, channels, x, stride, out);
  }
}

// Blocks [first, last) of x @ weight^T for `rows` rows of x, handed over in pieces: finish(row, rows, block, blocks, values), where values has
// a row stride of GROUP * 16.
template <class W, class Finish>
void product_of(const W* weight, int64_t channels, int64_t first, int64_t last, const float* x, int64_t stride, int64_t rows, Finish&& finish) {
  static thread_local Floats wide;
  alignas(64) float values[TILE * GROUP * BLOCK];
  // Other cores have just written parts of a short x: request all its lines at once instead of waiting for one after another.
  if (rows <= TILE)
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t k = 0; k < channels; k += BLOCK) __builtin_prefetch(x + row * stride + k);
  for (int64_t block = first; block < last; block += GROUP) {
    const int blocks = static_cast<int>(std::min<int64_t>(GROUP, last - block));
    const W* from = weight + block * channels * BLOCK;
    const bool widened = sizeof(W) < sizeof(float) && rows > MANY;
    if (widened) {
      // From this many rows on, widening the weights once for all rows costs less than the instructions it saves.
      wide.resize(GROUP * channels * BLOCK);
      for (int64_t i = 0; i < blocks * channels; ++i) store16(wide.data() + i * BLOCK, load16(from + i * BLOCK));
    }
    for (int64_t row = 0; row < rows; row += TILE) {
      const int count = static_cast<int>(std::min<int64_t>(TILE, rows - row));
      if (widened)
        group_product<float, false>(static_cast<const float*>(wide.data()), blocks, channels, x + row * stride, stride, count, values);
      else if (row == 0)
        group_product<W, true>(from, blocks, channels, x, stride, count, values);
      else
        group_product<W, false>(from, blocks, channels, x + row * stride, stride, count, values);
      finish(row, count, block, blocks, static_cast<float*>(values));
    }
  }
}

template <class Finish>
void product(const Matrix& m, int64_t first, int64_t last, const float* x, int64_t stride, int64_t rows, Finish&& finish) {
  if (m.bits == 32)
    product_of(static_cast<const float*>(m.data), m.channels, first, last, x, stride, rows, finish);
  else if (m.bits == 16)
    product_of(static_cast<const bfloat*>(m.data), m.channels, first, last, x, stride, rows, finish);
  else
    product_of(static_cast<const half*>(m.data), m.channels, first, last, x, stride, rows, finish);
}

// Blocks per chunk of a product: an equal share for each thread, in whole units of `unit` blocks. Smaller chunks would balance better but cost more:
// each claim moves a cache line between cores.
inline int64_t blocks_per_chunk(int64_t blocks, int threads, int64_t unit = 1) {
  const int64_t units = (blocks + unit - 1) / unit;
  return std::max<int64_t>((units + threads - 1) / threads, 1) * unit;
}

// out = x / rms(x) * weight, `size` channels.
inline void rms_norm(const float* x, const float* weight, float eps, int64_t size, float* out) {
  f8 sum = splat(0.0f);
  int64_t i = 0;
  for (; i + 8 <= size; i += 8) sum = fmadd(load8(x + i), load8(x + i), sum);
  float total = 0.0f;
  for (int j = 0; j < 8; ++j) total += sum[j];
  for (; i < size; ++i) total += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(total / static_cast<float>(size) + eps);
  for (i = 0; i + 8 <= size; i += 8) store8(out + i, load8(x + i) * splat(scale) * load8(weight + i));
  for (; i < size; ++i) out[i] = x[i] * scale * weight[i];
}

}  // namespace

// y = x @ weight^T for a handful of rows, float32. Plain C interface, no dependency but OpenMP.
//
// The weights are packed in blocks of 16 outputs, channel after channel, so that they stream through the cache once and every load is whole.
// Every output is one chain of fused multiply-adds over the channels in order, whatever the number of rows or threads: a row gets the same bits
// alone and among others.

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace {

constexpr int64_t BLOCK = 16;              // outputs per packed block: two vectors
constexpr int64_t PARALLEL_FROM = 1 << 16;  // multiply-adds below which a second thread costs more than it does

void put(float* y, int64_t first, int64_t outputs, f8 low, f8 high) {
  float whole[BLOCK];
  std::memcpy(whole, &low, sizeof low);
  std::memcpy(whole + 8, &high, sizeof high);
  const int64_t left = outputs - first;
  std::memcpy(y + first, whole, sizeof(float) * (left < BLOCK ? left : BLOCK));
}

// ROWS rows of x against BLOCKS neighbouring blocks. Few rows take several blocks at once: one chain of multiply-adds alone would wait for itself.
template <int ROWS, int BLOCKS>
void tile(float* y, const float* x, const float* packed, int64_t block, int64_t channels, int64_t outputs, int64_t x_stride) {
  f8 low[ROWS][BLOCKS] = {}, high[ROWS][BLOCKS] = {};
  const float* w = packed + block * BLOCK * channels;
  for (int64_t k = 0; k < channels; ++k) {
    for (int b = 0; b < BLOCKS; ++b) {
      const f8 w0 = load8(w + b * BLOCK * channels + k * BLOCK), w1 = load8(w + b * BLOCK * channels + k * BLOCK + 8);
      for (int r = 0; r < ROWS; ++r) {
        const f8 v = splat(x[r * x_stride + k]);
        low[r][b] = fma8(v, w0, low[r][b]);
        high[r][b] = fma8(v, w1, high[r][b]);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int b = 0; b < BLOCKS; ++b) put(y + r * outputs, (block + b) * BLOCK, outputs, low[r][b], high[r][b]);
}

template <int BLOCKS>
void rows(float* y, const float* x, const float* packed, int64_t block, int64_t count, int64_t channels, int64_t outputs, int64_t x_stride) {
  int64_t r = 0;
  for (; count - r >= 6; r += 6) tile<6, 1>(y + r * outputs, x + r * x_stride, packed, block, channels, outputs, x_stride);
  float* yr = y + r * outputs;
  const float* xr = x + r * x_stride;
  switch (count - r) {
    case 5: tile<5, 1>(yr, xr, packed, block, channels, outputs, x_stride); break;
    case 4: tile<4, 1>(yr, xr, packed, block, channels, outputs, x_stride); break;
    case 3: tile<3, 1>(yr, xr, packed, block, channels, outputs, x_stride); break;
    case 2: tile<2, 1>(yr, xr, packed, block, channels, outputs, x_stride); break;
    case 1: tile<1, 1>(yr, xr, packed, block, channels, outputs, x_stride); break;
    default: break;
  }
}

}  // namespace

extern "C" {

// packed[ceil(outputs / 16)][channels][16] from weight[outputs][channels]; the last block is padded with zeros.
void graphspec_pack_linear(float* packed, const float* weight, int64_t outputs, int64_t channels) {
  const int64_t blocks = (outputs + BLOCK - 1) / BLOCK;
  for (int64_t b = 0; b < blocks; ++b)
    for (int64_t k = 0; k < channels; ++k)
      for (int64_t j = 0; j < BLOCK; ++j) {
        const int64_t n = b * BLOCK + j;
        packed[(b * channels + k) * BLOCK + j] = n < outputs ? weight[n * channels + k] : 0.0f;
      }
}

// y[count][outputs] = x[count][channels] (row stride x_stride) @ weight^T.
void graphspec_linear(float* y, const float* x, const float* packed, int64_t count, int64_t channels, int64_t outputs, int64_t x_stride, int threads) {
  const int64_t blocks = (outputs + BLOCK - 1) / BLOCK;
  const bool spread = threads > 1 && count * channels * outputs >= PARALLEL_FROM && blocks >= 8;
  if (count == 1) {
    const int64_t quads = blocks / 4;
#pragma omp parallel for num_threads(threads) if (spread) schedule(static)
    for (int64_t q = 0; q < quads; ++q) tile<1, 4>(y, x, packed, q * 4, channels, outputs, x_stride);
    for (int64_t b = quads * 4; b < blocks; ++b) tile<1, 1>(y, x, packed, b, channels, outputs, x_stride);
    return;
  }
#pragma omp parallel for num_threads(threads) if (spread) schedule(static)
  for (int64_t b = 0; b < blocks; ++b) rows<1>(y, x, packed, b, count, channels, outputs, x_stride);
}

}  // extern "C"

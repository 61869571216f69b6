// Products with rounded activations. A row gets the same bits alone and among others, whatever the number of rows, threads or blocks.
//
// To 8 bits, for codes that are integers: groups of 32 channels of a row share a scale, as in llama.cpp's Q8_1. Sums over such a group, or over the part of it
// that shares a scale of the weight, are exact; they are added in float32 in the order of channels. So bits are the same on every machine that has fused
// multiply-adds.
//
// To bfloat16, for weights in bfloat16: each output is one chain of fused multiply-adds over pairs of channels in order, in a pair the odd one first.

#pragma once

#include <cstdint>
#include <vector>

#include "product.h"

namespace graphspec {

constexpr int64_t ROUNDED = 32;  // channels of a row that share a scale

// Rows of activations. A row's scales and sums stand one after the other, those of all rows as well.
struct RoundedRows {
  int64_t channels;
  std::vector<int8_t> values;
  std::vector<float> scale;
  std::vector<int32_t> sums;  // of 32 channels
  std::vector<int32_t> half_sums;  // of 16 channels

  void round(const float* x, int64_t stride, int64_t rows, int64_t channels);
};

// Hands over blocks [first, last) of a segment whose first output is number `from` of the weight, GROUP at a time, in tiles of at most TILE rows of nearly
// equal size: each reads the weights once. multiply(block, blocks, row, count, out, ahead) writes a tile, with a row stride of GROUP * BLOCK; `ahead`: bytes
// from a weight to the one that is fetched meanwhile.
template <int TILE, class F>
void in_tiles(const Segment& segment, int64_t from, int64_t first, int64_t last, int64_t rows, const Finish& finish, F multiply) {
  constexpr int64_t AHEAD = 2048;
  const int64_t tiles = (rows + TILE - 1) / TILE;
  alignas(64) float values[TILE * GROUP * BLOCK];
  for (int64_t block = first; block < last; block += GROUP) {
    const int blocks = static_cast<int>(std::min<int64_t>(GROUP, last - block));
    const int64_t at = block * BLOCK, width = std::min<int64_t>(blocks * BLOCK, segment.outputs - at);
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = rows * t / tiles;
      const int count = static_cast<int>(rows * (t + 1) / tiles - row);
      multiply(block, blocks, row, count, values, t == 0 ? AHEAD : 0);
      finish(row, count, from + at, width, values);
    }
  }
}

// As product() does, of blocks [first, last) of a segment whose first output is number `from` of the weight, and whose codes are integers.
void rounded_product(const Segment& segment, const char* weight, int64_t from, int64_t first, int64_t last, const RoundedRows& x, int64_t rows,
                     const Finish& finish);

// Rows of activations in bfloat16, two channels to a word; an odd number of channels ends with a zero.
struct PairedRows {
  int64_t pairs;
  std::vector<uint16_t> values;

  void round(const float* x, int64_t stride, int64_t rows, int64_t channels);
};

// As rounded_product(), of a segment in bfloat16.
void paired_product(const Segment& segment, const char* weight, int64_t from, int64_t first, int64_t last, const PairedRows& x, int64_t rows,
                    const Finish& finish);

// The weights of one output of such a segment, as float32.
void take_paired(const char* weight, int64_t channels, int64_t output, float* to);

}  // namespace graphspec

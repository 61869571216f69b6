// Products with activations of 8 bits: groups of 32 channels of a row share a scale, as in llama.cpp's Q8_1. Sums over such a group, or over the part of it
// that shares a scale of the weight, are exact; they are added in float32 in the order of channels. So each row gets the same bits alone and among others,
// whatever the number of rows, threads or blocks, and on every machine that has fused multiply-adds.

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

// As product() does, of blocks [first, last) of a segment whose first output is number `from` of the weight, and whose codes are integers.
void rounded_product(const Segment& segment, const char* weight, int64_t from, int64_t first, int64_t last, const RoundedRows& x, int64_t rows,
                     const Finish& finish);

}  // namespace graphspec

// Products of a few rows with a packed weight: blocks of 32 outputs, channel after channel, so that weights stream through the cache once and
// every load is whole. Each output is one chain of fused multiply-adds over the channels in order, whatever the number of rows, threads or
// blocks: a row gets the same bits alone and among others, and from weights kept in 16, 8 or 4 bits the same as from the float32 they stand for.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "simd.h"

namespace {

constexpr int64_t BLOCK = 32;
constexpr int GROUP = 2;  // blocks handed over together

}  // namespace

namespace graphspec {

// How weights are stored. Filled by graphspec/kernels/native/__init__.py, as are the next two.
enum Code : int64_t { SEGMENTS, FLOAT32, BFLOAT16, FLOAT16, INT4, UINT4, E2M1, INT8, UINT8, E4M3 };
// What is done to a code in addition to scaling it. A minimum is added by a fused multiply-add where the scaled code is exact in float32, else apart.
enum Offset : int64_t { NONE, ZERO, MINIMUM, MINIMUM_APART };

// Outputs of one format: [blocks][groups of channels][32 scales, 32 offsets, codes [channels][32]]; the last block is padded.
struct Segment {
  int64_t data;  // bytes from the start of the weight
  int64_t code;
  int64_t scale, offset;  // scale: the Code in which scales and offsets are stored
  int64_t group;  // channels that share a scale; those of FLOAT32, BFLOAT16 and FLOAT16 share none
  int64_t outputs;
  int64_t rounded;  // whether activations are rounded, those for BFLOAT16 to bfloat16 and others to 8 bits: rounded.h
};

// A packed weight. With the code SEGMENTS it begins with their number, the channels and their descriptions; with another it is one segment without scales.
class Matrix {
 public:
  Matrix(const void* data, int64_t code, int64_t channels, int64_t outputs)
      : channels(channels), data_(static_cast<const char*>(data)), one_{0, code, code, NONE, channels, outputs, 0} {
    if (code == SEGMENTS) std::memcpy(&count_, data_, sizeof count_);
    for (int64_t i = 0; i < count_; ++i) blocks += (segment(i).outputs + BLOCK - 1) / BLOCK;
  }
  int64_t segments() const { return count_; }
  const Segment& segment(int64_t i) const {
    return one_.code == SEGMENTS ? reinterpret_cast<const Segment*>(data_ + 2 * sizeof(int64_t))[i] : one_;
  }
  const char* data(int64_t i) const { return data_ + segment(i).data; }

  const int64_t channels;
  int64_t blocks = 0;

 private:
  const char* data_;
  Segment one_;
  int64_t count_ = 1;
};

// A function that takes results: rows [row, row + rows) of outputs [at, at + width), with a row stride of GROUP * BLOCK.
class Finish {
 public:
  template <class F>
  Finish(F& f)
      : object_(&f), call_([](void* object, int64_t row, int rows, int64_t at, int64_t width, const float* values) {
          (*static_cast<F*>(object))(row, rows, at, width, values);
        }) {}
  void operator()(int64_t row, int rows, int64_t at, int64_t width, const float* values) const { call_(object_, row, rows, at, width, values); }

 private:
  void* object_;
  void (*call_)(void*, int64_t, int, int64_t, int64_t, const float*);
};

// Blocks [first, last) of x @ weight^T for `rows` rows of x, handed over in pieces; the blocks of a segment do not reach into the next.
void product(const Matrix& m, int64_t first, int64_t last, const float* x, int64_t stride, int64_t rows, Finish finish);

// The weights of one output, as float32.
void take_output(const Matrix& m, int64_t output, float* to);

}  // namespace graphspec

namespace {

using graphspec::Matrix;

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

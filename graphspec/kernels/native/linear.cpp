// y = norm(x) @ weight^T + bias as an op of its own, float32. Plain C interface; what it computes and in which order stands in product.h.

#include <cstdint>
#include <vector>

#include "call.h"
#include "product.h"
#include "team.h"

namespace {

constexpr int64_t PARALLEL_FROM = 1 << 15;  // multiply-adds below which a second thread costs more than it saves

// Filled by graphspec/kernels/native/__init__.py.
struct Call {
  float* y;
  const float* x;
  const float *bias, *norm;  // may be null
  const char* weight;
  int64_t code, channels, outputs, rows, stride;
  double eps;
};

class Linear final : public graphspec::Program {
 public:
  Linear(const Call& call, float* normed) : call_(call), weight_(call.weight, call.code, call.channels, call.outputs), normed_(normed) {}

  int phases() const override { return 2; }
  void divide(int threads) override { per_chunk_ = blocks_per_chunk(weight_.blocks, threads); }
  int chunks(int phase) const override {
    if (phase == 0) return call_.norm != nullptr && call_.rows > ROWS ? static_cast<int>((call_.rows + ROWS - 1) / ROWS) : 0;
    return static_cast<int>((weight_.blocks + per_chunk_ - 1) / per_chunk_);
  }
  int64_t size() const override { return call_.rows * call_.channels * call_.outputs; }
  void work(int phase, int chunk) override {
    if (phase == 0) return norm_rows(chunk * ROWS, std::min(call_.rows, (chunk + 1) * ROWS), normed_);
    const int64_t channels = call_.channels, first = chunk * per_chunk_, last = std::min(weight_.blocks, first + per_chunk_);
    const float* x = normed_;
    if (call_.norm == nullptr) {
      x = call_.x;
    } else if (call_.rows <= ROWS) {
      static thread_local Floats own;
      if (static_cast<int64_t>(own.size()) < call_.rows * channels) own.resize(call_.rows * channels);
      norm_rows(0, call_.rows, own.data());
      x = own.data();
    }
    auto write = [&](int64_t row, int rows, int64_t at, int64_t width, const float* values) {
      for (int r = 0; r < rows; ++r) {
        float* y = call_.y + (row + r) * call_.outputs + at;
        const float* v = values + r * GROUP * BLOCK;
        if (call_.bias == nullptr)
          std::memcpy(y, v, width * sizeof(float));
        else
          for (int64_t i = 0; i < width; ++i) y[i] = v[i] + call_.bias[at + i];
      }
    };
    graphspec::product(weight_, first, last, x, call_.norm == nullptr ? call_.stride : channels, call_.rows, write);
  }

 private:
  // Rows per chunk of the norm. Up to one chunk of rows, the norm has no phase: each thread normalises them for itself, which is faster than a hand-over.
  static constexpr int64_t ROWS = 16;

  void norm_rows(int64_t first, int64_t last, float* out) const {
    for (int64_t r = first; r < last; ++r)
      rms_norm(call_.x + r * call_.stride, call_.norm, static_cast<float>(call_.eps), call_.channels, out + r * call_.channels);
  }

  const Call& call_;
  const Matrix weight_;
  float* normed_;
  int64_t per_chunk_ = 1;
};

}  // namespace

extern "C" {

void graphspec_linear(const char* fields, int threads) {
  const Call call = graphspec::call_of<Call>(fields);
  const int64_t channels = call.channels;
  static thread_local std::vector<float> normed;
  if (call.norm != nullptr && static_cast<int64_t>(normed.size()) < call.rows * channels) normed.resize(call.rows * channels);
  Linear linear(call, normed.data());
  graphspec::run(linear, call.rows * channels * call.outputs >= PARALLEL_FROM ? threads : 1);
}

}  // extern "C"

// Experts of a mixture, float32. Plain C interface; products and their order stand in product.h. Each expert that a token chose is read once
// for all of its tokens, and the bits of a token's result do not depend on the others.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "call.h"
#include "product.h"
#include "team.h"

namespace {

constexpr int64_t PARALLEL_FROM = 1 << 15;  // multiply-adds below which a second thread costs more than it saves

// Filled by graphspec/kernels/native/experts.py.
struct Call {
  float* out;
  const float* x;
  const int64_t* index;
  const float* weight;
  const char *gate_up, *down;            // one packed weight after the other
  const float *gate_up_bias, *down_bias;  // may be null
  int64_t gate_up_bytes, down_bytes;      // of the weight of one expert
  int64_t tokens, topk, experts, hidden, width, gated, gelu, stride;
  double alpha, limit;
};

// The choices of one expert: places in `Plan::choices`.
struct Chosen {
  int64_t expert, first, count;
};

struct Plan {
  std::vector<Chosen> chosen;
  std::vector<int64_t> choices;  // token * topk + k, expert after expert
  Floats gathered, entered, active, mixed;
};

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

class Experts final : public graphspec::Program {
 public:
  Experts(const Call& call, Plan& plan) : c_(call), plan_(plan), entering_((call.gated ? 2 : 1) * call.width) {
    plan_.chosen.clear();
    plan_.choices.clear();
    const int64_t all = c_.tokens * c_.topk;
    std::vector<int64_t> count(c_.experts + 1, 0);
    for (int64_t i = 0; i < all; ++i)
      if (c_.index[i] >= 0) ++count[c_.index[i] + 1];
    for (int64_t e = 0; e < c_.experts; ++e) {
      count[e + 1] += count[e];
      if (count[e + 1] > count[e]) plan_.chosen.push_back({e, count[e], count[e + 1] - count[e]});
    }
    plan_.choices.resize(count[c_.experts]);
    for (int64_t i = 0; i < all; ++i)
      if (c_.index[i] >= 0) plan_.choices[count[c_.index[i]]++] = i;
    const int64_t rows = plan_.choices.size();
    reserve(plan_.gathered, rows * c_.hidden);
    reserve(plan_.entered, rows * entering_);
    reserve(plan_.active, rows * c_.width);
    reserve(plan_.mixed, all * c_.hidden);
  }

  int phases() const override { return 5; }
  void divide(int threads) override {
    const int64_t experts = plan_.chosen.size();
    // With many experts each thread takes whole ones.
    parts_ = experts >= 4 * threads ? 1 : threads;
  }
  int chunks(int phase) const override {
    if (phase == 0 || phase == 2) return static_cast<int>((plan_.choices.size() + ROWS - 1) / ROWS);
    if (phase == 4) return static_cast<int>((c_.tokens + ROWS - 1) / ROWS);
    return static_cast<int>(plan_.chosen.size() * parts_);
  }
  int64_t size() const override { return static_cast<int64_t>(plan_.choices.size()) * c_.hidden * entering_; }
  void work(int phase, int chunk) override {
    const int64_t first = chunk * ROWS, last = std::min<int64_t>(plan_.choices.size(), first + ROWS);
    switch (phase) {
      case 0: return gather(first, last);
      case 1: return enter(plan_.chosen[chunk / parts_], chunk % parts_);
      case 2: return activate(first, last);
      case 3: return leave(plan_.chosen[chunk / parts_], chunk % parts_);
      default: return sum(first, std::min(c_.tokens, first + ROWS));
    }
  }

 private:
  static constexpr int64_t ROWS = 8;  // of a chunk of what is no product

  static void reserve(Floats& floats, int64_t size) {
    if (static_cast<int64_t>(floats.size()) < size) floats.resize(size);
  }

  void gather(int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i)
      std::memcpy(plan_.gathered.data() + i * c_.hidden, c_.x + plan_.choices[i] / c_.topk * c_.stride, c_.hidden * sizeof(float));
  }

  // Blocks of one expert's product that are part `part` of `parts_`.
  template <class F>
  void part_of(const Matrix& m, int64_t part, const float* x, int64_t rows, F& write) const {
    const int64_t per = blocks_per_chunk(m.blocks, parts_), first = part * per, last = std::min(m.blocks, first + per);
    if (first < last) graphspec::product(m, first, last, x, m.channels, rows, write);
  }

  void enter(const Chosen& own, int64_t part) {
    const Matrix m(c_.gate_up + own.expert * c_.gate_up_bytes, graphspec::SEGMENTS, c_.hidden, entering_);
    const float* bias = c_.gate_up_bias == nullptr ? nullptr : c_.gate_up_bias + own.expert * entering_;
    auto write = [&](int64_t row, int rows, int64_t at, int64_t width, const float* values) {
      for (int r = 0; r < rows; ++r)
        store(plan_.entered.data() + (own.first + row + r) * entering_ + at, values + r * GROUP * BLOCK, bias == nullptr ? nullptr : bias + at, width);
    };
    part_of(m, part, plan_.gathered.data() + own.first * c_.hidden, own.count, write);
  }

  void activate(int64_t first, int64_t last) {
    const float alpha = static_cast<float>(c_.alpha), limit = static_cast<float>(c_.limit);
    for (int64_t i = first; i < last; ++i) {
      const float *gate = plan_.entered.data() + i * entering_, *up = gate + (c_.gated ? c_.width : 0);
      float* to = plan_.active.data() + i * c_.width;
      // Comparisons are written so that NaN stays NaN.
      for (int64_t f = 0; f < c_.width; ++f) {
        float u = up[f];
        if (!c_.gated) {
          u = u < 0.0f ? 0.0f : u;
          to[f] = u * u;
        } else if (limit > 0.0f) {
          const float g = gate[f] > limit ? limit : gate[f];
          u = u > limit ? limit : u < -limit ? -limit : u;
          to[f] = g * sigmoid(alpha * g) * (u + 1.0f);
        } else {
          const float g = gate[f];
          to[f] = g * sigmoid(c_.gelu ? 1.5957691216f * (g + 0.044715f * g * g * g) : g) * u;  // the same GELU as gelu_of's
        }
      }
    }
  }

  void leave(const Chosen& own, int64_t part) {
    const Matrix m(c_.down + own.expert * c_.down_bytes, graphspec::SEGMENTS, c_.width, c_.hidden);
    const float* bias = c_.down_bias == nullptr ? nullptr : c_.down_bias + own.expert * c_.hidden;
    auto write = [&](int64_t row, int rows, int64_t at, int64_t width, const float* values) {
      for (int r = 0; r < rows; ++r) {
        const int64_t choice = plan_.choices[own.first + row + r];
        store(plan_.mixed.data() + choice * c_.hidden + at, values + r * GROUP * BLOCK, bias == nullptr ? nullptr : bias + at, width);
      }
    };
    part_of(m, part, plan_.active.data() + own.first * c_.width, own.count, write);
  }

  static void store(float* to, const float* values, const float* bias, int64_t width) {
    if (bias == nullptr)
      std::memcpy(to, values, width * sizeof(float));
    else
      for (int64_t i = 0; i < width; ++i) to[i] = values[i] + bias[i];
  }

  void sum(int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      float* out = c_.out + t * c_.hidden;
      std::memset(out, 0, c_.hidden * sizeof(float));
      for (int64_t k = 0; k < c_.topk; ++k) {
        const int64_t choice = t * c_.topk + k;
        if (c_.index[choice] < 0) continue;
        const float share = c_.weight[choice], *mixed = plan_.mixed.data() + choice * c_.hidden;
        for (int64_t h = 0; h < c_.hidden; ++h) out[h] += share * mixed[h];
      }
    }
  }

  const Call& c_;
  Plan& plan_;
  const int64_t entering_;
  int64_t parts_ = 1;
};

}  // namespace

extern "C" {

void graphspec_experts(const char* fields, int threads) {
  const Call call = graphspec::call_of<Call>(fields);
  static thread_local Plan plan;
  Experts experts(call, plan);
  graphspec::run(experts, experts.size() >= PARALLEL_FROM ? threads : 1);
}

}  // extern "C"

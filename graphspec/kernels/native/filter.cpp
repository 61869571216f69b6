// Top-k, top-p and min-p of graphspec/kernels/sampling/filter_logits.py, which defines the fields and the thresholds. A threshold is found by counting
// logits in buckets below the largest one and ordering the one bucket it lies in: linear in the vocabulary, where a sort is not.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "call.h"
#include "simd.h"
#include "team.h"

namespace {

constexpr int64_t PARALLEL_FROM = 1 << 13;  // logits below which a second thread costs more than it saves
constexpr int BUCKETS = 1024;
constexpr float SPAN = 32.0f;          // range of the buckets in units of the temperature: a weight is 0 from 40 ln 2 = 27.7 on
constexpr float UNIT = 1099511627776;  // 2^40: MASS_BITS
constexpr float NEVER = -std::numeric_limits<float>::infinity();

struct FilterCall {
  float* out;
  const float *logits, *temperature;
  const int64_t* top_k;
  const float *top_p, *min_p;
  int64_t lanes, tokens, vocab;
};

// Bucket 0 holds the largest logits, the last one all that are further below than its range.
class Buckets {
 public:
  Buckets(float peak, float range) : peak_(peak), scale_(std::min(BUCKETS / range, 1e30f)) {}

  int of(float x) const {
    const float place = (peak_ - x) * scale_;
    return place < BUCKETS - 1 ? static_cast<int>(place) : BUCKETS - 1;
  }

  // The logits in one bucket, in no order.
  const std::vector<float>& members(const float* x, int64_t count, int bucket) {
    found_.clear();
    for (int64_t i = 0; i < count; ++i)
      if (of(x[i]) == bucket) found_.push_back(x[i]);
    return found_;
  }

  std::vector<float>& found() { return found_; }

 private:
  float peak_, scale_;
  static thread_local std::vector<float> found_;
};

thread_local std::vector<float> Buckets::found_;

class FilterRows final : public graphspec::Program {
 public:
  explicit FilterRows(const FilterCall& call) : c_(call) {}
  int phases() const override { return 1; }
  int chunks(int) const override { return static_cast<int>(c_.lanes * c_.tokens); }
  int64_t size() const override { return c_.lanes * c_.tokens * c_.vocab; }

  void work(int, int row) override {
    const int64_t lane = row / c_.tokens, vocab = c_.vocab;
    const float* logits = c_.logits + row * vocab;
    float* out = c_.out + row * vocab;
    const float temperature = c_.temperature[lane];
    if (!(temperature > 0)) {
      std::memcpy(out, logits, vocab * sizeof(float));
      return;
    }
    float peak = NEVER;
    for (int64_t i = 0; i < vocab; ++i) {
      out[i] = std::fabs(logits[i]) <= std::numeric_limits<float>::max() ? logits[i] : NEVER;
      peak = std::max(peak, out[i]);
    }
    if (peak == NEVER) return;
    float least = peak + temperature * std::log(c_.min_p[lane]);
    const int64_t k = c_.top_k[lane];
    const bool limited = k > 0 && k < vocab;
    const float least_k = limited ? kth(out, peak, k) : NEVER;
    least = std::max(least, least_k);
    if (c_.top_p[lane] < 1) least = std::max(least, nucleus(out, peak, temperature, least_k, c_.top_p[lane]));
    for (int64_t i = 0; i < vocab; ++i) out[i] = out[i] >= least ? out[i] : NEVER;
  }

 private:
  // The k-th largest logit.
  float kth(const float* x, float peak, int64_t k) const {
    Buckets buckets(peak, SPAN);
    std::array<int64_t, BUCKETS> count{};
    for (int64_t i = 0; i < c_.vocab; ++i) ++count[buckets.of(x[i])];
    int64_t above = 0;
    int bucket = 0;
    while (above + count[bucket] < k) above += count[bucket++];
    buckets.members(x, c_.vocab, bucket);
    auto& found = buckets.found();
    std::nth_element(found.begin(), found.begin() + (k - 1 - above), found.end(), std::greater<float>());
    return found[k - 1 - above];
  }

  static int64_t mass(float x, float peak, float temperature) {
    return static_cast<int64_t>(exp8(splat((x - peak) / temperature))[0] * UNIT);
  }

  // The smallest logit that less than a share `top_p` lies above, of those from `least_k` on.
  float nucleus(const float* x, float peak, float temperature, float least_k, float top_p) const {
    Buckets buckets(peak, SPAN * temperature);
    std::array<int64_t, BUCKETS> sum{}, count{};
    int64_t total = 0;
    for (int64_t first = 0; first < c_.vocab; first += 8) {
      const int64_t size = std::min<int64_t>(8, c_.vocab - first);
      f8 part = splat(NEVER);
      std::memcpy(&part, x + first, size * sizeof(float));
      const f8 weight = exp8((part - splat(peak)) / splat(temperature)) * splat(UNIT);
      for (int64_t j = 0; j < size; ++j) {
        const int bucket = buckets.of(part[j]);
        const int64_t own = part[j] >= least_k ? static_cast<int64_t>(weight[j]) : 0;
        sum[bucket] += own, ++count[bucket], total += own;
      }
    }
    const double wanted = static_cast<double>(top_p) * static_cast<double>(total);
    int64_t above = 0, before = 0;
    int last = 0;
    for (int bucket = 0; bucket < BUCKETS; ++bucket) {
      if (count[bucket] != 0 && static_cast<double>(above) < wanted) last = bucket, before = above;
      above += sum[bucket];
    }
    buckets.members(x, c_.vocab, last);
    auto& found = buckets.found();
    std::sort(found.begin(), found.end(), std::greater<float>());
    float least = last == 0 ? peak : found.front();
    for (size_t i = 0; i < found.size() && static_cast<double>(before) < wanted; ++i) {
      least = found[i];
      before += found[i] >= least_k ? mass(found[i], peak, temperature) : 0;
    }
    return least;
  }

  const FilterCall& c_;
};

}  // namespace

extern "C" void graphspec_filter_logits(const char* fields, int threads) {
  const FilterCall call = graphspec::call_of<FilterCall>(fields);
  FilterRows program(call);
  graphspec::run(program, program.size() >= PARALLEL_FROM ? threads : 1);
}

// The thresholds of top-k, top-p and min-p of graphspec/kernels/sampling/filter_logits.py, which defines them. None needs a sort of the vocabulary:
// a row is read a few times, and only logits near its largest one are looked at singly.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "noise.h"
#include "simd.h"

namespace {

constexpr float NEVER = -std::numeric_limits<float>::infinity();

// Logits [first, first + 8) of a row, -inf past its end and where they are not finite.
inline f8 finite_part(const float* row, int64_t first, int64_t count) {
  const f8 x = load8(row + first, count - first, NEVER), most = splat(std::numeric_limits<float>::max());
  return (x <= most) & (x >= -most) ? x : splat(NEVER);
}

// Whether any lane of a comparison holds.
inline bool any8(i8 holds) {
#ifdef __FMA__
  return _mm256_movemask_ps(reinterpret_cast<__m256>(holds)) != 0;
#else
  int32_t found = 0;
  for (int j = 0; j < 8; ++j) found |= holds[j];
  return found != 0;
#endif
}

inline float largest8(f8 x) {
  float most = x[0];
  for (int j = 1; j < 8; ++j) most = x[j] > most ? x[j] : most;
  return most;
}

class Thresholds {
 public:
  // `peak`: the largest finite logit of the row.
  Thresholds(const float* row, int64_t count, float peak, float temperature) : row_(row), count_(count), peak_(peak), temperature_(temperature) {}

  // The least logit that stays.
  float least(int64_t top_k, float top_p, float min_p) const {
    const float least_k = top_k > 0 && top_k < count_ ? kth(top_k) : NEVER;
    float least = std::max(peak_ + temperature_ * std::log(min_p), least_k);
    if (top_p < 1) least = std::max(least, nucleus(least_k, top_p));
    return least;
  }

 private:
  static constexpr float UNIT = 1099511627776;  // 2^40: MASS_BITS
  static constexpr int BUCKETS = 1024;
  static constexpr float NO_MASS = 32;  // temperatures below the largest logit; a weight is 0 from 40 ln 2 = 27.7 on

  // A list that each thread reuses.
  static std::vector<float>& scratch() {
    static thread_local std::vector<float> found;
    found.clear();
    return found;
  }

  // The k-th largest logit: whenever the list of those above `bar` has become long, its k-th largest is the new bar.
  float kth(int64_t k) const {
    std::vector<float>& found = scratch();
    const size_t most = 2 * k + 64;
    const auto select = [&] {
      std::nth_element(found.begin(), found.begin() + (k - 1), found.end(), std::greater<float>());
      return found[k - 1];
    };
    float bar = NEVER;
    for (int64_t i = 0; i < count_; i += 8) {
      const f8 x = finite_part(row_, i, count_);
      if (!any8(x > splat(bar))) continue;
      for (int j = 0; j < 8; ++j)
        if (x[j] > bar) found.push_back(x[j]);
      if (found.size() < most) continue;
      bar = select();
      found.resize(k);
    }
    return static_cast<int64_t>(found.size()) < k ? NEVER : select();
  }

  // exp((x - peak) / temperature) in units of 2^-40, truncated. From 2^23 on a float is a whole number.
  f8 mass(f8 x) const {
    const f8 weight = exp8((x - splat(peak_)) / splat(temperature_)) * splat(UNIT), whole = splat(8388608.0f);
    const f8 near = (weight + whole) - whole;
    return weight < whole ? (near > weight ? near - splat(1.0f) : near) : weight;
  }

  // The sum of the masses of the logits from `least` on. A double holds it exactly for 2^12 vectors.
  int64_t total(float least) const {
    int64_t sum = 0;
    d8 part{};
    int64_t added = 0;
    for (int64_t i = 0; i < count_; i += 8) {
      const f8 x = finite_part(row_, i, count_);
      part += __builtin_convertvector(x >= splat(least) ? mass(x) : splat(0.0f), d8);
      if (++added % 4096 != 0 && i + 8 < count_) continue;
      for (int j = 0; j < 8; ++j) sum += static_cast<int64_t>(part[j]);
      part = d8{};
    }
    return sum;
  }

  // The smallest logit that less than a share `top_p` lies above, of those from `least` on. It is looked for among the logits of a few
  // temperatures below the largest one, and further below only where these have less than the share.
  float nucleus(float least, float top_p) const {
    const double wanted = static_cast<double>(top_p) * static_cast<double>(total(least));
    std::vector<float>& found = scratch();
    for (const float range : {8.0f, 12.0f, 16.0f}) {
      collect(std::max(least, peak_ - range * temperature_), found);
      const float reached = reach(found, range, wanted);
      if (reached > NEVER) return reached;
    }
    collect(least, found);
    return reach(found, NO_MASS, wanted);
  }

  // The finite logits from `least` on.
  void collect(float least, std::vector<float>& found) const {
    const f8 from = splat(std::max(least, std::numeric_limits<float>::lowest()));
    found.clear();
    for (int64_t i = 0; i < count_; i += 8) {
      const f8 x = finite_part(row_, i, count_);
      if (!any8(x >= from)) continue;
      for (int j = 0; j < 8; ++j)
        if (x[j] >= from[j]) found.push_back(x[j]);
    }
  }

  // The logit at which the mass, added from the largest one down, is what is wanted; -inf: all of them have less. They are sorted into buckets by
  // their distance from the largest one, up to `range` temperatures, and ordered in one bucket.
  float reach(std::vector<float>& found, float range, double wanted) const {
    const float scale = std::min(BUCKETS / (range * temperature_), 1e30f);
    const auto bucket_of = [&](float x) {
      const float place = (peak_ - x) * scale;
      return place < BUCKETS - 1 ? static_cast<int>(place) : BUCKETS - 1;
    };
    std::array<int64_t, BUCKETS> sum{};
    const int64_t size = found.size();
    for (int64_t i = 0; i < size; i += 8) {
      const f8 own = mass(finite_part(found.data(), i, size));
      for (int j = 0; j < 8 && i + j < size; ++j) sum[bucket_of(found[i + j])] += static_cast<int64_t>(own[j]);
    }
    int64_t above = 0;
    int last = 0;
    while (last < BUCKETS && static_cast<double>(above + sum[last]) < wanted) above += sum[last++];
    if (last == BUCKETS) return NEVER;
    found.erase(std::remove_if(found.begin(), found.end(), [&](float x) { return bucket_of(x) != last; }), found.end());
    std::sort(found.begin(), found.end(), std::greater<float>());
    size_t i = 0;
    while (static_cast<double>(above += static_cast<int64_t>(mass(splat(found[i]))[0])) < wanted) ++i;
    return found[i];
  }

  const float* row_;
  int64_t count_;
  float peak_, temperature_;
};

}  // namespace

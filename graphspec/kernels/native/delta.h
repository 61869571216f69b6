// The gated delta rule, one token and a tile of columns: graphspec/kernels/recurrent/delta_rule.py.

#pragma once

#include "states.h"

namespace {

constexpr float DELTA_NORM_EPS = 1e-6f;

// x / |x| * scale.
inline void normalise(const float* x, int64_t size, float scale, float* out) {
  f8 sum = splat(0.0f);
  int64_t i = 0;
  for (; i + 8 <= size; i += 8) sum = fmadd(load8(x + i), load8(x + i), sum);
  float total = 0.0f;
  for (int j = 0; j < 8; ++j) total += sum[j];
  for (; i < size; ++i) total += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(total + DELTA_NORM_EPS);
  for (i = 0; i < size; ++i) out[i] = x[i] * factor * scale;
}

struct DeltaRule {
  // Channels of a token: queries, keys, values.
  static constexpr bool VALUES_FIRST = false;

  static StateToken token(const StateHead& h, int64_t at, StateScratch& s) {
    s.query.resize(h.key_dim);
    s.key.resize(h.key_dim);
    normalise(h.query + at * h.key_stride, h.key_dim, 1.0f / std::sqrt(static_cast<float>(h.key_dim)), s.query.data());
    normalise(h.key + at * h.key_stride, h.key_dim, 1.0f, s.key.data());
    return {s.query.data(), s.key.data(), std::exp(h.decay[at * h.gate_stride]), h.rate[at * h.gate_stride]};
  }

  // S <- exp(g) S; u = beta (v - S^T k); S <- S + k u^T; S^T q.
  template <int VECTORS>
  static void update(const StateHead& h, const StateToken& token, const float* from, float* to, const float* value, float* read) {
    f16 sum[VECTORS], seen[VECTORS];
    for (int c = 0; c < VECTORS; ++c) sum[c] = splat16(0.0f);
    for (int64_t k = 0; k < h.key_dim; ++k) {
      const f16 factor = splat16(token.key[k]);
      for (int c = 0; c < VECTORS; ++c) sum[c] = fma16(load16(from + (k * VECTORS + c) * LANES), factor, sum[c]);
    }
    const f16 lost = splat16(-token.decay), wanted = splat16(token.rate);
    for (int c = 0; c < VECTORS; ++c) sum[c] = mul16(wanted, fma16(lost, sum[c], load16(value + c * LANES)));
    change_state<VECTORS>(from, to, h.key_dim, token, sum, seen);
    for (int c = 0; c < VECTORS; ++c) store16(read + c * LANES, seen[c]);
  }
};

}  // namespace

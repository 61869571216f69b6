// The selective state space of Mamba-2, one token and a tile of columns: graphspec/kernels/recurrent/ssm_rule.py.

#pragma once

#include "states.h"

namespace {

struct SelectiveRule {
  // Channels of a token: x, B, C, which is values, keys, queries.
  static constexpr bool VALUES_FIRST = true;

  static StateToken token(const StateHead& h, int64_t at, StateScratch&) {
    return {h.query + at * h.key_stride, h.key + at * h.key_stride, std::exp(h.decay[at * h.gate_stride]), h.rate[at * h.gate_stride]};
  }

  // S <- exp(g) S + B (dt x)^T; S^T C + D x.
  template <int VECTORS>
  static void update(const StateHead& h, const StateToken& token, const float* from, float* to, const float* value, float* read) {
    f16 change[VECTORS], seen[VECTORS];
    for (int c = 0; c < VECTORS; ++c) change[c] = mul16(splat16(token.rate), load16(value + c * LANES));
    change_state<VECTORS>(from, to, h.key_dim, token, change, seen);
    for (int c = 0; c < VECTORS; ++c) store16(read + c * LANES, fma16(splat16(h.skip), load16(value + c * LANES), seen[c]));
  }
};

}  // namespace

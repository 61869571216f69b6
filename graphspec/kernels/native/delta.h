// The gated delta rule for one head of one row: graphspec/kernels/delta_rule.py. There is one update. Decoding, trees, prompts and commits are
// the same operations in the same order, so a token has the same bits wherever it is computed.
//
// Columns of a state don't meet: each is a chain of its own over the channels of the key. They are taken 64 at a time, which a core's first
// cache holds.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "simd.h"

namespace {

constexpr int64_t LANES = 16;                // of a vector
constexpr int MOST_VECTORS = 4;              // of a tile
constexpr float DELTA_NORM_EPS = 1e-6f;

// One head: where its tokens and its state lie.
struct DeltaHead {
  const float *query, *key, *value, *decay, *rate;  // of token 0
  int64_t mixed_stride, gate_stride;                // from token to token
  float* out;
  int64_t out_stride;
  float* state;  // [key_dim, value_dim]
  int64_t key_dim, value_dim;
};

// A visit of a tree: node `token` goes on from buffer `from` and leaves its state in `to`; -1: nobody goes on from it.
struct Visit {
  int32_t token, from, to;
};

struct DeltaScratch {
  Floats buffers, query, key;
  std::vector<Visit> visits;
  std::vector<int32_t> child, sibling, stack;
};

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

// S <- exp(g) S; u = beta (v - S^T k); S <- S + k u^T; S^T q. `to` may be `from`, or null where the state isn't needed.
template <int VECTORS>
inline void delta_update(const float* from, float* to, int64_t dim, float decay, float rate, const float* key, const float* query,
                         const float* value, float* read) {
  constexpr int64_t WIDE = VECTORS * LANES;
  f16 sum[VECTORS], seen[VECTORS];
  for (int c = 0; c < VECTORS; ++c) sum[c] = seen[c] = splat16(0.0f);
  for (int64_t k = 0; k < dim; ++k) {
    const f16 factor = splat16(key[k]);
    for (int c = 0; c < VECTORS; ++c) sum[c] = fma16(load16(from + k * WIDE + c * LANES), factor, sum[c]);
  }
  const f16 kept = splat16(decay), lost = splat16(-decay), wanted = splat16(rate);
  for (int c = 0; c < VECTORS; ++c) sum[c] = mul16(wanted, fma16(lost, sum[c], load16(value + c * LANES)));
  for (int64_t k = 0; k < dim; ++k) {
    const f16 factor = splat16(key[k]), asked = splat16(query[k]);
    for (int c = 0; c < VECTORS; ++c) {
      const f16 s = fma16(factor, sum[c], mul16(load16(from + k * WIDE + c * LANES), kept));
      if (to != nullptr) store16(to + k * WIDE + c * LANES, s);
      seen[c] = fma16(s, asked, seen[c]);
    }
  }
  for (int c = 0; c < VECTORS; ++c) store16(read + c * LANES, seen[c]);
}

// Columns [first, first + width) of a head, padded to whole vectors.
template <int VECTORS>
struct DeltaTile {
  static constexpr int64_t WIDE = VECTORS * LANES;
  const DeltaHead& h;
  DeltaScratch& s;
  int64_t first, width;

  float* buffer(int64_t index) const { return s.buffers.data() + index * h.key_dim * WIDE; }

  void fetch(bool fresh) const {
    float* to = buffer(0);
    std::memset(to, 0, h.key_dim * WIDE * sizeof(float));
    if (fresh) return;
    for (int64_t k = 0; k < h.key_dim; ++k) std::memcpy(to + k * WIDE, h.state + k * h.value_dim + first, width * sizeof(float));
  }

  void keep() const {
    for (int64_t k = 0; k < h.key_dim; ++k) std::memcpy(h.state + k * h.value_dim + first, buffer(0) + k * WIDE, width * sizeof(float));
  }

  // Token `token` goes on from one buffer to another; what it reads is result `place`.
  void step(int64_t token, int64_t place, int64_t from, int64_t to) const {
    alignas(64) float value[WIDE] = {}, read[WIDE];
    const float* mixed = h.value + token * h.mixed_stride + first;
    std::memcpy(value, mixed, width * sizeof(float));
    normalise(h.query + token * h.mixed_stride, h.key_dim, 1.0f / std::sqrt(static_cast<float>(h.key_dim)), s.query.data());
    normalise(h.key + token * h.mixed_stride, h.key_dim, 1.0f, s.key.data());
    delta_update<VECTORS>(buffer(from), to < 0 ? nullptr : buffer(to), h.key_dim, std::exp(h.decay[token * h.gate_stride]),
                          h.rate[token * h.gate_stride], s.key.data(), s.query.data(), value, read);
    std::memcpy(h.out + place * h.out_stride + first, read, width * sizeof(float));
  }
};

template <class Work>
inline void each_tile(const DeltaHead& h, DeltaScratch& s, int64_t buffers, Work&& work) {
  s.query.resize(h.key_dim);
  s.key.resize(h.key_dim);
  const int64_t most = buffers * h.key_dim * MOST_VECTORS * LANES;
  if (static_cast<int64_t>(s.buffers.size()) < most) s.buffers.resize(most);
  for (int64_t first = 0; first < h.value_dim; first += MOST_VECTORS * LANES) {
    const int64_t width = std::min<int64_t>(MOST_VECTORS * LANES, h.value_dim - first);
    switch ((width + LANES - 1) / LANES) {
      case 1: work(DeltaTile<1>{h, s, first, width}); break;
      case 2: work(DeltaTile<2>{h, s, first, width}); break;
      case 3: work(DeltaTile<3>{h, s, first, width}); break;
      default: work(DeltaTile<MOST_VECTORS>{h, s, first, width});
    }
  }
}

// The order in which a tree's nodes are visited, children after their parent, and how many buffers that takes. A parent's last child takes
// over its buffer, so that a chain needs one apart from buffer 0, which is the row's own and not written.
inline int64_t plan_visits(const int64_t* ancestors, int64_t nodes, int64_t words, DeltaScratch& s) {
  const auto parent_of = [&](int64_t n) -> int64_t {
    for (int64_t x = n >> 6; x >= 0; --x) {
      uint64_t word = static_cast<uint64_t>(ancestors[n * words + x]);
      if (x == n >> 6) word &= (uint64_t{1} << (n & 63)) - 1;
      if (word != 0) return x * 64 + 63 - __builtin_clzll(word);
    }
    return -1;
  };
  // Entry 0 of `child` is of the row itself, entry n + 1 of node n.
  s.child.assign(nodes + 1, -1);
  s.sibling.assign(nodes, -1);
  for (int64_t n = nodes - 1; n >= 0; --n) {
    if ((static_cast<uint64_t>(ancestors[n * words + (n >> 6)]) >> (n & 63) & 1) == 0) continue;
    int32_t& before = s.child[parent_of(n) + 1];
    s.sibling[n] = before;
    before = static_cast<int32_t>(n);
  }
  s.visits.clear();
  s.stack.clear();
  int32_t buffers = 1;
  const auto push = [&](int32_t node, int32_t from) {
    if (node < 0) return;
    s.stack.push_back(node);
    s.stack.push_back(from);
  };
  push(s.child[0], 0);
  while (!s.stack.empty()) {
    const int32_t from = s.stack.back(), node = s.stack[s.stack.size() - 2], next = s.sibling[node], below = s.child[node + 1];
    s.stack.resize(s.stack.size() - 2);
    const int32_t to = below < 0 ? -1 : next < 0 && from > 0 ? from : from + 1;
    s.visits.push_back({node, from, to});
    buffers = std::max(buffers, to + 1);
    push(next, from);
    push(below, to);
  }
  return buffers;
}

// Every node of a tree from the row's state, which stays as it is. Results of unused nodes are 0.
inline void delta_tree(const DeltaHead& h, const int64_t* ancestors, int64_t nodes, int64_t words, DeltaScratch& s) {
  const int64_t buffers = plan_visits(ancestors, nodes, words, s);
  for (int64_t n = 0; n < nodes; ++n)
    if ((static_cast<uint64_t>(ancestors[n * words + (n >> 6)]) >> (n & 63) & 1) == 0)
      std::memset(h.out + n * h.out_stride, 0, h.value_dim * sizeof(float));
  each_tile(h, s, buffers, [&](const auto& tile) {
    tile.fetch(false);
    for (const Visit& visit : s.visits) tile.step(visit.token, visit.token, visit.from, visit.to);
  });
}

// The first `length` of `steps` tokens, along `path` where there is one, into the row's state. Results past them are 0.
inline void delta_run(const DeltaHead& h, const int64_t* path, int64_t steps, int64_t length, bool fresh, DeltaScratch& s) {
  for (int64_t t = length; t < steps; ++t) std::memset(h.out + t * h.out_stride, 0, h.value_dim * sizeof(float));
  if (length == 0 && !fresh) return;
  each_tile(h, s, 1, [&](const auto& tile) {
    tile.fetch(fresh);
    for (int64_t t = 0; t < length; ++t) tile.step(path == nullptr ? t : path[t], t, 0, 0);
    tile.keep();
  });
}

}  // namespace

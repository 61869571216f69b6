// The state matrix of one head of one row, updated and read by the tokens of a tree or a run, for any rule. A rule has one update. Decoding,
// trees, prompts and commits run the same operations in the same order, so a token has the same bits in all of them.
//
// Columns of a state are independent; each is a reduction over the channels of the key. They are processed 64 at a time, which fit the L1
// cache.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "simd.h"

namespace {

constexpr int64_t LANES = 16;    // of a vector
constexpr int MAX_VECTORS = 4;  // of a tile

// One head: pointers to its tokens and its state.
struct StateHead {
  const float *query, *key, *value, *decay, *rate;  // of token 0
  int64_t key_stride, value_stride, gate_stride;    // from token to token; a query's is that of a key
  float skip;                                       // share of its value that a token reads; not every rule has one
  float* out;
  int64_t out_stride;
  float* state;  // [key_dim, value_dim]
  int64_t key_dim, value_dim;
};

// A token as an update takes it. The decay is a factor.
struct StateToken {
  const float *query, *key;
  float decay, rate;
};

// A visit of a tree node: `token` continues from the state in buffer `from` and stores its own in `to`; -1: it has no children.
struct Visit {
  int32_t token, from, to;
};

struct StateScratch {
  Floats buffers, query, key;
  std::vector<Visit> visits;
  std::vector<int32_t> child, sibling, stack;
};

// S <- decay S + k u^T with the token's key k and its change u; S^T q. `to` may be `from`, or null if the state is not needed.
template <int VECTORS>
inline void change_state(const float* from, float* to, int64_t dim, const StateToken& token, const f16* change, f16* read) {
  constexpr int64_t WIDE = VECTORS * LANES;
  const f16 kept = splat16(token.decay);
  for (int c = 0; c < VECTORS; ++c) read[c] = splat16(0.0f);
  for (int64_t k = 0; k < dim; ++k) {
    const f16 key = splat16(token.key[k]), query = splat16(token.query[k]);
    for (int c = 0; c < VECTORS; ++c) {
      const f16 s = fma16(key, change[c], mul16(load16(from + k * WIDE + c * LANES), kept));
      if (to != nullptr) store16(to + k * WIDE + c * LANES, s);
      read[c] = fma16(s, query, read[c]);
    }
  }
}

// Columns [first, first + width) of a head, padded to whole vectors.
template <class RULE, int VECTORS>
struct StateTile {
  static constexpr int64_t WIDE = VECTORS * LANES;
  const StateHead& h;
  StateScratch& s;
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

  // Token `token` reads the state in one buffer and writes it to another; its output is result `place`.
  void step(int64_t token, int64_t place, int64_t from, int64_t to) const {
    alignas(64) float value[WIDE] = {}, read[WIDE];
    std::memcpy(value, h.value + token * h.value_stride + first, width * sizeof(float));
    RULE::template update<VECTORS>(h, RULE::token(h, token, s), buffer(from), to < 0 ? nullptr : buffer(to), value, read);
    std::memcpy(h.out + place * h.out_stride + first, read, width * sizeof(float));
  }
};

template <class RULE, class Work>
inline void each_tile(const StateHead& h, StateScratch& s, int64_t buffers, Work&& work) {
  const int64_t most = buffers * h.key_dim * MAX_VECTORS * LANES;
  if (static_cast<int64_t>(s.buffers.size()) < most) s.buffers.resize(most);
  for (int64_t first = 0; first < h.value_dim; first += MAX_VECTORS * LANES) {
    const int64_t width = std::min<int64_t>(MAX_VECTORS * LANES, h.value_dim - first);
    switch ((width + LANES - 1) / LANES) {
      case 1: work(StateTile<RULE, 1>{h, s, first, width}); break;
      case 2: work(StateTile<RULE, 2>{h, s, first, width}); break;
      case 3: work(StateTile<RULE, 3>{h, s, first, width}); break;
      default: work(StateTile<RULE, MAX_VECTORS>{h, s, first, width});
    }
  }
}

// The order in which a tree's nodes are visited, children after their parent, and the number of buffers needed. A parent's last child reuses
// its buffer, so a chain needs one besides buffer 0, which is the row's own and is not written.
inline int64_t plan_visits(const int64_t* ancestors, int64_t nodes, int64_t words, StateScratch& s) {
  const auto parent_of = [&](int64_t n) -> int64_t {
    for (int64_t x = n >> 6; x >= 0; --x) {
      uint64_t word = static_cast<uint64_t>(ancestors[n * words + x]);
      if (x == n >> 6) word &= (uint64_t{1} << (n & 63)) - 1;
      if (word != 0) return x * 64 + 63 - __builtin_clzll(word);
    }
    return -1;
  };
  // Entry 0 of `child` is the first child of the row itself, entry n + 1 that of node n.
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

// Outputs of every node of a tree, from the row's state, which is not changed. Outputs of unused nodes are 0.
template <class RULE>
inline void state_tree(const StateHead& h, const int64_t* ancestors, int64_t nodes, int64_t words, StateScratch& s) {
  const int64_t buffers = plan_visits(ancestors, nodes, words, s);
  for (int64_t n = 0; n < nodes; ++n)
    if ((static_cast<uint64_t>(ancestors[n * words + (n >> 6)]) >> (n & 63) & 1) == 0)
      std::memset(h.out + n * h.out_stride, 0, h.value_dim * sizeof(float));
  each_tile<RULE>(h, s, buffers, [&](const auto& tile) {
    tile.fetch(false);
    for (const Visit& visit : s.visits) tile.step(visit.token, visit.token, visit.from, visit.to);
  });
}

// Outputs of the first `length` of `tokens` tokens, which update the row's state. Outputs after them are 0.
template <class RULE>
inline void state_run(const StateHead& h, int64_t tokens, int64_t length, bool fresh, StateScratch& s) {
  for (int64_t t = length; t < tokens; ++t) std::memset(h.out + t * h.out_stride, 0, h.value_dim * sizeof(float));
  if (length == 0 && !fresh) return;
  each_tile<RULE>(h, s, 1, [&](const auto& tile) {
    tile.fetch(fresh);
    for (int64_t t = 0; t < length; ++t) tile.step(t, t, 0, 0);
    tile.keep();
  });
}

}  // namespace

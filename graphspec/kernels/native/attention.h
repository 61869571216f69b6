// Paged attention for the CPU, float32: one lane and one KV head at a time.
//
// Softmax in two passes: scores of every visible key, their maximum, then weights and the weighted sum. Every sum runs in one fixed order
// (over channels for a score, over visible slots for an output), so the result of a query depends on the keys and values it sees and
// on nothing else: not on the other queries, the batch, the page table, or where in the window its ancestors lie.
// Cost is proportional to visible slots, not to the page table's width.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "simd.h"

namespace {

typedef int32_t i8 __attribute__((vector_size(32)));

constexpr int LANES = 8;
constexpr int KEYS = 32;     // keys per block: four vectors of scores
constexpr int QUERIES = 32;  // (token, head) pairs that share one transposed block of keys
constexpr float MINUS_INF = -std::numeric_limits<float>::infinity();

inline float fma1(float a, float b, float c) {
#ifdef __FMA__
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

inline void transpose8(const float* const* row, int64_t at, float* out) {
  f8 a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = load8(row[i] + at);
  for (int i = 0; i < 4; ++i) {
    b[2 * i] = __builtin_shuffle(a[2 * i], a[2 * i + 1], i8{0, 8, 2, 10, 4, 12, 6, 14});
    b[2 * i + 1] = __builtin_shuffle(a[2 * i], a[2 * i + 1], i8{1, 9, 3, 11, 5, 13, 7, 15});
  }
  for (int half = 0; half < 2; ++half)
    for (int i = 0; i < 2; ++i) {
      a[4 * half + i] = __builtin_shuffle(b[4 * half + i], b[4 * half + i + 2], i8{0, 1, 8, 9, 4, 5, 12, 13});
      a[4 * half + i + 2] = __builtin_shuffle(b[4 * half + i], b[4 * half + i + 2], i8{2, 3, 10, 11, 6, 7, 14, 15});
    }
  for (int i = 0; i < 4; ++i) {
    store8(out + i * KEYS, __builtin_shuffle(a[i], a[i + 4], i8{0, 1, 2, 3, 8, 9, 10, 11}));
    store8(out + (i + 4) * KEYS, __builtin_shuffle(a[i], a[i + 4], i8{4, 5, 6, 7, 12, 13, 14, 15}));
  }
}

// Scores of NQ queries against one transposed block.
template <int NQ>
inline void score_block(const float* const* query, const float* key_t, int64_t dim, float scale, float* const* score) {
  f8 sum[NQ][KEYS / LANES];
  for (int q = 0; q < NQ; ++q)
    for (auto& s : sum[q]) s = splat(0.0f);
  for (int64_t d = 0; d < dim; ++d)
    for (int v = 0; v < KEYS / LANES; ++v) {
      f8 k = load8(key_t + d * KEYS + v * LANES);
      for (int q = 0; q < NQ; ++q) sum[q][v] = fma8(splat(query[q][d]), k, sum[q][v]);
    }
  for (int q = 0; q < NQ; ++q)
    for (int v = 0; v < KEYS / LANES; ++v) store8(score[q] + v * LANES, sum[q][v] * splat(scale));
}

// acc[q] += sum over keys of weight * value, NV vectors of channels from `at` on.
template <int NQ, int NV>
inline void value_block(const float* const* weight, const float* const* value, int keys, int64_t at, float* const* acc) {
  f8 sum[NQ][NV];
  for (int q = 0; q < NQ; ++q)
    for (int v = 0; v < NV; ++v) sum[q][v] = load8(acc[q] + at + v * LANES);
  for (int k = 0; k < keys; ++k)
    for (int v = 0; v < NV; ++v) {
      f8 x = load8(value[k] + at + v * LANES);
      for (int q = 0; q < NQ; ++q) sum[q][v] = fma8(splat(weight[q][k]), x, sum[q][v]);
    }
  for (int q = 0; q < NQ; ++q)
    for (int v = 0; v < NV; ++v) store8(acc[q] + at + v * LANES, sum[q][v]);
}

template <int NQ>
inline void weighted_values(const float* const* weight, const float* const* value, int keys, int64_t dim, float* const* acc,
                            float* const* total) {
  for (int q = 0; q < NQ; ++q) {
    float sum = *total[q];
    for (int k = 0; k < keys; ++k) sum += weight[q][k];
    *total[q] = sum;
  }
  int64_t at = 0;
  for (; at + 4 * LANES <= dim; at += 4 * LANES) value_block<NQ, 4>(weight, value, keys, at, acc);
  for (; at + LANES <= dim; at += LANES) value_block<NQ, 1>(weight, value, keys, at, acc);
  for (; at < dim; ++at)
    for (int q = 0; q < NQ; ++q) {
      float sum = acc[q][at];
      for (int k = 0; k < keys; ++k) sum = fma1(weight[q][k], value[k][at], sum);
      acc[q][at] = sum;
    }
}

// What one lane's queries may see: [lo, hi) each, and slots base + j where bit j of its words is set (no words: words == nullptr).
struct Visible {
  std::vector<int64_t> lo, hi;
  const int64_t* words = nullptr;
  int64_t num_words = 0, base = 0;
  std::vector<int64_t> slots;  // that any of the queries sees, ascending: nothing else is ever loaded
  std::vector<int64_t> rows;   // of the pool, where those lie
  std::vector<int32_t> cover;
  std::vector<int64_t> extra;

  bool bit(int64_t t, int64_t slot) const {
    const int64_t j = slot - base;
    if (words == nullptr || j < 0 || j >= 64 * num_words) return false;
    return (static_cast<uint64_t>(words[t * num_words + (j >> 6)]) >> (j & 63)) & 1;
  }

  void list(const int32_t* table, int64_t length, int64_t page_size) {
    const int64_t tokens = lo.size();
    slots.clear();
    rows.clear();
    int64_t first = length, last = 0;
    for (int64_t t = 0; t < tokens; ++t)
      if (lo[t] < hi[t]) first = std::min(first, lo[t]), last = std::max(last, hi[t]);
    cover.assign(std::max<int64_t>(last - first, 0) + 1, 0);
    for (int64_t t = 0; t < tokens; ++t)
      if (lo[t] < hi[t]) ++cover[lo[t] - first], --cover[hi[t] - first];
    const auto add = [&](int64_t slot) {
      const int64_t page = std::max<int64_t>(table[slot / page_size], 0);
      slots.push_back(slot);
      rows.push_back(page * page_size + slot % page_size);
    };
    // Bits may tell of slots on either side of the ranges, and inside of them.
    extra.clear();
    for (int64_t w = 0; w < num_words; ++w) {
      uint64_t any = 0;
      for (int64_t t = 0; t < tokens; ++t) any |= static_cast<uint64_t>(words[t * num_words + w]);
      for (; any; any &= any - 1) {
        const int64_t slot = base + 64 * w + __builtin_ctzll(any);
        if (slot >= 0 && slot < length) extra.push_back(slot);
      }
    }
    size_t next = 0;
    int32_t depth = 0;
    for (int64_t slot = first; slot < last; ++slot) {
      for (; next < extra.size() && extra[next] < slot; ++next) add(extra[next]);
      depth += cover[slot - first];
      const bool told = next < extra.size() && extra[next] == slot;
      next += told;
      if (depth > 0 || told) add(slot);
    }
    for (; next < extra.size(); ++next) add(extra[next]);
  }
};

struct Shape {
  int64_t lanes, tokens, heads, groups, dim, columns, page_size, pages, layer, num_words, query_b, query_t, query_h;
};

struct Scratch {
  std::vector<const float*> key, value;
  std::vector<float> key_t, score, acc;
  std::vector<uint8_t> seen;
};

inline int64_t clip(int64_t x, int64_t length) { return std::clamp<int64_t>(x, 0, length); }

// Prefix and ancestor words of lane b. The caller keeps the words.
inline void see_tree(Visible& v, const Shape& n, int64_t b, const int64_t* begin, const int64_t* end, const int64_t* ancestors) {
  const int64_t length = n.columns * n.page_size;
  v.lo.resize(n.tokens);
  v.hi.assign(n.tokens, clip(end[b], length));
  for (int64_t t = 0; t < n.tokens; ++t) v.lo[t] = clip(begin[b * n.tokens + t], length);
  v.words = ancestors + b * n.tokens * n.num_words;
  v.num_words = n.num_words;
  v.base = end[b];
}

// Causal: everything from `begin` to a valid token's own slot; an invalid token sees nothing.
inline void see_chunk(Visible& v, const Shape& n, int64_t b, const int64_t* begin, const int64_t* slot, const uint8_t* valid) {
  const int64_t length = n.columns * n.page_size;
  v.lo.assign(n.tokens, 0);
  v.hi.assign(n.tokens, 0);
  v.words = nullptr;
  v.num_words = 0;
  for (int64_t t = 0; t < n.tokens; ++t)
    if (valid[b * n.tokens + t]) {
      v.lo[t] = clip(begin[b * n.tokens + t], length);
      v.hi[t] = clip(slot[b * n.tokens + t] < length ? slot[b * n.tokens + t] + 1 : length, length);
    }
}

// Parts that the tokens of a lane and KV head are cut into, so that every thread has something to do.
inline int64_t token_splits(const Shape& n, int threads) {
  const int64_t pairs = n.lanes * n.groups;
  return threads == 1 ? 1 : std::clamp<int64_t>((2 * threads + pairs - 1) / pairs, 1, n.tokens);
}

// One lane, one KV head, tokens [first, last).
inline void attend(const Shape& n, const float* query, const float* pool, const Visible& see, int64_t lane, int64_t group, int64_t first,
                   int64_t last, float scale, float* out, Scratch& s) {
  const int64_t repeat = n.heads / n.groups, total = see.slots.size(), blocks = (total + KEYS - 1) / KEYS, padded = blocks * KEYS;
  const int64_t row = n.groups * n.dim, plane = n.pages * n.page_size * row;
  const float* keys = pool + 2 * n.layer * plane + group * n.dim;
  s.key.resize(padded);
  s.value.resize(padded);
  for (int64_t i = 0; i < total; ++i) {
    s.key[i] = keys + see.rows[i] * row;
    s.value[i] = s.key[i] + plane;
  }
  // The last block is filled up with a key that is seen; its scores are masked.
  for (int64_t i = total; i < padded; ++i) s.key[i] = s.key[total - 1], s.value[i] = s.value[total - 1];
  s.key_t.resize(n.dim * KEYS);
  s.score.resize((QUERIES + 1) * padded);
  s.acc.resize((QUERIES + 1) * n.dim);
  s.seen.resize(QUERIES * blocks);

  const int64_t all = (last - first) * repeat;
  for (int64_t start = 0; start < all; start += QUERIES) {
    const int count = static_cast<int>(std::min<int64_t>(QUERIES, all - start));
    const float* q_row[QUERIES];
    float* out_row[QUERIES];
    int64_t token[QUERIES];
    float peak[QUERIES], sum[QUERIES];
    for (int q = 0; q < count; ++q) {
      token[q] = first + (start + q) / repeat;
      const int64_t head = group * repeat + (start + q) % repeat;
      q_row[q] = query + lane * n.query_b + token[q] * n.query_t + head * n.query_h;
      out_row[q] = out + ((lane * n.tokens + token[q]) * n.heads + head) * n.dim;
      peak[q] = MINUS_INF;
      sum[q] = 0.0f;
    }
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t begin = see.slots[b * KEYS], end = see.slots[std::min(total, (b + 1) * KEYS) - 1];
      const int filled = static_cast<int>(std::min<int64_t>(KEYS, total - b * KEYS));
      int some = 0;
      for (int q = 0; q < count; ++q) {
        const int64_t t = token[q];
        uint8_t seen = begin >= see.lo[t] && end < see.hi[t] && filled == KEYS ? 2 : begin < see.hi[t] && end >= see.lo[t];
        for (int k = 0; !seen && see.words != nullptr && k < filled; ++k) seen = see.bit(t, see.slots[b * KEYS + k]);
        s.seen[q * blocks + b] = seen;
        some |= seen;
      }
      if (!some) continue;
      int64_t d = 0;
      for (; d + 8 <= n.dim; d += 8)
        for (int k = 0; k < KEYS; k += 8) transpose8(&s.key[b * KEYS + k], d, &s.key_t[d * KEYS + k]);
      for (; d < n.dim; ++d)
        for (int k = 0; k < KEYS; ++k) s.key_t[d * KEYS + k] = s.key[b * KEYS + k][d];
      for (int q = 0; q < count; q += 2) {
        float* score[2] = {&s.score[q * padded + b * KEYS], &s.score[(q + 1) * padded + b * KEYS]};
        if (q + 1 < count)
          score_block<2>(q_row + q, s.key_t.data(), n.dim, scale, score);
        else
          score_block<1>(q_row + q, s.key_t.data(), n.dim, scale, score);
      }
      for (int q = 0; q < count; ++q) {
        float* score = &s.score[q * padded + b * KEYS];
        const int64_t t = token[q];
        if (s.seen[q * blocks + b] == 0) continue;
        if (s.seen[q * blocks + b] == 1)
          for (int k = 0; k < KEYS; ++k) {
            const int64_t slot = k < filled ? see.slots[b * KEYS + k] : -1;
            if (!((slot >= see.lo[t] && slot < see.hi[t]) || (slot >= 0 && see.bit(t, slot)))) score[k] = MINUS_INF;
          }
        // A NaN among visible scores must reach the output: the caller fails the row by it.
        for (int k = 0; k < KEYS; ++k) peak[q] = score[k] > peak[q] || score[k] != score[k] ? score[k] : peak[q];
      }
    }
    std::fill(s.acc.begin(), s.acc.end(), 0.0f);
    for (int64_t b = 0; b < blocks; ++b) {
      const int filled = static_cast<int>(std::min<int64_t>(KEYS, total - b * KEYS));
      for (int q = 0; q < count; ++q) {
        float* score = &s.score[q * padded + b * KEYS];
        if (s.seen[q * blocks + b] == 0 || peak[q] == MINUS_INF)
          std::fill(score, score + KEYS, 0.0f);
        else
          for (int k = 0; k < KEYS; k += LANES) store8(score + k, exp8(load8(score + k) - splat(peak[q])));
      }
      for (int q = 0; q < count; q += 2) {
        const bool pair = q + 1 < count;
        if (s.seen[q * blocks + b] == 0 && (!pair || s.seen[(q + 1) * blocks + b] == 0)) continue;
        const float* weight[2] = {&s.score[q * padded + b * KEYS], &s.score[(q + 1) * padded + b * KEYS]};
        float* acc[2] = {&s.acc[q * n.dim], &s.acc[(q + 1) * n.dim]};
        float* totals[2] = {&sum[q], &sum[std::min(q + 1, count - 1)]};
        if (pair)
          weighted_values<2>(weight, &s.value[b * KEYS], filled, n.dim, acc, totals);
        else
          weighted_values<1>(weight, &s.value[b * KEYS], filled, n.dim, acc, totals);
      }
    }
    for (int q = 0; q < count; ++q) {
      const float divisor = sum[q] == 0.0f ? 1.0f : sum[q];
      for (int64_t d = 0; d < n.dim; ++d) out_row[q][d] = s.acc[q * n.dim + d] / divisor;
    }
  }
}

}  // namespace

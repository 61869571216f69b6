// Paged attention for the CPU, float32. Few queries over many keys read whole rows of keys, then whole rows of values, in two phases that are
// divided by key and by channel (class Attending); otherwise one lane and one KV head are a piece of work.
//
// Softmax in two passes: scores of all visible keys and their maximum, then weights and the weighted sum. Every sum has a fixed order (over
// channels for a score, over visible slots for an output), so a query's result depends only on the keys and values it sees, not on other
// queries, the batch, the page table, or the slots of its ancestors in the window. Cost is proportional to visible slots, not to the width
// of the page table.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "simd.h"

namespace {

constexpr int KEYS = 32;     // keys per block
constexpr int QUERIES = 64;  // (token, head) pairs that share one transposed block of keys
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

// A block of keys, channel by channel.
inline void transpose(const float* const* key, int64_t dim, float* out) {
  int64_t d = 0;
  for (; d + 8 <= dim; d += 8)
    for (int k = 0; k < KEYS; k += 8) transpose8(key + k, d, out + d * KEYS + k);
  for (; d < dim; ++d)
    for (int k = 0; k < KEYS; ++k) out[d * KEYS + k] = key[k][d];
}

// Scores of NQ queries against one transposed block.
template <int NQ>
inline void score_block(const float* const* query, const float* key_t, int64_t dim, float scale, float* const* score) {
  f16 sum[NQ][2];
  for (auto& row : sum)
    for (auto& s : row) s = splat16(0.0f);
  for (int64_t d = 0; d < dim; ++d) {
    const f16 low = load16(key_t + d * KEYS), high = load16(key_t + d * KEYS + 16);
    for (int q = 0; q < NQ; ++q) {
      const f16 x = splat16(query[q][d]);
      sum[q][0] = fma16(x, low, sum[q][0]);
      sum[q][1] = fma16(x, high, sum[q][1]);
    }
  }
  for (int q = 0; q < NQ; ++q)
    for (int v = 0; v < 2; ++v) store16(score[q] + v * 16, mul16(sum[q][v], splat16(scale)));
}

// acc[q] += sum over keys of weight * value, NV vectors of channels from `at` on; with TOTAL also total[q] += sum over keys of weight.
template <int NQ, int NV, bool TOTAL>
inline void value_block(const float* const* weight, const float* const* value, int keys, int64_t at, float* const* acc, float* const* total) {
  f16 sum[NQ][NV], all[NQ];
  for (int q = 0; q < NQ; ++q) {
    for (int v = 0; v < NV; ++v) sum[q][v] = load16(acc[q] + at + v * 16);
    all[q] = splat16(*total[q]);
  }
  for (int k = 0; k < keys; ++k) {
    f16 x[NV];
    for (int v = 0; v < NV; ++v) x[v] = load16(value[k] + at + v * 16);
    for (int q = 0; q < NQ; ++q) {
      const f16 w = splat16(weight[q][k]);
      for (int v = 0; v < NV; ++v) sum[q][v] = fma16(w, x[v], sum[q][v]);
      if (TOTAL) all[q] = add16(all[q], w);
    }
  }
  for (int q = 0; q < NQ; ++q) {
    for (int v = 0; v < NV; ++v) store16(acc[q] + at + v * 16, sum[q][v]);
    if (TOTAL) {
      float lanes[16];
      store16(lanes, all[q]);
      *total[q] = lanes[0];
    }
  }
}

// Channels [at, to) of acc, and the totals.
template <int NQ>
inline void weighted_values(const float* const* weight, const float* const* value, int keys, int64_t at, int64_t to, float* const* acc,
                            float* const* total) {
  if (to - at >= 32) {
    value_block<NQ, 2, true>(weight, value, keys, at, acc, total);
    for (at += 32; at + 32 <= to; at += 32) value_block<NQ, 2, false>(weight, value, keys, at, acc, total);
  } else if (to - at >= 16) {
    value_block<NQ, 1, true>(weight, value, keys, at, acc, total);
    at += 16;
  } else {
    for (int q = 0; q < NQ; ++q)
      for (int k = 0; k < keys; ++k) *total[q] += weight[q][k];
  }
  for (; at + 16 <= to; at += 16) value_block<NQ, 1, false>(weight, value, keys, at, acc, total);
  for (; at < to; ++at)
    for (int q = 0; q < NQ; ++q) {
      float sum = acc[q][at];
      for (int k = 0; k < keys; ++k) sum = fma1(weight[q][k], value[k][at], sum);
      acc[q][at] = sum;
    }
}

// The slots that one lane's queries see: [lo, hi) of each, and slot base + j if bit j of its words is set (words == nullptr: no words).
struct Visible {
  std::vector<int64_t> lo, hi;
  const int64_t* words = nullptr;
  int64_t num_words = 0, base = 0;
  std::vector<int64_t> slots;   // seen by any query, ascending; no other slot is loaded
  std::vector<int64_t> rows;    // rows of the pool that hold these slots
  std::vector<uint32_t> masks;  // [tokens][blocks of KEYS]: which of these slots each query sees
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
    // Slots of set bits may be before, inside or after the ranges.
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
      const bool listed = next < extra.size() && extra[next] == slot;
      next += listed;
      if (depth > 0 || listed) add(slot);
    }
    for (; next < extra.size(); ++next) add(extra[next]);
    mask(tokens);
  }

  int64_t blocks() const { return (static_cast<int64_t>(slots.size()) + KEYS - 1) / KEYS; }

 private:
  void mask(int64_t tokens) {
    const int64_t total = slots.size();
    masks.assign(tokens * blocks(), 0);
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t b = 0; b < blocks(); ++b) {
        const int64_t first = b * KEYS, count = std::min<int64_t>(KEYS, total - first);
        const int64_t low = slots[first], high = slots[first + count - 1];
        uint32_t& bits = masks[t * blocks() + b];
        if (low >= lo[t] && high < hi[t])
          bits = count == KEYS ? ~0u : (1u << count) - 1;
        else if (words != nullptr || (low < hi[t] && high >= lo[t]))
          for (int64_t k = 0; k < count; ++k) {
            const int64_t slot = slots[first + k];
            bits |= static_cast<uint32_t>((slot >= lo[t] && slot < hi[t]) || bit(t, slot)) << k;
          }
      }
  }
};

struct Shape {
  int64_t lanes, tokens, heads, groups, dim, columns, page_size, pages, layer, num_words, query_b, query_t, query_h;
};

// How scores become weights: see tree_attention() in graphspec/kernels/attention. softcap 0: none; sinks, by head, may be null.
struct Scores {
  float scale, softcap;
  const float* sinks;
};

struct Scratch {
  std::vector<const float*> key, value;
  Floats key_t, score, acc;
};

inline int64_t clip(int64_t x, int64_t length) { return std::clamp<int64_t>(x, 0, length); }

// Prefix and ancestor words of lane b. The caller owns the words.
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

// Number of parts into which the tokens of a lane and KV head are split, so that all threads have work. Each part reads all keys and values
// again, which pays from QUERIES / 2 queries per part on.
inline int64_t token_splits(const Shape& n, int threads) {
  const int64_t pairs = n.lanes * n.groups, most = std::max<int64_t>(n.tokens * (n.heads / n.groups) / (QUERIES / 2), 1);
  return threads == 1 ? 1 : std::clamp<int64_t>((2 * threads + pairs - 1) / pairs, 1, std::min(n.tokens, most));
}

// Set unseen scores to minus infinity, and update the running maximum of each vector lane. A NaN among visible scores must propagate, because
// the caller fails the row on it.
inline void mask_and_peak(float* score, uint32_t mask, widest& peak) {
  for (int k = 0; k < KEYS; k += WIDTH) {
    widest s;
    std::memcpy(&s, score + k, sizeof s);
    if (mask != ~0u) {
      const widest_int bits = widest_int{} + static_cast<int32_t>(mask >> k & ((1u << WIDTH) - 1));
      s = (bits >> LANE & 1) != 0 ? s : widest{} + MINUS_INF;
      std::memcpy(score + k, &s, sizeof s);
    }
    peak = s > peak || s != s ? s : peak;
  }
}

// The maximum over the vector lanes, or NaN.
inline float largest(widest x) {
  float most = x[0];
  for (int i = 1; i < WIDTH; ++i) most = x[i] > most || x[i] != x[i] ? x[i] : most;
  return most;
}

// score = exp(score - peak), for a block of keys.
inline void exp_block(float* score, float peak) {
  for (int k = 0; k < KEYS; k += WIDTH) {
    widest s;
    std::memcpy(&s, score + k, sizeof s);
    s = exp_of<widest, widest_int>(s - (widest{} + peak));
    std::memcpy(score + k, &s, sizeof s);
  }
}

// score = cap tanh(score / cap), for a block of keys.
inline void cap_block(float* score, float cap) {
  for (int k = 0; k < KEYS; k += 8) store8(score + k, splat(cap) * (splat(2.0f) * sigmoid8(splat(2.0f / cap) * load8(score + k)) - splat(1.0f)));
}

// Call f with the number of queries from `q` on that are processed together, as a compile-time constant.
template <class F>
inline int by_quads(int q, int count, F&& f) {
#ifdef __AVX512F__
  if (count - q >= 8) return f(std::integral_constant<int, 8>()), 8;
#endif
  if (count - q >= 4) return f(std::integral_constant<int, 4>()), 4;
#ifdef __AVX2__
  if (count - q == 3) return f(std::integral_constant<int, 3>()), 3;
#endif
  if (count - q >= 2) return f(std::integral_constant<int, 2>()), 2;
  return f(std::integral_constant<int, 1>()), 1;
}

// What divides a weighted sum: the sum of weights, to which a head's sink adds as a key without a value.
inline float weights_sum(float sum, float peak, const Scores& how, int64_t head) {
  if (how.sinks != nullptr && peak != MINUS_INF) sum += exp8(splat(how.sinks[head] - peak))[0];
  return sum == 0.0f ? 1.0f : sum;
}

// One lane, one KV head, tokens [first, last).
inline void attend(const Shape& n, const float* query, const float* pool, const Visible& see, int64_t lane, int64_t group, int64_t first,
                   int64_t last, const Scores& how, float* out, Scratch& s) {
  const int64_t repeat = n.heads / n.groups, total = see.slots.size(), blocks = see.blocks(), padded = blocks * KEYS;
  const int64_t row = n.groups * n.dim, plane = n.pages * n.page_size * row;
  const float* keys = pool + 2 * n.layer * plane + group * n.dim;
  s.key.resize(padded);
  s.value.resize(padded);
  for (int64_t i = 0; i < total; ++i) {
    s.key[i] = keys + see.rows[i] * row;
    s.value[i] = s.key[i] + plane;
  }
  // The last block is padded with a visible key, whose scores are masked.
  for (int64_t i = total; i < padded; ++i) s.key[i] = s.key[total - 1], s.value[i] = s.value[total - 1];
  s.key_t.resize(n.dim * KEYS);
  s.score.resize(QUERIES * padded);
  s.acc.resize(QUERIES * n.dim);

  const int64_t all = (last - first) * repeat;
  for (int64_t start = 0; start < all; start += QUERIES) {
    const int count = static_cast<int>(std::min<int64_t>(QUERIES, all - start));
    const float* q_row[QUERIES];
    const uint32_t* mask[QUERIES];
    float *out_row[QUERIES], *acc[QUERIES], *totals[QUERIES];
    widest peaks[QUERIES];
    float peak[QUERIES], sum[QUERIES];
    for (int q = 0; q < count; ++q) {
      const int64_t token = first + (start + q) / repeat, head = group * repeat + (start + q) % repeat;
      q_row[q] = query + lane * n.query_b + token * n.query_t + head * n.query_h;
      out_row[q] = out + ((lane * n.tokens + token) * n.heads + head) * n.dim;
      mask[q] = see.masks.data() + token * blocks;
      acc[q] = s.acc.data() + q * n.dim;
      totals[q] = sum + q;
      peaks[q] = widest{} + MINUS_INF;
      sum[q] = 0.0f;
    }
    const auto scores = [&](int q, int64_t b) { return s.score.data() + q * padded + b * KEYS; };
    const auto seen = [&](int q, int some, int64_t b) {
      uint32_t any = 0;
      for (int i = 0; i < some; ++i) any |= mask[q + i][b];
      return any != 0;
    };
    for (int64_t b = 0; b < blocks; ++b) {
      if (!seen(0, count, b)) continue;
      transpose(&s.key[b * KEYS], n.dim, s.key_t.data());
      for (int q = 0; q < count;)
        q += by_quads(q, count, [&](auto some) {
          if (!seen(q, some, b)) return;
          float* score[some];
          for (int i = 0; i < some; ++i) score[i] = scores(q + i, b);
          score_block<some>(q_row + q, s.key_t.data(), n.dim, how.scale, score);
        });
      if (how.softcap > 0.0f)
        for (int q = 0; q < count; ++q)
          if (mask[q][b] != 0) cap_block(scores(q, b), how.softcap);
      for (int q = 0; q < count; ++q)
        if (mask[q][b] != 0) mask_and_peak(scores(q, b), mask[q][b], peaks[q]);
    }
    for (int q = 0; q < count; ++q) peak[q] = largest(peaks[q]);
    std::fill(s.acc.begin(), s.acc.end(), 0.0f);
    for (int64_t b = 0; b < blocks; ++b) {
      const int filled = static_cast<int>(std::min<int64_t>(KEYS, total - b * KEYS));
      for (int q = 0; q < count;)
        q += by_quads(q, count, [&](auto some) {
          if (!seen(q, some, b)) return;
          const float* weight[some];
          for (int i = 0; i < some; ++i) {
            float* score = scores(q + i, b);
            weight[i] = score;
            if (mask[q + i][b] == 0 || peak[q + i] == MINUS_INF)
              std::fill(score, score + KEYS, 0.0f);
            else
              exp_block(score, peak[q + i]);
          }
          weighted_values<some>(weight, &s.value[b * KEYS], filled, 0, n.dim, acc + q, totals + q);
        });
    }
    for (int q = 0; q < count; ++q) {
      const float divisor = weights_sum(sum[q], peak[q], how, group * repeat + (start + q) % repeat);
      for (int64_t d = 0; d < n.dim; ++d) out_row[q][d] = acc[q][d] / divisor;
    }
  }
}

// Attention of a batch as pieces of work in two phases, in whichever way suits the threads and the longest lane.
//
// Over many keys, phase SCORE makes the scores of a range of keys, and phase VALUE the weighted sum of a range of channels: both read rows of the pool
// from end to end, as the hardware's prefetchers follow them, and whatever the ranges are, no sum changes its order. Over few keys,
// or for many queries, there is no phase SCORE, and `attend` does all of it.
class Attending {
 public:
  enum Phase { SCORE, VALUE };

  void divide(const Shape& n, int threads) {
    n_ = n;
    threads_ = threads;
    splits_ = token_splits(n, threads);
    each_ = n.tokens * (n.heads / n.groups);
    band_ = std::clamp<int64_t>(QUERIES / std::max<int64_t>(each_, 1), 1, n.groups);
    bands_ = (n.groups + band_ - 1) / band_;
    unit_ = n.dim % 32 == 0 ? 32 : n.dim;
  }

  int chunks(int phase, const Visible* see) const {
    if (!rows(see)) return phase == SCORE ? 0 : static_cast<int>(n_.lanes * n_.groups * splits_);
    return static_cast<int>(n_.lanes * bands_ * (phase == SCORE ? key_parts(see) : column_parts()));
  }

  // done(token, head, first channel, last channel) follows what is finished of `out`.
  template <class Done>
  void work(int phase, int chunk, int64_t layer, const float* query, const float* pool, const Visible* see, const Scores& how, float* out, Scratch& s,
            Done&& done) {
    Shape n = n_;
    n.layer = layer;
    if (!rows(see)) {
      const int64_t lane = chunk / (n.groups * splits_), group = chunk / splits_ % n.groups, part = chunk % splits_, repeat = n.heads / n.groups;
      const int64_t first = part * n.tokens / splits_, last = (part + 1) * n.tokens / splits_;
      attend(n, query, pool, see[lane], lane, group, first, last, how, out, s);
      for (int64_t t = first; t < last; ++t)
        for (int64_t h = group * repeat; h < (group + 1) * repeat; ++h) done(lane * n.tokens + t, h, int64_t{0}, n.dim);
      return;
    }
    const int64_t parts = phase == SCORE ? key_parts(see) : column_parts(), part = chunk % parts, lane = chunk / (parts * bands_);
    const int64_t band = chunk / parts % bands_, first = band * band_, last = std::min(n.groups, first + band_);
    if (phase == SCORE)
      score(n, query, pool, see, lane, first, last, part, how, s);
    else
      weigh(n, pool, see, lane, first, last, part, how, out, s, done);
  }

  // Room for the scores of any layer: to be called when every `see` is known, before the first SCORE. `sees`: how many sets of lanes there are.
  void reserve(const Visible* see, int64_t sees) {
    stride_ = 0;
    for (int64_t i = 0; i < sees; ++i)
      if (rows(see + i * n_.lanes)) stride_ = std::max(stride_, longest(see + i * n_.lanes) * KEYS);
    const size_t queries = stride_ == 0 ? 0 : n_.lanes * n_.groups * each_;
    if (scores_.size() < queries * stride_) scores_.resize(queries * stride_);
    if (peaks_.size() < queries * pieces()) peaks_.resize(queries * pieces());
  }

 private:
  static constexpr int64_t LONG = 32, MIN_BLOCKS = 8;  // blocks of keys: from which two phases pay, and in one piece
#ifdef __AVX2__
  static constexpr bool FAST = true;
#else
  static constexpr bool FAST = false;  // arithmetic takes longer than reading
#endif

  int64_t longest(const Visible* see) const {
    int64_t most = 0;
    for (int64_t lane = 0; lane < n_.lanes; ++lane) most = std::max(most, see[lane].blocks());
    return most;
  }
  bool rows(const Visible* see) const { return FAST && each_ <= QUERIES && longest(see) >= LONG; }
  int64_t pieces() const { return threads_ == 1 ? 1 : (2 * threads_ + n_.lanes * bands_ - 1) / (n_.lanes * bands_); }
  int64_t key_parts(const Visible* see) const { return std::min(pieces(), longest(see) / MIN_BLOCKS); }
  int64_t column_parts() const { return std::min(pieces(), band_ * (n_.dim / unit_)); }
  // Queries are numbered by group, token and head.
  int64_t first_query(int64_t lane, int64_t group) const { return (lane * n_.groups + group) * each_; }

  static bool seen(const uint32_t* const* mask, int some, int64_t block) {
    uint32_t any = 0;
    for (int i = 0; i < some; ++i) any |= mask[i][block];
    return any != 0;
  }

  // The rows of a block. The last block is padded with a visible row, whose scores are masked.
  static void point(const Visible& see, int64_t block, int64_t row, const float* base, const float** to) {
    const int64_t first = block * KEYS, count = std::min<int64_t>(KEYS, see.rows.size() - first);
    for (int64_t k = 0; k < count; ++k) to[k] = base + see.rows[first + k] * row;
    for (int64_t k = count; k < KEYS; ++k) to[k] = to[count - 1];
  }

  void score(const Shape& n, const float* query, const float* pool, const Visible* sees, int64_t lane, int64_t first, int64_t last, int64_t part,
             const Scores& how, Scratch& s) {
    const Visible& see = sees[lane];
    const int64_t repeat = n.heads / n.groups, row = n.groups * n.dim, blocks = see.blocks(), parts = key_parts(sees);
    const float* keys = pool + 2 * n.layer * n.pages * n.page_size * row;
    const int count = static_cast<int>(each_);
    const uint32_t* mask[QUERIES];
    const float* q_row[QUERIES];
    widest peaks[QUERIES];
    for (int64_t group = first, at = 0; group < last; ++group)
      for (int q = 0; q < count; ++q, ++at) {
        mask[at] = see.masks.data() + q / repeat * blocks;
        q_row[at] = query + lane * n.query_b + q / repeat * n.query_t + (group * repeat + q % repeat) * n.query_h;
        peaks[at] = widest{} + MINUS_INF;
      }
    s.key_t.resize(n.dim * KEYS);
    for (int64_t b = part * blocks / parts; b < (part + 1) * blocks / parts; ++b)
      for (int64_t group = first; group < last; ++group) {
        if (!seen(mask, count, b)) continue;
        const float* key[KEYS];
        point(see, b, row, keys + group * n.dim, key);
        transpose(key, n.dim, s.key_t.data());
        const int64_t at = (group - first) * each_;
        float* to = scores_.data() + first_query(lane, group) * stride_ + b * KEYS;
        for (int q = 0; q < count;)
          q += by_quads(q, count, [&](auto some) {
            if (!seen(mask + q, some, b)) return;
            float* score[some];
            for (int i = 0; i < some; ++i) score[i] = to + (q + i) * stride_;
            score_block<some>(q_row + at + q, s.key_t.data(), n.dim, how.scale, score);
          });
        if (how.softcap > 0.0f)
          for (int q = 0; q < count; ++q)
            if (mask[q][b] != 0) cap_block(to + q * stride_, how.softcap);
        for (int q = 0; q < count; ++q)
          if (mask[q][b] != 0) mask_and_peak(to + q * stride_, mask[q][b], peaks[at + q]);
      }
    for (int64_t q = 0; q < (last - first) * each_; ++q) peaks_[(first_query(lane, first) + q) * parts + part] = largest(peaks[q]);
  }

  template <class Done>
  void weigh(const Shape& n, const float* pool, const Visible* sees, int64_t lane, int64_t first, int64_t last, int64_t part, const Scores& how,
             float* out, Scratch& s, Done&& done) {
    const Visible& see = sees[lane];
    const int64_t repeat = n.heads / n.groups, row = n.groups * n.dim, blocks = see.blocks(), parts = key_parts(sees), total = see.rows.size();
    const int64_t units = (last - first) * (n.dim / unit_), columns = column_parts();
    const int64_t begin = first * n.dim + part * units / columns * unit_, end = first * n.dim + (part + 1) * units / columns * unit_;
    if (begin == end) return;
    const float* values = pool + (2 * n.layer + 1) * n.pages * n.page_size * row;
    const int count = static_cast<int>(each_);
    first = begin / n.dim, last = (end + n.dim - 1) / n.dim;
    s.acc.assign((last - first) * each_ * n.dim, 0.0f);
    s.score.resize(QUERIES * KEYS);
    const uint32_t* mask[QUERIES];
    float *acc[QUERIES], *sums[QUERIES], sum[QUERIES], peak_of[QUERIES];
    for (int64_t q = 0; q < (last - first) * each_; ++q) {
      mask[q] = see.masks.data() + q % each_ / repeat * blocks;
      acc[q] = s.acc.data() + q * n.dim;
      sum[q] = 0.0f, sums[q] = sum + q;
      const float* peak = peaks_.data() + (first_query(lane, first) + q) * parts;
      float most = peak[0];
      for (int64_t p = 1; p < parts; ++p) most = peak[p] > most || peak[p] != peak[p] ? peak[p] : most;
      peak_of[q] = most;
    }
    for (int64_t b = 0; b < blocks; ++b) {
      const int filled = static_cast<int>(std::min<int64_t>(KEYS, total - b * KEYS));
      for (int64_t group = first; group < last; ++group) {
        const float* value[KEYS];
        point(see, b, row, values + group * n.dim, value);
        const int64_t from = std::max<int64_t>(begin - group * n.dim, 0), to = std::min(end - group * n.dim, n.dim), at = (group - first) * each_;
        const float* scores = scores_.data() + first_query(lane, group) * stride_ + b * KEYS;
        for (int q = 0; q < count;)
          q += by_quads(q, count, [&](auto some) {
            if (!seen(mask + q, some, b)) return;
            const float* weight[some];
            for (int i = 0; i < some; ++i) {
              float* own = s.score.data() + (q + i) * KEYS;
              weight[i] = own;
              const float most = peak_of[at + q + i];
              if (mask[q + i][b] == 0 || most == MINUS_INF) {
                std::fill(own, own + KEYS, 0.0f);
              } else {
                std::memcpy(own, scores + (q + i) * stride_, KEYS * sizeof(float));
                exp_block(own, most);
              }
            }
            weighted_values<some>(weight, value, filled, from, to, acc + at + q, sums + at + q);
          });
      }
    }
    for (int64_t group = first; group < last; ++group)
      for (int q = 0; q < count; ++q) {
        const int64_t token = lane * n.tokens + q / repeat, head = group * repeat + q % repeat, at = (group - first) * each_ + q;
        const int64_t from = std::max<int64_t>(begin - group * n.dim, 0), to = std::min(end - group * n.dim, n.dim);
        const float divisor = weights_sum(sum[at], peak_of[at], how, head);
        for (int64_t d = from; d < to; ++d) out[(token * n.heads + head) * n.dim + d] = s.acc[at * n.dim + d] / divisor;
        done(token, head, from, to);
      }
  }

  Shape n_{};
  int threads_ = 1;
  int64_t splits_ = 1, each_ = 0, band_ = 1, bands_ = 1, unit_ = 1, stride_ = 0;
  Floats scores_, peaks_;
};

}  // namespace

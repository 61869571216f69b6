// Paged attention for the CPU: float32 arithmetic over keys and values of 32 or 16 bits.
//
// A query's keys are divided into tiles of TILE positions: a slot of its prefix has its own number as position, and what it sees after the prefix
// continues the count. A tile is a softmax of its own: scores of its keys and their maximum, then weights and the weighted sum, each in the order
// of slots. Tiles are merged in order at the end, scaled by the maximum of all. So tiles can be computed by any thread, and a query's
// result depends only on the keys and values it sees and their positions, not on other queries, the batch, the page table, or the slots of its
// ancestors in the window. Cost is proportional to visible slots, not to the width of the page table.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "product.h"
#include "simd.h"

namespace {

constexpr int KEYS = 32;     // keys per block
constexpr int TILE = 128;    // positions per tile
constexpr int QUERIES = 64;  // (token, head) pairs that share one transposed block of keys
constexpr float MINUS_INF = -std::numeric_limits<float>::infinity();

inline float fma1(float a, float b, float c) {
#ifdef __FMA__
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// Words of 32 bits: row i of `row` becomes column i of `out`, whose rows are KEYS long.
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

#ifdef __AVX512F__
inline void transpose16(const float* const* row, int64_t at, float* out) {
  // Four words of four rows are one register as they are loaded, so that what remains to be shuffled stays within its quarters.
  for (int quarter = 0; quarter < 4; ++quarter) {
    __m512 a[4], b[4];
    for (int i = 0; i < 4; ++i) {
      const auto part = [&](int k) { return _mm_loadu_ps(row[4 * k + i] + at + 4 * quarter); };
      __m512 x = _mm512_castps128_ps512(part(0));
      x = _mm512_insertf32x4(x, part(1), 1);
      x = _mm512_insertf32x4(x, part(2), 2);
      a[i] = _mm512_insertf32x4(x, part(3), 3);
    }
    for (int i = 0; i < 2; ++i) {
      b[2 * i] = _mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]);
      b[2 * i + 1] = _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
      float* to = out + (4 * quarter + 2 * i) * KEYS;
      _mm512_storeu_ps(to, _mm512_shuffle_ps(b[i], b[i + 2], 0x44));
      _mm512_storeu_ps(to + KEYS, _mm512_shuffle_ps(b[i], b[i + 2], 0xee));
    }
  }
}
#endif

inline void transpose_words(const float* const* key, int64_t words, float* out) {
  int64_t w = 0;
#ifdef __AVX512F__
  for (; w + 16 <= words; w += 16)
    for (int k = 0; k < KEYS; k += 16) transpose16(key + k, w, out + w * KEYS + k);
#endif
  for (; w + 8 <= words; w += 8)
    for (int k = 0; k < KEYS; k += 8) transpose8(key + k, w, out + w * KEYS + k);
}

// A block of keys, channel by channel. `room`: as much as `out`.
template <class T>
inline void transpose(const T* const* key, int64_t dim, float* out, float* room) {
  constexpr int64_t PER_WORD = sizeof(float) / sizeof(T);
  const int64_t words = dim / PER_WORD / 8 * 8;
  const float* row[KEYS];
  for (int k = 0; k < KEYS; ++k) row[k] = reinterpret_cast<const float*>(key[k]);
  transpose_words(row, words, PER_WORD == 1 ? out : room);
  if constexpr (PER_WORD == 2)
    for (int64_t w = 0; w < words; ++w)
      for (int k = 0; k < KEYS; k += 16) widen_pairs(reinterpret_cast<const T*>(room + w * KEYS + k), out + 2 * w * KEYS + k, out + (2 * w + 1) * KEYS + k);
  for (int64_t d = words * PER_WORD; d < dim; ++d)
    for (int k = 0; k < KEYS; ++k) out[d * KEYS + k] = widen(key[k][d]);
}

// Scores of NQ queries against one transposed block, a chain of fused multiply-adds over the channels.
template <int NQ>
inline void score_chain(const float* const* query, const float* key_t, int64_t dim, float scale, float* const* score) {
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

// The same for heads of any width: a chain over more than LONGEST channels would round too often, so there are several, added in order.
template <int NQ>
inline void score_block(const float* const* query, const float* key_t, int64_t dim, float scale, float* const* score) {
  constexpr int64_t LONGEST = 256, PART = 128;
  if (dim <= LONGEST) return score_chain<NQ>(query, key_t, dim, scale, score);
  score_chain<NQ>(query, key_t, PART, scale, score);
  alignas(64) float more[NQ][KEYS];
  float* to[NQ];
  const float* from[NQ];
  for (int64_t d = PART; d < dim; d += PART) {
    for (int q = 0; q < NQ; ++q) to[q] = more[q], from[q] = query[q] + d;
    score_chain<NQ>(from, key_t + d * KEYS, std::min(PART, dim - d), scale, to);
    for (int q = 0; q < NQ; ++q)
      for (int k = 0; k < KEYS; k += 16) store16(score[q] + k, add16(load16(score[q] + k), load16(more[q] + k)));
  }
}

// acc[q] += sum over keys of weight * value, NV vectors of channels from `at` on; with TOTAL also total[q] += sum over keys of weight.
template <int NQ, int NV, bool TOTAL, class T>
inline void value_block(const float* const* weight, const T* const* value, int keys, int64_t at, float* const* acc, float* const* total) {
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

// All channels of acc, and the totals.
template <int NQ, class T>
inline void weighted_values(const float* const* weight, const T* const* value, int keys, int64_t dim, float* const* acc, float* const* total) {
  int64_t at = 0;
  if (dim >= 32) {
    value_block<NQ, 2, true>(weight, value, keys, at, acc, total);
    for (at += 32; at + 32 <= dim; at += 32) value_block<NQ, 2, false>(weight, value, keys, at, acc, total);
  } else if (dim >= 16) {
    value_block<NQ, 1, true>(weight, value, keys, at, acc, total);
    at += 16;
  } else {
    for (int q = 0; q < NQ; ++q)
      for (int k = 0; k < keys; ++k) *total[q] += weight[q][k];
  }
  for (; at + 16 <= dim; at += 16) value_block<NQ, 1, false>(weight, value, keys, at, acc, total);
  for (; at < dim; ++at)
    for (int q = 0; q < NQ; ++q) {
      float sum = acc[q][at];
      for (int k = 0; k < keys; ++k) sum = fma1(weight[q][k], widen(value[k][at]), sum);
      acc[q][at] = sum;
    }
}

// The slots that one lane's queries see: [lo, hi) of each, and slot base + j if bit j of its words is set (words == nullptr: no words).
struct Visible {
  std::vector<int64_t> lo, hi;
  const int64_t* words = nullptr;
  int64_t num_words = 0, base = 0;
  std::vector<int64_t> slots;   // seen by any query, ascending, after as many as make the first a multiple of KEYS
  std::vector<int64_t> rows;    // rows of the pool that hold these slots; of those that no query sees, a row that one sees
  // Blocks of KEYS of these slots, by tile and slot. A block in which queries have different tiles is a step of each.
  struct Step {
    int64_t block, tile;
  };
  std::vector<Step> steps;
  std::vector<int64_t> tiles;   // the first step of each tile, and the number of steps
  std::vector<uint32_t> masks;  // [tokens][steps]: which slots of the block each query sees in that tile
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
    const int64_t least = extra.empty() ? first : std::min(first, extra.front());
    if (least < length && (first < last || !extra.empty()))
      for (int64_t slot = least / KEYS * KEYS; slot < least; ++slot) {
        slots.push_back(slot);
        rows.push_back(std::max<int64_t>(table[least / page_size], 0) * page_size + least % page_size);
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
    divide(tokens);
  }

  int64_t blocks() const { return (static_cast<int64_t>(slots.size()) + KEYS - 1) / KEYS; }
  int64_t num_tiles() const { return static_cast<int64_t>(tiles.size()) - 1; }
  int64_t longest_tile() const {
    int64_t most = 0;
    for (int64_t i = 0; i < num_tiles(); ++i) most = std::max(most, tiles[i + 1] - tiles[i]);
    return most;
  }

 private:
  struct Part {
    int64_t block, tile, token;
    uint32_t mask;
  };
  std::vector<Part> parts;
  std::vector<uint32_t> whole;  // [tokens][blocks]

  // Slots of a block that a query sees.
  uint32_t mask(int64_t t, int64_t block) const {
    const int64_t first = block * KEYS, count = std::min<int64_t>(KEYS, static_cast<int64_t>(slots.size()) - first);
    const int64_t low = slots[first], high = slots[first + count - 1];
    if (low >= lo[t] && high < hi[t]) return count == KEYS ? ~0u : (1u << count) - 1;
    uint32_t bits = 0;
    if (words != nullptr || (low < hi[t] && high >= lo[t]))
      for (int64_t k = 0; k < count; ++k) {
        const int64_t slot = slots[first + k];
        bits |= static_cast<uint32_t>((slot >= lo[t] && slot < hi[t]) || bit(t, slot)) << k;
      }
    return bits;
  }

  void divide(int64_t tokens) {
    const int64_t count = blocks();
    steps.clear();
    parts.clear();
    whole.assign(tokens * count, 0);
    for (int64_t t = 0; t < tokens; ++t) {
      int64_t after = hi[t];  // the position of the next slot that is not of the prefix
      for (int64_t b = 0; b < count; ++b) {
        uint32_t seen = mask(t, b);
        if (seen == 0) continue;
        const int64_t first = b * KEYS, tile = slots[first] / TILE;
        const int64_t last = slots[std::min<int64_t>(first + KEYS, slots.size()) - 1];
        if (last < hi[t] && last / TILE == tile) {
          whole[t * count + b] = seen;
          continue;
        }
        for (; seen; seen &= seen - 1) {
          const int k = __builtin_ctz(seen);
          const int64_t slot = slots[first + k], position = slot >= lo[t] && slot < hi[t] ? slot : after++;
          if (parts.empty() || parts.back().token != t || parts.back().block != b || parts.back().tile != position / TILE)
            parts.push_back({b, position / TILE, t, 0});
          parts.back().mask |= 1u << k;
        }
      }
    }
    for (int64_t b = 0; b < count; ++b)
      for (int64_t t = 0; t < tokens; ++t)
        if (whole[t * count + b] != 0) {
          steps.push_back({b, slots[b * KEYS] / TILE});
          break;
        }
    for (const Part& part : parts) steps.push_back({part.block, part.tile});
    const auto before = [](const Step& a, const Step& b) { return a.tile != b.tile ? a.tile < b.tile : a.block < b.block; };
    const auto same = [](const Step& a, const Step& b) { return a.tile == b.tile && a.block == b.block; };
    std::sort(steps.begin(), steps.end(), before);
    steps.erase(std::unique(steps.begin(), steps.end(), same), steps.end());
    tiles.clear();
    masks.assign(tokens * steps.size(), 0);
    for (size_t i = 0; i < steps.size(); ++i) {
      const Step& step = steps[i];
      if (i == 0 || steps[i - 1].tile != step.tile) tiles.push_back(i);
      if (slots[step.block * KEYS] / TILE == step.tile)
        for (int64_t t = 0; t < tokens; ++t) masks[t * steps.size() + i] = whole[t * count + step.block];
    }
    tiles.push_back(steps.size());
    for (const Part& part : parts)
      masks[part.token * steps.size() + (std::lower_bound(steps.begin(), steps.end(), Step{part.block, part.tile}, before) - steps.begin())] |= part.mask;
  }
};

struct Shape {
  int64_t lanes, tokens, heads, groups, dim, columns, page_size, pages, layer, num_words, query_b, query_t, query_h;
};

// A KV pool, and the code of its dtype.
struct Pool {
  char* data;
  int64_t code;

  // f of a pointer to its first element.
  template <class F>
  void visit(F&& f) const {
    switch (code) {
      case graphspec::BFLOAT16: return f(reinterpret_cast<bfloat*>(data));
      case graphspec::FLOAT16: return f(reinterpret_cast<half*>(data));
      default: return f(reinterpret_cast<float*>(data));
    }
  }
};

// How scores become weights: see tree_attention() in graphspec/kernels/attention. softcap 0: none; sinks, by head, may be null.
struct Scores {
  float scale, softcap;
  const float* sinks;
};

struct Scratch {
  Floats key_t, room, score, parts;
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

// Queries of one lane that are computed together: of KV heads [first, last), `each` a head, from number `from` on. A head's queries are numbered by
// token and head.
struct Batch {
  int64_t lane, first, last, from, each;
  int64_t count() const { return (last - first) * each; }
};

// Attention of a batch of lanes as pieces of work.
//
// Few queries over several tiles of keys are divided by tile: rows of the pool are read from end to end, those of all KV heads together, as the
// hardware's prefetchers follow them, or of as many as give all threads work; whoever finishes a lane's last tile merges all. Otherwise one
// lane, one KV head and a part of the tokens are a piece.
class Attending {
 public:
  void divide(const Shape& n, int threads) {
    n_ = n;
    threads_ = threads;
    splits_ = token_splits(n, threads);
    each_ = n.tokens * (n.heads / n.groups);
    band_ = std::clamp<int64_t>(QUERIES / std::max<int64_t>(each_, 1), 1, n.groups);
    part_ = (n.dim + 2 + 15) / 16 * 16;
  }

  int chunks(const Visible* see) const {
    return static_cast<int>(by_tile(see) ? n_.lanes * bands(see) * pieces(see) : n_.lanes * n_.groups * splits_);
  }

  // Room for the tiles of any layer: to be called when every `see` is known, before work(). `sees`: how many sets of lanes there are.
  void reserve(const Visible* see, int64_t sees) {
    stride_ = 0;
    for (int64_t i = 0; i < sees; ++i)
      if (by_tile(see + i * n_.lanes)) stride_ = std::max(stride_, longest(see + i * n_.lanes));
    if (stride_ == 0) return;
    const size_t size = n_.lanes * n_.groups * each_ * stride_ * part_;
    if (parts_.size() < size) parts_.resize(size);
    if (places_ < n_.lanes * n_.groups) {
      places_ = n_.lanes * n_.groups;
      done_ = std::make_unique<std::atomic<int64_t>[]>(places_);
    }
    for (int64_t i = 0; i < places_; ++i) done_[i].store(0, std::memory_order_relaxed);
  }

  // done(token, head) follows each finished row of `out`.
  template <class T, class Done>
  void work(int chunk, int64_t layer, const float* query, const T* pool, const Visible* see, const Scores& how, float* out, Scratch& s, Done&& done) {
    const int64_t repeat = n_.heads / n_.groups;
    if (!by_tile(see)) {
      const int64_t lane = chunk / (n_.groups * splits_), group = chunk / splits_ % n_.groups, part = chunk % splits_;
      const int64_t last = (part + 1) * n_.tokens / splits_ * repeat, tiles = see[lane].num_tiles();
      s.parts.resize(QUERIES * std::max<int64_t>(tiles, 1) * part_);
      for (int64_t from = part * n_.tokens / splits_ * repeat; from < last; from += QUERIES) {
        const Batch batch{lane, group, group + 1, from, std::min<int64_t>(QUERIES, last - from)};
        for (int64_t tile = 0; tile < tiles; ++tile) compute(batch, tile, layer, query, pool, see[lane], how, s.parts.data(), tiles, s);
        merge(batch, tiles, how, s.parts.data(), tiles, out, done);
      }
      return;
    }
    const int64_t count = pieces(see), part = chunk % count, place = chunk / count, lane = place / bands(see), first = place % bands(see) * band(see);
    const Batch batch{lane, first, std::min(n_.groups, first + band(see)), 0, each_};
    float* parts = parts_.data() + (lane * n_.groups + first) * each_ * stride_ * part_;
    const int64_t tiles = see[lane].num_tiles();
    for (int64_t tile = part * tiles / count; tile < (part + 1) * tiles / count; ++tile)
      compute(batch, tile, layer, query, pool, see[lane], how, parts, stride_, s);
    if (done_[place].fetch_add(1, std::memory_order_acq_rel) + 1 < count) return;
    done_[place].store(0, std::memory_order_relaxed);
    merge(batch, tiles, how, parts, stride_, out, done);
  }

 private:
#ifdef __AVX2__
  static constexpr bool FAST = true;
#else
  static constexpr bool FAST = false;  // arithmetic takes longer than reading
#endif

  int64_t longest(const Visible* see) const {
    int64_t most = 0;
    for (int64_t lane = 0; lane < n_.lanes; ++lane) most = std::max(most, see[lane].num_tiles());
    return most;
  }
  bool by_tile(const Visible* see) const { return FAST && each_ <= QUERIES && longest(see) >= 2; }
  int64_t pieces(const Visible* see) const { return threads_ == 1 ? 1 : longest(see); }
  // KV heads that are read together, and the number of such sets.
  int64_t band(const Visible* see) const {
    const int64_t count = n_.lanes * pieces(see);
    return std::clamp<int64_t>(n_.groups / ((threads_ + count - 1) / count), 1, band_);
  }
  int64_t bands(const Visible* see) const { return (n_.groups + band(see) - 1) / band(see); }

  static bool seen(const uint32_t* const* mask, int some, int64_t step) {
    uint32_t any = 0;
    for (int i = 0; i < some; ++i) any |= mask[i][step];
    return any != 0;
  }

  // The rows of a block. The last block is padded with a visible row, whose scores are masked.
  template <class T>
  static int point(const Visible& see, int64_t block, int64_t row, const T* base, const T** to) {
    const int64_t first = block * KEYS, count = std::min<int64_t>(KEYS, static_cast<int64_t>(see.rows.size()) - first);
    for (int64_t k = 0; k < count; ++k) to[k] = base + see.rows[first + k] * row;
    for (int64_t k = count; k < KEYS; ++k) to[k] = to[count - 1];
    return static_cast<int>(count);
  }

  // Read `width` elements of the rows of a block in their order: the hardware then fetches what follows, which it does not where one head's part
  // of each row is read at a time, and not after prefetches either.
  template <class T>
  static void touch(const Visible& see, int64_t block, int64_t row, const T* base, int64_t width) {
    const int64_t first = block * KEYS, last = std::min<int64_t>(first + KEYS, static_cast<int64_t>(see.rows.size()));
    for (int64_t k = first; k < last; ++k) {
      const char* from = reinterpret_cast<const char*>(base + see.rows[k] * row);
      for (int64_t at = 0; at < width * static_cast<int64_t>(sizeof(T)); at += 64) {
        const char byte = from[at];
        asm volatile("" : : "r"(byte));
      }
    }
  }

  // One tile: the maximum of a query's scores, the sum of weights and the weighted sum, at parts[query * tiles + tile], part_ floats each.
  template <class T>
  void compute(const Batch& batch, int64_t tile, int64_t layer, const float* query, const T* pool, const Visible& see, const Scores& how, float* parts,
               int64_t tiles, Scratch& s) const {
    const int64_t repeat = n_.heads / n_.groups, row = n_.groups * n_.dim, plane = n_.pages * n_.page_size * row, dim = n_.dim;
    const T *keys = pool + 2 * layer * plane, *values = keys + plane;
    const int64_t begin = see.tiles[tile], end = see.tiles[tile + 1], width = (end - begin) * KEYS;
    const int count = static_cast<int>(batch.count()), each = static_cast<int>(batch.each);
    const uint32_t* mask[QUERIES];
    const float* q_row[QUERIES];
    float *acc[QUERIES], *sum[QUERIES], peak[QUERIES];
    widest peaks[QUERIES];
    s.key_t.resize(dim * KEYS);
    s.room.resize(dim * KEYS);
    s.score.resize(QUERIES * width);
    for (int at = 0; at < count; ++at) {
      const int64_t group = batch.first + at / each, q = batch.from + at % each;
      mask[at] = see.masks.data() + q / repeat * see.steps.size();
      q_row[at] = query + batch.lane * n_.query_b + q / repeat * n_.query_t + (group * repeat + q % repeat) * n_.query_h;
      peaks[at] = widest{} + MINUS_INF;
    }
    const auto score_of = [&](int64_t q, int64_t step) { return s.score.data() + q * width + (step - begin) * KEYS; };
    const T* rows[KEYS];
    const int64_t together = (batch.last - batch.first) * dim;
    for (int64_t step = begin; step < end; ++step) {
      if (together > dim) touch(see, see.steps[step].block, row, keys + batch.first * dim, together);
      for (int64_t group = batch.first, at = 0; group < batch.last; ++group, at += each) {
        if (!seen(mask + at, each, step)) continue;
        point(see, see.steps[step].block, row, keys + group * dim, rows);
        transpose(rows, dim, s.key_t.data(), s.room.data());
        for (int q = 0; q < each;)
          q += by_quads(q, each, [&](auto some) {
            if (!seen(mask + at + q, some, step)) return;
            float* score[some];
            for (int i = 0; i < some; ++i) score[i] = score_of(at + q + i, step);
            score_block<some>(q_row + at + q, s.key_t.data(), dim, how.scale, score);
          });
        for (int64_t q = at; q < at + each; ++q) {
          if (mask[q][step] == 0) continue;
          if (how.softcap > 0.0f) cap_block(score_of(q, step), how.softcap);
          mask_and_peak(score_of(q, step), mask[q][step], peaks[q]);
        }
      }
    }
    for (int q = 0; q < count; ++q) {
      float* part = parts + (q * tiles + tile) * part_;
      peak[q] = part[0] = largest(peaks[q]);
      sum[q] = part + 1, acc[q] = part + 2;
      std::fill(part + 1, part + 2 + dim, 0.0f);
    }
    for (int64_t step = begin; step < end; ++step) {
      if (together > dim) touch(see, see.steps[step].block, row, values + batch.first * dim, together);
      for (int64_t group = batch.first, at = 0; group < batch.last; ++group, at += each) {
        if (!seen(mask + at, each, step)) continue;
        const int filled = point(see, see.steps[step].block, row, values + group * dim, rows);
        for (int q = 0; q < each;)
          q += by_quads(q, each, [&](auto some) {
            if (!seen(mask + at + q, some, step)) return;
            const float* weight[some];
            for (int i = 0; i < some; ++i) {
              float* score = score_of(at + q + i, step);
              weight[i] = score;
              if (mask[at + q + i][step] == 0 || peak[at + q + i] == MINUS_INF)
                std::fill(score, score + KEYS, 0.0f);
              else
                exp_block(score, peak[at + q + i]);
            }
            weighted_values<some>(weight, rows, filled, dim, acc + at + q, sum + at + q);
          });
      }
    }
  }

  template <class Done>
  void merge(const Batch& batch, int64_t tiles, const Scores& how, const float* parts, int64_t stride, float* out, Done&& done) const {
    const int64_t repeat = n_.heads / n_.groups;
    for (int64_t at = 0; at < batch.count(); ++at) {
      const int64_t q = batch.from + at % batch.each, token = batch.lane * n_.tokens + q / repeat;
      const int64_t head = (batch.first + at / batch.each) * repeat + q % repeat;
      const float* part = parts + at * stride * part_;
      float* to = out + (token * n_.heads + head) * n_.dim;
      float peak = MINUS_INF, sum = 0.0f;
      for (int64_t t = 0; t < tiles; ++t) {
        const float own = part[t * part_];
        peak = own > peak || own != own ? own : peak;
      }
      std::fill(to, to + n_.dim, 0.0f);
      for (int64_t t = 0; t < tiles; ++t) {
        const float* from = part + t * part_;
        if (from[0] == MINUS_INF) continue;
        const float share = exp8(splat(from[0] - peak))[0];
        sum = fma1(from[1], share, sum);
        int64_t d = 0;
        for (; d + 8 <= n_.dim; d += 8) store8(to + d, fmadd(load8(from + 2 + d), splat(share), load8(to + d)));
        for (; d < n_.dim; ++d) to[d] = fma1(from[2 + d], share, to[d]);
      }
      if (how.sinks != nullptr && peak != MINUS_INF) sum += exp8(splat(how.sinks[head] - peak))[0];
      const float divisor = sum == 0.0f ? 1.0f : sum;
      for (int64_t d = 0; d < n_.dim; ++d) to[d] /= divisor;
      done(token, head);
    }
  }

  Shape n_{};
  int threads_ = 1;
  int64_t splits_ = 1, each_ = 0, band_ = 1, part_ = 16, stride_ = 0, places_ = 0;
  Floats parts_;
  std::unique_ptr<std::atomic<int64_t>[]> done_;
};

}  // namespace

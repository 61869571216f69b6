// Paged attention for the CPU, float32. Plain C interface, no dependency but OpenMP.
//
// Softmax in two passes: scores of every visible key, their maximum, then weights and the weighted sum. Every sum runs in one fixed order
// (over channels for a score, over visible slots for an output), so the result of a query depends on the keys and values it sees and
// on nothing else: not on the other queries, the batch, the page table, or where in the window its ancestors lie.
// Cost is proportional to visible slots, not to the page table's width.

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

inline void store8(float* p, f8 v) { std::memcpy(p, &v, sizeof v); }

inline float fma1(float a, float b, float c) {
#ifdef __FMA__
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// exp(x) for x <= 0: Cody-Waite reduction by ln 2 and the degree-6 minimax polynomial of Cephes' expf (about 1 ulp); 0 below -87.
inline f8 exp8(f8 x) {
  const f8 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  f8 clipped = x < splat(-87.0f) ? splat(-87.0f) : x;
  f8 whole = fma8(clipped, splat(1.44269504088896341f), magic);
  i8 power;
  std::memcpy(&power, &whole, sizeof power);
  f8 n = whole - magic;
  f8 r = fma8(n, splat(-0.693359375f), clipped);
  r = fma8(n, splat(2.12194440e-4f), r);
  f8 p = splat(1.9875691500e-4f);
  p = fma8(p, r, splat(1.3981999507e-3f));
  p = fma8(p, r, splat(8.3334519073e-3f));
  p = fma8(p, r, splat(4.1665795894e-2f));
  p = fma8(p, r, splat(1.6666665459e-1f));
  p = fma8(p, r, splat(5.0000001201e-1f));
  p = fma8(p, r * r, r) + splat(1.0f);
  i8 bits;
  std::memcpy(&bits, &p, sizeof bits);
  bits += power << 23;  // the low bits of the rounded sum are n; its high bits leave the word
  std::memcpy(&p, &bits, sizeof p);
  return x < splat(-87.0f) ? splat(0.0f) : p;
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

  bool bit(int64_t t, int64_t slot) const {
    const int64_t j = slot - base;
    if (words == nullptr || j < 0 || j >= 64 * num_words) return false;
    return (static_cast<uint64_t>(words[t * num_words + (j >> 6)]) >> (j & 63)) & 1;
  }
};

struct Shape {
  int64_t lanes, tokens, heads, groups, dim, columns, page_size, pages, layer, num_words, query_b, query_t, query_h;
};

struct Scratch {
  std::vector<int32_t> cover;
  std::vector<int64_t> slots;
  std::vector<const float*> key, value;
  std::vector<float> key_t, score, acc;
  std::vector<uint8_t> seen;
};

// Slots that any of the queries sees, ascending. Nothing else is ever loaded, so what the rest of the pool holds can't matter.
void list_slots(const Visible& see, int64_t tokens, int64_t length, Scratch& s) {
  s.cover.assign(length + 1, 0);
  for (int64_t t = 0; t < tokens; ++t)
    if (see.lo[t] < see.hi[t]) {
      ++s.cover[see.lo[t]];
      --s.cover[see.hi[t]];
    }
  for (int64_t w = 0; w < see.num_words; ++w) {
    uint64_t any = 0;
    for (int64_t t = 0; t < tokens; ++t) any |= static_cast<uint64_t>(see.words[t * see.num_words + w]);
    for (; any; any &= any - 1) {
      const int64_t slot = see.base + 64 * w + __builtin_ctzll(any);
      if (slot >= 0 && slot < length) {
        ++s.cover[slot];
        --s.cover[slot + 1];
      }
    }
  }
  s.slots.clear();
  int32_t depth = 0;
  for (int64_t slot = 0; slot < length; ++slot) {
    depth += s.cover[slot];
    if (depth > 0) s.slots.push_back(slot);
  }
}

// One lane, one KV head, tokens [first, last).
void attend(const Shape& n, const float* query, const float* pool, const int32_t* table, const Visible& see, int64_t lane, int64_t group,
            int64_t first, int64_t last, float scale, float* out, Scratch& s) {
  const int64_t repeat = n.heads / n.groups, total = s.slots.size(), blocks = (total + KEYS - 1) / KEYS, padded = blocks * KEYS;
  const int64_t row = n.groups * n.dim, plane = n.pages * n.page_size * row;
  const float* keys = pool + 2 * n.layer * plane + group * n.dim;
  s.key.resize(padded);
  s.value.resize(padded);
  for (int64_t i = 0; i < total; ++i) {
    const int64_t slot = s.slots[i], page = std::max<int64_t>(table[lane * n.columns + slot / n.page_size], 0);
    s.key[i] = keys + (page * n.page_size + slot % n.page_size) * row;
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
      const int64_t begin = s.slots[b * KEYS], end = s.slots[std::min(total, (b + 1) * KEYS) - 1];
      const int filled = static_cast<int>(std::min<int64_t>(KEYS, total - b * KEYS));
      int some = 0;
      for (int q = 0; q < count; ++q) {
        const int64_t t = token[q];
        uint8_t seen = begin >= see.lo[t] && end < see.hi[t] && filled == KEYS ? 2 : begin < see.hi[t] && end >= see.lo[t];
        for (int k = 0; !seen && see.words != nullptr && k < filled; ++k) seen = see.bit(t, s.slots[b * KEYS + k]);
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
            const int64_t slot = k < filled ? s.slots[b * KEYS + k] : -1;
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

constexpr int64_t WORK_PER_THREAD = 1 << 19;  // multiply-adds below which starting a second thread costs more than it saves

void run(const Shape& n, const float* query, const float* pool, const int32_t* table, const std::vector<Visible>& see, float scale,
         float* out, int threads) {
  const int64_t length = n.columns * n.page_size;
  int64_t work = 0;
  for (const Visible& v : see) {
    int64_t most = 0;
    for (int64_t t = 0; t < n.tokens; ++t) most += std::max<int64_t>(0, v.hi[t] - v.lo[t]);
    work += most * n.heads * n.dim * 2;
  }
  threads = static_cast<int>(std::clamp<int64_t>(work / WORK_PER_THREAD, 1, threads));
  const int64_t pairs = n.lanes * n.groups;
  const int64_t splits = threads == 1 ? 1 : std::clamp<int64_t>((2 * threads + pairs - 1) / pairs, 1, n.tokens);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic)
  for (int64_t task = 0; task < pairs * splits; ++task) {
    static thread_local Scratch scratch;
    const int64_t lane = task / (n.groups * splits), group = task / splits % n.groups, part = task % splits;
    list_slots(see[lane], n.tokens, length, scratch);
    attend(n, query, pool, table, see[lane], lane, group, part * n.tokens / splits, (part + 1) * n.tokens / splits, scale, out, scratch);
  }
}

int64_t clip(int64_t x, int64_t length) { return std::clamp<int64_t>(x, 0, length); }

}  // namespace

extern "C" {

void graphspec_tree_attention(float* out, const float* query, const float* pool, const int32_t* table, const int64_t* prefix_begin,
                              const int64_t* prefix_end, const int64_t* ancestors, const int64_t* dims, double scale, int threads) {
  Shape n;
  std::memcpy(&n, dims, sizeof n);
  const int64_t length = n.columns * n.page_size;
  static thread_local std::vector<Visible> see;
  see.resize(n.lanes);
  for (int64_t b = 0; b < n.lanes; ++b) {
    Visible& v = see[b];
    v.lo.resize(n.tokens);
    v.hi.assign(n.tokens, clip(prefix_end[b], length));
    for (int64_t t = 0; t < n.tokens; ++t) v.lo[t] = clip(prefix_begin[b * n.tokens + t], length);
    v.words = ancestors + b * n.tokens * n.num_words;
    v.num_words = n.num_words;
    v.base = prefix_end[b];
  }
  run(n, query, pool, table, see, static_cast<float>(scale), out, threads);
}

void graphspec_chunk_attention(float* out, const float* query, const float* pool, const int32_t* table, const int64_t* prefix_begin,
                               const int64_t* slot, const uint8_t* valid, const int64_t* dims, double scale, int threads) {
  Shape n;
  std::memcpy(&n, dims, sizeof n);
  const int64_t length = n.columns * n.page_size;
  static thread_local std::vector<Visible> see;
  see.resize(n.lanes);
  for (int64_t b = 0; b < n.lanes; ++b) {
    Visible& v = see[b];
    v.lo.assign(n.tokens, 0);
    v.hi.assign(n.tokens, 0);
    v.words = nullptr;
    v.num_words = 0;
    for (int64_t t = 0; t < n.tokens; ++t)
      if (valid[b * n.tokens + t]) {
        v.lo[t] = clip(prefix_begin[b * n.tokens + t], length);
        v.hi[t] = clip(slot[b * n.tokens + t] < length ? slot[b * n.tokens + t] + 1 : length, length);
      }
  }
  run(n, query, pool, table, see, static_cast<float>(scale), out, threads);
}
}

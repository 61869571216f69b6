// Top-k of draft rows, beams of a level, nodes of a tree. Plain C interface; the fields of each struct are filled by
// graphspec/kernels/native/cycle.py, in this order. The references define their meaning.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "call.h"
#include "noise.h"
#include "row_program.h"

namespace {

constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr int64_t LIVE = 1;
constexpr int64_t STRIDE = 32;      // logits compared at a time
constexpr int64_t NOISE_UNITS = 8;  // of work for each logit

// The best entries pushed so far, descending; ties in order of arrival.
class Best {
 public:
  void begin(int64_t size) {
    size_ = size;
    value_.clear();
    index_.clear();
  }
  float bar() const { return static_cast<int64_t>(value_.size()) < size_ ? NEVER : value_.back(); }
  bool full() const { return static_cast<int64_t>(value_.size()) == size_; }
  void offer(float value, int64_t index) {
    if (full()) {
      if (size_ == 0 || !(value > value_.back())) return;
      value_.pop_back();
      index_.pop_back();
    }
    const auto at = std::upper_bound(value_.begin(), value_.end(), value, [](float a, float b) { return a > b; });
    index_.insert(index_.begin() + (at - value_.begin()), index);
    value_.insert(at, value);
  }
  float value(int64_t i) const { return value_[i]; }
  int64_t index(int64_t i) const { return index_[i]; }
  std::vector<int64_t>& indices() { return index_; }

 private:
  int64_t size_ = 0;
  std::vector<float> value_;
  std::vector<int64_t> index_;
};

inline f8 finite8(f8 x) {
  const f8 most = splat(std::numeric_limits<float>::max());
  return (x <= most) & (x >= -most) ? x : splat(NEVER);
}
inline float finite1(float x) { return std::isfinite(x) ? x : NEVER; }

struct Sum {
  float peak, log_total;  // the best key, and the logarithm of the sum of exp(key - peak)
};

// The best keys of a row, and what makes log-probabilities of them.
Sum rank(const float* key, int64_t vocab, int64_t topk, Best& best) {
  best.begin(topk);
  int64_t i = 0;
  for (; i < std::min(topk, vocab); ++i) best.offer(finite1(key[i]), i);
  for (; i + STRIDE <= vocab; i += STRIDE) {
    f8 most = splat(NEVER);
    for (int64_t j = i; j < i + STRIDE; j += 8) {
      const f8 x = finite8(load8(key + j));
      most = x > most ? x : most;
    }
    float peak = most[0];
    for (int j = 1; j < 8; ++j) peak = most[j] > peak ? most[j] : peak;
    if (peak > best.bar())
      for (int64_t j = i; j < i + STRIDE; ++j) best.offer(finite1(key[j]), j);
  }
  for (; i < vocab; ++i) best.offer(finite1(key[i]), i);

  const float peak = best.value(0) == NEVER ? 0.0f : best.value(0);
  f8 sums = splat(0.0f);
  for (i = 0; i + 8 <= vocab; i += 8) sums = sums + exp8(finite8(load8(key + i)) - splat(peak));
  alignas(32) float rest[8];
  for (int j = 0; j < 8; ++j) rest[j] = i + j < vocab ? finite1(key[i + j]) - peak : NEVER;
  sums = sums + exp8(load8(rest));
  float total = 0.0f;
  for (int j = 0; j < 8; ++j) total += sums[j];
  return {peak, std::log(total)};
}

struct DraftTopK {
  float* logprob;
  int64_t* token;
  const float* keys;
  const int64_t* target;           // or null
  const int64_t *seed, *position;  // of a lane; null: no noise
  const float* temperature;
  int64_t count, vocab, topk, per_lane;

  int64_t rows() const { return count; }
  int64_t units() const { return count * vocab * (seed == nullptr ? 1 : NOISE_UNITS); }
  void row(int64_t r) const {
    static thread_local Best best;
    const auto [peak, log_total] = rank(ranked(r), vocab, topk, best);
    for (int64_t k = 0; k < topk; ++k) {
      const int64_t index = best.index(k), to = r * topk + k;
      logprob[to] = best.value(k) == NEVER ? NEVER : best.value(k) - peak - log_total;
      token[to] = target == nullptr ? index : target[index];
    }
  }

 private:
  // What ranks a row's tokens: logits, plus noise if there is any.
  const float* ranked(int64_t r) const {
    static thread_local std::vector<float> noisy;
    const float* logits = keys + r * vocab;
    const int64_t lane = r / per_lane;
    if (seed == nullptr || !(temperature[lane] > 0)) return logits;
    const Noise noise(seed[lane], position[lane]);
    const f8 heat = splat(temperature[lane]);
    noisy.resize((vocab + 7) / 8 * 8);
    for (int64_t i = 0; i < vocab; i += 8) {
      f8 x = splat(NEVER);
      std::memcpy(&x, logits + i, std::min<int64_t>(8, vocab - i) * sizeof(float));
      store8(noisy.data() + i, finite8(x) + heat * noise.of(target, i, vocab));
    }
    return noisy.data();
  }
};

struct NoteLogprobs {
  const float* logits;
  const int64_t *path, *sample, *cycle;
  float *chosen, *top;
  int64_t* top_token;
  int64_t lanes, nodes, vocab, width, alternatives, slots, chosen_slot, chosen_lane, top_slot, top_lane, top_entry;

  int64_t rows() const { return lanes * width; }
  int64_t units() const { return rows() * vocab; }
  void row(int64_t entry) const {
    static thread_local Best best;
    const int64_t lane = entry / width, at = entry % width, node = lane * nodes + path[entry], slot = *cycle % slots;
    const float* x = logits + node * vocab;
    const Sum sum = rank(x, vocab, std::max<int64_t>(alternatives, 1), best);
    chosen[slot * chosen_slot + lane * chosen_lane + at] = x[std::max<int64_t>(sample[node], 0)] - sum.peak - sum.log_total;
    const int64_t to = slot * top_slot + lane * top_lane + at * top_entry;
    for (int64_t k = 0; k < alternatives; ++k) {
      top[to + k] = best.value(k) == NEVER ? NEVER : best.value(k) - sum.peak - sum.log_total;
      top_token[to + k] = best.index(k);
    }
  }
};

struct Level {
  const float* increment;
  const int64_t* next;
  const int64_t *lane_row, *status, *seq_len;
  float* score;
  int64_t *token, *parent;
  int64_t *beam_token, *beam_index, *beam_source, *beam_path, *beam_ancestors;
  uint8_t* beam_valid;
  int64_t *beam_slot, *beam_position, *beam_end, *next_position;
  int64_t level, beams, shift, lanes, rows, topk, pool, depth, words;
};

void draft_level(const Level& c) {
  static thread_local Best best;
  static thread_local std::vector<int64_t> before;
  const int64_t k = c.topk, begin = c.level > 1 ? k + (c.level - 2) * k * k : 0, count = c.rows * k;
  for (int64_t lane = 0; lane < c.lanes; ++lane) {
    const int64_t row = c.lane_row[lane], length = c.seq_len[row];
    const bool live = c.status[row] == LIVE;
    const float* increment = c.increment + lane * count;
    const int64_t* next = c.next + lane * count;
    float* pool = c.score + lane * c.pool;
    best.begin(k);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t above = c.level > 1 ? c.beam_index[lane * k + i / k] : -1;
      float score = c.level > 1 ? pool[above] : 0.0f;
      score = live && score > NEVER ? (c.level > 1 ? score + increment[i] : increment[i]) : NEVER;
      if (std::isnan(score)) score = NEVER;
      pool[begin + i] = score;
      c.token[lane * c.pool + begin + i] = next[i];
      c.parent[lane * c.pool + begin + i] = above;
      best.offer(score, i);
    }
    if (!c.beams) continue;
    int64_t *path = c.beam_path + lane * k * c.depth, *ancestors = c.beam_ancestors + lane * k * c.words;
    // Beams may swap places, so the old ones are copied first.
    before.assign(path, path + k * c.depth);
    before.insert(before.end(), ancestors, ancestors + k * c.words);
    for (int64_t b = 0; b < k; ++b) {
      const int64_t chosen = best.index(b), source = chosen / k, bit = (c.level - 1) * k + b, at = lane * k + b;
      const bool valid = best.value(b) > NEVER;
      for (int64_t d = 0; d + 1 < c.level; ++d) path[b * c.depth + d] = before[source * c.depth + d];
      path[b * c.depth + c.level - 1] = next[chosen];
      for (int64_t w = 0; w < c.words; ++w) {
        const int64_t own = bit / 64 == w ? static_cast<int64_t>(uint64_t{1} << bit % 64) : 0;
        const int64_t inherited = c.level > 1 ? before[k * c.depth + source * c.words + w] : 0;
        ancestors[b * c.words + w] = valid ? own | inherited : 0;
      }
      c.beam_token[at] = valid ? next[chosen] : -1;
      c.beam_index[at] = begin + chosen;
      c.beam_source[at] = source;
      c.beam_valid[at] = valid;
      c.beam_slot[at] = length + 1 + bit;
      c.beam_position[at] = length + c.level - c.shift;
    }
    c.beam_end[lane] = length + 1;
    c.next_position[lane] = length + 1 + c.level;
  }
}

struct Marginals {
  const float* increment;
  const int64_t *next, *lane_row, *status;
  float* score;
  int64_t *token, *parent;
  int64_t lanes, steps, topk;
};

void marginal_pool(const Marginals& c) {
  static thread_local Best best;
  static thread_local std::vector<int64_t> beams;
  const int64_t k = c.topk, pool = k + (c.steps - 1) * k * k;
  for (int64_t lane = 0; lane < c.lanes; ++lane) {
    float* score = c.score + lane * pool;
    int64_t *token = c.token + lane * pool, *parent = c.parent + lane * pool;
    const bool live = c.status[c.lane_row[lane]] == LIVE;
    beams.assign(1, -1);
    int64_t begin = 0;
    for (int64_t level = 0; level < c.steps; ++level) {
      const float* increment = c.increment + (lane * c.steps + level) * k;
      const int64_t* next = c.next + (lane * c.steps + level) * k;
      best.begin(k);
      int64_t at = begin;
      for (const int64_t beam : beams) {
        const float above = beam < 0 ? (live ? 0.0f : NEVER) : score[beam];
        for (int64_t i = 0; i < k; ++i, ++at) {
          const float sum = above + increment[i];
          score[at] = above > NEVER && !std::isnan(sum) ? sum : NEVER;
          token[at] = next[i];
          parent[at] = beam;
          best.offer(score[at], at);
        }
      }
      beams.resize(k);
      for (int64_t b = 0; b < k; ++b) beams[b] = best.index(b);
      begin = at;
    }
  }
}

struct Tree {
  const float* score;
  const int64_t *token, *parent, *lane_row, *window_token, *window_len;
  int64_t *node_token, *node_parent, *node_depth, *node_ancestors;
  int64_t max_depth, lanes, pool, nodes, words, capacity;
};

void tree_build(const Tree& c) {
  static thread_local Best best;
  static thread_local std::vector<uint8_t> used;
  used.resize(c.nodes);
  for (int64_t lane = 0; lane < c.lanes; ++lane) {
    const float* score = c.score + lane * c.pool;
    const int64_t *token = c.token + lane * c.pool, *parent = c.parent + lane * c.pool, row = c.lane_row[lane];
    int64_t *node_token = c.node_token + lane * c.nodes, *node_parent = c.node_parent + lane * c.nodes;
    int64_t *depth = c.node_depth + lane * c.nodes, *ancestors = c.node_ancestors + lane * c.nodes * c.words;
    best.begin(c.nodes - 1);
    for (int64_t i = 0; i < c.pool; ++i) best.offer(std::isnan(score[i]) ? NEVER : score[i], i);
    std::vector<int64_t>& chosen = best.indices();
    std::sort(chosen.begin(), chosen.end());
    std::fill(ancestors, ancestors + c.nodes * c.words, 0);
    node_token[0] = c.window_token[row * c.capacity + std::max<int64_t>(c.window_len[row] - 1, 0)];
    node_parent[0] = -1;
    depth[0] = 0;
    used[0] = 1;
    ancestors[0] = 1;
    for (int64_t n = 1; n < c.nodes; ++n) {
      const int64_t at = chosen[n - 1], above = parent[at];
      int64_t up = above == -1 ? 0 : -1;
      if (above != -1) {
        const auto found = std::lower_bound(chosen.begin(), chosen.begin() + (n - 1), above);
        if (found != chosen.begin() + (n - 1) && *found == above) up = found - chosen.begin() + 1;
      }
      used[n] = up >= 0 && used[up] && token[at] >= 0 && score[at] > NEVER && depth[up] < c.max_depth;
      node_token[n] = used[n] ? token[at] : -1;
      node_parent[n] = used[n] ? up : -1;
      depth[n] = used[n] ? depth[up] + 1 : 0;
      if (used[n]) std::copy_n(ancestors + up * c.words, c.words, ancestors + n * c.words);
      uint64_t own = static_cast<uint64_t>(ancestors[n * c.words + n / 64]) | uint64_t{1} << n % 64;
      ancestors[n * c.words + n / 64] = static_cast<int64_t>(own);
    }
  }
}

}  // namespace

extern "C" {

void graphspec_draft_topk(const char* fields, int threads) { graphspec::run_rows<DraftTopK>(fields, threads); }

void graphspec_note_logprobs(const char* fields, int threads) { graphspec::run_rows<NoteLogprobs>(fields, threads); }

void graphspec_draft_level(const char* fields, int) { draft_level(graphspec::call_of<Level>(fields)); }

void graphspec_marginal_pool(const char* fields, int) { marginal_pool(graphspec::call_of<Marginals>(fields)); }

void graphspec_tree_build(const char* fields, int) { tree_build(graphspec::call_of<Tree>(fields)); }

}  // extern "C"

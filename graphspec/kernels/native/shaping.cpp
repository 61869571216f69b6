// Penalties, biases and bans of logits, one row of a vocabulary at a time, the small gathers next to them, and rows of masks. The references define the
// fields; shaping.py fills them.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "row_program.h"
#include "simd.h"
#include "words.h"

namespace {

constexpr int64_t UNITS = 4;  // of work for each logit

// What is not finite stays, so that it is still found to be none of the bans'.
void ban(float& logit) {
  if (std::abs(logit) <= std::numeric_limits<float>::max()) logit = -std::numeric_limits<float>::infinity();
}

struct Penalise {
  float* out;
  const float* logits;
  const int64_t* lane_row;
  const float *repetition, *presence, *frequency;
  const int32_t* count;
  const int8_t* seen;
  const int64_t *path, *target;  // or null
  int64_t lanes, tokens, columns, vocab, width;

  int64_t rows() const { return lanes * tokens; }
  int64_t units() const { return rows() * columns * UNITS; }
  void row(int64_t r) const {
    const float* x = logits + r * columns;
    float* to = out + r * columns;
    const int64_t from = lane_row[r / tokens];
    const int32_t* counts = count + from * vocab;
    const int8_t* prompt = seen + from * vocab;
    const int64_t* way = path == nullptr ? nullptr : path + r * width;
    const float factor = repetition[from], often = frequency[from], once = presence[from];
    int64_t i = 0;
    if (target == nullptr) {
      typedef int8_t b8 __attribute__((vector_size(8)));
      for (; i + 8 <= columns; i += 8) {
        i8 times;
        b8 in_prompt;
        std::memcpy(&times, counts + i, sizeof times);
        std::memcpy(&in_prompt, prompt + i, sizeof in_prompt);
        const auto out_before = times > 0;
        const f8 old = load8(x + i), repeated = old > splat(0.0f) ? old / splat(factor) : old * splat(factor);
        f8 made = (out_before | (__builtin_convertvector(in_prompt, i8) != 0)) ? repeated : old;
        made = made - splat(often) * __builtin_convertvector(times, f8);
        store8(to + i, made - splat(once) * (out_before ? splat(1.0f) : splat(0.0f)));
      }
      for (; i < columns; ++i) to[i] = one(x[i], counts[i], prompt[i], factor, often, once);
      // What is drafted is counted too, in the few columns of its tokens.
      for (int64_t j = 0; j < (way == nullptr ? 0 : width); ++j)
        if (way[j] >= 0) to[way[j]] = one(x[way[j]], counts[way[j]] + drafted(way, way[j]), prompt[way[j]], factor, often, once);
      return;
    }
    for (; i < columns; ++i) {
      const int64_t token = target[i];
      to[i] = one(x[i], counts[token] + drafted(way, token), prompt[token], factor, often, once);
    }
  }

 private:
  int32_t drafted(const int64_t* way, int64_t token) const {
    int32_t found = 0;
    for (int64_t j = 0; j < (way == nullptr ? 0 : width); ++j) found += way[j] == token;
    return found;
  }

  static float one(float x, int32_t times, int8_t in_prompt, float factor, float often, float once) {
    if (times > 0 || in_prompt != 0) x = x > 0 ? x / factor : x * factor;
    x = x - often * static_cast<float>(times);
    return x - once * (times > 0 ? 1.0f : 0.0f);
  }
};

struct Mask {
  float* out;
  const float* logits;
  const int64_t* lane_row;
  const char *allowed, *mask;  // words, a bit for each token; or null
  const int64_t* target;       // or null
  int64_t lanes, tokens, columns, allowed_bytes, mask_bytes;

  int64_t rows() const { return lanes * tokens; }
  int64_t units() const { return rows() * columns * UNITS; }
  void row(int64_t r) const {
    const float* x = logits + r * columns;
    float* to = out + r * columns;
    const char* of_row = allowed == nullptr ? nullptr : allowed + lane_row[r / tokens] * allowed_bytes;
    const char* of_node = mask == nullptr ? nullptr : mask + r * mask_bytes;
    for (int64_t i = 0; i < columns; i += 8) {
      const int64_t size = columns - i < 8 ? columns - i : 8;
      int32_t bits = 0xff;
      if (target == nullptr) {
        if (of_row != nullptr) bits &= of_row[i / 8];
        if (of_node != nullptr) bits &= of_node[i / 8];
      } else {
        for (int64_t j = 0; j < size; ++j) {
          const int64_t token = target[i + j];
          const bool clear = (of_row != nullptr && !(of_row[token / 8] >> token % 8 & 1)) || (of_node != nullptr && !(of_node[token / 8] >> token % 8 & 1));
          if (clear) bits &= ~(1 << j);
        }
      }
      const f8 old = load8(x + i, size, 0.0f), most = splat(std::numeric_limits<float>::max()), never = splat(-std::numeric_limits<float>::infinity());
      const i8 lane_bit = {1, 2, 4, 8, 16, 32, 64, 128};
      const auto finite = (old <= most) & (old >= -most), banned = (lane_bit & (i8{} + bits)) == 0;
      const f8 kept = old < -most ? splat(std::numeric_limits<float>::quiet_NaN()) : old;
      store8(to + i, (finite & banned) ? never : kept, size);
    }
  }
};

struct Bias {
  float* out;
  const float* logits;
  const int64_t *lane_row, *id;
  const float* value;
  const int64_t *stop, *stop_from, *position, *target;  // target: or null
  int64_t lanes, tokens, columns, ids, stops, positions, vocab;

  int64_t rows() const { return lanes * tokens; }
  int64_t units() const { return rows() * columns * UNITS; }
  void row(int64_t r) const {
    const float* x = logits + r * columns;
    float* to = out + r * columns;
    const int64_t from = lane_row[r / tokens], at = r / tokens * positions + (positions == 1 ? 0 : r % tokens);
    const int64_t *ids_of = id + from * ids, *stops_of = stop + from * stops, banned = position[at] < stop_from[from] ? stops : 0;
    const float* values = value + from * ids;
    if (target == nullptr) {
      std::memcpy(to, x, columns * sizeof(float));
      for (int64_t i = 0; i < ids; ++i)
        if (ids_of[i] >= 0) to[ids_of[i]] += values[i];
      for (int64_t i = 0; i < banned; ++i)
        if (stops_of[i] >= 0) ban(to[stops_of[i]]);
      return;
    }
    // By target id; zero outside this function.
    static thread_local std::vector<float> added;
    static thread_local std::vector<uint8_t> stopped;
    added.resize(std::max<size_t>(added.size(), vocab)), stopped.resize(std::max<size_t>(stopped.size(), vocab));
    for (int64_t i = 0; i < ids; ++i)
      if (ids_of[i] >= 0) added[ids_of[i]] = values[i];
    for (int64_t i = 0; i < banned; ++i)
      if (stops_of[i] >= 0) stopped[stops_of[i]] = 1;
    for (int64_t i = 0; i < columns; ++i) {
      to[i] = x[i] + added[target[i]];
      if (stopped[target[i]]) ban(to[i]);
    }
    for (int64_t i = 0; i < ids; ++i)
      if (ids_of[i] >= 0) added[ids_of[i]] = 0;
    for (int64_t i = 0; i < banned; ++i)
      if (stops_of[i] >= 0) stopped[stops_of[i]] = 0;
  }
};

struct Words {
  float* out;
  const float* logits;
  const int64_t *lane_row, *word, *before;
  int64_t lanes, tokens, columns, words, length;

  int64_t rows() const { return lanes * tokens; }
  int64_t units() const { return rows() * columns * UNITS; }
  void row(int64_t r) const {
    float* to = out + r * columns;
    const int64_t* context = before + r * (length - 1);
    std::memcpy(to, logits + r * columns, columns * sizeof(float));
    for (int64_t w = 0; w < words; ++w) {
      const int64_t* tokens_of = word + (lane_row[r / tokens] * words + w) * length;
      bool hit = tokens_of[length - 1] >= 0;
      for (int64_t j = 0; j + 1 < length && hit; ++j) hit = tokens_of[j] < 0 || tokens_of[j] == context[j];
      if (hit) ban(to[tokens_of[length - 1]]);
    }
  }
};

struct Paths {
  int64_t* out;
  const int64_t *token, *ancestors;
  int64_t lanes, nodes, words;
};

struct PutFirst {
  float* score_out;
  int64_t* token_out;
  const float* score;
  const int64_t *token, *forced, *path;
  int64_t lanes, tokens, topk, depth, drafted;  // drafted: tokens on the way to a row; -1: row t has depth t + 1
};

void put_first(const PutFirst& c) {
  for (int64_t r = 0; r < c.lanes * c.tokens; ++r) {
    const int64_t* run = c.forced + r / c.tokens * c.depth;
    bool on_way = true;
    for (int64_t d = 0; d < c.drafted; ++d) on_way &= c.path[r * c.drafted + d] == run[d];
    const int64_t forced = on_way ? run[c.drafted < 0 ? r % c.tokens : c.drafted] : -1;
    const float* score = c.score + r * c.topk;
    const int64_t* token = c.token + r * c.topk;
    float* score_out = c.score_out + r * c.topk;
    int64_t* token_out = c.token_out + r * c.topk;
    if (forced < 0) {
      std::copy_n(score, c.topk, score_out);
      std::copy_n(token, c.topk, token_out);
      continue;
    }
    const int64_t room = std::min<int64_t>(std::find(token, token + c.topk, forced) - token, c.topk - 1);
    score_out[0] = 0.0f;
    token_out[0] = forced;
    for (int64_t k = 1; k < c.topk; ++k) {
      const int64_t from = k <= room ? k - 1 : k;
      score_out[k] = score[from];
      token_out[k] = token[from];
    }
  }
}

struct AppendMasks {
  int64_t* token;
  uint8_t* valid;
  int64_t *slot, *position, *ancestors;
  float* feature;
  int64_t* row;
  uint8_t* proposing;
  int64_t* next;
  const int64_t* window_token;
  const float* window_feature;
  const int64_t *begin, *known;
  const float* mask_feature;
  int64_t lanes, width, features, mask_token, masks, shift, words;
};

void append_masks(const AppendMasks& c) {
  const int64_t entries = c.width + c.masks;
  for (int64_t b = 0; b < c.lanes; ++b) {
    const int64_t known = c.known[b], count = known > 0 ? known + c.masks : 0;
    for (int64_t u = 0; u < entries; ++u) {
      const int64_t at = b * entries + u, from = b * c.width + u;
      const bool valid = u < count, mask = valid && u >= known;
      c.token[at] = mask ? c.mask_token : u < c.width ? c.window_token[from] : -1;
      c.valid[at] = valid;
      c.slot[at] = c.begin[b] + u;
      c.position[at] = c.begin[b] + u - c.shift;
      for (int64_t x = 0; x < c.words; ++x) c.ancestors[at * c.words + x] = valid ? causal_word(u, x) : 0;
      float* feature = c.feature + at * c.features;
      if (mask || u < c.width)
        std::copy_n(mask ? c.mask_feature : c.window_feature + from * c.features, c.features, feature);
      else
        std::fill_n(feature, c.features, 0.0f);
    }
    for (int64_t s = 0; s <= c.masks; ++s) {
      const int64_t at = b * (c.masks + 1) + s;
      c.row[at] = std::max<int64_t>(known - 1, 0) + s;
      c.proposing[at] = known > 0;
      c.next[at] = c.begin[b] + c.row[at] + 1;
    }
  }
}

struct MaskBlock {
  int64_t* token;
  uint8_t* valid;
  int64_t *slot, *position, *ancestors, *proposed;
  const int64_t *window_token, *known, *next;
  int64_t lanes, width, mask_token, rows, steps, shift, words;
};

void mask_block(const MaskBlock& c) {
  for (int64_t b = 0; b < c.lanes; ++b) {
    const int64_t known = c.known[b];
    for (int64_t t = 0; t < c.rows; ++t) {
      const int64_t at = b * c.rows + t;
      c.token[at] = known <= 0 ? -1 : t == 0 ? c.window_token[b * c.width + known - 1] : c.mask_token;
      c.valid[at] = known > 0;
      c.slot[at] = c.next[b] + t;
      c.position[at] = c.next[b] + t - c.shift;
      for (int64_t x = 0; x < c.words; ++x) c.ancestors[at * c.words + x] = known > 0 ? causal_word(t, x) : 0;
    }
    for (int64_t s = 0; s < c.steps; ++s) c.proposed[b * c.steps + s] = c.next[b] + s;
  }
}

struct Rows {
  char* out;
  const char* from;
  const int64_t* row;
  int64_t count, bytes;
};

}  // namespace

extern "C" {

void graphspec_penalise(const char* fields, int threads) { graphspec::run_rows<Penalise>(fields, threads); }

void graphspec_mask_tokens(const char* fields, int threads) { graphspec::run_rows<Mask>(fields, threads); }

void graphspec_bias_logits(const char* fields, int threads) { graphspec::run_rows<Bias>(fields, threads); }

void graphspec_ban_words(const char* fields, int threads) { graphspec::run_rows<Words>(fields, threads); }

void graphspec_node_paths(const char* fields, int) {
  const Paths c = graphspec::call_of<Paths>(fields);
  for (int64_t b = 0; b < c.lanes; ++b)
    for (int64_t n = 0; n < c.nodes; ++n) {
      const int64_t* words = c.ancestors + (b * c.nodes + n) * c.words;
      int64_t* to = c.out + (b * c.nodes + n) * c.nodes;
      for (int64_t m = 0; m < c.nodes; ++m) to[m] = m > 0 && bit(words, m) ? c.token[b * c.nodes + m] : -1;
    }
}

void graphspec_append_masks(const char* fields, int) { append_masks(graphspec::call_of<AppendMasks>(fields)); }

void graphspec_mask_block(const char* fields, int) { mask_block(graphspec::call_of<MaskBlock>(fields)); }

void graphspec_put_first(const char* fields, int) { put_first(graphspec::call_of<PutFirst>(fields)); }

void graphspec_take_rows(const char* fields, int) {
  const Rows c = graphspec::call_of<Rows>(fields);
  for (int64_t i = 0; i < c.count; ++i) std::memcpy(c.out + i * c.bytes, c.from + c.row[i] * c.bytes, c.bytes);
}

}  // extern "C"

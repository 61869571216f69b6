// Penalties and masks of logits, one row of a vocabulary at a time, and the small gathers next to them. The references define the fields; shaping.py
// fills them.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "call.h"
#include "simd.h"
#include "team.h"

namespace {

constexpr int64_t PARALLEL_FROM = 1 << 14;  // logits below which a second thread costs more than it saves

// Rows of logits that are shaped independently of each other.
template <class Call>
class ShapedRows final : public graphspec::Program {
 public:
  explicit ShapedRows(const Call& call) : c_(call) {}
  int phases() const override { return 1; }
  int chunks(int) const override { return static_cast<int>(c_.lanes * c_.tokens); }
  int64_t size() const override { return c_.lanes * c_.tokens * c_.columns; }
  void work(int, int row) override { c_.shape(row, row / c_.tokens, c_.logits + row * c_.columns, c_.out + row * c_.columns); }

 private:
  const Call& c_;
};

template <class Call>
void shape_rows(const char* fields, int threads) {
  const Call call = graphspec::call_of<Call>(fields);
  ShapedRows<Call> program(call);
  graphspec::run(program, program.size() >= PARALLEL_FROM ? threads : 1);
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

  void shape(int64_t row, int64_t lane, const float* x, float* to) const {
    const int64_t from = lane_row[lane];
    const int32_t* counts = count + from * vocab;
    const int8_t* prompt = seen + from * vocab;
    const int64_t* way = path == nullptr ? nullptr : path + row * width;
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

  void shape(int64_t row, int64_t lane, const float* x, float* to) const {
    const char* of_row = allowed == nullptr ? nullptr : allowed + lane_row[lane] * allowed_bytes;
    const char* of_node = mask == nullptr ? nullptr : mask + row * mask_bytes;
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

struct Paths {
  int64_t* out;
  const int64_t *token, *ancestors;
  int64_t lanes, nodes, words;
};

struct Rows {
  char* out;
  const char* from;
  const int64_t* row;
  int64_t count, bytes;
};

}  // namespace

extern "C" {

void graphspec_penalise(const char* fields, int threads) { shape_rows<Penalise>(fields, threads); }

void graphspec_mask_tokens(const char* fields, int threads) { shape_rows<Mask>(fields, threads); }

void graphspec_node_paths(const char* fields, int) {
  const Paths c = graphspec::call_of<Paths>(fields);
  for (int64_t b = 0; b < c.lanes; ++b)
    for (int64_t n = 0; n < c.nodes; ++n) {
      const int64_t* words = c.ancestors + (b * c.nodes + n) * c.words;
      int64_t* to = c.out + (b * c.nodes + n) * c.nodes;
      for (int64_t m = 0; m < c.nodes; ++m)
        to[m] = m > 0 && (static_cast<uint64_t>(words[m / 64]) >> m % 64 & 1) ? c.token[b * c.nodes + m] : -1;
    }
}

void graphspec_take_rows(const char* fields, int) {
  const Rows c = graphspec::call_of<Rows>(fields);
  for (int64_t i = 0; i < c.count; ++i) std::memcpy(c.out + i * c.bytes, c.from + c.row[i] * c.bytes, c.bytes);
}

}  // extern "C"

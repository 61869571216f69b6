// Ops of recurrent layers, float32: the convolution over paths and its window, and the rules by which tokens change and read states (delta.h,
// ssm.h). What they mean stands next to the references; fields are filled by graphspec/kernels/native/recurrent.py, in the order of these
// structs.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "call.h"
#include "delta.h"
#include "ssm.h"
#include "team.h"

namespace {

constexpr int64_t PARALLEL_FROM = 1 << 15;  // multiply-adds below which a second thread costs more than it saves

struct Conv {
  float* out;
  const float *input, *column;
  const int64_t *lane_row, *parent;
  const float *weight, *bias;  // no bias: null
  const uint8_t* fresh;        // may be null
  int64_t lanes, tokens, channels, columns, layers, layer;
};

// One chunk: a node.
class TreeConv final : public graphspec::Program {
 public:
  explicit TreeConv(const Conv& call) : c_(call) {}
  int phases() const override { return 1; }
  int chunks(int) const override { return static_cast<int>((c_.lanes * c_.tokens + ROWS - 1) / ROWS); }
  int64_t size() const override { return c_.lanes * c_.tokens * c_.channels; }
  void work(int, int chunk) override {
    for (int64_t r = chunk * ROWS; r < std::min(c_.lanes * c_.tokens, (chunk + 1) * ROWS); ++r) row(r);
  }

 private:
  static constexpr int64_t ROWS = 4;

  void row(int64_t r) const {
    static thread_local std::vector<const float*> sources;
    static thread_local Floats wide;
    const int64_t lane = r / c_.tokens, taps = c_.columns + 1;
    const float* columns = c_.column + (c_.lane_row[lane] * c_.layers + c_.layer) * c_.columns * c_.channels;
    const bool fresh = c_.fresh != nullptr && c_.fresh[lane];
    sources.assign(taps, nullptr);
    int64_t place = r % c_.tokens;
    for (int64_t tap = c_.columns; tap >= 0; --tap) {
      if (place >= 0)
        sources[tap] = c_.input + (lane * c_.tokens + place) * c_.channels;
      else if (!fresh)
        sources[tap] = columns + (c_.columns + place) * c_.channels;
      place = place >= 0 ? c_.parent[lane * c_.tokens + place] : place - 1;
    }
    const int64_t padded = (c_.channels + 7) / 8 * 8;
    wide.assign(padded, 0.0f);
    float* sum = wide.data();
    for (int64_t tap = 0; tap < taps; ++tap)
      if (const float* x = sources[tap]; x != nullptr)
        for (int64_t e = 0; e < c_.channels; ++e) sum[e] += x[e] * c_.weight[e * taps + tap];
    if (c_.bias != nullptr)
      for (int64_t e = 0; e < c_.channels; ++e) sum[e] += c_.bias[e];
    for (int64_t e = 0; e < padded; e += 8) store8(sum + e, load8(sum + e) * sigmoid8(load8(sum + e)));
    std::memcpy(c_.out + r * c_.channels, sum, c_.channels * sizeof(float));
  }

  const Conv& c_;
};

struct Shift {
  const char* input;
  char* column;
  const int64_t *lane_row, *path, *length;
  const uint8_t* fresh;  // may be null
  int64_t count, lanes, tokens, width, columns, layers, layer, bytes;
};

void conv_shift(const Shift& c) {
  std::vector<char> kept(c.columns * c.bytes);
  for (int64_t u = 0; u < c.count; ++u)
    for (int64_t b = 0; b < c.lanes; ++b) {
      const bool fresh = c.fresh != nullptr && c.fresh[b];
      if (c.length[b] == 0 && !fresh) continue;
      char* columns = c.column + (c.lane_row[b] * c.layers + c.layer + u) * c.columns * c.bytes;
      for (int64_t o = 0; o < c.columns; ++o) {
        const int64_t place = c.length[b] + o - c.columns;
        char* to = kept.data() + o * c.bytes;
        if (place >= 0)
          std::memcpy(to, c.input + ((u * c.lanes + b) * c.tokens + c.path[b * c.width + place]) * c.bytes, c.bytes);
        else if (fresh)
          std::memset(to, 0, c.bytes);
        else
          std::memcpy(to, columns + (c.columns + place) * c.bytes, c.bytes);
      }
      std::memcpy(columns, kept.data(), c.columns * c.bytes);
    }
}

struct States {
  float* out;
  const float *mixed, *gate, *skip;  // no skip: null
  float* matrix;
  const int64_t *lane_row, *ancestors;  // no ancestors: a run
  const int64_t *length, *path;         // of a run; no path: in order
  const uint8_t* fresh;                 // may be null
  int64_t lanes, tokens, steps, channels, heads, key_dim, value_dim, layers, layer, words;
};

// One chunk: a head of a lane.
template <class RULE>
class StateRule final : public graphspec::Program {
 public:
  explicit StateRule(const States& call) : c_(call) {}
  int phases() const override { return 1; }
  int chunks(int) const override { return static_cast<int>(c_.lanes * c_.heads); }
  int64_t size() const override { return c_.lanes * c_.steps * c_.heads * c_.key_dim * c_.value_dim; }

  void work(int, int chunk) override {
    static thread_local StateScratch scratch;
    const int64_t lane = chunk / c_.heads, head = chunk % c_.heads, values = c_.heads * c_.value_dim, keys = (c_.channels - values) / 2;
    const int64_t served = head * keys / (c_.heads * c_.key_dim) * c_.key_dim;
    const float *mixed = c_.mixed + lane * c_.tokens * c_.channels, *gate = c_.gate + lane * c_.tokens * 2 * c_.heads;
    StateHead h;
    h.query = mixed + (RULE::VALUES_FIRST ? values + keys : 0) + served;
    h.key = mixed + (RULE::VALUES_FIRST ? values : keys) + served;
    h.value = mixed + (RULE::VALUES_FIRST ? 0 : 2 * keys) + head * c_.value_dim;
    h.decay = gate + head;
    h.rate = gate + c_.heads + head;
    h.mixed_stride = c_.channels;
    h.gate_stride = 2 * c_.heads;
    h.skip = c_.skip == nullptr ? 0.0f : c_.skip[head];
    h.out = c_.out + (lane * c_.steps * c_.heads + head) * c_.value_dim;
    h.out_stride = values;
    h.state = c_.matrix + ((c_.lane_row[lane] * c_.layers + c_.layer) * c_.heads + head) * c_.key_dim * c_.value_dim;
    h.key_dim = c_.key_dim;
    h.value_dim = c_.value_dim;
    if (c_.ancestors != nullptr)
      state_tree<RULE>(h, c_.ancestors + lane * c_.tokens * c_.words, c_.tokens, c_.words, scratch);
    else
      state_run<RULE>(h, c_.path == nullptr ? nullptr : c_.path + lane * c_.steps, c_.steps, c_.length[lane],
                      c_.fresh != nullptr && c_.fresh[lane], scratch);
  }

 private:
  const States& c_;
};

template <class RULE>
void run_rule(const char* fields, int threads) {
  const States call = graphspec::call_of<States>(fields);
  StateRule<RULE> rule(call);
  graphspec::run(rule, call.lanes * call.steps * call.heads * call.key_dim * call.value_dim >= PARALLEL_FROM ? threads : 1);
}

}  // namespace

extern "C" {

void graphspec_tree_conv(const char* fields, int threads) {
  const Conv call = graphspec::call_of<Conv>(fields);
  TreeConv conv(call);
  graphspec::run(conv, call.lanes * call.tokens * call.channels * (call.columns + 1) >= PARALLEL_FROM ? threads : 1);
}

void graphspec_conv_shift(const char* fields, int) { conv_shift(graphspec::call_of<Shift>(fields)); }

void graphspec_delta_rule(const char* fields, int threads) { run_rule<DeltaRule>(fields, threads); }

void graphspec_ssm_rule(const char* fields, int threads) { run_rule<SelectiveRule>(fields, threads); }

}  // extern "C"

// Ops of recurrent layers, float32: the convolution over paths and its window, and the rules that update and read states (delta.h, ssm.h). The
// references define the fields; graphspec/kernels/native/recurrent.py fills them, in the order of these structs.

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

// silu(bias + sum of inputs times weights), oldest input first; a null source is zero. `out` has room for whole vectors of 8.
inline void convolve(const float* const* sources, const float* weight, const float* bias, int64_t taps, int64_t channels, float* out) {
  const int64_t padded = (channels + 7) / 8 * 8;
  std::fill(out, out + padded, 0.0f);
  for (int64_t tap = 0; tap < taps; ++tap)
    if (const float* x = sources[tap]; x != nullptr)
      for (int64_t e = 0; e < channels; ++e) out[e] += x[e] * weight[e * taps + tap];
  if (bias != nullptr)
    for (int64_t e = 0; e < channels; ++e) out[e] += bias[e];
  for (int64_t e = 0; e < padded; e += 8) store8(out + e, load8(out + e) * sigmoid8(load8(out + e)));
}

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
    wide.resize((c_.channels + 7) / 8 * 8);
    convolve(sources.data(), c_.weight, c_.bias, taps, c_.channels, wide.data());
    std::memcpy(c_.out + r * c_.channels, wide.data(), c_.channels * sizeof(float));
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
  const int64_t* length;                // of a run
  const uint8_t* fresh;                 // may be null
  int64_t lanes, tokens, channels, heads, key_dim, value_dim, layers, layer, words;
};

// Offsets of a head's channels in a token.
struct HeadPlaces {
  int64_t query, key, value;
};

template <class RULE>
HeadPlaces head_places(int64_t head, int64_t channels, int64_t heads, int64_t key_dim, int64_t value_dim) {
  const int64_t values = heads * value_dim, keys = (channels - values) / 2, served = head * keys / (heads * key_dim) * key_dim;
  return {(RULE::VALUES_FIRST ? values + keys : 0) + served, (RULE::VALUES_FIRST ? values : keys) + served,
          (RULE::VALUES_FIRST ? 0 : 2 * keys) + head * value_dim};
}

// One chunk: a head of a lane.
template <class RULE>
class StateRule final : public graphspec::Program {
 public:
  explicit StateRule(const States& call) : c_(call) {}
  int phases() const override { return 1; }
  int chunks(int) const override { return static_cast<int>(c_.lanes * c_.heads); }
  int64_t size() const override { return c_.lanes * c_.tokens * c_.heads * c_.key_dim * c_.value_dim; }

  void work(int, int chunk) override {
    static thread_local StateScratch scratch;
    const int64_t lane = chunk / c_.heads, head = chunk % c_.heads, values = c_.heads * c_.value_dim;
    const HeadPlaces at = head_places<RULE>(head, c_.channels, c_.heads, c_.key_dim, c_.value_dim);
    const float *mixed = c_.mixed + lane * c_.tokens * c_.channels, *gate = c_.gate + lane * c_.tokens * 2 * c_.heads;
    StateHead h;
    h.query = mixed + at.query;
    h.key = mixed + at.key;
    h.value = mixed + at.value;
    h.decay = gate + head;
    h.rate = gate + c_.heads + head;
    h.key_stride = h.value_stride = c_.channels;
    h.gate_stride = 2 * c_.heads;
    h.skip = c_.skip == nullptr ? 0.0f : c_.skip[head];
    h.out = c_.out + (lane * c_.tokens * c_.heads + head) * c_.value_dim;
    h.out_stride = values;
    h.state = c_.matrix + ((c_.lane_row[lane] * c_.layers + c_.layer) * c_.heads + head) * c_.key_dim * c_.value_dim;
    h.key_dim = c_.key_dim;
    h.value_dim = c_.value_dim;
    if (c_.ancestors != nullptr)
      state_tree<RULE>(h, c_.ancestors + lane * c_.tokens * c_.words, c_.tokens, c_.words, scratch);
    else
      state_run<RULE>(h, c_.tokens, c_.length[lane], c_.fresh != nullptr && c_.fresh[lane], scratch);
  }

 private:
  const States& c_;
};

struct Commit {
  const float *input, *gate, *weight, *bias, *column;  // no bias: null
  float* matrix;
  const int64_t *lane_row, *path, *length;
  int64_t layers, lanes, tokens, width, channels, columns, heads, key_dim, value_dim, selective;
};

// One chunk: the path of a layer, a lane and a head. It computes the convolution of its key and value.
template <class RULE>
class StateCommit final : public graphspec::Program {
 public:
  explicit StateCommit(const Commit& call) : c_(call) {}
  int phases() const override { return 1; }
  int chunks(int) const override { return static_cast<int>(c_.layers * c_.lanes * c_.heads); }
  int64_t size() const override { return c_.layers * c_.lanes * c_.width * c_.heads * c_.key_dim * c_.value_dim; }

  void work(int, int chunk) override {
    static thread_local StateScratch scratch;
    static thread_local Floats keys, values, decays, rates, read;
    static thread_local std::vector<const float*> key_sources, value_sources;
    const int64_t layer = chunk / (c_.lanes * c_.heads), lane = chunk / c_.heads % c_.lanes, head = chunk % c_.heads;
    const int64_t length = c_.length[lane], taps = c_.columns + 1;
    if (length == 0) return;
    const HeadPlaces at = head_places<RULE>(head, c_.channels, c_.heads, c_.key_dim, c_.value_dim);
    const int64_t key_stride = (c_.key_dim + 7) / 8 * 8, value_stride = (c_.value_dim + 7) / 8 * 8;
    const int64_t *path = c_.path + lane * c_.width, row = c_.lane_row[lane] * c_.layers + layer;
    const float *inputs = c_.input + (layer * c_.lanes + lane) * c_.tokens * c_.channels, *columns = c_.column + row * c_.columns * c_.channels;
    const float *gate = c_.gate + (layer * c_.lanes + lane) * c_.tokens * 2 * c_.heads, *weight = c_.weight + layer * c_.channels * taps;
    const float* bias = c_.bias == nullptr ? nullptr : c_.bias + layer * c_.channels;
    keys.resize(length * key_stride);
    values.resize(length * value_stride);
    decays.resize(length);
    rates.resize(length);
    read.resize(c_.value_dim);
    key_sources.resize(taps);
    value_sources.resize(taps);
    for (int64_t t = 0; t < length; ++t) {
      for (int64_t tap = 0; tap < taps; ++tap) {
        const int64_t place = t + tap - c_.columns;
        const float* token = place >= 0 ? inputs + path[place] * c_.channels : columns + (c_.columns + place) * c_.channels;
        key_sources[tap] = token + at.key;
        value_sources[tap] = token + at.value;
      }
      const auto bias_at = [&](int64_t channel) { return bias == nullptr ? nullptr : bias + channel; };
      convolve(key_sources.data(), weight + at.key * taps, bias_at(at.key), taps, c_.key_dim, keys.data() + t * key_stride);
      convolve(value_sources.data(), weight + at.value * taps, bias_at(at.value), taps, c_.value_dim, values.data() + t * value_stride);
      decays[t] = gate[path[t] * 2 * c_.heads + head];
      rates[t] = gate[path[t] * 2 * c_.heads + c_.heads + head];
    }
    // The outputs of these tokens are not used, so any query will do.
    StateHead h{keys.data(), keys.data(), values.data(), decays.data(), rates.data(), key_stride, value_stride, 1, 0.0f, read.data(), 0,
                c_.matrix + (row * c_.heads + head) * c_.key_dim * c_.value_dim, c_.key_dim, c_.value_dim};
    state_run<RULE>(h, length, length, false, scratch);
  }

 private:
  const Commit& c_;
};

template <class RULE>
void run_commit(const Commit& call, int threads) {
  StateCommit<RULE> commit(call);
  graphspec::run(commit, commit.size() >= PARALLEL_FROM ? threads : 1);
}

template <class RULE>
void run_rule(const char* fields, int threads) {
  const States call = graphspec::call_of<States>(fields);
  StateRule<RULE> rule(call);
  graphspec::run(rule, call.lanes * call.tokens * call.heads * call.key_dim * call.value_dim >= PARALLEL_FROM ? threads : 1);
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

void graphspec_state_commit(const char* fields, int threads) {
  const Commit call = graphspec::call_of<Commit>(fields);
  call.selective ? run_commit<SelectiveRule>(call, threads) : run_commit<DeltaRule>(call, threads);
}

}  // extern "C"

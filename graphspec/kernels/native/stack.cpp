// A stack of decoder layers over paged KV, in float32 arithmetic: norms, projections, rotation, KV, attention, residuals, gated MLP, taps. Plain C interface.
//
// Rows of all lanes run side by side. Each phase of a layer is divided into chunks that a team of threads claims (team.h); no phase forks
// threads or allocates. What a row becomes depends on that row and the keys and values it sees alone, to the bit: products sum as product.h says,
// attention as attention.h does, and everything else is one row at a time.

#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "attention.h"
#include "call.h"
#include "product.h"
#include "team.h"

namespace {

// Both are filled by graphspec/kernels/native/stack.py, which knows the same order. Offsets are bytes into the weights; -1: there is none. Layers
// without an `out` only write keys and values, all of the same input; a stack has no other layers then.
struct LayerPlan {
  int64_t input_norm, qkv, qkv_code, qkv_bias, query_norm, key_norm, out, out_code, out_bias;
  int64_t mlp_norm, gate_up, gate_up_code, gate_up_bias, down, down_code, down_bias;
  int64_t out_norm, down_norm;  // of what a block adds
  int64_t sinks;
  int64_t input_size, intermediate, window, kv_layer, tap, rope_rows, whole;  // whole: each token sees what the last one sees
};
struct StackPlan {
  int64_t layers, hidden, heads, groups, dim, rotary, gated, gelu, final_norm, last_tap;
  double eps, scale, softcap;
};

// What one call is about: see `decode` in graphspec/kernels/native/stack.py.
struct Call {
  const char* weights;
  const StackPlan* plan;
  const float *residual, *input;  // input: what the first attention reads instead of the normed residual, or null
  char* pool;
  float *out, *taps;
  const float* rope;
  const int64_t* rope_row;
  const int32_t* table;
  const int64_t *slot, *position, *begin, *end, *ancestors;  // no ancestors: causal
  const uint8_t* valid;
  int64_t lanes, tokens, columns, page_size, pages, num_words, rope_rows;
  int64_t pool_code;
  int64_t first, last, num_taps, final_norm, kv_only;  // layers [first, last); num_taps 0: keep none
};

enum Phase { INPUT_NORM, QKV, ATTEND, OUT, OUT_NORM, MLP_NORM, GATE_UP, DOWN, DOWN_NORM, PHASES };

// Rows per chunk of a norm. Up to one chunk of rows, the norm has no phase: each thread normalises them for itself, which is faster than a hand-over.
constexpr int64_t ROWS = 16;

constexpr int64_t PAIRS = BLOCK / 2;

// What queries see depends on these two of a layer.
struct View {
  int64_t window, whole;
};

struct Workspace {
  Floats residual, normed, qkv, mixed, act, block;
  std::vector<Visible> see;
  std::vector<View> views;
  std::vector<int64_t> begin, ancestors;
  Attending attending;
};

void reserve(Floats& v, int64_t size) {
  if (static_cast<int64_t>(v.size()) < size) v.resize(size);
}

class Stack final : public graphspec::Program {
 public:
  Stack(const Call& call, Workspace& work) : c_(call), p_(*call.plan), w_(work), rows_(call.lanes * call.tokens) {
    layers_ = reinterpret_cast<const LayerPlan*>(call.plan + 1) + call.first;
    count_ = call.last - call.first;
    normed_at_end_ = call.final_norm && p_.final_norm >= 0;
    tapped_at_end_ = call.num_taps > 0 && p_.last_tap >= 0 && call.last == p_.layers;
    query_ = p_.heads * p_.dim;
    qkv_ = query_ * (p_.gated ? 2 : 1) + 2 * p_.groups * p_.dim;
    int64_t widest = 0;
    for (int64_t l = 0; l < count_; ++l) widest = std::max(widest, layers_[l].intermediate);
    reserve(w_.residual, rows_ * p_.hidden);
    reserve(w_.normed, rows_ * p_.hidden);
    reserve(w_.qkv, rows_ * qkv_);
    reserve(w_.mixed, rows_ * query_);
    reserve(w_.act, rows_ * widest);
    reserve(w_.block, rows_ * p_.hidden);
    shape_ = Shape{c_.lanes, c_.tokens, p_.heads, p_.groups, p_.dim, c_.columns, c_.page_size, c_.pages, 0, c_.num_words,
                   c_.tokens * qkv_, qkv_, (p_.gated ? 2 : 1) * p_.dim};
    w_.views.clear();
    for (int64_t l = 0; l < count_; ++l)
      if (view_index(layers_[l]) == static_cast<int64_t>(w_.views.size())) w_.views.push_back({layers_[l].window, layers_[l].whole});
    if (w_.see.size() < w_.views.size() * c_.lanes) w_.see.resize(w_.views.size() * c_.lanes);
    const size_t views = w_.views.size() * rows_;
    if (w_.begin.size() < views) w_.begin.resize(views);
    if (w_.ancestors.size() < views * c_.num_words) w_.ancestors.resize(views * c_.num_words);
  }

  // One for what each lane sees, one for the room that takes, those of every layer, one for the final norm and the stream before it.
  int phases() const override { return static_cast<int>(FIRST + count_ * PHASES + 1); }

  void divide(int threads) override {
    threads_ = threads;
    w_.attending.divide(shape_, threads);
    // A chunk of queries, keys and values holds whole heads.
    each_qkv_ = blocks_per_chunk(blocks(qkv_), threads, p_.dim / std::gcd(p_.dim, BLOCK));
    each_hidden_ = blocks_per_chunk(blocks(p_.hidden), threads);
  }

  int64_t size() const override { return rows_ * p_.hidden; }
  int chunks(int number) const override {
    if (number < FIRST && !attends(0)) return 0;
    if (number == 0) return static_cast<int>(w_.views.size() * c_.lanes);
    if (number == 1) return 1;
    if (number == phases() - 1) return (normed_at_end_ || tapped_at_end_) && !c_.kv_only ? row_chunks() : 0;
    const int64_t l = (number - FIRST) / PHASES;
    const LayerPlan& layer = layers_[l];
    const int phase = (number - FIRST) % PHASES;
    if (phase > QKV && !attends(l)) return 0;
    switch (phase) {
      case INPUT_NORM: return layer.input_norm >= 0 && rows_ > ROWS ? row_chunks() : 0;
      case QKV: return block_chunks(blocks(qkv_), each_qkv_);
      case ATTEND: return w_.attending.chunks(seen(layer));
      case OUT_NORM: return layer.out_norm >= 0 ? row_chunks() : 0;
      case DOWN_NORM: return layer.down_norm >= 0 ? row_chunks() : 0;
      case MLP_NORM: return layer.mlp_norm >= 0 && rows_ > ROWS ? row_chunks() : 0;
      case GATE_UP: return block_chunks(pairs(layer.intermediate), blocks_per_chunk(pairs(layer.intermediate), threads_));
      default: return block_chunks(blocks(p_.hidden), each_hidden_);
    }
  }

  void work(int number, int chunk) override {
    if (number == 0) return see(chunk);
    if (number == 1) return w_.attending.reserve(w_.see.data(), w_.views.size());
    if (number == phases() - 1) return end(chunk);
    const int64_t l = (number - FIRST) / PHASES;
    const LayerPlan& layer = layers_[l];
    switch ((number - FIRST) % PHASES) {
      case INPUT_NORM: return norm(chunk, layer.input_norm, entering(l), w_.normed.data());
      case QKV: return qkv(l, chunk);
      case ATTEND: return attention(layer, chunk);
      case OUT: return add(chunk, {at(layer.out), layer.out_code, query_, p_.hidden}, layer.out_bias, w_.mixed.data(), layer.out_norm, entering(l), w_.residual.data());
      case OUT_NORM: return add_normed(chunk, layer.out_norm, entering(l), w_.residual.data());
      case MLP_NORM: return norm(chunk, layer.mlp_norm, w_.residual.data(), w_.normed.data());
      case GATE_UP: return gate_up(layer, chunk);
      case DOWN: return add(chunk, {at(layer.down), layer.down_code, layer.intermediate, p_.hidden}, layer.down_bias, w_.act.data(), layer.down_norm, w_.residual.data(), leaving(l));
      default: return add_normed(chunk, layer.down_norm, w_.residual.data(), leaving(l));
    }
  }

 private:
  static constexpr int FIRST = 2;  // phases before those of the layers

  static int64_t blocks(int64_t outputs) { return (outputs + BLOCK - 1) / BLOCK; }
  // Sixteen gates and the sixteen ups that go with them make a block.
  static int64_t pairs(int64_t intermediate) { return (intermediate + PAIRS - 1) / PAIRS; }
  const void* at(int64_t offset) const { return c_.weights + offset; }
  const float* floats(int64_t offset) const { return offset < 0 ? nullptr : reinterpret_cast<const float*>(c_.weights + offset); }
  // Whether a layer does more than to write keys and values.
  bool attends(int64_t l) const { return layers_[l].out >= 0 && !(c_.kv_only && l == count_ - 1); }
  const float* entering(int64_t l) const { return l == 0 || layers_[l].out < 0 ? c_.residual : w_.residual.data(); }
  Pool pool() const { return {c_.pool, c_.pool_code}; }
  float* leaving(int64_t l) const { return l == count_ - 1 && !normed_at_end_ ? c_.out : w_.residual.data(); }
  int row_chunks() const { return static_cast<int>((rows_ + ROWS - 1) / ROWS); }
  static int block_chunks(int64_t count, int64_t each) { return static_cast<int>((count + each - 1) / each); }
  int64_t view_index(const LayerPlan& layer) const {
    int64_t i = 0;
    while (i < static_cast<int64_t>(w_.views.size()) && (w_.views[i].window != layer.window || w_.views[i].whole != layer.whole)) ++i;
    return i;
  }

  const Visible* seen(const LayerPlan& layer) const { return w_.see.data() + view_index(layer) * c_.lanes; }

  void see(int chunk) {
    const int64_t lane = chunk % c_.lanes, view = chunk / c_.lanes, window = w_.views[view].window;
    int64_t* begin = w_.begin.data() + view * rows_;
    for (int64_t i = lane * c_.tokens; i < (lane + 1) * c_.tokens; ++i)
      begin[i] = c_.begin[i] + (window < 0 ? 0 : std::max<int64_t>(0, c_.position[i] - window + 1));
    Visible& v = w_.see[chunk];
    if (c_.ancestors != nullptr) {
      const int64_t* ancestors = c_.ancestors;
      if (w_.views[view].whole) {
        int64_t* own = w_.ancestors.data() + view * rows_ * c_.num_words;
        const int64_t* last = ancestors + ((lane + 1) * c_.tokens - 1) * c_.num_words;
        for (int64_t i = lane * c_.tokens; i < (lane + 1) * c_.tokens; ++i) std::copy_n(last, c_.num_words, own + i * c_.num_words);
        ancestors = own;
      }
      see_tree(v, shape_, lane, begin, c_.end, ancestors);
    } else {
      see_chunk(v, shape_, lane, begin, c_.slot, c_.valid);
    }
    v.list(c_.table + lane * c_.columns, c_.columns * c_.page_size, c_.page_size);
  }

  void norm_rows(int64_t first, int64_t last, int64_t weight, const float* x, float* out) const {
    for (int64_t r = first; r < last; ++r)
      rms_norm(x + r * p_.hidden, floats(weight), static_cast<float>(p_.eps), p_.hidden, out + r * p_.hidden);
  }

  void norm(int chunk, int64_t weight, const float* x, float* out) const { norm_rows(chunk * ROWS, std::min(rows_, (chunk + 1) * ROWS), weight, x, out); }

  // The norm of all rows of x, computed by an earlier phase or here.
  const float* normed(int64_t weight, const float* x) const {
    if (rows_ > ROWS) return w_.normed.data();
    static thread_local Floats own;
    reserve(own, rows_ * p_.hidden);
    norm_rows(0, rows_, weight, x, own.data());
    return own.data();
  }

  // Blocks of one chunk of `each`, handed over as product() does.
  void blocks_of(int chunk, int64_t each, const Matrix& m, const float* x, graphspec::Finish finish) {
    graphspec::product(m, chunk * each, std::min(m.blocks, (chunk + 1) * each), x, m.channels, rows_, finish);
  }

  // Queries, keys and values of the chunk's heads, normalised and rotated, with KV written.
  void qkv(int64_t l, int chunk) {
    const LayerPlan& layer = layers_[l];
    const float* x = layer.input_norm >= 0 ? normed(layer.input_norm, entering(l)) : l == 0 && c_.input != nullptr ? c_.input : entering(l);
    const float* bias = floats(layer.qkv_bias);
    auto write = [&](int64_t row, int rows, int64_t from, int64_t width, const float* values) {
      for (int r = 0; r < rows; ++r) {
        float* y = w_.qkv.data() + (row + r) * qkv_ + from;
        const float* v = values + r * GROUP * BLOCK;
        for (int64_t i = 0; i < width; ++i) y[i] = bias == nullptr ? v[i] : v[i] + bias[from + i];
      }
    };
    blocks_of(chunk, each_qkv_, {at(layer.qkv), layer.qkv_code, layer.input_size, qkv_}, x, write);
    const int64_t first = chunk * each_qkv_ * BLOCK / p_.dim, last = std::min(qkv_, (chunk + 1) * each_qkv_ * BLOCK) / p_.dim;
    pool().visit([&](auto* pool) { heads(l, first, last, pool); });
    if (chunk == 0 && layer.tap >= 0 && c_.num_taps > 0) tap(0, rows_, layer.tap, entering(l));
  }

  void tap(int64_t first, int64_t last, int64_t index, const float* stream) const {
    for (int64_t r = first; r < last; ++r)
      std::memcpy(c_.taps + (r * c_.num_taps + index) * p_.hidden, stream + r * p_.hidden, p_.hidden * sizeof(float));
  }

  // What follows the last layer.
  void end(int chunk) const {
    if (tapped_at_end_) tap(chunk * ROWS, std::min(rows_, (chunk + 1) * ROWS), p_.last_tap, normed_at_end_ ? w_.residual.data() : c_.out);
    if (normed_at_end_) norm(chunk, p_.final_norm, w_.residual.data(), c_.out);
  }

  // x @ weight^T + bias + before, into out; both [rows, hidden]. With a norm in between, the sum is left to add_normed().
  void add(int chunk, const Matrix& m, int64_t bias_at, const float* x, int64_t norm, const float* before, float* out) {
    const float* bias = floats(bias_at);
    const bool later = norm >= 0;
    if (later) out = w_.block.data();
    auto write = [&](int64_t row, int rows, int64_t from, int64_t width, const float* values) {
      for (int r = 0; r < rows; ++r) {
        const int64_t to = (row + r) * p_.hidden + from;
        const float* v = values + r * GROUP * BLOCK;
        for (int64_t i = 0; i < width; ++i) {
          const float y = bias == nullptr ? v[i] : v[i] + bias[from + i];
          out[to + i] = later ? y : before[to + i] + y;
        }
      }
    };
    blocks_of(chunk, each_hidden_, m, x, write);
  }

  // before + norm(block), into out.
  void add_normed(int chunk, int64_t weight, const float* before, float* out) {
    const int64_t first = chunk * ROWS, last = std::min(rows_, (chunk + 1) * ROWS);
    norm_rows(first, last, weight, w_.block.data(), w_.block.data());
    for (int64_t i = first * p_.hidden; i < last * p_.hidden; ++i) out[i] = before[i] + w_.block[i];
  }

  void gate_up(const LayerPlan& layer, int chunk) {
    const float* bias = floats(layer.gate_up_bias);
    const Matrix weight{at(layer.gate_up), layer.gate_up_code, p_.hidden, pairs(layer.intermediate) * BLOCK};
    auto write = [&](int64_t row, int rows, int64_t from, int64_t width, const float* values) {
      for (int r = 0; r < rows; ++r)
        for (int64_t block = 0; block < width / BLOCK; ++block) {
          const float *gate = values + (r * GROUP + block) * BLOCK, *biases = bias == nullptr ? nullptr : bias + from + block * BLOCK;
          const int64_t at = (from / BLOCK + block) * PAIRS, count = std::min<int64_t>(PAIRS, layer.intermediate - at);
          float *to = w_.act.data() + (row + r) * layer.intermediate + at, rest[PAIRS], *product = count < PAIRS ? rest : to;
          for (int i = 0; i < PAIRS; i += WIDTH) {
            const auto load = [i](const float* p) {
              widest v;
              std::memcpy(&v, p + i, sizeof v);
              return v;
            };
            widest g = load(gate), up = load(gate + PAIRS);
            if (biases != nullptr) g = g + load(biases), up = up + load(biases + PAIRS);
            const widest out = (p_.gelu ? gelu_of<widest, widest_int>(g) : g * sigmoid_of<widest, widest_int>(g)) * up;
            std::memcpy(product + i, &out, sizeof out);
          }
          if (count < PAIRS) std::memcpy(to, rest, count * sizeof(float));
        }
    };
    blocks_of(chunk, blocks_per_chunk(weight.blocks, threads_), weight, layer.mlp_norm >= 0 ? normed(layer.mlp_norm, w_.residual.data()) : w_.residual.data(), write);
  }

  void rotate(float* head, const float* rope) const {
    const int64_t half = p_.rotary / 2;
    for (int64_t i = 0; i < half; ++i) {
      const float first = head[i], second = head[i + half], cos = rope[i], sin = rope[half + i];
      head[i] = first * cos - second * sin;
      head[i + half] = second * cos + first * sin;
    }
  }

  // Normalise and rotate queries and keys, and write KV, for heads [first, last) of every row. Queries, keys and values are numbered in this order;
  // a gated query counts twice, first the query and then its gate.
  template <class T>
  void heads(int64_t l, int64_t first, int64_t last, T* pool) {
    const LayerPlan& layer = layers_[l];
    const int64_t kv = p_.groups * p_.dim, plane = c_.pages * c_.page_size * kv, length = c_.columns * c_.page_size;
    const int64_t per_query = p_.gated ? 2 : 1, key = per_query * p_.heads, value = key + p_.groups;
    const float *query_norm = floats(layer.query_norm), *key_norm = floats(layer.key_norm);
    T* keys = pool + 2 * layer.kv_layer * plane;
    for (int64_t r = 0; r < rows_; ++r) {
      const float* rope = c_.rope + std::clamp<int64_t>(c_.rope_row[r] + layer.rope_rows, 0, c_.rope_rows - 1) * p_.rotary;
      // Invalid tokens are written to the dummy page, which is never read.
      const int64_t slot = std::clamp<int64_t>(c_.slot[r], 0, length - 1), lane = r / c_.tokens;
      const int64_t page = c_.valid[r] ? c_.table[lane * c_.columns + slot / c_.page_size] : 0;
      T* to = keys + (page * c_.page_size + slot % c_.page_size) * kv;
      for (int64_t h = first; h < last; ++h) {
        float* head = w_.qkv.data() + r * qkv_ + h * p_.dim;
        const float* weight = h < key ? query_norm : key_norm;
        const bool turns = h < key ? h % per_query == 0 : h < value;
        if (turns && weight != nullptr) rms_norm(head, weight, static_cast<float>(p_.eps), p_.dim, head);
        if (turns) rotate(head, rope);
        if (h < key) continue;
        T* kept = h < value ? to + (h - key) * p_.dim : to + plane + (h - value) * p_.dim;
        for (int64_t i = 0; i < p_.dim; ++i) narrow(head[i], kept[i]);
      }
    }
  }

  void attention(const LayerPlan& layer, int chunk) {
    static thread_local Scratch scratch;
    const auto gate = [&](int64_t token, int64_t head) {
      if (!p_.gated) return;
      float* out = w_.mixed.data() + (token * p_.heads + head) * p_.dim;
      const float* gate = w_.qkv.data() + token * qkv_ + head * shape_.query_h + p_.dim;
      int64_t i = 0;
      for (; i + 8 <= p_.dim; i += 8) store8(out + i, load8(out + i) * sigmoid8(load8(gate + i)));
      for (; i < p_.dim; ++i) out[i] *= sigmoid8(splat(gate[i]))[0];
    };
    const Scores how{static_cast<float>(p_.scale), static_cast<float>(p_.softcap), floats(layer.sinks)};
    pool().visit([&](auto* pool) { w_.attending.work(chunk, layer.kv_layer, w_.qkv.data(), pool, seen(layer), how, w_.mixed.data(), scratch, gate); });
  }

  const Call& c_;
  const StackPlan& p_;
  Workspace& w_;
  const int64_t rows_;
  int threads_ = 1;
  const LayerPlan* layers_;
  int64_t count_, query_, qkv_, each_qkv_, each_hidden_;
  bool normed_at_end_, tapped_at_end_;
  Shape shape_;
};

}  // namespace

extern "C" {

void graphspec_decode(const char* fields, int threads) {
  const Call call = graphspec::call_of<Call>(fields);
  if (call.lanes * call.tokens == 0) return;
  static thread_local Workspace workspace;
  Stack stack(call, workspace);
  graphspec::run(stack, threads);
}

}  // extern "C"

// A stack of decoder layers over paged KV, float32: norms, projections, rotation, KV, attention, residuals, gated MLP, taps. Plain C interface.
//
// Rows of all lanes run side by side. Each phase of a layer is divided into chunks that a team of threads claims (team.h); no phase forks
// threads or allocates. What a row becomes depends on that row and the keys and values it sees alone, to the bit: products sum as product.h says,
// attention as attention.h does, and everything else is one row at a time.

#include <cstdint>
#include <cstring>
#include <vector>

#include "attention.h"
#include "call.h"
#include "product.h"
#include "team.h"

namespace {

// Both are filled by graphspec/kernels/native/stack.py, which knows the same order. Offsets are bytes into the weights; -1: there is none.
struct LayerPlan {
  int64_t input_norm, qkv, qkv_bits, qkv_bias, query_norm, key_norm, out, out_bits, out_bias;
  int64_t mlp_norm, gate_up, gate_up_bits, gate_up_bias, down, down_bits, down_bias;
  int64_t input_size, intermediate, window, kv_layer, tap;
};
struct StackPlan {
  int64_t layers, hidden, heads, groups, dim, rotary, gated, final_norm;
  double eps, scale;
};

// What one call is about: see `decode` in graphspec/kernels/native/stack.py.
struct Call {
  const char* weights;
  const StackPlan* plan;
  const float *residual, *input;  // input: what the first attention reads instead of the normed residual, or null
  float *pool, *out, *taps;
  const float* rope;
  const int64_t* rope_row;
  const int32_t* table;
  const int64_t *slot, *position, *begin, *end, *ancestors;  // no ancestors: causal
  const uint8_t* valid;
  int64_t lanes, tokens, columns, page_size, pages, num_words, rope_rows;
  int64_t first, last, num_taps, final_norm, kv_only;  // layers [first, last); num_taps 0: keep none
};

enum Phase { INPUT_NORM, QKV, HEADS, ATTEND, OUT, MLP_NORM, GATE_UP, DOWN, PHASES };

constexpr int64_t ROWS = 16;  // rows per chunk of the phases that are one row at a time

struct Workspace {
  Floats residual, normed, qkv, mixed, act;
  std::vector<Visible> see;
  std::vector<int64_t> windows, begin;
};

void reserve(Floats& v, int64_t size) {
  if (static_cast<int64_t>(v.size()) < size) v.resize(size);
}

class Stack final : public graphspec::Program {
 public:
  Stack(const Call& call, Workspace& work, int threads)
      : c_(call), p_(*call.plan), w_(work), rows_(call.lanes * call.tokens), threads_(threads) {
    layers_ = reinterpret_cast<const LayerPlan*>(call.plan + 1) + call.first;
    count_ = call.last - call.first;
    normed_at_end_ = call.final_norm && p_.final_norm >= 0;
    query_ = p_.heads * p_.dim;
    qkv_ = query_ * (p_.gated ? 2 : 1) + 2 * p_.groups * p_.dim;
    int64_t widest = 0, input = p_.hidden;
    for (int64_t l = 0; l < count_; ++l) {
      widest = std::max(widest, layers_[l].intermediate);
      input = std::max(input, layers_[l].input_size);
    }
    reserve(w_.residual, rows_ * p_.hidden);
    reserve(w_.normed, rows_ * input);
    reserve(w_.qkv, rows_ * qkv_);
    reserve(w_.mixed, rows_ * query_);
    reserve(w_.act, rows_ * widest);
    shape_ = Shape{c_.lanes, c_.tokens, p_.heads, p_.groups, p_.dim, c_.columns, c_.page_size, c_.pages, 0, c_.num_words,
                   c_.tokens * qkv_, qkv_, (p_.gated ? 2 : 1) * p_.dim};
    splits_ = token_splits(shape_, threads_);
    per_chunk_[0] = {blocks(qkv_), blocks_per_chunk(blocks(qkv_), threads_)};
    per_chunk_[1] = {blocks(p_.hidden), blocks_per_chunk(blocks(p_.hidden), threads_)};
    per_chunk_[2] = {2 * blocks(widest), blocks_per_chunk(2 * blocks(widest), threads_)};
    // What queries see depends on a layer's window alone.
    w_.windows.clear();
    for (int64_t l = 0; l < count_; ++l)
      if (window_index(layers_[l].window) == static_cast<int64_t>(w_.windows.size())) w_.windows.push_back(layers_[l].window);
    if (w_.see.size() < w_.windows.size() * c_.lanes) w_.see.resize(w_.windows.size() * c_.lanes);
    if (static_cast<int64_t>(w_.begin.size()) < static_cast<int64_t>(w_.windows.size()) * rows_) w_.begin.resize(w_.windows.size() * rows_);
  }

  // One for what each lane sees, those of every layer, one for the final norm.
  int phases() const override { return static_cast<int>(1 + count_ * PHASES + 1); }

  int64_t size() const override { return rows_ * p_.hidden; }
  int chunks(int number) const override {
    if (number == 0) return static_cast<int>(w_.windows.size() * c_.lanes);
    if (number == phases() - 1) return normed_at_end_ && !c_.kv_only ? row_chunks() : 0;
    const int64_t l = (number - 1) / PHASES;
    const LayerPlan& layer = layers_[l];
    const int phase = (number - 1) % PHASES;
    if (c_.kv_only && l == count_ - 1 && phase > HEADS) return 0;
    switch (phase) {
      case INPUT_NORM: return layer.input_norm >= 0 ? row_chunks() : 0;
      case QKV: return block_chunks(qkv_);
      case HEADS: return row_chunks();
      case ATTEND: return static_cast<int>(c_.lanes * p_.groups * splits_);
      case OUT: return block_chunks(p_.hidden);
      case MLP_NORM: return row_chunks();
      case GATE_UP: return block_chunks(2 * padded(layer.intermediate));
      default: return block_chunks(p_.hidden);
    }
  }

  void work(int number, int chunk) override {
    if (number == 0) return see(chunk);
    if (number == phases() - 1) return norm(chunk, p_.final_norm, w_.residual.data(), p_.hidden, c_.out);
    const int64_t l = (number - 1) / PHASES;
    const LayerPlan& layer = layers_[l];
    switch ((number - 1) % PHASES) {
      case INPUT_NORM: return norm(chunk, layer.input_norm, entering(l), p_.hidden, w_.normed.data());
      case QKV: return qkv(l, chunk);
      case HEADS: return heads(l, chunk);
      case ATTEND: return attention(l, chunk);
      case OUT: return add(chunk, {at(layer.out), layer.out_bits, query_, blocks(p_.hidden)}, layer.out_bias, w_.mixed.data(), entering(l), w_.residual.data());
      case MLP_NORM: return norm(chunk, layer.mlp_norm, w_.residual.data(), p_.hidden, w_.normed.data());
      case GATE_UP: return gate_up(layer, chunk);
      default: {
        float* to = l == count_ - 1 && !normed_at_end_ ? c_.out : w_.residual.data();
        return add(chunk, {at(layer.down), layer.down_bits, layer.intermediate, blocks(p_.hidden)}, layer.down_bias, w_.act.data(), w_.residual.data(), to);
      }
    }
  }

 private:
  static int64_t blocks(int64_t outputs) { return (outputs + BLOCK - 1) / BLOCK; }
  static int64_t padded(int64_t outputs) { return blocks(outputs) * BLOCK; }
  const void* at(int64_t offset) const { return c_.weights + offset; }
  const float* floats(int64_t offset) const { return offset < 0 ? nullptr : reinterpret_cast<const float*>(c_.weights + offset); }
  const float* entering(int64_t l) const { return l == 0 ? c_.residual : w_.residual.data(); }
  int row_chunks() const { return static_cast<int>((rows_ + ROWS - 1) / ROWS); }
  int64_t per_chunk(int64_t count) const {
    for (const auto& known : per_chunk_)
      if (known.blocks == count) return known.each;
    return blocks_per_chunk(count, threads_);
  }
  int block_chunks(int64_t outputs) const {
    const int64_t each = per_chunk(blocks(outputs));
    return static_cast<int>((blocks(outputs) + each - 1) / each);
  }
  int64_t window_index(int64_t window) const {
    int64_t i = 0;
    while (i < static_cast<int64_t>(w_.windows.size()) && w_.windows[i] != window) ++i;
    return i;
  }

  void see(int chunk) {
    const int64_t lane = chunk % c_.lanes, window = w_.windows[chunk / c_.lanes];
    int64_t* begin = w_.begin.data() + chunk / c_.lanes * rows_;
    for (int64_t i = lane * c_.tokens; i < (lane + 1) * c_.tokens; ++i)
      begin[i] = c_.begin[i] + (window < 0 ? 0 : std::max<int64_t>(0, c_.position[i] - window + 1));
    Visible& v = w_.see[chunk];
    if (c_.ancestors != nullptr)
      see_tree(v, shape_, lane, begin, c_.end, c_.ancestors);
    else
      see_chunk(v, shape_, lane, begin, c_.slot, c_.valid);
    v.list(c_.table + lane * c_.columns, c_.columns * c_.page_size, c_.page_size);
  }

  void norm(int chunk, int64_t weight, const float* x, int64_t size, float* out) {
    for (int64_t r = chunk * ROWS; r < std::min(rows_, (chunk + 1) * ROWS); ++r)
      rms_norm(x + r * size, floats(weight), static_cast<float>(p_.eps), size, out + r * size);
  }

  // Blocks of one chunk, handed over as product() does.
  template <class Finish>
  void blocks_of(int chunk, const Matrix& m, const float* x, Finish&& finish) {
    const int64_t each = per_chunk(m.blocks), first = chunk * each;
    product(m, first, std::min(m.blocks, first + each), x, m.channels, rows_, finish);
  }

  void qkv(int64_t l, int chunk) {
    const LayerPlan& layer = layers_[l];
    const float* x = layer.input_norm >= 0 ? w_.normed.data() : l == 0 && c_.input != nullptr ? c_.input : entering(l);
    const float* bias = floats(layer.qkv_bias);
    blocks_of(chunk, {at(layer.qkv), layer.qkv_bits, layer.input_size, blocks(qkv_)}, x,
              [&](int64_t row, int rows, int64_t block, int count, const float* values) {
                const int64_t from = block * BLOCK, width = std::min<int64_t>(count * BLOCK, qkv_ - from);
                for (int r = 0; r < rows; ++r) {
                  float* y = w_.qkv.data() + (row + r) * qkv_ + from;
                  const float* v = values + r * GROUP * BLOCK;
                  for (int64_t i = 0; i < width; ++i) y[i] = bias == nullptr ? v[i] : v[i] + bias[from + i];
                }
              });
  }

  // x @ weight^T + bias + before, into out; both [rows, hidden].
  void add(int chunk, const Matrix& m, int64_t bias_at, const float* x, const float* before, float* out) {
    const float* bias = floats(bias_at);
    blocks_of(chunk, m, x, [&](int64_t row, int rows, int64_t block, int count, const float* values) {
      const int64_t from = block * BLOCK, width = std::min<int64_t>(count * BLOCK, p_.hidden - from);
      for (int r = 0; r < rows; ++r) {
        const int64_t to = (row + r) * p_.hidden + from;
        const float* v = values + r * GROUP * BLOCK;
        for (int64_t i = 0; i < width; ++i) out[to + i] = before[to + i] + (bias == nullptr ? v[i] : v[i] + bias[from + i]);
      }
    });
  }

  // Gate and up blocks take turns, so that a pair is at hand where it is needed.
  void gate_up(const LayerPlan& layer, int chunk) {
    const float* bias = floats(layer.gate_up_bias);
    blocks_of(chunk, {at(layer.gate_up), layer.gate_up_bits, p_.hidden, 2 * blocks(layer.intermediate)}, w_.normed.data(),
              [&](int64_t row, int rows, int64_t block, int count, const float* values) {
                for (int r = 0; r < rows; ++r)
                  for (int pair = 0; pair < count / 2; ++pair) {
                    const float *gate = values + r * GROUP * BLOCK + pair * 2 * BLOCK, *biases = bias == nullptr ? nullptr : bias + (block + 2 * pair) * BLOCK;
                    alignas(32) float product[BLOCK];
                    for (int i = 0; i < BLOCK; i += 8) {
                      f8 g = load8(gate + i), up = load8(gate + BLOCK + i);
                      if (biases != nullptr) g = g + load8(biases + i), up = up + load8(biases + BLOCK + i);
                      store8(product + i, g * sigmoid8(g) * up);
                    }
                    const int64_t from = (block / 2 + pair) * BLOCK, width = std::min<int64_t>(BLOCK, layer.intermediate - from);
                    std::memcpy(w_.act.data() + (row + r) * layer.intermediate + from, product, width * sizeof(float));
                  }
              });
  }

  void rotate(float* head, const float* rope) const {
    const int64_t half = p_.rotary / 2;
    for (int64_t i = 0; i < half; ++i) {
      const float first = head[i], second = head[i + half], cos = rope[i], sin = rope[half + i];
      head[i] = first * cos - second * sin;
      head[i + half] = second * cos + first * sin;
    }
  }

  // Norm and rotation of queries and keys, KV into the pages; what enters a tapped layer is kept.
  void heads(int64_t l, int chunk) {
    const LayerPlan& layer = layers_[l];
    const int64_t kv = p_.groups * p_.dim, plane = c_.pages * c_.page_size * kv, length = c_.columns * c_.page_size;
    const float *query_norm = floats(layer.query_norm), *key_norm = floats(layer.key_norm), eps = static_cast<float>(p_.eps);
    float* keys = c_.pool + 2 * layer.kv_layer * plane;
    for (int64_t r = chunk * ROWS; r < std::min(rows_, (chunk + 1) * ROWS); ++r) {
      if (layer.tap >= 0 && c_.num_taps > 0)
        std::memcpy(c_.taps + (r * c_.num_taps + layer.tap) * p_.hidden, entering(l) + r * p_.hidden, p_.hidden * sizeof(float));
      const float* rope = c_.rope + std::clamp<int64_t>(c_.rope_row[r], 0, c_.rope_rows - 1) * p_.rotary;
      float *row = w_.qkv.data() + r * qkv_, *key = row + qkv_ - 2 * kv;
      for (int64_t h = 0; h < p_.heads; ++h) {
        float* head = row + h * shape_.query_h;
        if (query_norm != nullptr) rms_norm(head, query_norm, eps, p_.dim, head);
        rotate(head, rope);
      }
      for (int64_t g = 0; g < p_.groups; ++g) {
        if (key_norm != nullptr) rms_norm(key + g * p_.dim, key_norm, eps, p_.dim, key + g * p_.dim);
        rotate(key + g * p_.dim, rope);
      }
      // Invalid tokens are written to the dummy page, which is never read.
      const int64_t slot = std::clamp<int64_t>(c_.slot[r], 0, length - 1), lane = r / c_.tokens;
      const int64_t page = c_.valid[r] ? c_.table[lane * c_.columns + slot / c_.page_size] : 0;
      float* to = keys + (page * c_.page_size + slot % c_.page_size) * kv;
      std::memcpy(to, key, kv * sizeof(float));
      std::memcpy(to + plane, key + kv, kv * sizeof(float));
    }
  }

  void attention(int64_t l, int task) {
    static thread_local Scratch scratch;
    const LayerPlan& layer = layers_[l];
    Shape n = shape_;
    n.layer = layer.kv_layer;
    const int64_t lane = task / (p_.groups * splits_), group = task / splits_ % p_.groups, part = task % splits_;
    const int64_t first = part * c_.tokens / splits_, last = (part + 1) * c_.tokens / splits_;
    const Visible& see = w_.see[window_index(layer.window) * c_.lanes + lane];
    attend(n, w_.qkv.data(), c_.pool, see, lane, group, first, last, static_cast<float>(p_.scale), w_.mixed.data(), scratch);
    if (!p_.gated) return;
    const int64_t repeat = p_.heads / p_.groups;
    for (int64_t t = lane * c_.tokens + first; t < lane * c_.tokens + last; ++t)
      for (int64_t h = group * repeat; h < (group + 1) * repeat; ++h) {
        float* out = w_.mixed.data() + (t * p_.heads + h) * p_.dim;
        const float* gate = w_.qkv.data() + t * qkv_ + h * shape_.query_h + p_.dim;
        int64_t i = 0;
        for (; i + 8 <= p_.dim; i += 8) store8(out + i, load8(out + i) * sigmoid8(load8(gate + i)));
        for (; i < p_.dim; ++i) out[i] *= sigmoid8(splat(gate[i]))[0];
      }
  }

  const Call& c_;
  const StackPlan& p_;
  Workspace& w_;
  const int64_t rows_;
  const int threads_;
  const LayerPlan* layers_;
  int64_t count_, query_, qkv_, splits_;
  bool normed_at_end_;
  Shape shape_;
  struct {
    int64_t blocks, each;
  } per_chunk_[3];
};

}  // namespace

extern "C" {

void graphspec_decode(const char* fields, int threads) {
  const Call call = graphspec::call_of<Call>(fields);
  if (call.lanes * call.tokens == 0) return;
  static thread_local Workspace workspace;
  Stack stack(call, workspace, threads);
  graphspec::run(stack, threads);
}

}  // extern "C"

// Attention ops: paged, float32, plain C interface. attention.h defines the computation and its order.

#include "attention.h"

#include "call.h"
#include "team.h"

namespace {

constexpr int64_t WORK_PER_THREAD = 1 << 17;  // multiply-adds below which a second thread costs more than it saves

class Attention final : public graphspec::Program {
 public:
  Attention(const Shape& n, const float* query, const float* pool, const std::vector<Visible>& see, Scores scores, float* out,
            Attending& attending)
      : n_(n), query_(query), pool_(pool), see_(see), scores_(scores), out_(out), attending_(attending) {}

  int phases() const override { return 2; }
  void divide(int threads) override {
    attending_.divide(n_, threads);
    attending_.reserve(see_.data(), 1);
  }
  int chunks(int phase) const override { return attending_.chunks(phase, see_.data()); }
  int64_t size() const override { return n_.lanes * n_.tokens * n_.heads * n_.dim; }
  void work(int phase, int chunk) override {
    static thread_local Scratch scratch;
    attending_.work(phase, chunk, n_.layer, query_, pool_, see_.data(), scores_, out_, scratch, [](int64_t, int64_t, int64_t, int64_t) {});
  }

 private:
  const Shape& n_;
  const float *query_, *pool_;
  const std::vector<Visible>& see_;
  const Scores scores_;
  float* out_;
  Attending& attending_;
};

void run(const Shape& n, const float* query, const float* pool, const int32_t* table, std::vector<Visible>& see, Scores scores, float* out,
         int threads) {
  int64_t work = 0;
  for (int64_t lane = 0; lane < n.lanes; ++lane) {
    see[lane].list(table + lane * n.columns, n.columns * n.page_size, n.page_size);
    work += static_cast<int64_t>(see[lane].slots.size()) * n.tokens * n.heads * n.dim * 2;
  }
  static thread_local Attending attending;
  Attention attention(n, query, pool, see, scores, out, attending);
  graphspec::run(attention, static_cast<int>(std::clamp<int64_t>(work / WORK_PER_THREAD, 1, threads)));
}

// Filled by graphspec/kernels/native/__init__.py, as the struct below.
struct TreeCall {
  float* out;
  const float *query, *pool, *sinks;
  const int32_t* table;
  const int64_t *prefix_begin, *prefix_end, *ancestors;
  Shape shape;
  double scale, softcap;

  Scores scores() const { return {static_cast<float>(scale), static_cast<float>(softcap), sinks}; }
};

struct ChunkCall {
  float* out;
  const float *query, *pool, *sinks;
  const int32_t* table;
  const int64_t *prefix_begin, *slot;
  const uint8_t* valid;
  Shape shape;
  double scale, softcap;

  Scores scores() const { return {static_cast<float>(scale), static_cast<float>(softcap), sinks}; }
};

}  // namespace

extern "C" {

void graphspec_tree_attention(const char* fields, int threads) {
  const TreeCall c = graphspec::call_of<TreeCall>(fields);
  static thread_local std::vector<Visible> see;
  see.resize(c.shape.lanes);
  for (int64_t b = 0; b < c.shape.lanes; ++b) see_tree(see[b], c.shape, b, c.prefix_begin, c.prefix_end, c.ancestors);
  run(c.shape, c.query, c.pool, c.table, see, c.scores(), c.out, threads);
}

void graphspec_chunk_attention(const char* fields, int threads) {
  const ChunkCall c = graphspec::call_of<ChunkCall>(fields);
  static thread_local std::vector<Visible> see;
  see.resize(c.shape.lanes);
  for (int64_t b = 0; b < c.shape.lanes; ++b) see_chunk(see[b], c.shape, b, c.prefix_begin, c.slot, c.valid);
  run(c.shape, c.query, c.pool, c.table, see, c.scores(), c.out, threads);
}

}  // extern "C"

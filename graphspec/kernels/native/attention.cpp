// Attention ops: paged, plain C interface. attention.h defines the computation and its order.

#include "attention.h"

#include "call.h"
#include "team.h"

namespace {

constexpr int64_t WORK_PER_THREAD = 1 << 17;  // multiply-adds below which a second thread costs more than it saves

class Attention final : public graphspec::Program {
 public:
  Attention(const Shape& n, const float* query, Pool pool, const std::vector<Visible>& see, Scores scores, float* out, Attending& attending)
      : n_(n), query_(query), pool_(pool), see_(see), scores_(scores), out_(out), attending_(attending) {}

  int phases() const override { return 1; }
  void divide(int threads) override {
    attending_.divide(n_, threads);
    attending_.reserve(see_.data(), 1);
  }
  int chunks(int) const override { return attending_.chunks(see_.data()); }
  int64_t size() const override { return n_.lanes * n_.tokens * n_.heads * n_.dim; }
  void work(int, int chunk) override {
    static thread_local Scratch scratch;
    pool_.visit([&](auto* pool) { attending_.work(chunk, n_.layer, query_, pool, see_.data(), scores_, out_, scratch, [](int64_t, int64_t) {}); });
  }

 private:
  const Shape& n_;
  const float* query_;
  const Pool pool_;
  const std::vector<Visible>& see_;
  const Scores scores_;
  float* out_;
  Attending& attending_;
};

void run(const Shape& n, const float* query, Pool pool, const int32_t* table, std::vector<Visible>& see, Scores scores, float* out,
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
  const float* query;
  char* pool;
  const float* sinks;
  const int32_t* table;
  const int64_t *prefix_begin, *prefix_end, *ancestors;
  Shape shape;
  int64_t pool_code;
  double scale, softcap;

  Scores scores() const { return {static_cast<float>(scale), static_cast<float>(softcap), sinks}; }
};

struct ChunkCall {
  float* out;
  const float* query;
  char* pool;
  const float* sinks;
  const int32_t* table;
  const int64_t *prefix_begin, *slot;
  const uint8_t* valid;
  Shape shape;
  int64_t pool_code;
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
  run(c.shape, c.query, {c.pool, c.pool_code}, c.table, see, c.scores(), c.out, threads);
}

void graphspec_chunk_attention(const char* fields, int threads) {
  const ChunkCall c = graphspec::call_of<ChunkCall>(fields);
  static thread_local std::vector<Visible> see;
  see.resize(c.shape.lanes);
  for (int64_t b = 0; b < c.shape.lanes; ++b) see_chunk(see[b], c.shape, b, c.prefix_begin, c.slot, c.valid);
  run(c.shape, c.query, {c.pool, c.pool_code}, c.table, see, c.scores(), c.out, threads);
}

}  // extern "C"

// Noise, filters, and the sampled token of each row of logits. The references define the fields; cycle.py fills them.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "call.h"
#include "noise.h"
#include "team.h"
#include "thresholds.h"

namespace {

constexpr int64_t PARALLEL_FROM = 1 << 15;  // logits below which a second thread costs more than it saves
constexpr int64_t COST_OF_NOISE = 8;        // relative to comparing a logit
constexpr int64_t COST_OF_FILTERS = 4;

struct NoiseCall {
  float* out;
  const int64_t *seed, *position, *token;
  int64_t lanes, tokens, vocab;
};

class NoiseRows final : public graphspec::Program {
 public:
  explicit NoiseRows(const NoiseCall& call) : c_(call) {}
  int phases() const override { return 1; }
  int chunks(int) const override { return static_cast<int>(c_.lanes * c_.tokens); }
  int64_t size() const override { return c_.lanes * c_.tokens * c_.vocab; }
  void work(int, int row) override {
    const Noise noise(c_.seed[row / c_.tokens], c_.position[row]);
    float* out = c_.out + row * c_.vocab;
    for (int64_t i = 0; i < c_.vocab; i += 8) {
      store8(out + i, noise.of(c_.token, i, c_.vocab), c_.vocab - i);
    }
  }

 private:
  const NoiseCall& c_;
};

struct FilterCall {
  float* out;
  const float *logits, *temperature;
  const int64_t* top_k;
  const float *top_p, *min_p;
  int64_t lanes, tokens, vocab;
};

class FilterRows final : public graphspec::Program {
 public:
  explicit FilterRows(const FilterCall& call) : c_(call) {}
  int phases() const override { return 1; }
  int chunks(int) const override { return static_cast<int>(c_.lanes * c_.tokens); }
  int64_t size() const override { return c_.lanes * c_.tokens * c_.vocab; }

  void work(int, int row) override {
    const int64_t lane = row / c_.tokens, vocab = c_.vocab;
    const float* logits = c_.logits + row * vocab;
    float* out = c_.out + row * vocab;
    const float temperature = c_.temperature[lane];
    if (!(temperature > 0)) {
      std::memcpy(out, logits, vocab * sizeof(float));
      return;
    }
    f8 most = splat(NEVER);
    for (int64_t i = 0; i < vocab; i += 8) {
      const f8 x = finite_part(logits, i, vocab);
      most = x > most ? x : most;
    }
    const float peak = largest8(most);
    float least = NEVER;
    if (peak > NEVER) least = Thresholds(logits, vocab, peak, temperature).least(c_.top_k[lane], c_.top_p[lane], c_.min_p[lane]);
    for (int64_t i = 0; i < vocab; i += 8) {
      const f8 x = finite_part(logits, i, vocab);
      store8(out + i, x >= splat(least) ? x : splat(NEVER), vocab - i);
    }
  }

 private:
  const FilterCall& c_;
};

struct SampleCall {
  int64_t* token;
  uint8_t* sound;
  const float *logits, *temperature;  // no temperature: every row is greedy
  const int64_t *seed, *position;
  const int64_t* top_k;  // null, like the next two: no filters
  const float *top_p, *min_p;
  int64_t lanes, tokens, vocab, strict;
};

class SampleRows final : public graphspec::Program {
 public:
  explicit SampleRows(const SampleCall& call) : c_(call) {}
  int phases() const override { return 1; }
  int chunks(int) const override { return static_cast<int>(c_.lanes * c_.tokens); }
  int64_t size() const override { return c_.lanes * c_.tokens * c_.vocab; }

  void work(int, int row) override {
    const int64_t lane = row / c_.tokens;
    const float* logits = c_.logits + row * c_.vocab;
    const Best best = greedy(logits, c_.sound[row]);
    const float temperature = c_.temperature == nullptr ? 0.0f : c_.temperature[lane];
    if (!(temperature > 0) || best.key == NEVER) {
      c_.token[row] = best.token;
      return;
    }
    float least = NEVER;
    if (c_.top_k != nullptr)
      least = Thresholds(logits, c_.vocab, best.key, temperature).least(c_.top_k[lane], c_.top_p[lane], c_.min_p[lane]);
    c_.token[row] = draw(logits, least, temperature, Noise(c_.seed[lane], c_.position[row]));
  }

 private:
  struct Best {
    float key = NEVER;
    int64_t token = 0;
  };

  // The largest finite logit, of equal ones the first token's; `sound`: whether the row is valid.
  Best greedy(const float* logits, uint8_t& sound) const {
    const f8 most = splat(std::numeric_limits<float>::max()), ban = splat(c_.strict ? 1.0f : 0.0f);
    f8 peak = splat(NEVER), known = splat(0.0f), wrong = splat(0.0f);  // known: any finite logit; wrong: any invalid logit
    i8 place{};                                                        // of the peak's vector
    const auto look = [&](int64_t i, f8 x, int64_t count) {
      const auto finite = (x <= most) & (x >= -most);
      known = finite ? splat(1.0f) : known;
      // With bans, -inf is valid; any other non-finite logit is not. Padding of the last vector is ignored.
      const f8 fault = finite ? splat(0.0f) : (x < -most ? ban : splat(1.0f));
      if (count == 8)
        wrong = fault > wrong ? fault : wrong;
      else
        for (int j = 0; j < count; ++j) wrong[j] = std::max(wrong[j], fault[j]);
      const f8 key = finite ? x : splat(NEVER);
      const auto above = key > peak;
      peak = above ? key : peak;
      place = above ? i8{} + static_cast<int32_t>(i) : place;
    };
    int64_t i = 0;
    for (; i + 8 <= c_.vocab; i += 8) look(i, load8(logits + i), 8);
    if (i < c_.vocab) look(i, load8(logits + i, c_.vocab - i, NEVER), c_.vocab - i);
    Best best;
    bool any = false, bad = false;
    for (int j = 0; j < 8; ++j) {
      if (peak[j] > best.key || (peak[j] == best.key && place[j] + j < best.token)) best = {peak[j], place[j] + j};
      any |= known[j] != 0, bad |= wrong[j] != 0;
    }
    sound = !bad && any;
    return best;
  }

  // The token with the largest key among those with a logit of at least `least`. Noise is computed only where its bound lets a key become the
  // largest; that leaves few tokens, since they are looked at in order and an equal key of a later token loses.
  int64_t draw(const float* logits, float least, float temperature, const Noise& noise) const {
    const f8 from = splat(std::max(least, std::numeric_limits<float>::lowest())), scale = splat(temperature);
    Best best;
    for (int64_t i = 0; i < c_.vocab; i += 8) {
      const f8 x = finite_part(logits, i, c_.vocab), bar = splat(best.key);
      const auto kept = x >= from;
      if (!any8(kept) || !any8(x + scale * splat(Noise::MOST) > bar)) continue;
      if (!any8(kept & (x + scale * noise.bound(i) > bar))) continue;
      const f8 key = kept ? x + scale * noise.of(nullptr, i, c_.vocab) : splat(NEVER);
      for (int j = 0; j < 8; ++j)
        if (key[j] > best.key) best = {key[j], i + j};
    }
    return best.token;
  }

  const SampleCall& c_;
};

}  // namespace

extern "C" {

void graphspec_gumbel_noise(const char* fields, int threads) {
  const NoiseCall call = graphspec::call_of<NoiseCall>(fields);
  NoiseRows program(call);
  graphspec::run(program, call.lanes * call.tokens * call.vocab * COST_OF_NOISE >= PARALLEL_FROM ? threads : 1);
}

void graphspec_filter_logits(const char* fields, int threads) {
  const FilterCall call = graphspec::call_of<FilterCall>(fields);
  FilterRows program(call);
  graphspec::run(program, program.size() * COST_OF_FILTERS >= PARALLEL_FROM ? threads : 1);
}

void graphspec_sample_tokens(const char* fields, int threads) {
  const SampleCall call = graphspec::call_of<SampleCall>(fields);
  SampleRows program(call);
  const int64_t work = program.size() * (call.temperature == nullptr ? 1 : call.top_k == nullptr ? 2 : COST_OF_FILTERS);
  graphspec::run(program, work >= PARALLEL_FROM ? threads : 1);
}

}  // extern "C"

// Noise, filters, and the sampled token of each row of logits. The references define the fields; cycle.py fills them.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "noise.h"
#include "row_program.h"
#include "thresholds.h"

namespace {

constexpr int64_t NOISE_UNITS = 16, FILTER_UNITS = 8, SAMPLE_UNITS = 4;  // of work for each logit

struct GumbelNoise {
  float* out;
  const int64_t *seed, *position, *token;
  int64_t lanes, tokens, vocab;

  int64_t rows() const { return lanes * tokens; }
  int64_t units() const { return rows() * vocab * NOISE_UNITS; }
  void row(int64_t r) const {
    const Noise noise(seed[r / tokens], position[r]);
    for (int64_t i = 0; i < vocab; i += 8) store8(out + r * vocab + i, noise.of(token, i, vocab), vocab - i);
  }
};

struct FilterLogits {
  float* out;
  const float *logits, *temperature;
  const int64_t* top_k;
  const float *top_p, *min_p;
  int64_t lanes, tokens, vocab;

  int64_t rows() const { return lanes * tokens; }
  int64_t units() const { return rows() * vocab * FILTER_UNITS; }
  void row(int64_t r) const {
    const int64_t lane = r / tokens;
    const float* x = logits + r * vocab;
    float* to = out + r * vocab;
    if (!(temperature[lane] > 0)) {
      std::memcpy(to, x, vocab * sizeof(float));
      return;
    }
    f8 most = splat(NEVER);
    for (int64_t i = 0; i < vocab; i += 8) {
      const f8 part = finite_part(x, i, vocab);
      most = part > most ? part : most;
    }
    const float peak = largest8(most);
    float least = NEVER;
    if (peak > NEVER) least = Thresholds(x, vocab, peak, temperature[lane]).least(top_k[lane], top_p[lane], min_p[lane]);
    for (int64_t i = 0; i < vocab; i += 8) {
      const f8 part = finite_part(x, i, vocab);
      store8(to + i, part >= splat(least) ? part : splat(NEVER), vocab - i);
    }
  }
};

struct SampleTokens {
  int64_t* token;
  uint8_t* sound;
  const float *logits, *temperature;  // no temperature: every row is greedy
  const int64_t *seed, *position;
  const int64_t* top_k;  // null, like the next two: no filters
  const float *top_p, *min_p;
  int64_t lanes, tokens, vocab, strict;

  int64_t rows() const { return lanes * tokens; }
  int64_t units() const { return rows() * vocab * (temperature == nullptr ? SAMPLE_UNITS / 2 : top_k == nullptr ? SAMPLE_UNITS : FILTER_UNITS); }
  void row(int64_t r) const {
    const int64_t lane = r / tokens;
    const float* x = logits + r * vocab;
    const Best best = greedy(x, sound[r]);
    const float heat = temperature == nullptr ? 0.0f : temperature[lane];
    if (!(heat > 0) || best.key == NEVER) {
      token[r] = best.token;
      return;
    }
    float least = NEVER;
    if (top_k != nullptr) least = Thresholds(x, vocab, best.key, heat).least(top_k[lane], top_p[lane], min_p[lane]);
    token[r] = draw(x, least, heat, Noise(seed[lane], position[r]));
  }

 private:
  struct Best {
    float key = NEVER;
    int64_t token = 0;
  };

  // The largest finite logit, of equal ones the first token's; `valid`: whether the row is valid.
  Best greedy(const float* x, uint8_t& valid) const {
    const f8 most = splat(std::numeric_limits<float>::max()), ban = splat(strict ? 1.0f : 0.0f);
    f8 peak = splat(NEVER), known = splat(0.0f), wrong = splat(0.0f);  // known: any finite logit; wrong: any invalid logit
    i8 place{};                                                        // of the peak's vector
    const auto look = [&](int64_t i, f8 part, int64_t count) {
      const auto finite = (part <= most) & (part >= -most);
      known = finite ? splat(1.0f) : known;
      // With bans, -inf is valid; any other non-finite logit is not. Padding of the last vector is ignored.
      const f8 fault = finite ? splat(0.0f) : (part < -most ? ban : splat(1.0f));
      if (count == 8)
        wrong = fault > wrong ? fault : wrong;
      else
        for (int j = 0; j < count; ++j) wrong[j] = std::max(wrong[j], fault[j]);
      const f8 key = finite ? part : splat(NEVER);
      const auto above = key > peak;
      peak = above ? key : peak;
      place = above ? i8{} + static_cast<int32_t>(i) : place;
    };
    int64_t i = 0;
    for (; i + 8 <= vocab; i += 8) look(i, load8(x + i), 8);
    if (i < vocab) look(i, load8(x + i, vocab - i, NEVER), vocab - i);
    Best best;
    bool any = false, bad = false;
    for (int j = 0; j < 8; ++j) {
      if (peak[j] > best.key || (peak[j] == best.key && place[j] + j < best.token)) best = {peak[j], place[j] + j};
      any |= known[j] != 0, bad |= wrong[j] != 0;
    }
    valid = !bad && any;
    return best;
  }

  // The token with the largest key among those with a logit of at least `least`. Noise is computed only where its bound lets a key become the
  // largest; that leaves few tokens, since they are looked at in order and an equal key of a later token loses.
  int64_t draw(const float* x, float least, float heat, const Noise& noise) const {
    const f8 from = splat(std::max(least, std::numeric_limits<float>::lowest())), scale = splat(heat);
    Best best;
    for (int64_t i = 0; i < vocab; i += 8) {
      const f8 part = finite_part(x, i, vocab), bar = splat(best.key);
      const auto kept = part >= from;
      if (!any8(kept) || !any8(part + scale * splat(Noise::MOST) > bar)) continue;
      if (!any8(kept & (part + scale * noise.bound(i) > bar))) continue;
      const f8 key = kept ? part + scale * noise.of(nullptr, i, vocab) : splat(NEVER);
      for (int j = 0; j < 8; ++j)
        if (key[j] > best.key) best = {key[j], i + j};
    }
    return best.token;
  }
};

}  // namespace

extern "C" {

void graphspec_gumbel_noise(const char* fields, int threads) { graphspec::run_rows<GumbelNoise>(fields, threads); }

void graphspec_filter_logits(const char* fields, int threads) { graphspec::run_rows<FilterLogits>(fields, threads); }

void graphspec_sample_tokens(const char* fields, int threads) { graphspec::run_rows<SampleTokens>(fields, threads); }

}  // extern "C"

// Noise, and the sampled token of each row of logits. The references define the fields; cycle.py fills them.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "call.h"
#include "noise.h"
#include "team.h"

namespace {

constexpr int64_t PARALLEL_FROM = 1 << 15;  // logits below which a second thread costs more than it saves
constexpr int64_t COST_OF_NOISE = 8;        // relative to comparing a logit
constexpr float NEVER = -std::numeric_limits<float>::infinity();

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
      const f8 found = noise.of(c_.token, i, c_.vocab);
      std::memcpy(out + i, &found, std::min<int64_t>(8, c_.vocab - i) * sizeof(float));
    }
  }

 private:
  const NoiseCall& c_;
};

struct SampleCall {
  int64_t* token;
  uint8_t* sound;
  const float *logits, *temperature;  // no temperature: every row is greedy
  const int64_t *seed, *position;
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
    const float temperature = c_.temperature == nullptr ? 0.0f : c_.temperature[lane];
    const bool hot = temperature > 0;
    const Noise noise(hot ? c_.seed[lane] : 0, hot ? c_.position[row] : 0);
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
      f8 key = finite ? x : splat(NEVER);
      if (hot) key = key + splat(temperature) * noise.of(nullptr, i, c_.vocab);
      const auto above = key > peak;
      peak = above ? key : peak;
      place = above ? i8{} + static_cast<int32_t>(i) : place;
    };
    int64_t i = 0;
    for (; i + 8 <= c_.vocab; i += 8) look(i, load8(logits + i), 8);
    if (i < c_.vocab) {
      f8 x = splat(NEVER);
      std::memcpy(&x, logits + i, (c_.vocab - i) * sizeof(float));
      look(i, x, c_.vocab - i);
    }
    float best = NEVER;
    int64_t token = 0;
    bool any = false, bad = false;
    for (int j = 0; j < 8; ++j) {
      // Of equal keys, the first token's.
      if (peak[j] > best || (peak[j] == best && place[j] + j < token)) best = peak[j], token = place[j] + j;
      any |= known[j] != 0, bad |= wrong[j] != 0;
    }
    c_.token[row] = token;
    c_.sound[row] = !bad && any;
  }

 private:
  const SampleCall& c_;
};

}  // namespace

extern "C" {

void graphspec_gumbel_noise(const char* fields, int threads) {
  const NoiseCall call = graphspec::call_of<NoiseCall>(fields);
  NoiseRows program(call);
  graphspec::run(program, call.lanes * call.tokens * call.vocab * COST_OF_NOISE >= PARALLEL_FROM ? threads : 1);
}

void graphspec_sample_tokens(const char* fields, int threads) {
  const SampleCall call = graphspec::call_of<SampleCall>(fields);
  SampleRows program(call);
  const int64_t work = call.lanes * call.tokens * call.vocab * (call.temperature == nullptr ? 1 : COST_OF_NOISE);
  graphspec::run(program, work >= PARALLEL_FROM ? threads : 1);
}

}  // extern "C"

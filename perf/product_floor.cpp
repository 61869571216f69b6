// The plainest loops over weights in three formats: 16 outputs side by side, one vector lane each, dequantised once for all rows. No other format,
// no odd shape, nothing around the products: what a machine with AVX-512 takes for them at best. Prints one line per format and number of rows.

#include <immintrin.h>
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr int LANES = 16, GROUP = 32, REPEATS = 30;
constexpr size_t HUGE_PAGE = 2 << 20;  // in which the engine's weights are, too
typedef __m512 Floats;

__m128i bytes(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
__m256i shorts(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
Floats halves(const uint8_t* p) { return _mm512_cvtph_ps(shorts(p)); }
Floats floats(__m512i code) { return _mm512_cvtepi32_ps(code); }

// Each reads the weights of two channels, whose codes are at `q`, as `low` and `high`; the group's scales are at `p`.
struct Q4_1 {  // scales, minimums, then bytes of two channels each
  static constexpr int HEADER = 4 * LANES, PAIR = LANES;
  Floats scale, minimum;
  explicit Q4_1(const uint8_t* p) : scale(halves(p)), minimum(halves(p + 2 * LANES)) {}
  void operator()(const uint8_t* q, Floats& low, Floats& high) const {
    const __m512i code = _mm512_cvtepu8_epi32(bytes(q));
    low = _mm512_fmadd_ps(floats(_mm512_and_si512(code, _mm512_set1_epi32(15))), scale, minimum);
    high = _mm512_fmadd_ps(floats(_mm512_srli_epi32(code, 4)), scale, minimum);
  }
};
struct Q8_0 {
  static constexpr int HEADER = 2 * LANES, PAIR = 2 * LANES;
  Floats scale;
  explicit Q8_0(const uint8_t* p) : scale(halves(p)) {}
  void operator()(const uint8_t* q, Floats& low, Floats& high) const {
    low = _mm512_mul_ps(floats(_mm512_cvtepi8_epi32(bytes(q))), scale);
    high = _mm512_mul_ps(floats(_mm512_cvtepi8_epi32(bytes(q + LANES))), scale);
  }
};
struct BF16 {
  static constexpr int HEADER = 0, PAIR = 4 * LANES;
  explicit BF16(const uint8_t*) {}
  static Floats widened(const uint8_t* q) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(shorts(q)), 16)); }
  void operator()(const uint8_t* q, Floats& low, Floats& high) const { low = widened(q), high = widened(q + 2 * LANES); }
};
template <class Format>
constexpr int BYTES = Format::HEADER + GROUP / 2 * Format::PAIR;

template <class Format, int ROWS>
void product(const uint8_t* weight, long outputs, long channels, const float* x, float* y) {
  const long groups = channels / GROUP;
#pragma omp parallel for schedule(static)
  for (long block = 0; block < outputs / LANES; ++block) {
    const uint8_t* p = weight + block * groups * BYTES<Format>;
    Floats even[ROWS], odd[ROWS];
    for (int r = 0; r < ROWS; ++r) even[r] = odd[r] = _mm512_setzero_ps();
    for (long g = 0; g < groups; ++g, p += BYTES<Format>) {
      const Format format(p);
#pragma GCC unroll 16
      for (int pair = 0; pair < GROUP / 2; ++pair) {
        Floats low, high;
        format(p + Format::HEADER + pair * Format::PAIR, low, high);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
          const float* at = x + r * channels + g * GROUP + 2 * pair;
          even[r] = _mm512_fmadd_ps(low, _mm512_set1_ps(at[0]), even[r]);
          odd[r] = _mm512_fmadd_ps(high, _mm512_set1_ps(at[1]), odd[r]);
        }
      }
    }
    for (int r = 0; r < ROWS; ++r) _mm512_storeu_ps(y + (block * ROWS + r) * LANES, _mm512_add_ps(even[r], odd[r]));
  }
}

struct Weight {
  long outputs, channels;
  uint8_t* data;
};

template <class Format>
Weight weight(long outputs, long channels) {
  const size_t size = outputs / LANES * (channels / GROUP) * BYTES<Format>, whole = size + -size % HUGE_PAGE;
  Weight made{outputs, channels, static_cast<uint8_t*>(std::aligned_alloc(HUGE_PAGE, whole))};
  madvise(made.data, whole, MADV_HUGEPAGE);
#pragma omp parallel for schedule(static)
  for (size_t i = 0; i < size; ++i) made.data[i] = i * 7 & 0x3f;  // no infinities in any format
  return made;
}

template <class Format, class Head, int ROWS>
void measure(const char* name, const std::vector<Weight>& layers, const Weight& head) {
  std::vector<float> x(ROWS * 8192, 0.01f), y(ROWS * 65536 * 4L);
  double best = 1e9;
  for (int repeat = 0; repeat < REPEATS; ++repeat) {
    const auto begin = std::chrono::steady_clock::now();
    for (const Weight& w : layers) product<Format, ROWS>(w.data, w.outputs, w.channels, x.data(), y.data());
    product<Head, ROWS>(head.data, head.outputs, head.channels, x.data(), y.data());
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  std::printf("%s %d %.9f\n", name, ROWS, best);
}

template <class Format, class Head>
void both(const char* name, const std::vector<std::pair<long, long>>& shapes) {
  std::vector<Weight> layers;
  for (size_t i = 0; i + 1 < shapes.size(); ++i) layers.push_back(weight<Format>(shapes[i].first, shapes[i].second));
  const Weight head = weight<Head>(shapes.back().first, shapes.back().second);
  measure<Format, Head, 1>(name, layers, head);
  measure<Format, Head, 5>(name, layers, head);
  for (const Weight& w : layers) std::free(w.data);
  std::free(head.data);
}

}  // namespace

// Arguments: threads, then outputs and channels of each product; the last is the head.
int main(int count, char** words) {
  omp_set_num_threads(std::atoi(words[1]));
  std::vector<std::pair<long, long>> shapes;
  for (int i = 2; i + 1 < count; i += 2) shapes.emplace_back(std::atol(words[i]), std::atol(words[i + 1]));
  both<Q4_1, Q8_0>("q4_1", shapes);
  both<Q8_0, Q8_0>("q8_0", shapes);
  both<BF16, BF16>("bf16", shapes);
}

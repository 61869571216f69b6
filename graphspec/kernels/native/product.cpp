// What product.h declares.

#include "product.h"

#include <type_traits>
#include <utility>

#include "codes.h"
#include "rounded.h"

namespace graphspec {
namespace {

// Rows handled together, and registers of sixteen outputs: as many as leave room for the weights among the vector registers. Codes with scales are read
// from one block at a time: from two, a row took up to a quarter longer on one thread.
// From more than MANY rows on, weights are widened once, in a buffer.
#ifdef __AVX512F__
constexpr int TILE = 8;
constexpr int64_t MANY = 3 * TILE;
constexpr int parts_at_once(int rows, bool coded) { return rows <= 2 && !coded ? 4 : 2; }
constexpr bool WIDENS_HALVES = false;  // numbers of 16 bits take one instruction here, less than reading them in 32 bits
#else
constexpr int TILE = 6;
constexpr int64_t MANY = 4 * TILE;
constexpr int parts_at_once(int rows, bool coded) { return rows == 1 && !coded ? 4 : rows <= (coded ? 2 : 3) ? 2 : 1; }
constexpr bool WIDENS_HALVES = true;
#endif
constexpr int WIDE = GROUP * BLOCK;
constexpr int64_t AHEAD = 2048;  // bytes

// Numbers: nothing but the codes.
template <class C>
struct Dense {
  static constexpr int STEP = C::STEP, TABLES = 0;
  void begin(const Format&, const char*, int) {}
  template <int HALF>
  f16 read(const char* p) const {
    return C::template read<HALF>(p);
  }
};

// Codes with a scale per group of channels.
template <class C, Offset OFFSET>
struct Coded {
  static constexpr int STEP = C::STEP, TABLES = OFFSET == NONE ? 1 : 2;
  f16 scale, offset;
  void begin(const Format& f, const char* p, int half) {
    p += half * (f.scale_bytes / 2);
    scale = load_scale(p, f.scale);
    if (OFFSET != NONE) offset = load_scale(p + f.scale_bytes, f.scale);
  }
  template <int HALF>
  f16 read(const char* p) const {
    const f16 code = C::template read<HALF>(p);
    switch (OFFSET) {
      case NONE: return mul16(code, scale);
      case ZERO: return mul16(sub16(code, offset), scale);
      case MINIMUM: return fma16(code, scale, offset);
      default: return add16(mul16(code, scale), offset);
    }
  }
};

// The weights of PARTS halves of blocks, from the half FIRST of the first block on, group after group and channel after channel.
template <class R, int PARTS, int FIRST>
struct Reader {
  R part[PARTS];
  const char* at;

  void begin(const Format& f) {
    if (R::TABLES == 0) return;
    for (int i = 0; i < PARTS; ++i) part[i].begin(f, at + (FIRST + i) / 2 * f.block_bytes, (FIRST + i) % 2);
    at += R::TABLES * f.scale_bytes;
  }
  void next(const Format& f, f16* w) {
    w[0] = part[0].template read<FIRST>(at);
    if constexpr (PARTS >= 2) w[1] = part[1].template read<1>(at);
    if constexpr (PARTS == 4) {
      w[2] = part[2].template read<0>(at + f.block_bytes);
      w[3] = part[3].template read<1>(at + f.block_bytes);
    }
    at += R::STEP;
  }
};

// out[ROWS][PARTS * 16], row stride WIDE. ahead: bytes from a weight to the one that is fetched meanwhile. Not inlined: GCC then keeps the sums of
// every size in registers.
template <class R, int ROWS, int PARTS, int FIRST>
[[gnu::noinline]] void tile(const Format& format, const char* weight, const float* x, int64_t stride, float* out, int64_t ahead) {
  const Format f = format;
  f16 sum[ROWS][PARTS];
  for (auto& row : sum)
    for (auto& s : row) s = splat16(0.0f);
  Reader<R, PARTS, FIRST> reader;
  reader.at = weight;
  for (int64_t k = 0; k < f.channels;) {
    const int64_t end = std::min(f.channels, k + f.group);
    reader.begin(f);
#pragma GCC unroll 2
    for (; k < end; ++k) {
      __builtin_prefetch(reader.at + ahead);
      if (PARTS == 4) __builtin_prefetch(reader.at + ahead + f.block_bytes);
      f16 w[PARTS];
      reader.next(f, w);
      for (int r = 0; r < ROWS; ++r) {
        const f16 v = splat16(x[r * stride + k]);
        for (int i = 0; i < PARTS; ++i) sum[r][i] = fma16(v, w[i], sum[r][i]);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int i = 0; i < PARTS; ++i) store16(out + r * WIDE + i * HALF_BLOCK, sum[r][i]);
}

template <class R, int ROWS>
void rows_of_group(const Format& f, const char* weight, int blocks, const float* x, int64_t stride, float* out, int64_t ahead) {
  constexpr int PARTS = parts_at_once(ROWS, R::TABLES > 0);
  int b = 0;
  if constexpr (PARTS == 4)
    for (; b + 2 <= blocks; b += 2) tile<R, ROWS, 4, 0>(f, weight + b * f.block_bytes, x, stride, out + b * BLOCK, ahead);
  for (; b < blocks; ++b) {
    const char* from = weight + b * f.block_bytes;
    if constexpr (PARTS == 1) {
      tile<R, ROWS, 1, 0>(f, from, x, stride, out + b * BLOCK, ahead);
      tile<R, ROWS, 1, 1>(f, from, x, stride, out + b * BLOCK + HALF_BLOCK, ahead);
    } else {
      tile<R, ROWS, 2, 0>(f, from, x, stride, out + b * BLOCK, ahead);
    }
  }
}

template <class R>
void group_product(const Format& f, const char* weight, int blocks, const float* x, int64_t stride, int rows, float* out, int64_t ahead) {
  switch (rows) {
    case 1: return rows_of_group<R, 1>(f, weight, blocks, x, stride, out, ahead);
    case 2: return rows_of_group<R, 2>(f, weight, blocks, x, stride, out, ahead);
    case 3: return rows_of_group<R, 3>(f, weight, blocks, x, stride, out, ahead);
    case 4: return rows_of_group<R, 4>(f, weight, blocks, x, stride, out, ahead);
    case 5: return rows_of_group<R, 5>(f, weight, blocks, x, stride, out, ahead);
#ifdef __AVX512F__
    case 6: return rows_of_group<R, 6>(f, weight, blocks, x, stride, out, ahead);
    case 7: return rows_of_group<R, 7>(f, weight, blocks, x, stride, out, ahead);
#endif
    default: return rows_of_group<R, TILE>(f, weight, blocks, x, stride, out, ahead);
  }
}

// Blocks as float32, without tables.
template <class R>
[[gnu::noinline]] void widen(const Format& f, const char* weight, int blocks, float* to) {
  for (int b = 0; b < blocks; ++b) {
    Reader<R, 2, 0> reader;
    reader.at = weight + b * f.block_bytes;
    for (int64_t k = 0; k < f.channels;) {
      const int64_t end = std::min(f.channels, k + f.group);
      reader.begin(f);
      for (; k < end; ++k, to += BLOCK) {
        f16 w[2];
        reader.next(f, w);
        store16(to, w[0]);
        store16(to + HALF_BLOCK, w[1]);
      }
    }
  }
}

// Whether weights go from registers into products of few rows. What no published format has is widened always: the same bits, less to compile.
template <class R>
constexpr bool IN_REGISTERS = true;
template <class C>
constexpr bool IN_REGISTERS<Coded<C, MINIMUM_APART>> = false;
template <>
constexpr bool IN_REGISTERS<Coded<Integer4<0>, NONE>> = false;
template <>
constexpr bool IN_REGISTERS<Coded<Integer4<8>, MINIMUM>> = false;
template <>
constexpr bool IN_REGISTERS<Coded<E2m1, ZERO>> = false;
template <>
constexpr bool IN_REGISTERS<Coded<E2m1, MINIMUM>> = false;
template <>
constexpr bool IN_REGISTERS<Coded<Int8, ZERO>> = false;
template <>
constexpr bool IN_REGISTERS<Coded<Int8, MINIMUM>> = false;
template <>
constexpr bool IN_REGISTERS<Coded<Uint8, NONE>> = false;
template <>
constexpr bool IN_REGISTERS<Coded<E4m3, ZERO>> = false;
template <>
constexpr bool IN_REGISTERS<Coded<E4m3, MINIMUM>> = false;

// Blocks [first, last) of a segment whose first output is number `from` of the weight.
template <class R>
void product_of(const Segment& segment, const char* weight, int64_t from, int64_t channels, int64_t first, int64_t last, const float* x, int64_t stride,
                int64_t rows, const Finish& finish) {
  static thread_local Floats wide;
  const Format f(segment, channels, R::STEP, R::TABLES);
  const Segment plain{0, FLOAT32, FLOAT32, NONE, channels, 0, 0};
  const Format wide_format(plain, channels, Float32::STEP, 0);
  alignas(64) float values[TILE * WIDE];
  for (int64_t block = first; block < last; block += GROUP) {
    const int blocks = static_cast<int>(std::min<int64_t>(GROUP, last - block));
    const char* data = weight + block * f.block_bytes;
    const int64_t at = block * BLOCK, width = std::min<int64_t>(blocks * BLOCK, segment.outputs - at);
    const bool widened = !IN_REGISTERS<R> || (rows > MANY && (R::TABLES > 0 || (WIDENS_HALVES && !std::is_same_v<R, Dense<Float32>>)));
    if (widened) {
      // From this many rows on, widening the weights once for all rows costs less than the instructions it saves.
      wide.resize(GROUP * channels * BLOCK);
      widen<R>(f, data, blocks, wide.data());
    }
    for (int64_t row = 0; row < rows; row += TILE) {
      const int count = static_cast<int>(std::min<int64_t>(TILE, rows - row));
      const float* some = x + row * stride;
      if (widened)
        group_product<Dense<Float32>>(wide_format, reinterpret_cast<const char*>(wide.data()), blocks, some, stride, count, values, 0);
      else if constexpr (IN_REGISTERS<R>)
        group_product<R>(f, data, blocks, some, stride, count, values, row == 0 ? AHEAD : 0);
      finish(row, count, from + at, width, values);
    }
  }
}

struct Multiply {
  template <class R, class... Rest>
  static void run(const Segment& segment, const Rest&... rest) {
    product_of<R>(segment, rest...);
  }
};

// The weights of output `number` of a segment.
struct Take {
  template <class R>
  static void run(const Segment& segment, const char* weight, int64_t channels, int64_t number, float* to) {
    const Format f(segment, channels, R::STEP, R::TABLES);
    weight += number / BLOCK * f.block_bytes;
    if (number % BLOCK < HALF_BLOCK)
      lane<R, 0>(f, weight, number % HALF_BLOCK, to);
    else
      lane<R, 1>(f, weight, number % HALF_BLOCK, to);
  }
  template <class R, int HALF>
  static void lane(const Format& f, const char* weight, int64_t lane, float* to) {
    Reader<R, 1, HALF> reader;
    reader.at = weight;
    for (int64_t k = 0; k < f.channels;) {
      const int64_t end = std::min(f.channels, k + f.group);
      reader.begin(f);
      for (; k < end; ++k) {
        f16 w;
        float values[HALF_BLOCK];
        reader.next(f, &w);
        store16(values, w);
        to[k] = values[lane];
      }
    }
  }
};

template <class Do, class C, class... Rest>
void with_offset(const Segment& segment, const Rest&... rest) {
  switch (segment.offset) {
    case NONE: return Do::template run<Coded<C, NONE>>(segment, rest...);
    case ZERO: return Do::template run<Coded<C, ZERO>>(segment, rest...);
    case MINIMUM: return Do::template run<Coded<C, MINIMUM>>(segment, rest...);
    default: return Do::template run<Coded<C, MINIMUM_APART>>(segment, rest...);
  }
}

// Do::run with the reader of a segment's format.
template <class Do, class... Rest>
void with_reader(const Segment& segment, const Rest&... rest) {
  switch (segment.code) {
    case FLOAT32: return Do::template run<Dense<Float32>>(segment, rest...);
    case BFLOAT16: return Do::template run<Dense<Bfloat16>>(segment, rest...);
    case FLOAT16: return Do::template run<Dense<Float16>>(segment, rest...);
    case INT4: return with_offset<Do, Integer4<8>>(segment, rest...);
    case UINT4: return with_offset<Do, Integer4<0>>(segment, rest...);
    case E2M1: return with_offset<Do, E2m1>(segment, rest...);
    case INT8: return with_offset<Do, Int8>(segment, rest...);
    case UINT8: return with_offset<Do, Uint8>(segment, rest...);
    default: return with_offset<Do, E4m3>(segment, rest...);
  }
}

}  // namespace

void product(const Matrix& m, int64_t first, int64_t last, const float* x, int64_t stride, int64_t rows, Finish finish) {
  // Other cores have just written parts of a short x: request all its lines at once instead of waiting for one after another.
  if (rows <= TILE)
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t k = 0; k < m.channels; k += 16) __builtin_prefetch(x + row * stride + k);
  static thread_local RoundedRows integers;
  static thread_local PairedRows halves;
  bool have_integers = false, have_halves = false;
  int64_t begin = 0, from = 0;
  for (int64_t i = 0; i < m.segments(); ++i) {
    const Segment& segment = m.segment(i);
    const int64_t blocks = (segment.outputs + BLOCK - 1) / BLOCK, low = std::max<int64_t>(first - begin, 0), high = std::min(last - begin, blocks);
    if (low < high && segment.rounded && segment.code == BFLOAT16) {
      if (!std::exchange(have_halves, true)) halves.round(x, stride, rows, m.channels);
      paired_product(segment, m.data(i), from, low, high, halves, rows, finish);
    } else if (low < high && segment.rounded) {
      if (!std::exchange(have_integers, true)) integers.round(x, stride, rows, m.channels);
      rounded_product(segment, m.data(i), from, low, high, integers, rows, finish);
    } else if (low < high) {
      with_reader<Multiply>(segment, m.data(i), from, m.channels, low, high, x, stride, rows, finish);
    }
    begin += blocks;
    from += segment.outputs;
  }
}

void take_output(const Matrix& m, int64_t output, float* to) {
  int64_t i = 0;
  for (; output >= m.segment(i).outputs; ++i) output -= m.segment(i).outputs;
  const Segment& segment = m.segment(i);
  if (segment.rounded && segment.code == BFLOAT16) return take_paired(m.data(i), m.channels, output, to);
  with_reader<Take>(segment, m.data(i), m.channels, output, to);
}

}  // namespace graphspec

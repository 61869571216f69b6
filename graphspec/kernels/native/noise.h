// Gumbel noise of graphspec/kernels/sampling/noise.py: a hash of (seed, position, token), eight tokens at a time.

#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace {

typedef uint32_t w8 __attribute__((vector_size(32)));

template <class T>
inline T mix32(T x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

typedef double d8 __attribute__((vector_size(64)));
typedef int64_t l8 __attribute__((vector_size(64)));

inline d8 wide8(double x) { return d8{x, x, x, x, x, x, x, x}; }

// log(1 + more) of positive normal numbers `x`, which is 1 + more up to rounding: in double, so that what is rounded to float is rounded right.
// 2 * atanh(s) with s = (m - 1) / (m + 1), where x = m * 2^e; below s^2 = 0.03 the series ends at 10^-13.
inline d8 log8(d8 x, d8 more) {
  l8 bits;
  std::memcpy(&bits, &x, sizeof bits);
  d8 e = __builtin_convertvector((bits >> 52) - 1022, d8), m;
  bits = (bits & 0x000fffffffffffff) | 0x3fe0000000000000;
  std::memcpy(&m, &bits, sizeof m);
  const auto low = m < wide8(0.70710678118654752);
  e = low ? e - wide8(1.0) : e;
  m = low ? m + m : m;
  const d8 over = e == wide8(0.0) ? more : m - wide8(1.0), s = over / (wide8(2.0) + over), z = s * s;
  d8 sum = wide8(1.0 / 15);
  for (int k = 13; k > 0; k -= 2) sum = sum * z + wide8(1.0 / k);
  return wide8(2.0) * s * sum + e * wide8(0.69314718055994531);
}

// The noise of one seed at one position.
class Noise {
 public:
  Noise(int64_t seed, int64_t position) {
    const uint32_t low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32), at = static_cast<uint32_t>(position);
    a_ = mix32(mix32(mix32(low ^ 0x9e3779b9u) ^ high) ^ at);
    b_ = mix32(mix32(mix32(at ^ 0x7f4a7c15u) ^ low) ^ high);
  }

  // No noise is larger: at the least u, 2^-33, it is 33 ln 2.
  static constexpr float MOST = 22.9f;

  f8 of(w8 token) const {
    const d8 down = -__builtin_convertvector(uniform(token), d8), one = wide8(1.0);
    const d8 exponential = __builtin_convertvector(__builtin_convertvector(-log8(one + down, down), f8), d8);
    return __builtin_convertvector(-log8(exponential, exponential - one), f8);
  }

  // Noise of tokens [first, first + 8) of a list of `count` token ids; without a list, of ids first, first + 1, ...
  f8 of(const int64_t* tokens, int64_t first, int64_t count) const {
    w8 token;
    for (int i = 0; i < 8; ++i) token[i] = static_cast<uint32_t>(tokens == nullptr || first + i >= count ? first + i : tokens[first + i]);
    return of(token);
  }

  // An upper bound of the noise of token ids [first, first + 8), without a logarithm: -log(-log(1 - u)) <= -log u, and -log u <= -e ln 2 where
  // u >= 2^e. The last term is for rounding.
  f8 bound(int64_t first) const {
    w8 token;
    for (int i = 0; i < 8; ++i) token[i] = static_cast<uint32_t>(first + i);
    const f8 u = uniform(token);
    i8 bits;
    std::memcpy(&bits, &u, sizeof bits);
    return __builtin_convertvector(127 - (bits >> 23), f8) * splat(0.6931472f) + splat(1e-3f);
  }

 private:
  // A hash of the token, in (0, 1).
  f8 uniform(w8 token) const {
    const f8 random = __builtin_convertvector(mix32(mix32(token ^ a_) + b_), f8);
    const f8 u = (random + splat(0.5f)) * splat(0x1p-32f);
    return u < splat(1.0f - 0x1p-24f) ? u : splat(1.0f - 0x1p-24f);
  }

  uint32_t a_, b_;
};

}  // namespace

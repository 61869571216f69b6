// Eight floats at a time, for the kernels in this folder.

#pragma once

#include <cstdint>
#include <cstring>

#ifdef __FMA__
#include <immintrin.h>
#endif

namespace {

typedef float f8 __attribute__((vector_size(32)));

inline f8 load8(const float* p) {
  f8 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline f8 splat(float x) { return f8{x, x, x, x, x, x, x, x}; }

// Fused where the hardware does it, and then always: compiled with -ffp-contract=off, because a compiler that picks which products to fuse
// picks differently for one row and for two.
inline f8 fma8(f8 a, f8 b, f8 c) {
#ifdef __FMA__
  return reinterpret_cast<f8>(_mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#else
  return a * b + c;
#endif
}

}  // namespace

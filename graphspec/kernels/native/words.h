// Ancestor words: 64 nodes or slots of a window in each, bit n & 63 of word n >> 6.

#pragma once

#include <cstdint>

namespace {

// Word x of those in which bits 0 to n are set.
inline int64_t causal_word(int64_t n, int64_t x) {
  if (x != n >> 6) return x < n >> 6 ? -1 : 0;
  return static_cast<int64_t>(~(~uint64_t{1} << (n & 63)));
}

inline bool bit(const int64_t* words, int64_t n) { return static_cast<uint64_t>(words[n >> 6]) >> (n & 63) & 1; }

}  // namespace

// How Python calls a function of this library: a struct, filled field by field, and how many threads may work.

#pragma once

#include <cstring>

namespace graphspec {

typedef void (*Function)(const char* fields, int threads);

// The struct that `fields` holds; the memory need not be aligned.
template <class T>
T call_of(const char* fields) {
  T call;
  std::memcpy(&call, fields, sizeof call);
  return call;
}

}  // namespace graphspec

// Calls from Python: a struct, filled field by field, and the number of threads.

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

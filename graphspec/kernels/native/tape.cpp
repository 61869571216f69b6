// Repeats the calls of a tape in order, on the memory they were recorded with.

#include <cstdint>

#include "call.h"

namespace {

// Filled by graphspec/kernels/native/call.py.
struct Entry {
  graphspec::Function function;
  const char* fields;
};

}  // namespace

extern "C" {

void graphspec_replay(const Entry* entries, int64_t count, int threads) {
  for (const Entry* entry = entries; entry < entries + count; ++entry) entry->function(entry->fields, threads);
}

}  // extern "C"

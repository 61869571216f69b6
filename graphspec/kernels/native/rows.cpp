// Ops between the passes of a network, one row at a time. Fields are filled by graphspec/kernels/native/cycle.py and call.py.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "call.h"
#include "product.h"

namespace {

// A token's row of the embedding; null where the token is not valid or unknown.
struct Table {
  const int64_t* token;
  const uint8_t* valid;
  const char* weight;
  int64_t code, vocab, hidden;  // code: SEGMENTS: packed; FLOAT32: row after row
};

void take(const float* from, float* to, int64_t size) {
  if (from == nullptr)
    std::memset(to, 0, size * sizeof(float));
  else
    std::memcpy(to, from, size * sizeof(float));
}

void take(const Table& table, int64_t r, float* to) {
  const int64_t token = table.token[r];
  const bool known = table.valid[r] && token >= 0 && token < table.vocab;
  if (known && table.code == graphspec::SEGMENTS)
    graphspec::take_output(Matrix(table.weight, table.code, table.hidden, table.vocab), token, to);
  else
    take(known ? reinterpret_cast<const float*>(table.weight) + token * table.hidden : nullptr, to, table.hidden);
}

struct Embed {
  float* out;
  Table table;
  int64_t rows;
};

struct Enter {
  float *side_by_side, *masked;
  const float *hidden, *embedding_norm, *hidden_norm;  // norms may be null
  Table table;
  int64_t rows, hidden_first;
  double eps;
};

void enter(const Enter& c) {
  const int64_t size = c.table.hidden;
  for (int64_t r = 0; r < c.rows; ++r) {
    float *embedding = c.side_by_side + (2 * r + c.hidden_first) * size, *hidden = c.side_by_side + (2 * r + 1 - c.hidden_first) * size;
    float* masked = c.masked + r * size;
    take(c.table, r, embedding);
    take(c.table.valid[r] ? c.hidden + r * size : nullptr, masked, size);
    if (c.embedding_norm != nullptr) rms_norm(embedding, c.embedding_norm, static_cast<float>(c.eps), size, embedding);
    if (c.hidden_norm != nullptr)
      rms_norm(masked, c.hidden_norm, static_cast<float>(c.eps), size, hidden);
    else
      take(masked, hidden, size);
  }
}

struct Carry {
  float* out;
  const float* hidden;
  const int64_t* source;
  const uint8_t* valid;
  int64_t lanes, before, after, size;
};

constexpr int DIMS = 6;

struct Copy {
  char* to;
  const char* from;
  int64_t bytes, size[DIMS], to_stride[DIMS], from_stride[DIMS];  // strides in elements
};

void copy(const Copy& c, int dim, char* to, const char* from) {
  // The dimensions from here on are contiguous in both.
  int64_t whole = 1;
  int d = DIMS - 1;
  for (; d >= dim && (c.size[d] == 1 || (c.to_stride[d] == whole && c.from_stride[d] == whole)); --d) whole *= c.size[d];
  if (d < dim) {
    std::memcpy(to, from, whole * c.bytes);
    return;
  }
  for (int64_t i = 0; i < c.size[dim]; ++i) copy(c, dim + 1, to + i * c.to_stride[dim] * c.bytes, from + i * c.from_stride[dim] * c.bytes);
}

}  // namespace

extern "C" {

void graphspec_embed(const char* fields, int) {
  const Embed c = graphspec::call_of<Embed>(fields);
  for (int64_t r = 0; r < c.rows; ++r) take(c.table, r, c.out + r * c.table.hidden);
}

void graphspec_enter(const char* fields, int) { enter(graphspec::call_of<Enter>(fields)); }

void graphspec_carry(const char* fields, int) {
  const Carry c = graphspec::call_of<Carry>(fields);
  for (int64_t i = 0; i < c.lanes * c.after; ++i)
    take(c.valid[i] ? c.hidden + (i / c.after * c.before + c.source[i]) * c.size : nullptr, c.out + i * c.size, c.size);
}

void graphspec_copy(const char* fields, int) {
  const Copy c = graphspec::call_of<Copy>(fields);
  for (const int64_t size : c.size)
    if (size == 0) return;
  copy(c, 0, c.to, c.from);
}

}  // extern "C"

// Calls on rows of logits, each row independent of the others.

#pragma once

#include <cstdint>

#include "call.h"
#include "team.h"

namespace graphspec {

// Units of work below which a second thread costs more than it saves. Ranking a row's tokens is a unit for each logit.
constexpr int64_t PARALLEL_FROM = 1 << 16;

// A call has `int64_t rows() const`, `int64_t units() const` and `void row(int64_t r) const`.
template <class Call>
class RowProgram final : public Program {
 public:
  explicit RowProgram(const Call& call) : c_(call) {}
  int phases() const override { return 1; }
  int chunks(int) const override { return static_cast<int>(c_.rows()); }
  int64_t size() const override { return c_.units(); }
  void work(int, int row) override { c_.row(row); }

 private:
  const Call& c_;
};

template <class Call>
void run_rows(const char* fields, int threads) {
  const Call call = call_of<Call>(fields);
  RowProgram<Call> program(call);
  run(program, call.units() >= PARALLEL_FROM ? threads : 1);
}

}  // namespace graphspec

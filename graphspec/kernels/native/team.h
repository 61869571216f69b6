// Threads that work through programs together: phases one after the other, the chunks of a phase claimed by idle threads.

#pragma once

#include <cstdint>

namespace graphspec {

// What a team runs. Chunks of a phase are independent of each other and see everything the phases before wrote.
class Program {
 public:
  virtual int phases() const = 0;
  // Called before chunks() and work(): how many threads will claim chunks. Chunks that suit two threads are extra work for one.
  virtual void divide(int) {}
  // Chunks of a phase, at most 65535; 0 skips it.
  virtual int chunks(int phase) const = 0;
  virtual void work(int phase, int chunk) = 0;
  // How much work it is, in any unit: programs of one class with as many phases and as much work take about the same time.
  virtual int64_t size() const = 0;

 protected:
  ~Program() = default;
};

// Run every phase of `program` on the calling thread and up to `threads` - 1 others, where that has been faster. Returns when all is done.
void run(Program& program, int threads);

}  // namespace graphspec

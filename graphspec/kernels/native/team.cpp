// A team of threads, one per process. Its members stay awake inside a program and for a moment after it, then sleep.
//
// One word says which chunk of which phase comes next; claiming a chunk is one compare-and-swap on it, and whoever finishes the last chunk of
// a phase opens the next one. No phase waits for a member, only for chunks that were claimed: a member that another program keeps off its
// core holds nothing up, unless it had a chunk just then. Who waits for such a chunk soon sleeps, which leaves its core to the member.
// Each kind of program runs together or on the caller's thread alone, whichever has been faster (pace.h).

#include "team.h"

#include <fenv.h>
#include <pthread.h>
#include <signal.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <typeinfo>

#include "pace.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace graphspec {
namespace {

using Clock = std::chrono::steady_clock;
using Nanoseconds = std::chrono::nanoseconds;

constexpr Nanoseconds PATIENCE = std::chrono::microseconds(50);  // awake while a phase is under way
constexpr Nanoseconds LINGER = std::chrono::microseconds(500);   // awake after a program: the next one may come at once
constexpr size_t KINDS = 256;  // kinds of programs with a pace of their own; a power of two

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The word: 16 bits each of program, phase, chunks of the phase, and next chunk. No chunks: no program is under way.
uint64_t word(uint64_t program, uint64_t phase, uint64_t chunks) { return (program & 0xffff) << 48 | phase << 32 | chunks << 16; }
int phase_of(uint64_t w) { return static_cast<int>(w >> 32 & 0xffff); }
int chunks_of(uint64_t w) { return static_cast<int>(w >> 16 & 0xffff); }
int next_of(uint64_t w) { return static_cast<int>(w & 0xffff); }

class Team {
 public:
  void run(Program& program, int threads) {
    const std::unique_lock<std::mutex> lead(leading_, std::try_to_lock);
    if (!lead.owns_lock() || threads < 2) {
      alone(program);
      return;
    }
    Pace& pace = pace_of(program, threads);
    const auto begin = Clock::now();
    if (pace.together())
      together(program, threads);
    else
      alone(program);
    pace.took(std::chrono::duration<double>(Clock::now() - begin).count());
  }

 private:
  struct Kind {
    size_t name = 0;
    Pace pace;
  };

  // The leader's own. A kind whose place another one takes begins anew.
  Pace& pace_of(const Program& program, int threads) {
    const size_t parts = (static_cast<size_t>(program.size()) << 16 | static_cast<size_t>(program.phases())) ^ static_cast<size_t>(threads) << 56;
    const size_t name = (typeid(program).hash_code() ^ parts) * 0x9e3779b97f4a7c15u | 1;
    Kind& kind = kinds_[name >> 32 & (KINDS - 1)];
    if (kind.name != name) kind = {name, {}};
    return kind.pace;
  }

  static void alone(Program& program) {
    program.divide(1);
    for (int phase = 0; phase < program.phases(); ++phase)
      for (int chunk = 0, count = program.chunks(phase); chunk < count; ++chunk) program.work(phase, chunk);
  }

  void together(Program& program, int threads) {
    program.divide(threads);
    grow(threads);
    width_.store(threads, std::memory_order_relaxed);
    program_ = &program;
    fegetenv(&environment_);
    open(++programs_, 0);
    help(false);
  }

  void grow(int threads) {
    while (members_ < threads - 1) {
      sigset_t all, before;
      sigfillset(&all);
      // Signals are for the threads of the host program.
      pthread_sigmask(SIG_SETMASK, &all, &before);
      try {
        std::thread(&Team::member, this, members_ + 1).detach();
        ++members_;
      } catch (const std::system_error&) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return;
      }
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
  }

  void member(int number) {
    for (;;) {
      const uint64_t seen = word_.load(std::memory_order_acquire);
      if (chunks_of(seen) == 0 || number >= width_.load(std::memory_order_relaxed))
        wait(seen, LINGER);
      else
        help(true);
    }
  }

  // Claim and do chunks until the program is over.
  void help(bool member) {
    uint64_t program = ~uint64_t{0};
    for (;;) {
      uint64_t seen = word_.load(std::memory_order_acquire);
      if (chunks_of(seen) == 0) return;
      if (next_of(seen) >= chunks_of(seen)) {
        wait(seen, PATIENCE);
        continue;
      }
      if (!word_.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      if (member && program != seen >> 48) {
        // How the leader's thread rounds and treats denormals: the same row must have the same bits on every member.
        fesetenv(&environment_);
        program = seen >> 48;
      }
      program_->work(phase_of(seen), next_of(seen));
      if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks_of(seen)) open(seen >> 48, phase_of(seen) + 1);
    }
  }

  // Open the first phase from `phase` on that has chunks.
  void open(uint64_t program, int phase) {
    done_.store(0, std::memory_order_relaxed);
    int chunks = 0;
    for (const int phases = program_->phases(); phase < phases && chunks == 0; phase += chunks == 0) chunks = program_->chunks(phase);
    word_.store(word(program, chunks == 0 ? 0 : phase, chunks), std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      { const std::lock_guard<std::mutex> guard(sleeping_); }
      changed_.notify_all();
    }
  }

  // Until the word is another: awake for `patience`, then asleep.
  void wait(uint64_t seen, Nanoseconds patience) {
    const auto begin = Clock::now();
    do {
      for (int i = 0; i < 16; ++i) {
        if (word_.load(std::memory_order_acquire) != seen) return;
        relax();
      }
    } while (Clock::now() - begin < patience);
    std::unique_lock<std::mutex> guard(sleeping_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    changed_.wait(guard, [&] { return word_.load(std::memory_order_seq_cst) != seen; });
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

  alignas(64) std::atomic<uint64_t> word_{0};
  alignas(64) std::atomic<int> done_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<int> width_{0};
  // Written by the leader before it opens the first phase, read by whoever has claimed a chunk.
  Program* program_ = nullptr;
  fenv_t environment_{};
  // The leader's own.
  std::mutex leading_;
  uint64_t programs_ = 0;
  int members_ = 0;
  std::array<Kind, KINDS> kinds_{};
  std::mutex sleeping_;
  std::condition_variable changed_;
};

// Never destroyed: its members may be at work when the process exits. A child of fork has no members and makes a team of its own.
std::atomic<Team*> current{nullptr};

void forget() { current.store(nullptr, std::memory_order_relaxed); }

Team& team() {
  static const bool watched = pthread_atfork(nullptr, nullptr, forget) == 0;
  (void)watched;
  Team* found = current.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  Team* made = new Team;
  if (current.compare_exchange_strong(found, made, std::memory_order_acq_rel)) return *made;
  delete made;
  return *found;
}

}  // namespace

void run(Program& program, int threads) { team().run(program, threads); }

}  // namespace graphspec

extern "C" {

// What a Pace chooses over `count` programs that take `together[i]` or `alone[i]`; for tests.
void graphspec_pace(const double* together, const double* alone, int64_t count, uint8_t* chosen) {
  graphspec::Pace pace;
  for (int64_t i = 0; i < count; ++i) {
    chosen[i] = pace.together();
    pace.took(chosen[i] ? together[i] : alone[i]);
  }
}

}  // extern "C"

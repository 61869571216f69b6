// A team of threads, one per process. Its members stay awake inside a program and for a moment after it, then sleep.
//
// One word says which chunk of which phase comes next; claiming a chunk is one compare-and-swap on it, and whoever finishes the last chunk of
// a phase opens the next one. No phase waits for a member, only for chunks that were claimed: a member that another program keeps off its
// core holds nothing up, unless it had a chunk just then. Who waits for such a chunk soon sleeps, which leaves its core to the member.
// Where the caller's thread is off its core for too large a part of the time, the next programs run on it alone.

#include "team.h"

#include <fenv.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace graphspec {
namespace {

using Clock = std::chrono::steady_clock;
using Nanoseconds = std::chrono::nanoseconds;

constexpr Nanoseconds PATIENCE = std::chrono::microseconds(50);  // awake while a phase is under way
constexpr Nanoseconds LINGER = std::chrono::microseconds(500);   // awake after a program: the next one may come at once
constexpr Nanoseconds PAUSE = std::chrono::milliseconds(20);     // between two programs; after a longer one the caller had something else to do
constexpr int LOSS = 4;               // the caller's thread may be off its core for 1/LOSS of the time
constexpr int STRIKES = 2;            // times that may happen less than FORGIVEN programs apart
constexpr int64_t FORGIVEN = 64;
constexpr int64_t ALONE_LEAST = 256;  // programs that run alone after that, doubled each time it happens again
constexpr int64_t ALONE_MOST = 16384;
constexpr int64_t TRUSTED = 1024;     // programs in a row that lost less, after which it begins anew

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
    if (!lead.owns_lock() || threads < 2 || alone_ > 0) {
      // The counters are the leader's own.
      if (lead.owns_lock() && threads > 1) --alone_;
      for (int phase = 0; phase < program.phases(); ++phase)
        for (int chunk = 0, count = program.chunks(phase); chunk < count; ++chunk) program.work(phase, chunk);
      return;
    }
    grow(threads);
    width_.store(threads, std::memory_order_relaxed);
    const Stamp begin = stamp();
    program_ = &program;
    fegetenv(&environment_);
    open(++programs_, 0);
    help(false);
    judge(begin);
  }

 private:
  // When, and how long the calling thread had run by then.
  struct Stamp {
    Nanoseconds wall, run;
    std::thread::id thread;
  };

  static Stamp stamp() {
    timespec run;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &run);
    return {Clock::now().time_since_epoch(), std::chrono::seconds(run.tv_sec) + Nanoseconds(run.tv_nsec), std::this_thread::get_id()};
  }

  // Other programs, or members on the wrong core, keep a thread from running in a program as well as between two of them.
  void judge(const Stamp& begin) {
    const bool follows = last_.thread == begin.thread && begin.wall - last_.wall < PAUSE;
    const Stamp since = follows ? last_ : begin;
    last_ = stamp();
    const Nanoseconds took = last_.wall - since.wall, off = took - (last_.run - since.run);
    if (off * LOSS > took && off > PATIENCE) {
      good_ = 0;
      if (++strikes_ < STRIKES) return;
      alone_ = penalty_;
      penalty_ = std::min(2 * penalty_, ALONE_MOST);
    } else {
      ++good_;
      if (good_ == FORGIVEN) strikes_ = 0;
      if (good_ == TRUSTED) penalty_ = ALONE_LEAST;
    }
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
  Stamp last_{};
  int64_t alone_ = 0, penalty_ = ALONE_LEAST, good_ = 0;
  int strikes_ = 0;
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

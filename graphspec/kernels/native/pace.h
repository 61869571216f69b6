// Whether a team is worth its cost for one kind of program: the faster way by the clock, tried again from time to time.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace graphspec {

// Chooses between running together and alone from how long each took, in any unit. Members that another program keeps off their cores, cores
// that share one unit, and phases too short to share all show in the time alone.
class Pace {
 public:
  // How the next program is to run.
  bool together() const { return together_ != trying_; }

  // How long it took.
  void took(double time) {
    if (trying_) {
      tried_[tries_++] = time;
      slow_ += time > CLEAR * median(recent_, known());
      if (slow_ == GIVE_UP || tries_ == WINDOW) decide();
      return;
    }
    recent_[runs_++ % WINDOW] = time;
    if (runs_ < WINDOW) return;
    const double now = median(recent_, WINDOW);
    if (standing_ == 0.0) standing_ = now;
    // Together is the way that another program can slow down from one moment to the next.
    slower_ = together_ && now > CLEAR * standing_ ? slower_ + 1 : 0;
    if (runs_ < until_ && slower_ < WINDOW) return;
    if (slower_ == WINDOW) stay_ = MIN_STAY;
    trying_ = true;
    tries_ = slow_ = slower_ = 0;
  }

 private:
  static constexpr int WINDOW = 5, GIVE_UP = 2;
  static constexpr double CLEAR = 1.25;  // times a time that no jitter of a calm machine explains
  static constexpr double GAIN = 0.97;   // share of the time that is worth a change
  static constexpr int64_t MIN_STAY = 64, MAX_STAY = 16384;

  using Times = std::array<double, WINDOW>;

  int known() const { return static_cast<int>(std::min<int64_t>(runs_, WINDOW)); }

  static double median(Times times, int count) {
    std::nth_element(times.begin(), times.begin() + count / 2, times.begin() + count);
    return times[count / 2];
  }

  void decide() {
    const bool better = slow_ < GIVE_UP && median(tried_, tries_) < GAIN * median(recent_, WINDOW);
    if (better) {
      together_ = !together_;
      recent_ = tried_;
      stay_ = MIN_STAY;
    } else {
      stay_ = std::min(2 * stay_, MAX_STAY);
    }
    standing_ = median(recent_, WINDOW);
    trying_ = false;
    runs_ = WINDOW;
    until_ = WINDOW + stay_;
  }

  bool together_ = true, trying_ = false;
  Times recent_{}, tried_{};
  double standing_ = 0.0;
  int tries_ = 0, slow_ = 0, slower_ = 0;
  int64_t runs_ = 0, until_ = 3 * WINDOW, stay_ = MIN_STAY;
};

}  // namespace graphspec

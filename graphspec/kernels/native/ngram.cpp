// Continuations of earlier occurrences of a row's last tokens. The reference defines their meaning: graphspec/kernels/tree/ngram_match.py.
// Fields are filled by graphspec/kernels/native/cycle.py.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "call.h"

namespace {

constexpr int64_t LIVE = 1;
constexpr int64_t PATH_COST = 4;

struct NgramMatch {
  const int64_t *history, *lane_row, *status, *seq_len;
  float* score;  // from here on [lanes, depth, paths], entry d * paths + k
  int64_t *token, *parent;
  int64_t lanes, width, paths, depth, min_match, max_match;
};

// A place before the root at which its last tokens occur, and the tokens after it, up to the root.
struct Occurrence {
  int64_t matched, place, count;
  bool open;
};

class Lane {
 public:
  Lane(const NgramMatch& call, const int64_t* history, int64_t last) : c_(call), history_(history), last_(last) {
    for (int64_t place = last - 1; place >= 0; --place) {
      const int64_t most = std::min(c_.max_match, place + 1);
      int64_t matched = 0;
      while (matched < most && history[place - matched] == history[last - matched]) ++matched;
      if (matched >= c_.min_match) found_.push_back({matched, place, std::min(last - place, c_.depth), true});
    }
    // More matching tokens first; places are in order already, the most recent first.
    std::stable_sort(found_.begin(), found_.end(), [](const Occurrence& a, const Occurrence& b) { return a.matched > b.matched; });
  }

  // The next path: null when there is none.
  const Occurrence* next() {
    const auto start = std::find_if(found_.begin(), found_.end(), [](const Occurrence& each) { return each.open; });
    if (start == found_.end()) return nullptr;
    // Of the continuations that begin with it, the longest; of equally long ones the best occurrence.
    const Occurrence* longest = nullptr;
    for (const Occurrence& each : found_)
      if (each.count >= start->count && same(each, *start, start->count) && (longest == nullptr || each.count > longest->count)) longest = &each;
    for (Occurrence& each : found_)
      if (each.count <= longest->count && same(each, *longest, each.count)) each.open = false;
    return longest;
  }

 private:
  bool same(const Occurrence& a, const Occurrence& b, int64_t count) const {
    return std::equal(history_ + a.place + 1, history_ + a.place + 1 + count, history_ + b.place + 1);
  }

  const NgramMatch& c_;
  const int64_t* history_;
  int64_t last_;
  std::vector<Occurrence> found_;
};

void match(const NgramMatch& c, int64_t lane) {
  const int64_t entries = c.depth * c.paths, row = c.lane_row[lane];
  float* score = c.score + lane * entries;
  int64_t *token = c.token + lane * entries, *parent = c.parent + lane * entries;
  std::fill_n(score, entries, -std::numeric_limits<float>::infinity());
  std::fill_n(token, entries, -1);
  std::fill_n(parent, entries, -1);
  if (c.status[row] != LIVE) return;
  const int64_t* history = c.history + row * c.width;
  Lane found(c, history, c.seq_len[row]);
  std::vector<const int64_t*> path;
  std::vector<int64_t> length;
  for (int64_t k = 0; k < c.paths; ++k) {
    const Occurrence* next = found.next();
    if (next == nullptr) return;
    path.push_back(history + next->place + 1);
    length.push_back(next->count);
    int64_t above = -1;
    for (int64_t d = 0; d < next->count; ++d) {
      // The first path with the same tokens so far has the entry.
      int64_t keeper = 0;
      while (keeper < k && !(length[keeper] > d && std::equal(path[k], path[k] + d + 1, path[keeper]))) ++keeper;
      const int64_t entry = d * c.paths + keeper;
      if (keeper == k) score[entry] = static_cast<float>(-(d + PATH_COST * k)), token[entry] = path[k][d], parent[entry] = above;
      above = entry;
    }
  }
}

struct ForcedRun {
  const int64_t* forced;
  float* score;  // from here on [lanes, depth, paths], entry d * paths + k
  int64_t *token, *parent;
  int64_t lanes, depth, paths;
};

// The path that has the run's token at each depth, -1 from where the pool differs.
void follow(const ForcedRun& c, const int64_t* forced, const int64_t* token, const int64_t* parent, std::vector<int64_t>& place) {
  int64_t above = -1;
  for (int64_t d = 0; d < c.depth; ++d) {
    place[d] = -1;
    for (int64_t i = d * c.paths; i < (d + 1) * c.paths && place[d] < 0; ++i)
      if (forced[d] >= 0 && token[i] == forced[d] && parent[i] == above) place[d] = i - d * c.paths;
    above = place[d] < 0 ? -2 : d * c.paths + place[d];
  }
}

void forced_run(const ForcedRun& c) {
  std::vector<int64_t> place(c.depth);
  const int64_t size = c.depth * c.paths;
  for (int64_t lane = 0; lane < c.lanes; ++lane) {
    const int64_t* forced = c.forced + lane * c.depth;
    float* score = c.score + lane * size;
    int64_t *token = c.token + lane * size, *parent = c.parent + lane * size;
    if (forced[0] < 0) continue;
    follow(c, forced, token, parent, place);
    bool whole = true;
    for (int64_t d = 0; d < c.depth; ++d) whole &= (place[d] >= 0) == (forced[d] >= 0);
    for (int64_t i = 0; i < size; ++i) score[i] -= static_cast<float>(c.depth);
    if (!whole) {
      for (int64_t i = c.paths - 1; i < size; i += c.paths) score[i] = -std::numeric_limits<float>::infinity(), token[i] = parent[i] = -1;
      follow(c, forced, token, parent, place);
    }
    int64_t above = -1;
    for (int64_t d = 0; d < c.depth; ++d) {
      if (forced[d] >= 0 && place[d] < 0) place[d] = c.paths - 1;
      const int64_t i = d * c.paths + place[d];
      if (place[d] >= 0) score[i] = static_cast<float>(-d), token[i] = forced[d], parent[i] = above;
      above = i;
    }
  }
}

}  // namespace

extern "C" {

void graphspec_ngram_match(const char* fields, int) {
  const NgramMatch c = graphspec::call_of<NgramMatch>(fields);
  for (int64_t lane = 0; lane < c.lanes; ++lane) match(c, lane);
}

void graphspec_forced_run(const char* fields, int) { forced_run(graphspec::call_of<ForcedRun>(fields)); }

}  // extern "C"

// Ops that update the rows' state: message, windows, nodes, walk and commit. The references define the fields;
// graphspec/kernels/native/cycle.py fills them, in the order of these structs.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "call.h"
#include "words.h"

namespace {

constexpr int64_t LIVE = 1, FREE = 0, FAILED = 4, STOPPED = 1, OUT_OF_BUDGET = 2;
constexpr int64_t JOIN_WORDS = 11;

// The float32 in the low half of a word.
float real(int64_t word) {
  const uint32_t low = static_cast<uint32_t>(word);
  float out;
  std::memcpy(&out, &low, sizeof out);
  return out;
}

struct Mail {
  const int64_t* mail;
  int64_t* lane_row;
  int32_t* lane_table;
  int64_t* lane_seed;
  float* lane_temperature;
  int64_t *status, *budget, *seed;
  float* temperature;
  int64_t *draft_len, *stop_id;
  int32_t* page_table;
  int64_t* top_k;  // null, like the other groups, if the class has no such slots
  float *top_p, *min_p;
  float *repetition, *presence, *frequency;
  char *output_count, *prompt_seen;
  int64_t lanes_at, aborts_at, pages_at, pages_end, joins_at, joins, join_words, lanes, columns, stops, count_bytes, seen_bytes;
};

void join(const Mail& c, const int64_t* words) {
  const int64_t *stops = words + JOIN_WORDS, row = words[0];
  c.budget[row] = words[1];
  c.seed[row] = words[2];
  c.temperature[row] = real(words[3]);
  c.draft_len[row] = words[4];
  std::copy_n(stops, c.stops, c.stop_id + row * c.stops);
  if (c.top_k != nullptr) {
    c.top_k[row] = words[5];
    c.top_p[row] = real(words[6]);
    c.min_p[row] = real(words[7]);
  }
  if (c.repetition != nullptr) {
    c.repetition[row] = real(words[8]);
    c.presence[row] = real(words[9]);
    c.frequency[row] = real(words[10]);
    std::memset(c.output_count + row * c.count_bytes, 0, c.count_bytes);
    std::memset(c.prompt_seen + row * c.seen_bytes, 0, c.seen_bytes);
  }
}

void mail_apply(const Mail& c) {
  std::copy_n(c.mail + c.lanes_at, c.lanes, c.lane_row);
  for (int64_t i = c.aborts_at; i < c.pages_at; ++i) c.status[c.mail[i]] = FREE;
  for (int64_t i = c.pages_at; i < c.pages_end; i += 3) c.page_table[c.mail[i] * c.columns + c.mail[i + 1]] = static_cast<int32_t>(c.mail[i + 2]);
  for (int64_t j = 0; j < c.joins; ++j) join(c, c.mail + c.joins_at + j * c.join_words);
  for (int64_t b = 0; b < c.lanes; ++b) {
    const int64_t from = c.lane_row[b];
    std::copy_n(c.page_table + from * c.columns, c.columns, c.lane_table + b * c.columns);
    c.lane_seed[b] = c.seed[from];
    c.lane_temperature[b] = c.temperature[from];
  }
}

struct WindowCall {
  int64_t* token;
  uint8_t* valid;
  int64_t *slot, *position, *begin, *ancestors, *known, *next;
  float* feature;
  const int64_t *lane_row, *status, *seq_len, *window_len, *window_token;
  const float* window_feature;  // may be null, like the next two
  const int64_t* lookback_token;
  const float* lookback_feature;
  int64_t lanes, width, words, shift, capacity, features, lookback;
};

void draft_window(const WindowCall& c) {
  const int64_t entries = c.lookback + c.width;
  for (int64_t b = 0; b < c.lanes; ++b) {
    const int64_t row = c.lane_row[b];
    const bool live = c.status[row] == LIVE;
    const int64_t length = live ? c.window_len[row] : 0, early = c.seq_len[row] - length + 1 - c.lookback;
    const int64_t skip = std::clamp<int64_t>(c.shift - early, 0, c.lookback), begin = early + skip;
    c.begin[b] = begin;
    c.known[b] = live ? c.lookback + length - skip : 0;
    c.next[b] = c.seq_len[row] + 1;
    for (int64_t u = 0; u < entries; ++u) {
      const int64_t at = b * entries + u, from = std::min(u + skip, entries - 1), late = from - c.lookback;
      const bool valid = u < c.known[b];
      c.token[at] = !valid ? -1 : late < 0 ? c.lookback_token[row * c.lookback + from] : c.window_token[row * c.capacity + late];
      c.valid[at] = valid;
      c.slot[at] = begin + u;
      c.position[at] = begin + u - c.shift;
      for (int64_t x = 0; x < c.words; ++x) c.ancestors[at * c.words + x] = valid ? causal_word(u, x) : 0;
      if (c.features == 0) continue;
      const float* feature = late < 0 ? c.lookback_feature + (row * c.lookback + from) * c.features
                                      : c.window_feature + (row * c.capacity + late) * c.features;
      if (valid)
        std::copy_n(feature, c.features, c.feature + at * c.features);
      else
        std::fill_n(c.feature + at * c.features, c.features, 0.0f);
    }
  }
}

struct HostTree {
  const int64_t *mail, *lane_row, *status;
  float* score;
  int64_t *token, *parent;
  int64_t trees_at, capacity, lanes, nodes;
};

void host_tree(const HostTree& c) {
  for (int64_t b = 0; b < c.lanes; ++b) {
    const int64_t* token = c.mail + c.trees_at + 2 * c.capacity * b;
    const bool live = c.status[c.lane_row[b]] == LIVE;
    for (int64_t m = 0; m < c.nodes; ++m) {
      const int64_t at = b * c.nodes + m;
      const bool used = live && token[m] >= 0;
      c.score[at] = used ? 0.0f : -std::numeric_limits<float>::infinity();
      c.token[at] = used ? token[m] : -1;
      c.parent[at] = used ? token[c.capacity + m] : -1;
    }
  }
}

struct Last {
  char* out;
  const char* hidden;
  const int64_t* known;
  int64_t lanes, entries, bytes;
};

void take_last(const Last& c) {
  for (int64_t b = 0; b < c.lanes; ++b)
    std::memcpy(c.out + b * c.bytes, c.hidden + (b * c.entries + std::max<int64_t>(c.known[b] - 1, 0)) * c.bytes, c.bytes);
}

struct Chain {
  const float* score;  // null, and the tokens too: the root is the only node
  const int64_t *candidate, *lane_row, *window_token, *window_len;
  int64_t *token, *parent, *depth, *ancestors;
  int64_t lanes, nodes, words, capacity;
};

void chain_layout(const Chain& c) {
  for (int64_t b = 0; b < c.lanes; ++b) {
    const int64_t row = c.lane_row[b], last = std::max<int64_t>(c.window_len[row] - 1, 0);
    for (int64_t n = 0; n < c.nodes; ++n) {
      const int64_t at = b * c.nodes + n, drafted = b * (c.nodes - 1) + n - 1;
      if (n == 0)
        c.token[at] = c.window_token[row * c.capacity + last];
      else if (c.score != nullptr)
        c.token[at] = c.score[drafted] > -__builtin_inff() ? c.candidate[drafted] : -1;
      c.parent[at] = n - 1;
      c.depth[at] = n;
      for (int64_t x = 0; x < c.words; ++x) c.ancestors[at * c.words + x] = causal_word(n, x);
    }
  }
}

struct Verify {
  int64_t* token;
  uint8_t* valid;
  int64_t *slot, *position, *begin, *end, *ancestors;
  const int64_t *lane_row, *status, *seq_len, *node_token, *node_depth, *node_ancestors;
  int64_t lanes, nodes, words;
};

void verify_rows(const Verify& c) {
  for (int64_t b = 0; b < c.lanes; ++b) {
    const int64_t row = c.lane_row[b], length = c.seq_len[row];
    c.end[b] = length;
    for (int64_t n = 0; n < c.nodes; ++n) {
      const int64_t at = b * c.nodes + n;
      const bool valid = c.status[row] == LIVE && c.node_token[at] >= 0;
      c.token[at] = valid ? c.node_token[at] : -1;
      c.valid[at] = valid;
      c.slot[at] = length + n;
      c.position[at] = length + c.node_depth[at];
      c.begin[at] = 0;
      for (int64_t x = 0; x < c.words; ++x) c.ancestors[at * c.words + x] = valid ? c.node_ancestors[at * c.words + x] : 0;
    }
  }
}

struct Walk {
  const int64_t *token, *parent, *depth, *ancestors, *drawn;
  const uint8_t* finite;
  const int64_t* depth_cap;  // may be null
  const int64_t *lane_row, *status, *seq_len, *draft_len, *budget, *stop_id;
  int64_t *sample, *path, *accept_len, *outcome;
  int64_t draft_context, lanes, nodes, words, width, stops;
};

void walk(const Walk& c, int64_t b) {
  static thread_local std::vector<int64_t> missing;
  const int64_t row = c.lane_row[b], first = b * c.nodes;
  const int64_t *drawn = c.drawn + first, *stop_id = c.stop_id + row * c.stops;
  int64_t* path = c.path + b * c.width;
  std::copy_n(drawn, c.nodes, c.sample + first);
  std::fill_n(path, c.width, 0);
  c.accept_len[b] = 0;
  c.outcome[b] = c.status[row];
  if (c.status[row] != LIVE) return;
  int64_t cap = std::min(c.draft_len[row], std::max<int64_t>(c.draft_context - c.seq_len[row], 0));
  if (c.depth_cap != nullptr) cap = std::min(cap, c.depth_cap[b]);
  cap = std::min(cap, c.width - 1);
  missing.assign(c.words, 0);
  for (int64_t n = 1; n < c.nodes; ++n) {
    const int64_t token = c.token[first + n], parent = c.parent[first + n];
    const bool match = token >= 0 && parent >= 0 && token == drawn[parent] && c.depth[first + n] <= cap;
    if (!match) missing[n >> 6] |= static_cast<int64_t>(uint64_t{1} << (n & 63));
  }
  int64_t found = 0;
  for (int64_t n = 0; n < c.nodes; ++n) {
    const int64_t* ancestors = c.ancestors + (first + n) * c.words;
    bool accepted = !bit(missing.data(), n);
    for (int64_t x = 0; x < c.words; ++x) accepted &= (ancestors[x] & missing[x]) == 0;
    found += accepted;
    if (accepted && c.depth[first + n] < c.width) path[c.depth[first + n]] = n;
  }
  const int64_t budget = c.budget[row];
  int64_t stop = c.width + 1, sound = c.width;
  for (int64_t a = std::min(found, c.width) - 1; a >= 0; --a)
    if (std::any_of(stop_id, stop_id + c.stops, [&](int64_t id) { return id >= 0 && id == drawn[path[a]]; })) stop = a + 1;
  for (int64_t a = c.width - 1; a >= 0; --a)
    if (!c.finite[first + path[a]]) sound = a;
  const int64_t length = std::min({found, stop, std::max<int64_t>(budget, 0)});
  c.accept_len[b] = std::min(length, sound);
  c.outcome[b] = sound < length ? FAILED : LIVE + (stop == length ? STOPPED : budget <= length ? OUT_OF_BUDGET : 0);
}

struct Move {
  char* pool;
  const int32_t* table;
  const int64_t *seq_len, *path, *accept_len, *lane_row;  // no rows: the lanes are the rows
  int64_t lanes, width, planes, pages, page_size, columns, bytes;
};

void kv_move(const Move& c) {
  static thread_local std::vector<char> kept;
  static thread_local std::vector<int64_t> from, to;
  for (int64_t b = 0; b < c.lanes; ++b) {
    const int64_t row = c.lane_row == nullptr ? b : c.lane_row[b], count = std::min(c.accept_len[b], c.width);
    const auto at = [&](int64_t slot) {
      slot = std::clamp<int64_t>(slot, 0, c.columns * c.page_size - 1);
      return (c.table[row * c.columns + slot / c.page_size] * c.page_size + slot % c.page_size) * c.bytes;
    };
    from.clear();
    to.clear();
    for (int64_t a = 0; a < count; ++a)
      if (c.path[b * c.width + a] != a) from.push_back(at(c.seq_len[row] + c.path[b * c.width + a])), to.push_back(at(c.seq_len[row] + a));
    kept.resize(from.size() * c.bytes);
    for (int64_t p = 0; p < c.planes; ++p) {
      char* plane = c.pool + p * c.pages * c.page_size * c.bytes;
      for (size_t i = 0; i < from.size(); ++i) std::memcpy(kept.data() + i * c.bytes, plane + from[i], c.bytes);
      for (size_t i = 0; i < to.size(); ++i) std::memcpy(plane + to[i], kept.data() + i * c.bytes, c.bytes);
    }
  }
}

struct PageFeature {
  char* pool;
  const int32_t* table;
  const int64_t *begin, *length;
  const char* feature;
  const int64_t *path, *lane_row;  // no path: the tokens in order; no rows: the lanes are the rows
  int64_t lanes, page_size, columns, tokens, width, bytes;
};

void page_feature_write(const PageFeature& c) {
  for (int64_t b = 0; b < c.lanes; ++b) {
    const int64_t count = c.length[b];
    if (count <= 0) continue;
    const int64_t begin = c.begin[c.lane_row == nullptr ? b : c.lane_row[b]];
    for (int64_t t = c.page_size - 1 - begin % c.page_size; t < count; t += c.page_size) {
      const int64_t page = c.table[b * c.columns + (begin + t) / c.page_size], source = c.path == nullptr ? t : c.path[b * c.width + t];
      std::memcpy(c.pool + page * c.bytes, c.feature + (b * c.tokens + source) * c.bytes, c.bytes);
    }
  }
}

struct Commit {
  const int64_t *lane_row, *sample, *path, *accept_len, *outcome;
  const char* feature;  // may be null, as may the other features, the lookback, the history and the counts
  int64_t *cycle, *ring, *window_len, *window_token;
  char* window_feature;
  int64_t* lookback_token;
  char* lookback_feature;
  int64_t *seq_len, *budget, *status, *history;
  int32_t* output_count;
  int64_t lanes, nodes, width, capacity, feature_bytes, lookback, history_length, vocab, ring_slots, ring_stride, append;
};

// Shift the lookback: it becomes the last entries of the old lookback followed by the old window.
template <class T>
void look_back(T* lookback, const T* window, int64_t entries, int64_t length, int64_t size) {
  for (int64_t y = 0; y < entries; ++y) {
    const int64_t from = length + y;
    std::memmove(lookback + y * size, from < entries ? lookback + from * size : window + (from - entries) * size, size * sizeof(T));
  }
}

void commit(const Commit& c, int64_t b, int64_t* ring) {
  const int64_t row = c.lane_row[b], length = c.accept_len[b];
  const int64_t *path = c.path + b * c.width, *sample = c.sample + b * c.nodes;
  ring[0] = length;
  ring[1] = c.outcome[b];
  for (int64_t a = 0; a < c.width; ++a) ring[2 + a] = a < length ? sample[path[a]] : -1;
  if (length > 0) {
    int64_t *tokens = c.window_token + row * c.capacity, &filled = c.window_len[row];
    char* features = c.feature == nullptr ? nullptr : c.window_feature + row * c.capacity * c.feature_bytes;
    if (!c.append && c.lookback_token != nullptr && c.lookback_feature != nullptr && features != nullptr) {
      look_back(c.lookback_token + row * c.lookback, tokens, c.lookback, filled, 1);
      look_back(c.lookback_feature + row * c.lookback * c.feature_bytes, features, c.lookback, filled, c.feature_bytes);
    }
    for (int64_t a = 0; a < length; ++a) {
      const int64_t position = c.seq_len[row] + 1 + a, token = ring[2 + a];
      if (c.history != nullptr && position < c.history_length) c.history[row * c.history_length + position] = token;
      if (c.output_count != nullptr) ++c.output_count[row * c.vocab + std::max<int64_t>(token, 0)];
    }
    const int64_t first = c.append ? filled : 0, count = c.append ? std::min(length, c.capacity - first) : c.width;
    for (int64_t a = 0; a < count; ++a) {
      tokens[first + a] = ring[2 + a];
      if (features == nullptr) continue;
      char* to = features + (first + a) * c.feature_bytes;
      if (a < length)
        std::memcpy(to, c.feature + (b * c.nodes + path[a]) * c.feature_bytes, c.feature_bytes);
      else
        std::memset(to, 0, c.feature_bytes);
    }
    filled = first + length;
    c.seq_len[row] += length;
    c.budget[row] -= length;
  }
  c.status[row] = c.outcome[b];
}

struct Contexts {
  int64_t* out;
  const int64_t *recent, *lane_row, *token, *parent;
  int64_t lanes, nodes, width;
};

void node_contexts(const Contexts& c) {
  for (int64_t b = 0; b < c.lanes; ++b) {
    const int64_t *recent = c.recent + c.lane_row[b] * c.width, *token = c.token + b * c.nodes, *parent = c.parent + b * c.nodes;
    for (int64_t n = 0; n < c.nodes; ++n) {
      const int64_t newest = (b * c.nodes + n + 1) * (c.width - 1) - 1;
      int64_t node = n, place = c.width - 1;  // place: of the row's recent tokens, once the node is the root
      for (int64_t i = 0; i + 1 < c.width; ++i) {
        c.out[newest - i] = node > 0 ? token[node] : recent[place];
        if (node > 0)
          node = std::max<int64_t>(parent[node], 0);
        else
          place = std::max<int64_t>(place - 1, 0);
      }
    }
  }
}

struct NoteTokens {
  const int64_t *token, *path, *count, *lane_row;  // path: or null
  int64_t* recent;
  int64_t lanes, nodes, length, width;
};

void note_tokens(const NoteTokens& c) {
  for (int64_t b = 0; b < c.lanes; ++b) {
    int64_t* recent = c.recent + c.lane_row[b] * c.width;
    const int64_t count = c.count[b];
    for (int64_t i = 0; i < c.width; ++i) {
      const int64_t from = i + count, appended = from - c.width;
      recent[i] = appended < 0 ? recent[from] : c.token[b * c.nodes + (c.path == nullptr ? appended : c.path[b * c.length + appended])];
    }
  }
}

struct Positions {
  int64_t* out;
  const int64_t *lane_row, *seq_len, *depth;
  int64_t lanes, nodes;
};

}  // namespace

extern "C" {

void graphspec_mail_apply(const char* fields, int) { mail_apply(graphspec::call_of<Mail>(fields)); }

void graphspec_draft_window(const char* fields, int) { draft_window(graphspec::call_of<WindowCall>(fields)); }

void graphspec_host_tree(const char* fields, int) { host_tree(graphspec::call_of<HostTree>(fields)); }

void graphspec_take_last(const char* fields, int) { take_last(graphspec::call_of<Last>(fields)); }

void graphspec_chain_layout(const char* fields, int) { chain_layout(graphspec::call_of<Chain>(fields)); }

void graphspec_verify_rows(const char* fields, int) { verify_rows(graphspec::call_of<Verify>(fields)); }

void graphspec_tree_walk(const char* fields, int) {
  const Walk c = graphspec::call_of<Walk>(fields);
  for (int64_t b = 0; b < c.lanes; ++b) walk(c, b);
}

void graphspec_kv_move(const char* fields, int) { kv_move(graphspec::call_of<Move>(fields)); }

void graphspec_page_feature_write(const char* fields, int) { page_feature_write(graphspec::call_of<PageFeature>(fields)); }

void graphspec_commit_rows(const char* fields, int) {
  const Commit c = graphspec::call_of<Commit>(fields);
  int64_t* slot = c.ring + *c.cycle % c.ring_slots * c.ring_stride;
  ++*c.cycle;
  for (int64_t b = 0; b < c.lanes; ++b) commit(c, b, slot + b * (2 + c.width));
}

void graphspec_node_contexts(const char* fields, int) { node_contexts(graphspec::call_of<Contexts>(fields)); }

void graphspec_note_tokens(const char* fields, int) { note_tokens(graphspec::call_of<NoteTokens>(fields)); }

void graphspec_positions(const char* fields, int) {
  const Positions c = graphspec::call_of<Positions>(fields);
  for (int64_t i = 0; i < c.lanes * c.nodes; ++i) c.out[i] = c.seq_len[c.lane_row[i / c.nodes]] + 1 + c.depth[i];
}

}  // extern "C"

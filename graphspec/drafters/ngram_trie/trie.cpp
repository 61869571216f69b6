// A trie of every n-gram up to a fixed depth, shared by all requests, with a thread of its own for insertion.
//
// Nodes come from one array that never grows. Node 0 is the root and also stands for "none": it is no node's child, sibling or neighbour.
// Three intrusive structures run through the nodes:
//   - a hash table over (parent, token), chained: finding a child costs the same below the root as anywhere else;
//   - the children of a node, most recent first;
//   - one list of all nodes by last use. A path is put in front as a whole with the parent before its child, so the last node of the
//     list never has children, and evicting it is evicting the least recently used leaf.

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <queue>
#include <thread>
#include <utility>
#include <vector>

namespace {

using Index = uint32_t;

struct Config {
    int64_t prob, min_window, max_window, min_breadth, max_breadth, branch_length, capacity;
    int64_t depth() const { return max_window + branch_length; }
};

struct Node {
    int64_t count;
    int32_t token;
    Index parent;
    Index first_child;
    Index newer_sibling, older_sibling;
    Index newer, older;
    Index chain;
};

struct Sequence {
    std::vector<int32_t> tokens;
    int64_t fresh;
};

// A tree under construction; entry 0 is the context's last token.
class Draft {
  public:
    Draft(int64_t num_nodes, int64_t* tokens, int64_t* parents)
        : tokens_(tokens), parents_(parents), room_(num_nodes - 1), first_child_(num_nodes), next_sibling_(num_nodes) {}

    bool full() const { return used_ == room_; }
    int64_t used() const { return used_; }

    // The child of `parent` with this token, made if there is none; call only while not full.
    int64_t child(int64_t parent, int32_t token) {
        for (int64_t c = first_child_[parent]; c != 0; c = next_sibling_[c])
            if (tokens_[c - 1] == token) return c;
        const int64_t made = ++used_;
        tokens_[made - 1] = token;
        parents_[made - 1] = parent;
        next_sibling_[made] = first_child_[parent];
        first_child_[parent] = made;
        return made;
    }

  private:
    int64_t *tokens_, *parents_;
    int64_t room_, used_ = 0;
    std::vector<int64_t> first_child_, next_sibling_;
};

class Trie {
  public:
    explicit Trie(const Config& config) : config_(config), nodes_(config.capacity + 1) {
        size_t buckets = 16;
        while (buckets < static_cast<size_t>(config.capacity)) buckets *= 2;
        buckets_.resize(buckets);
        path_.reserve(config.depth());
    }

    int64_t size() const { return used_; }

    // Path that starts at token `start`: one more use of each n-gram that ends among the last `fresh` tokens.
    void insert_path(const Sequence& sequence, int64_t start) {
        const int64_t length = static_cast<int64_t>(sequence.tokens.size());
        const int64_t end = std::min(length, start + config_.depth());
        path_.clear();
        Index at = 0;
        int64_t position = start;
        for (; position < end; ++position) {
            const Index next = find(at, sequence.tokens[position]);
            if (next == 0) break;
            path_.push_back(at = next);
            if (position >= length - sequence.fresh) ++nodes_[at].count;
        }
        for (size_t i = path_.size(); i-- > 0;) {
            to_front_of_siblings(path_[i]);
            unlink_use(path_[i]);
            link_use(path_[i], 0);
        }
        // The path stands in front of everything else and is shorter than the capacity, so eviction never reaches it.
        for (; position < end; ++position) {
            const Index made = allocate();
            Node& node = nodes_[made];
            node.token = sequence.tokens[position];
            node.parent = at;
            node.count = 1;
            node.first_child = 0;
            link_sibling(made);
            link_use(made, at);
            Index& bucket = buckets_[slot(at, node.token)];
            node.chain = bucket;
            bucket = made;
            at = made;
        }
    }

    int64_t match(const int32_t* context, int64_t length, int64_t num_nodes, int64_t* tokens, int64_t* parents) const {
        Draft draft(num_nodes, tokens, parents);
        for (int64_t window = std::min(length, config_.max_window); window >= config_.min_window && !draft.full(); --window) {
            Index anchor = 0;
            for (int64_t i = length - window; i < length; ++i)
                if ((anchor = find(anchor, context[i])) == 0) break;
            if (anchor == 0) continue;
            if (config_.prob) by_frequency(anchor, draft);
            else by_recency(anchor, window, draft);
        }
        return draft.used();
    }

  private:
    struct Recent {
        Index node;
        int64_t at, depth;
    };
    struct Likely {
        double probability;
        int64_t order;
        Index node;
        int64_t parent, depth;
        bool operator<(const Likely& other) const {
            return probability != other.probability ? probability < other.probability : order > other.order;
        }
    };

    int64_t breadth(int64_t window, int64_t depth) const {
        const int64_t span = std::max<int64_t>(1, config_.max_window - config_.min_window);
        const int64_t wider = (config_.max_breadth - config_.min_breadth) * (config_.max_window - window - depth);
        return std::max<int64_t>(1, (config_.min_breadth * span + wider) / span);
    }

    void by_recency(Index anchor, int64_t window, Draft& draft) const {
        std::queue<Recent> todo;
        todo.push({anchor, 0, 0});
        while (!todo.empty() && !draft.full()) {
            const Recent item = todo.front();
            todo.pop();
            int64_t left = breadth(window, item.depth);
            for (Index c = nodes_[item.node].first_child; c != 0 && left > 0 && !draft.full(); c = nodes_[c].older_sibling, --left) {
                const int64_t at = draft.child(item.at, nodes_[c].token);
                if (item.depth + 1 < config_.branch_length) todo.push({c, at, item.depth + 1});
            }
        }
    }

    void by_frequency(Index anchor, Draft& draft) const {
        std::priority_queue<Likely> todo;
        std::vector<Index> best;
        int64_t order = 0;
        const auto offer = [&](Index node, double probability, int64_t at, int64_t depth) {
            best.clear();
            for (Index c = nodes_[node].first_child; c != 0; c = nodes_[c].older_sibling) {
                const bool room = static_cast<int64_t>(best.size()) < config_.max_breadth;
                if (!room && nodes_[c].count <= nodes_[best.back()].count) continue;
                if (!room) best.pop_back();
                size_t place = best.size();
                while (place > 0 && nodes_[best[place - 1]].count < nodes_[c].count) --place;
                best.insert(best.begin() + static_cast<std::ptrdiff_t>(place), c);
            }
            int64_t total = 0;
            for (Index c : best) total += nodes_[c].count;
            for (Index c : best)
                todo.push({probability * static_cast<double>(nodes_[c].count) / static_cast<double>(total), order++, c, at, depth + 1});
        };
        offer(anchor, 1.0, 0, 0);
        while (!todo.empty() && !draft.full()) {
            const Likely item = todo.top();
            todo.pop();
            const int64_t at = draft.child(item.parent, nodes_[item.node].token);
            if (item.depth < config_.branch_length) offer(item.node, item.probability, at, item.depth);
        }
    }

    size_t slot(Index parent, int32_t token) const {
        uint64_t x = (static_cast<uint64_t>(parent) << 32 | static_cast<uint32_t>(token)) * 0x9E3779B97F4A7C15u;
        x ^= x >> 32;
        return x & (buckets_.size() - 1);
    }

    Index find(Index parent, int32_t token) const {
        Index at = buckets_[slot(parent, token)];
        while (at != 0 && (nodes_[at].token != token || nodes_[at].parent != parent)) at = nodes_[at].chain;
        return at;
    }

    void link_sibling(Index at) {
        Node& node = nodes_[at];
        Index& first = nodes_[node.parent].first_child;
        node.newer_sibling = 0;
        node.older_sibling = first;
        if (first != 0) nodes_[first].newer_sibling = at;
        first = at;
    }

    void unlink_sibling(Index at) {
        const Node& node = nodes_[at];
        if (node.newer_sibling != 0) nodes_[node.newer_sibling].older_sibling = node.older_sibling;
        else nodes_[node.parent].first_child = node.older_sibling;
        if (node.older_sibling != 0) nodes_[node.older_sibling].newer_sibling = node.newer_sibling;
    }

    void to_front_of_siblings(Index at) {
        if (nodes_[at].newer_sibling == 0) return;
        unlink_sibling(at);
        link_sibling(at);
    }

    // Right after `newer` in the order of use, or in front of all when that is 0.
    void link_use(Index at, Index newer) {
        const Index older = newer != 0 ? nodes_[newer].older : newest_;
        nodes_[at].newer = newer;
        nodes_[at].older = older;
        (newer != 0 ? nodes_[newer].older : newest_) = at;
        (older != 0 ? nodes_[older].newer : oldest_) = at;
    }

    void unlink_use(Index at) {
        const Node& node = nodes_[at];
        (node.newer != 0 ? nodes_[node.newer].older : newest_) = node.older;
        (node.older != 0 ? nodes_[node.older].newer : oldest_) = node.newer;
    }

    Index allocate() {
        if (used_ < config_.capacity) return static_cast<Index>(++used_);
        const Index at = oldest_;
        unlink_use(at);
        unlink_sibling(at);
        Index* link = &buckets_[slot(nodes_[at].parent, nodes_[at].token)];
        while (*link != at) link = &nodes_[*link].chain;
        *link = nodes_[at].chain;
        return at;
    }

    const Config config_;
    std::vector<Node> nodes_;
    std::vector<Index> buckets_;
    std::vector<Index> path_;
    int64_t used_ = 0;
    Index newest_ = 0, oldest_ = 0;
};

class Shared {
  public:
    explicit Shared(const Config& config) : config_(config), trie_(config), worker_([this] { work(); }) {}

    ~Shared() {
        {
            std::lock_guard<std::mutex> hold(queue_mutex_);
            stop_ = true;
        }
        changed_.notify_all();
        worker_.join();
    }

    void insert(const int32_t* tokens, int64_t length, int64_t fresh) {
        Sequence sequence{std::vector<int32_t>(tokens, tokens + length), fresh};
        {
            std::lock_guard<std::mutex> hold(queue_mutex_);
            queue_.push_back(std::move(sequence));
            ++queued_;
        }
        changed_.notify_all();
    }

    void synchronize() {
        std::unique_lock<std::mutex> hold(queue_mutex_);
        const int64_t wanted = queued_;
        changed_.wait(hold, [&] { return done_ >= wanted; });
    }

    int64_t size() {
        const Reader reader(*this);
        return trie_.size();
    }

    void match(const int32_t* contexts, const int64_t* offsets, int64_t lanes, int64_t num_nodes, int64_t* tokens, int64_t* parents,
               int64_t* counts) {
        const Reader reader(*this);
        for (int64_t b = 0; b < lanes; ++b) {
            const int64_t row = b * (num_nodes - 1);
            counts[b] = trie_.match(contexts + offsets[b], offsets[b + 1] - offsets[b], num_nodes, tokens + row, parents + row);
        }
    }

  private:
    static constexpr int64_t kPathsPerTurn = 64;
    static constexpr int kPatience = 1000;

    // Holds the trie for reading; the worker lets go between turns when a reader waits here.
    class Reader {
      public:
        explicit Reader(Shared& shared) : shared_(shared) {
            ++shared_.readers_;
            shared_.trie_mutex_.lock();
            --shared_.readers_;
        }
        ~Reader() { shared_.trie_mutex_.unlock(); }
        Reader(const Reader&) = delete;
        Reader& operator=(const Reader&) = delete;

      private:
        Shared& shared_;
    };

    void work() {
        std::unique_lock<std::mutex> hold(queue_mutex_);
        for (;;) {
            changed_.wait(hold, [this] { return stop_ || !queue_.empty(); });
            if (stop_) return;
            const Sequence sequence = std::move(queue_.front());
            queue_.pop_front();
            hold.unlock();
            insert_now(sequence);
            hold.lock();
            ++done_;
            changed_.notify_all();
        }
    }

    void insert_now(const Sequence& sequence) {
        const int64_t length = static_cast<int64_t>(sequence.tokens.size());
        int64_t start = std::max<int64_t>(0, length - sequence.fresh - config_.depth() + 1);
        while (start < length && !stop_) {
            for (int spin = 0; readers_ > 0 && spin < kPatience; ++spin) std::this_thread::yield();
            std::lock_guard<std::mutex> hold(trie_mutex_);
            for (const int64_t end = std::min(length, start + kPathsPerTurn); start < end; ++start) trie_.insert_path(sequence, start);
        }
    }

    const Config config_;
    Trie trie_;
    std::mutex trie_mutex_, queue_mutex_;
    std::condition_variable changed_;
    std::deque<Sequence> queue_;
    int64_t queued_ = 0, done_ = 0;
    std::atomic<bool> stop_{false};
    std::atomic<int> readers_{0};
    std::thread worker_;  // last: it runs as soon as it exists
};

}  // namespace

// No exception may cross this border: 0 is success, anything else means that memory or a thread was not to be had.
extern "C" {

void* graphspec_ngram_open(const int64_t* numbers) {
    try {
        return new Shared({numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6]});
    } catch (const std::exception&) {
        return nullptr;
    }
}

void graphspec_ngram_close(void* trie) { delete static_cast<Shared*>(trie); }

int graphspec_ngram_insert(void* trie, const int32_t* tokens, int64_t length, int64_t fresh) {
    try {
        static_cast<Shared*>(trie)->insert(tokens, length, fresh);
        return 0;
    } catch (const std::exception&) {
        return 1;
    }
}

void graphspec_ngram_synchronize(void* trie) { static_cast<Shared*>(trie)->synchronize(); }

int64_t graphspec_ngram_size(void* trie) { return static_cast<Shared*>(trie)->size(); }

int graphspec_ngram_match(void* trie, const int32_t* contexts, const int64_t* offsets, int64_t lanes, int64_t num_nodes, int64_t* tokens,
                          int64_t* parents, int64_t* counts) {
    try {
        static_cast<Shared*>(trie)->match(contexts, offsets, lanes, num_nodes, tokens, parents, counts);
        return 0;
    } catch (const std::exception&) {
        return 1;
    }
}
}

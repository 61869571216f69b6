"""The host trie against a slow oracle of dictionaries and tuples, written from the contract."""

from __future__ import annotations

import heapq
import itertools
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphspec.config.schema import NgramSettings
from graphspec.drafters.ngram_trie import trie as trie_module
from graphspec.drafters.ngram_trie.trie import NgramTrie
from graphspec.errors import ConfigError, RequestError, ResourceError
from graphspec.host.native_build import find_compiler


@dataclass(frozen=True)
class TrieSettings:
    """What a trie is made of, in one place for it and the oracle."""

    match: str = "bfs"
    min_window: int = 1
    max_window: int = 12
    min_breadth: int = 1
    max_breadth: int = 10
    branch_length: int = 18
    capacity: int = 1_000_000

    @property
    def depth(self) -> int:
        return self.max_window + self.branch_length

    def trie(self) -> NgramTrie:
        names = ("match", "min_window", "max_window", "min_breadth", "capacity")
        settings = NgramSettings(**{name: getattr(self, name) for name in names})
        return NgramTrie(settings, self.branch_length, self.max_breadth)


SMALL = TrieSettings(min_window=1, max_window=3, min_breadth=1, max_breadth=3, branch_length=4, capacity=1000)
Gram = tuple[int, ...]


class Oracle:
    """Every n-gram is a tuple; recency is the number of the last path that held it."""

    def __init__(self, config: TrieSettings) -> None:
        self.config, self.count, self.last, self.clock = config, {}, {}, 0

    def insert(self, tokens: Sequence[int], new: int | None = None) -> None:
        new = len(tokens) if new is None else new
        depth = self.config.max_window + self.config.branch_length
        for start in range(len(tokens)):
            end = min(start + depth, len(tokens))
            if end <= len(tokens) - new:
                continue
            self.clock += 1
            path = [tuple(tokens[start : stop + 1]) for stop in range(start, end)]
            known = [gram for gram in path if gram in self.count]
            for gram in known:
                self.last[gram] = self.clock
                self.count[gram] += start + len(gram) > len(tokens) - new
            for gram in path[len(known) :]:
                if len(self.count) == self.config.capacity:
                    inner = {other[:-1] for other in self.count}
                    victim = min((g for g in self.count if g not in inner), key=lambda g: self.last[g])
                    del self.count[victim], self.last[victim]
                self.count[gram], self.last[gram] = 1, self.clock

    def children(self, gram: Gram) -> list[Gram]:
        below = (g for g in self.count if len(g) == len(gram) + 1 and g[:-1] == gram)
        return sorted(below, key=lambda g: -self.last[g])

    def match(self, context: Sequence[int], num_nodes: int) -> list[Gram]:
        """Paths below the root, in order of creation."""
        config, found = self.config, []
        for window in range(min(config.max_window, len(context)), config.min_window - 1, -1):
            anchor = tuple(context[-window:])
            if anchor in self.count:
                follow = self._frequent(anchor) if config.match == "prob" else self._recent(anchor)
                for gram in follow:
                    if gram[window:] not in found:
                        found.append(gram[window:])
                    if len(found) >= num_nodes - 1:
                        return found[: num_nodes - 1]
        return found

    def _recent(self, anchor: Gram) -> list[Gram]:
        config, level, order = self.config, [anchor], []
        for depth in range(config.branch_length):
            share = (config.max_window - len(anchor) - depth) / max(1, config.max_window - config.min_window)
            breadth = max(1, int(config.min_breadth + share * (config.max_breadth - config.min_breadth) + 1e-9))
            level = [child for gram in level for child in self.children(gram)[:breadth]]
            order += level
        return order

    def _frequent(self, anchor: Gram) -> list[Gram]:
        ticket, heap, order = itertools.count(), [(-1.0, -1, anchor)], []
        while heap:
            chance, _, gram = heapq.heappop(heap)
            order.append(gram)
            if len(gram) - len(anchor) < self.config.branch_length:
                best = sorted(self.children(gram), key=lambda g: -self.count[g])[: self.config.max_breadth]
                total = sum(self.count[g] for g in best)
                for child in best:
                    heapq.heappush(heap, (chance * self.count[child] / total, next(ticket), child))
        return order[1:]


def trie_of(**settings: int) -> NgramTrie:
    return TrieSettings(**settings).trie()


def match(trie: NgramTrie, context: Sequence[int], num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    return trie.match([context], num_nodes)[0]


def paths(tree: tuple[np.ndarray, np.ndarray]) -> list[Gram]:
    """Token path of every node; fails unless parents come first."""
    found: list[Gram] = [()]
    for token, parent in zip(tree[0].tolist(), tree[1].tolist(), strict=True):
        assert 0 <= parent < len(found)
        found.append((*found[parent], token))
    return found[1:]


@st.composite
def configs(draw: Callable, tight: bool) -> TrieSettings:
    low, high = sorted((draw(st.integers(1, 4)), draw(st.integers(1, 4))))
    narrow, wide = sorted((draw(st.integers(1, 5)), draw(st.integers(1, 5))))
    branch = draw(st.integers(1, 5))
    capacity = high + branch + draw(st.integers(0, 25)) if tight else 10_000
    mode = draw(st.sampled_from(("bfs", "prob")))
    return TrieSettings(mode, low, high, narrow, wide, branch, capacity)


@given(st.data(), st.booleans(), st.integers(0, 2**32), st.integers(1, 5))
@settings(max_examples=250, deadline=None)
def test_trees_are_those_of_the_oracle(data: st.DataObject, tight: bool, seed: int, alphabet: int) -> None:
    config, rng = data.draw(configs(tight)), random.Random(seed)
    oracle = Oracle(config)
    trie = config.trie()
    for _ in range(4):
        tokens = [rng.randrange(alphabet) for _ in range(rng.randrange(40))]
        new = rng.choice((None, rng.randint(0, len(tokens))))
        trie.insert(tokens, new)
        oracle.insert(tokens, new)
        start = rng.randint(0, len(tokens))
        contexts = [tokens[start : start + rng.randrange(7)], [rng.randrange(alphabet + 1) for _ in range(rng.randrange(6))]]
        num_nodes = rng.randint(1, 30)
        for context, tree in zip(contexts, trie.match(contexts, num_nodes), strict=True):
            found = paths(tree)
            assert found == oracle.match(context, num_nodes)
            assert len(set(found)) == len(found) <= num_nodes - 1
            assert max(map(len, found), default=0) <= min(config.branch_length, num_nodes - 1)
        assert trie.size == len(oracle.count) <= config.capacity


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_a_growing_sequence_counts_once(data: st.DataObject) -> None:
    """Inserting in pieces or as a whole gives the same nodes, counts and order; pieces only pass the tail that is needed."""
    config = data.draw(configs(tight=False))
    tokens = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=40))
    whole, grown = config.trie(), config.trie()
    whole.insert(tokens)
    done = 0
    while done < len(tokens):
        new = data.draw(st.integers(1, len(tokens) - done))
        done += new
        grown.insert(np.array(tokens[max(0, done - new - config.depth + 1) : done], np.int64), new)
    for context in ([0], [1], [0, 1], [2, 2, 1], tokens[:3], tokens[:9]):
        assert paths(match(whole, context, 30)) == paths(match(grown, context, 30))
    assert whole.size == grown.size


@pytest.mark.parametrize("mode", ["bfs", "prob"])
def test_fewer_nodes_are_a_prefix_and_a_batch_is_its_lanes(mode: str) -> None:
    config = replace(SMALL, match=mode)
    rng = random.Random(3)
    tokens = [rng.randrange(4) for _ in range(200)]
    trie = config.trie()
    trie.insert(tokens)
    contexts = [[0, 1], [], [3, 3, 3, 2], [9], [1, 9, 2]]
    full = [paths(tree) for tree in trie.match(contexts, 40)]
    assert full[0] and full[2] and full[4] and full[1] == full[3] == []
    for num_nodes in (1, 2, 5, 17, 40):
        batch = [paths(tree) for tree in trie.match(contexts, num_nodes)]
        assert batch == [paths(match(trie, context, num_nodes)) for context in contexts]
        assert batch == [tree[: num_nodes - 1] for tree in full]
    assert trie.match([], 5) == []


@pytest.mark.parametrize(
    ("mode", "both", "short"),
    [
        # The anchor (1, 2) has room for two children, the anchor (2) for three.
        ("bfs", [(8,), (7,), (7, 4), (9,)], [(9,), (8,), (7,), (7, 4)]),
        ("prob", [(7,), (7, 4), (8,), (9,)], [(7,), (7, 4), (9,), (8,)]),
    ],
)
def test_recency_and_frequency_by_hand(mode: str, both: list[Gram], short: list[Gram]) -> None:
    trie = replace(SMALL, match=mode).trie()
    for tokens in ([1, 2, 7], [1, 2, 7], [1, 2, 7, 4], [1, 2, 8], [5, 2, 9]):
        trie.insert(tokens)
    assert paths(match(trie, [1, 2], 9)) == both
    assert paths(match(trie, [6, 2], 9)) == short


def test_sequences_do_not_run_into_one_another() -> None:
    trie = SMALL.trie()
    trie.insert([1, 2])
    trie.insert([3, 4])
    assert paths(match(trie, [1, 2], 9)) == []
    assert paths(match(trie, [3], 9)) == [(4,)]


def test_an_evicted_ngram_counts_from_one() -> None:
    config = TrieSettings("prob", 1, 1, 1, 2, 1, capacity=5)
    trie = config.trie()
    for _ in range(5):
        trie.insert([1, 2])
    trie.insert([1, 3])
    assert paths(match(trie, [1], 9)) == [(2,), (3,)]
    trie.insert([8])  # takes the place of (1, 2)
    assert paths(match(trie, [1], 9)) == [(3,)]
    trie.insert([1, 3])
    trie.insert([1, 2])
    assert paths(match(trie, [1], 9)) == [(3,), (2,)]


@pytest.mark.parametrize("mode", ["bfs", "prob"])
def test_capacity_of_one_path(mode: str) -> None:
    """The smallest trie there can be holds the last path and survives any traffic."""
    config = TrieSettings(mode, 1, 2, 1, 2, 3, capacity=5)
    oracle, rng = Oracle(config), random.Random(0)
    trie = config.trie()
    for _ in range(60):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 30))]
        trie.insert(tokens)
        oracle.insert(tokens)
        assert paths(match(trie, tokens[:2], 8)) == oracle.match(tokens[:2], 8)
        assert trie.size == len(oracle.count)
    trie.insert([9, 8, 7, 6, 5])
    assert trie.size == 5


@pytest.mark.parametrize("mode", ["bfs", "prob"])
def test_threads_insert_and_match_at_once(mode: str) -> None:
    """Writers have separate alphabets, so the order between them does not affect any match."""
    config = replace(SMALL, match=mode, capacity=200_000)
    rng = random.Random(5)
    streams = [[[100 * w + rng.randrange(5) for _ in range(rng.randrange(1, 60))] for _ in range(40)] for w in range(4)]
    grams = {tuple(s[i:j]) for stream in streams for s in stream for i in range(len(s)) for j in range(i, len(s) + 1)}
    problems: list[object] = []
    finished = threading.Event()
    trie = config.trie()

    def write(stream: list[list[int]]) -> None:
        for tokens in stream:
            trie.insert(tokens)

    def read(seed: int) -> None:
        own = random.Random(seed)
        while not finished.is_set():
            context = own.choice(own.choice(streams))[:3]
            found = paths(match(trie, context, 16))
            problems.extend(path for path in found if not any((*context[-n:], *path) in grams for n in range(1, 4)))

    writers = [threading.Thread(target=write, args=(stream,)) for stream in streams]
    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in (*readers, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    trie.synchronize()
    finished.set()
    for thread in readers:
        thread.join()
    assert problems == []
    assert trie.size == len({gram for gram in grams if 0 < len(gram) <= config.depth})
    for stream in streams:
        oracle = Oracle(config)
        for tokens in stream:
            oracle.insert(tokens)
        for tokens in stream[:6]:
            assert paths(match(trie, tokens[:3], 12)) == oracle.match(tokens[:3], 12)


def test_every_ngram_is_counted_where_it_ends() -> None:
    """With ``match=prob``, the more frequent of two continuations comes first, not the more recent."""
    rng = random.Random(1)
    tokens = [rng.choice((0, 0, 0, 1, 1, 2)) for _ in range(600)]
    config = TrieSettings("prob", 1, 2, 1, 9, 1, 5000)
    pairs = Counter(itertools.pairwise(tokens))
    trie = config.trie()
    for end in range(1, len(tokens) + 1):
        trie.insert(tokens[:end], new=1)
    for token in range(3):
        counts = [pairs[token, path[0]] for path in paths(match(trie, [99, token], 9))]
        assert counts == sorted(counts, reverse=True) and len(counts) == 3 and len(set(counts)) > 1


def test_insert_returns_before_the_work_is_done_and_matching_waits_for_it() -> None:
    trie = TrieSettings(capacity=300_000).trie()
    trie.insert(np.arange(300_000) % 5003)
    trie.insert([7003, 7004])
    assert trie.size < 5003 * 30 + 3, "the last sequence waits"
    assert paths(match(trie, [7003], 5)) == [(7004,)]
    assert trie.size == 5003 * 30 + 3


def test_a_deleted_trie_drops_its_queue() -> None:
    trie = TrieSettings(capacity=300_000).trie()
    for _ in range(50):
        trie.insert(np.arange(500_000) % 100_003)
    start = time.perf_counter()
    del trie
    assert time.perf_counter() - start < 5, "fifty insertions take longer"


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        (NgramSettings, {"match": "dfs"}, r"variant\.ngram\.match: found 'dfs' \(did you mean bfs\?\), expected one of bfs, prob"),
        (NgramSettings, {"min_window": 0}, r"variant\.ngram\.min_window: expected an integer >= 1, .*found 0"),
        (NgramSettings, {"max_window": 2.0}, r"variant\.ngram\.max_window: expected an integer, found 2\.0"),
        (NgramSettings, {"min_window": 9}, r"variant\.ngram\.max_window: expected an integer >= 9, .*found 8"),
        (NgramSettings, {"capacity": 2**31}, r"variant\.ngram\.capacity: expected .* at most 2147483646"),
        (trie_of, {"min_breadth": 11}, r"variant\.ngram\.min_breadth: expected at most topk = 10, found 11"),
        (trie_of, {"capacity": 29}, r"variant\.ngram\.capacity: expected at least 30 nodes, one whole path .*, found 29"),
    ],
)
def test_bad_numbers(kind: Callable[..., object], change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        kind(**change)


def test_bad_tokens() -> None:
    trie = SMALL.trie()
    for tokens, words in (
        ([1, -5], r"token ids in 0\.\.2147483647, found -5"),
        ([2**31], r"token ids in 0\.\.2147483647, found 2147483648"),
        ([0.5], "a flat sequence of integers, found float64"),
        ([[1, 2]], r"a flat sequence of integers, found int64 \[1, 2\]"),
        (["a"], "a flat sequence of integers"),
    ):
        with pytest.raises(RequestError, match=f"ngram insert: tokens: expected {words}"):
            trie.insert(tokens)
        with pytest.raises(RequestError, match="ngram match: context"):
            match(trie, tokens, 4)
    for new in (-1, 3):
        with pytest.raises(RequestError, match=rf"ngram insert: new: expected 0\.\.2, the length of the sequence, found {new}"):
            trie.insert([1, 2], new)
    with pytest.raises(RequestError, match="ngram match: num_nodes: expected 1 or more"):
        match(trie, [1], 0)
    assert trie.size == 0
    trie.insert([2**31 - 1, 0])
    assert paths(match(trie, [2**31 - 1], 4)) == [(0,)]


def test_no_compiler_names_the_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ResourceError, match=r"variant\.ngram: expected a C\+\+ compiler.*no-such-compiler"):
        trie_module.LIBRARY.build(tmp_path)


def test_source_has_no_warnings() -> None:
    source = Path(trie_module.__file__).with_name("trie.cpp")
    command = [find_compiler("test", ""), *trie_module.FLAGS, "-Wall", "-Wextra", "-Werror", "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_package_needs_no_torch_and_builds_nothing_on_import() -> None:
    code = "import sys, subprocess; subprocess.Popen = None; import graphspec.drafters.ngram_trie.trie; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

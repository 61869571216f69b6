"""The host trie: n-grams in, draft trees out. The work is done in ``trie.cpp``, through a C interface; this file checks and converts."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...config.schema import NgramSettings
from ...errors import ConfigError, RequestError, ResourceError
from ...host.native_build import SharedLibrary

Tokens = Sequence[int] | npt.NDArray[np.integer]
"""Token ids in ``0..2^31-1``; one dimension."""
Tree = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Tokens and parents of draft nodes ``1..n``; entry ``i`` is node ``i + 1``."""

SOURCES = ("trie.cpp",)
FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-pthread", "-shared", "-fPIC")
MAX_TOKEN = 2**31 - 1
KEY = "variant.ngram"
LIBRARY = SharedLibrary("ngram", __package__, SOURCES, (), FLAGS, KEY, "install g++; the host trie exists in C++ only")


@functools.cache
def load() -> ctypes.CDLL:
    """The library, opened once per process, argument types declared.

    Raises:
        ResourceError: see :meth:`graphspec.host.native_build.SharedLibrary.load`.
    """
    library = LIBRARY.load()
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    for name, arguments, result in (
        ("open", [pointer], pointer),
        ("close", [pointer], None),
        ("insert", [pointer, pointer, long, long], ctypes.c_int),
        ("synchronize", [pointer], None),
        ("size", [pointer], long),
        ("match", [pointer, pointer, pointer, long, long, pointer, pointer, pointer], ctypes.c_int),
    ):
        function = getattr(library, f"graphspec_ngram_{name}")
        function.argtypes, function.restype = arguments, result
    return library


def _tail(name: str, tokens: Tokens, count: int) -> npt.NDArray[np.int32]:
    """The last ``count`` tokens as a contiguous array; earlier ones are neither converted nor checked."""
    if count == 0 or len(tokens) == 0:
        return np.empty(0, np.int32)
    array = np.asarray(tokens[-count:])
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise RequestError(name, "a flat sequence of integers", f"{array.dtype} {list(array.shape)}")
    low, high = array.min(), array.max()
    if low < 0 or high > MAX_TOKEN:
        raise RequestError(name, f"token ids in 0..{MAX_TOKEN}", int(low if low < 0 else high))
    return np.ascontiguousarray(array, np.int32)


class NgramTrie:
    """Every inserted n-gram of up to ``max_window + branch_length`` tokens, with how often and how recently it occurred.

    **Insertion.** An occurrence of an n-gram is a position where it ends. :meth:`insert` queues; a thread inserts in the order of the
    queue, one path per start position, in time proportional to ``length * depth``. Inserting a path makes each of its nodes the most recent
    among its siblings. With ``new=k`` only n-grams that end in the last k tokens are counted, so a growing sequence counts each once, at a
    cost of ``(k + depth) * depth``. Inserting a sequence in several parts gives the same trie, as long as nothing is evicted.

    **Eviction.** With ``capacity`` nodes in use, a new node replaces the leaf that was inserted longest ago; never one of the path being
    inserted. An evicted n-gram that is inserted again counts from one. Matching does not make nodes recent.

    **Matching.** Anchors are the suffixes of the context that are in the trie, from ``max_window`` tokens down to ``min_window``. The
    longest first, each adds its continuations to one tree until ``num_nodes`` is reached; a path that the tree already has is shared.

    - ``bfs``: level by level, nodes in the order in which they were reached; of each the children, most recent first, as many as the
      breadth allows: ``max_breadth`` at the shortest anchor, ``min_breadth`` at the longest, linear in between (rounded down), reduced by
      one step of that line per level below, and at least one. A shared child counts.
    - ``prob``: the most probable path first. A node's probability is its parent's times its share in the counts of the ``max_breadth`` most
      frequent children (ties: more recent first); the anchor's is 1. Equal probabilities: in the order reached, siblings by frequency and
      then recency. A node costs a pass over all of its trie children.

    Trees depend on the sequence of calls alone, not on timing, as long as one thread makes the calls. All methods may be called from any
    thread.

    **Cost.** This is a host boundary. Between the end of a cycle and the start of the next come the copy of its tokens to the host, the
    match (microseconds), and the copy of the tree to the device. Insert after matching, so that insertion overlaps the cycle.

    Args:
        settings: windows, ``min_breadth`` and mode; ``capacity`` nodes, 40 to 48 bytes each, are allocated here.
        branch_length: tokens of the longest path below an anchor.
        max_breadth: ``bfs``: children taken directly below an anchor of ``min_window`` tokens. ``prob``: children considered below any
            node.

    Raises:
        ConfigError: two values contradict each other.
        ResourceError: no compiler for the library, or no memory for the nodes.
    """

    def __init__(self, settings: NgramSettings, branch_length: int, max_breadth: int) -> None:
        self.max_window = settings.max_window
        self.depth = settings.max_window + branch_length
        """Longest n-gram the trie stores: an anchor and the path below it."""
        if max_breadth < settings.min_breadth:
            raise ConfigError(f"{KEY}.min_breadth", f"at most topk = {max_breadth}", settings.min_breadth)
        if settings.capacity < self.depth:
            raise ConfigError(f"{KEY}.capacity", f"at least {self.depth} nodes, one whole path (max_window + num_steps)", settings.capacity)
        self._library = load()
        numbers = (
            int(settings.match == "prob"),
            settings.min_window,
            settings.max_window,
            settings.min_breadth,
            max_breadth,
            branch_length,
            settings.capacity,
        )
        handle = self._library.graphspec_ngram_open((ctypes.c_int64 * len(numbers))(*numbers))
        if not handle:
            raise ResourceError("variant.ngram.capacity", "memory for the nodes, and a thread", f"none for {settings.capacity} nodes")
        self._handle: int = handle
        # Drops what is queued, and frees the nodes.
        weakref.finalize(self, self._library.graphspec_ngram_close, handle)

    def insert(self, tokens: Tokens, new: int | None = None) -> None:
        """Queue a sequence; returns at once.

        Args:
            tokens: the sequence so far; of the tokens before the new ones, only the last ``depth - 1`` are read.
            new: how many of the last tokens were not inserted before; None: all of them.

        Raises:
            RequestError: no token ids, or ``new`` out of range.
            ResourceError: memory for the queue ran out.
        """
        length = len(tokens)
        new = length if new is None else new
        if not 0 <= new <= length:
            raise RequestError("ngram insert: new", f"0..{length}, the length of the sequence", new)
        tail = _tail("ngram insert: tokens", tokens, new + self.depth - 1 if new else 0)
        if tail.size and self._library.graphspec_ngram_insert(self._handle, tail.ctypes.data, tail.size, new):
            raise ResourceError(KEY, "memory for the queue", f"none for {tail.size} tokens")

    def synchronize(self) -> None:
        """Wait for everything that was queued before this call."""
        self._library.graphspec_ngram_synchronize(self._handle)

    def match(self, contexts: Sequence[Tokens], num_nodes: int) -> list[Tree]:
        """The draft tree below each context's last token, all against the same state of the trie; everything queued is inserted first.

        Args:
            contexts: tokens so far, the root last; the last ``max_window`` are read.
            num_nodes: N, root included; a tree has at most N - 1 draft nodes.

        Returns:
            Per context tokens and parents, int64 ``[n]`` with ``n <= N - 1``, nothing padded. Entry i is node i + 1 and parents are node
            indices: 0 is the root, which has no entry. A parent comes before its children, siblings differ, no node is deeper than
            ``branch_length``. Nodes come best first: the tree for fewer nodes is a prefix of the tree for more.

        Raises:
            RequestError: no token ids, or ``num_nodes`` below 1.
            ResourceError: no memory for the trees.
        """
        if num_nodes < 1:
            raise RequestError("ngram match: num_nodes", "1 or more (the root counts)", num_nodes)
        tails = [_tail("ngram match: context", context, self.max_window) for context in contexts]
        lanes = len(tails)
        flat = np.concatenate(tails) if tails else np.empty(0, np.int32)
        offsets = np.zeros(lanes + 1, np.int64)
        np.cumsum([tail.size for tail in tails], out=offsets[1:])
        tokens = np.empty((lanes, num_nodes - 1), np.int64)
        parents, counts = np.empty_like(tokens), np.empty(lanes, np.int64)
        self.synchronize()
        pointers = (array.ctypes.data for array in (tokens, parents, counts))
        if self._library.graphspec_ngram_match(self._handle, flat.ctypes.data, offsets.ctypes.data, lanes, num_nodes, *pointers):
            raise ResourceError(KEY, "memory for the trees", f"none for {lanes} of {num_nodes} nodes")
        return [(tokens[lane, :count], parents[lane, :count]) for lane, count in enumerate(counts.tolist())]

    @property
    def size(self) -> int:
        """Nodes in use, at most ``capacity``; queued sequences have none yet."""
        return int(self._library.graphspec_ngram_size(self._handle))

"""Finds near-duplicate texts by their shingles, and runs of words that two texts have in common."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from functools import cache

import numpy as np

WORD = re.compile(r"\w+")
GRAM = 13
"""Words in a row that two texts must not share (Brown et al. 2020, appendix C); punctuation does not count."""
SHINGLE = 5
"""Words in a row by which near-duplicates are found."""
NEAR = 0.7
"""Jaccard similarity of two sets of shingles above which one of the texts is removed."""
SAMPLED = 8
"""One in this many shingles is looked up."""
COMMON = 64
"""A shingle that this many texts share is not looked up any more."""
MULTIPLIER = np.uint64(6364136223846793005)


@cache
def _hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def words(text: str) -> list[str]:
    """The words of ``text``, in order."""
    return WORD.findall(text)


def run_hashes(tokens: list[str], width: int) -> np.ndarray:
    """``[len(tokens) - width + 1]`` uint64: a hash of every run of ``width`` words; the same run has the same hash everywhere."""
    if len(tokens) < width:
        return np.empty(0, dtype=np.uint64)
    values = np.fromiter((_hash(token) for token in tokens), dtype=np.uint64, count=len(tokens))
    runs = len(tokens) - width + 1
    out = np.zeros(runs, dtype=np.uint64)
    for place in range(width):
        out = out * MULTIPLIER + values[place : place + runs]
    # The low bits of a polynomial are weak; they choose the sample.
    return out ^ (out >> np.uint64(29))


class GramFilter:
    """Removes from texts the lines that share :data:`GRAM` words in a row with one of ``protected``."""

    def __init__(self, protected: Iterable[str]) -> None:
        runs = [run_hashes(words(text), GRAM) for text in protected]
        self.held = np.unique(np.concatenate(runs)) if runs else np.empty(0, dtype=np.uint64)

    def without_overlap(self, text: str) -> list[str]:
        """The pieces of ``text`` between overlapping lines, in order; the text itself if no line overlaps."""
        spans = [match.span() for match in WORD.finditer(text)]
        tokens = [text[a:b] for a, b in spans]
        hits = np.flatnonzero(np.isin(run_hashes(tokens, GRAM), self.held))
        if not len(hits):
            return [text]
        bad = np.zeros(len(tokens) + 1, dtype=np.int64)
        np.add.at(bad, hits, 1)
        np.add.at(bad, hits + GRAM, -1)
        covered = np.cumsum(bad)[:-1] > 0
        pieces, start, position, word = [], 0, 0, 0
        for line in text.splitlines(keepends=True):
            end = position + len(line)
            overlapping = False
            while word < len(spans) and spans[word][0] < end:
                overlapping |= bool(covered[word])
                word += 1
            if overlapping:
                pieces.append(text[start:position])
                start = end
            position = end
        pieces.append(text[start:])
        return [piece for piece in pieces if piece.strip()]


class NearDuplicates:
    """Recognises texts that are nearly equal to an earlier one.

    Args:
        similarity: Jaccard similarity of the sets of shingles from which on two texts count as equal.
    """

    def __init__(self, similarity: float) -> None:
        self.similarity = similarity
        self.kept: list[np.ndarray] = []
        self.holders: dict[int, list[int]] = {}

    def seen(self, tokens: list[str]) -> bool:
        """Whether the text of ``tokens`` nearly equals a kept one; if not, it is kept. A text shorter than a shingle is one shingle."""
        shingles = np.unique(run_hashes(tokens, min(SHINGLE, max(1, len(tokens)))))
        # Chosen by value, so that the same shingles of two texts are looked up; all of a short text.
        sample = shingles if len(shingles) < 32 * SAMPLED else shingles[shingles % np.uint64(SAMPLED) == 0]
        shared = Counter(holder for value in sample.tolist() for holder in self.holders.get(value, ()))
        for holder, _ in shared.most_common(8):
            other = self.kept[holder]
            both = len(np.intersect1d(shingles, other, assume_unique=True))
            if both >= self.similarity * (len(shingles) + len(other) - both):
                return True
        for value in sample.tolist():
            holders = self.holders.setdefault(value, [])
            if len(holders) < COMMON:
                holders.append(len(self.kept))
        self.kept.append(shingles)
        return False

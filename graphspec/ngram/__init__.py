"""Draft trees from n-grams that any request has seen: a trie on the host, shared by all requests. No torch here.

This is one of two n-gram drafters. The other, :mod:`graphspec.kernels.ngram_match`, searches the request's own tokens on the device and
is a stage like any other. This one can learn from other requests and from a corpus, but it stands at a host boundary: the tokens of a
cycle must have reached the host before the next tree can be proposed, so no cycle can be launched ahead of that read.
"""

from __future__ import annotations

from ..drafters.ngram_trie.config import NgramConfig
from ..drafters.ngram_trie.trie import NgramTrie

__all__ = ["NgramConfig", "NgramTrie"]

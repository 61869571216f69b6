"""Draft trees from the n-grams of all requests: a trie on the host, shared by all of them.

:mod:`graphspec.drafters.ngram` searches the request's own tokens on the device. This drafter also learns from other requests and from a
corpus, but at the cost of a host boundary: the tokens of a cycle must reach the host before the next tree can be proposed, so no cycle can
be launched before that read.
"""

from __future__ import annotations

from ...config.catalog import Variant
from ...shapes import CycleShape

VARIANT = Variant(
    name="ngram_trie",
    summary="no network: a trie over all traffic on the host, between two cycles",
    drafter="host",
    shares_prefix=True,
    stages="graphspec.drafters.ngram_trie.stages:stages",
    proposer="graphspec.drafters.ngram_trie.proposer:make_proposer",
    auto_shape=CycleShape(8, 8, 12, "nodes"),
)

"""Draft trees from n-grams that any request has seen: a trie on the host, shared by all requests.

:mod:`graphspec.drafters.ngram` searches the request's own tokens on the device. This drafter can learn from other requests and from a
corpus, but it stands at a host boundary: the tokens of a cycle must have reached the host before the next tree can be proposed, so no
cycle can be launched ahead of that read.
"""

from __future__ import annotations

from ...catalog import Variant
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

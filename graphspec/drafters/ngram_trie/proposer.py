"""The drafter on the host: one n-gram trie for all requests, matched between two cycles."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from ...config.paths import read_text
from ...engine.proposer import Nodes
from ...engine.request import Request
from ...errors import ConfigError
from ...plan.plan import Plan
from .trie import NgramTrie


class TrieProposer:
    """Trees from :class:`~graphspec.drafters.ngram_trie.trie.NgramTrie`: what followed the same tokens in this request or in any other.

    A prompt is inserted while it is being read, new tokens while the next cycle runs: they are queued after the match, for the trie's
    thread. The next match waits for that thread, so that the same requests give the same trees. ``num_steps`` is the longest branch,
    ``topk`` the most children of a node.
    """

    def __init__(self, plan: Plan) -> None:
        self._num_nodes = plan.shape.num_draft_tokens
        self._trie = NgramTrie(plan.ngram, plan.shape.num_steps, plan.shape.topk)
        self._queued: list[tuple[list[int], int]] = []

    def load_corpus(self, file: str, encode: Callable[[str], list[int]]) -> None:
        """Insert a corpus: a text file with one document per line, or ``.jsonl`` with a JSON string per line.

        No n-gram spans two documents.

        Raises:
            ConfigError: the file can't be read, or a line is no JSON string.
        """
        key = "variant.ngram.corpus"
        text, in_json = read_text(key, file), file.endswith(".jsonl")
        documents = [line for line in (text.split("\n") if in_json else text.splitlines()) if line.strip()]
        if in_json:
            for number, line in enumerate(documents):
                try:
                    document = json.loads(line)
                except (ValueError, RecursionError):
                    document = None
                if not isinstance(document, str):
                    raise ConfigError(key, "a JSON string on every line", f"{file}, document {number + 1}: {line[:60]}")
                documents[number] = document
        for document in documents:
            self._trie.insert(encode(document))

    def admit(self, request: Request) -> None:
        # The prompt of a row that was preempted has been inserted before.
        if not request.output:
            self._trie.insert(request.prompt)

    def propose(self, requests: Sequence[Request]) -> list[Nodes]:
        window = self._trie.max_window
        contexts = [[*r.prompt[-window:], *r.output[-window:]] for r in requests]
        trees = self._trie.match(contexts, self._num_nodes)
        for tokens, new in self._queued:
            self._trie.insert(tokens, new=new)
        self._queued.clear()
        return [(tokens.tolist(), (parents - 1).tolist()) for tokens, parents in trees]

    def observe(self, request: Request, new: int) -> None:
        depth = self._trie.depth
        self._queued.append(([*request.prompt[-depth:], *request.output[-depth - new :]], new))


def make_proposer(plan: Plan, encode: Callable[[str], list[int]]) -> TrieProposer:
    """See :attr:`graphspec.config.catalog.Variant.proposer`; reads the corpus, if there is one."""
    proposer = TrieProposer(plan)
    if plan.ngram.corpus is not None:
        proposer.load_corpus(plan.ngram.corpus, encode)
    return proposer

"""The logits of every committed position of an engine, as hashes of their bits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from graphspec.api.llm import LLM, generate_through
from graphspec.api.outputs import Output
from graphspec.engine.request import SamplingParams
from graphspec.graphs.stages.mailbox import Message
from graphspec.shapes import GraphKey


class CommittedLogits:
    """A launcher that hashes the logits of each accepted node, of engines whose results are there when a launch returns.

    Requests are told apart by the length of their prompts, which must differ.

    Attributes:
        found: hash by (length of the prompt, position).
    """

    def __init__(self, llm: LLM) -> None:
        self.cycle: Any = llm.cycle
        self.found: dict[tuple[int, int], str] = {}
        self._started: dict[int, tuple[int, int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cycle, name)

    def launch(self, key: Any, message: Message) -> int:
        ticket: int = self.cycle.launch(key, message)
        if isinstance(key, GraphKey):
            self._note(key)
        return ticket

    def _note(self, key: GraphKey) -> None:
        views = self.cycle.views(key)
        for lane, row in enumerate(views.lane_row_B.tolist()):
            count = int(views.accept_len_B[lane])
            first = int(views.seq_len_R[row]) - count
            begin, following = self._started.get(row, (-1, -1))
            if count and first != following:
                begin = first
            for place, node in enumerate(views.path_BA[lane, :count].tolist()):
                assert (begin, first + place) not in self.found, "two requests of one length"
                bits = views.logits_BNV[lane, node].contiguous().numpy().tobytes()
                self.found[begin, first + place] = hashlib.sha256(bits).hexdigest()
            if count:
                self._started[row] = (begin, first + count)


def committed(
    llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> tuple[list[Output], dict[tuple[int, int], str]]:
    """Outputs, and the hash of the logits of every position by (length of the prompt, position)."""
    launcher = CommittedLogits(llm)
    outputs = generate_through(llm, launcher, [list(prompt) for prompt in prompts], list(params))
    return outputs, launcher.found

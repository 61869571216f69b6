"""The logits of every committed position of an engine, as hashes of their bits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from graphspec.api.llm import LLM, generate_through
from graphspec.api.outputs import Output
from graphspec.engine.request import SamplingParams
from graphspec.errors import ConfigError
from graphspec.graphs.stages.mailbox import Message
from graphspec.shapes import GraphKey


class CommittedLogits:
    """A launcher that hashes the logits of each accepted node, of engines whose results are there when a launch returns.

    Requests are told apart by their seeds, which must differ. A greedy request has one too.

    Attributes:
        found: SHA-256 of the float32 logits ``[V]``, by (seed, position).
        launches: cycles that were launched.
    """

    def __init__(self, llm: LLM) -> None:
        self.cycle: Any = llm.cycle
        self.found: dict[tuple[int, int], bytes] = {}
        self.launches = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cycle, name)

    def launch(self, key: Any, message: Message) -> int:
        """As :meth:`graphspec.graphs.cycle.Cycle.launch`; then the accepted nodes of a cycle are noted."""
        ticket: int = self.cycle.launch(key, message)
        if isinstance(key, GraphKey):
            self._note(key)
        return ticket

    def _note(self, key: GraphKey) -> None:
        self.launches += 1
        views = self.cycle.views(key)
        seeds = self.cycle.arena["seed_R"].tolist()
        for lane, row in enumerate(views.lane_row_B.tolist()):
            count = int(views.accept_len_B[lane])
            first = int(views.seq_len_R[row]) - count
            for place, node in enumerate(views.path_BA[lane, :count].tolist()):
                at = (seeds[row], first + place)
                assert at not in self.found, f"position {at[1]} of seed {at[0]} was committed twice"
                self.found[at] = hashlib.sha256(views.logits_BNV[lane, node].contiguous().numpy().tobytes()).digest()


def committed(
    llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> tuple[list[Output], dict[tuple[int, int], bytes]]:
    """Outputs, and the hash of the logits of every committed position by (seed, position).

    The token at a prompt's end is sampled by the prompt's own pass, whose logits are not among these.

    Raises:
        ConfigError: two requests have one seed.
    """
    seeds = [one.seed for one in params]
    if None in seeds or len(set(seeds)) < len(seeds):
        raise ConfigError("seed", "a different one for each request", seeds)
    launcher = CommittedLogits(llm)
    outputs = generate_through(llm, launcher, [list(prompt) for prompt in prompts], list(params))
    return outputs, launcher.found

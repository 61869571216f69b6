"""What a grammar in a batch costs the rows without one: they are measured next to rows that follow a grammar, and next to the same without.

With a grammar in the batch only one cycle is in flight, and the program is split where the host fills masks, for all of its rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...api.llm import LLM
from ...engine.request import ResolvedParams
from ...errors import ResourceError
from ...text.structured import Structured
from .metrics import Timeline, spread

RECORDS = {
    "type": "array",
    # More than any context holds, so that the text never ends by itself.
    "minItems": 2**16,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "value": {"type": "integer", "minimum": 0, "maximum": 999}},
        "required": ["name", "value"],
        "additionalProperties": False,
    },
}
"""What rows with a grammar write."""


def companion(params: ResolvedParams, *, grammar: bool) -> ResolvedParams:
    """A request that decodes until it is aborted, with a grammar or without."""
    structured = Structured(json_schema=RECORDS, any_whitespace=False) if grammar else None
    endless = replace(params, max_tokens=2**30, stop=(), stop_token_ids=(), min_tokens=0)
    return replace(endless, structured=structured, ignore_eos=not grammar)


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over the rows without a grammar.

    Attributes:
        seconds: mean of their times per output token (:attr:`Timeline.tpot`).
        tokens: of each.
        cycles, masked: cycles from the first of their prompts to the last of their ends, and how many of these had masks filled.
    """

    seconds: float
    tokens: list[list[int]]
    cycles: int
    masked: int


class GrammarRows:
    """A batch of requests; the first ``structured`` of them run with a grammar or without.

    Args:
        llm: the engine.
        prompts: one per row of the batch.
        params: of the same; more than one token each.
        structured: rows with a grammar.
    """

    def __init__(self, llm: LLM, prompts: Sequence[list[int]], params: Sequence[ResolvedParams], structured: int) -> None:
        self.llm, self.structured = llm, structured
        self._prompts, self._params = list(prompts), list(params)

    def requests(self, *, grammar: bool) -> tuple[list[list[int]], list[ResolvedParams]]:
        """All rows of a pass, the structured ones first."""
        first = [companion(params, grammar=grammar) for params in self._params[: self.structured]]
        return self._prompts, [*first, *self._params[self.structured :]]

    def run(self, *, grammar: bool) -> Pass:
        """One pass: the structured rows decode before the others arrive, and are aborted when the last of these has ended.

        Raises:
            ResourceError: a request without a grammar failed, or none of them had a second token.
        """
        prompts, params = self.requests(grammar=grammar)
        count = self.structured
        first = self.llm.submit(prompts[:count], params[:count])
        try:
            while not first.ended and not all(request.output for request in first.requests):
                first.wait()
            before = self._cycles()
            others = self.llm.submit(prompts[count:], params[count:])
            while not others.ended:
                others.wait()
            cycles, masked = (after - earlier for after, earlier in zip(self._cycles(), before, strict=True))
        finally:
            first.abort()
            while not first.ended:
                first.wait()
        for number, request in enumerate(others.requests, count):
            if request.finish_reason == "error":
                raise ResourceError(f"request {number}", "an output", request.error)
        lines = [
            Timeline(0.0, list(request.metrics.bursts), request.metrics.finished or 0.0, request.finish_reason or "")
            for request in others.requests
        ]
        times = [tpot for line in lines if (tpot := line.tpot) is not None]
        if not times:
            raise ResourceError("profile.structured_rows", "rows without a grammar that have two tokens or more", "one token each")
        return Pass(statistics.fmean(times), [list(request.output) for request in others.requests], cycles, masked)

    def _cycles(self) -> tuple[int, int]:
        load = self.llm.load()
        return sum(times.count for times in load.cycles.values()), sum(times.count for times in load.with_grammar.values())

    def measure(self, rounds: int) -> dict[str, Any]:
        """Alternate passes with and without a grammar, after one warm-up pass of each.

        Returns:
            ``rows`` and ``structured_rows`` of the batch; ``equal``: whether the other rows' tokens were the same in all passes, None where
            the acceptance rule does not promise that; ``tpot_ms`` of the other rows ``with`` and ``without`` (:func:`spread`), and
            ``ratio``, with divided by without, round by round, null unless the tokens were right; ``masked``: the share of the cycles of
            passes with a grammar that had masks filled, 1 unless the context was too short for a structured row to last until the end.
        """
        found: dict[bool, list[Pass]] = {True: [], False: []}
        for number in range(rounds + 1):
            for grammar in (False, True) if number % 2 else (True, False):
                found[grammar].append(self.run(grammar=grammar))
        accept, hot = self.llm.plan.accept, any(params.sampling_class.noise for params in self._params)
        exact = not accept.lossy and (accept.rule == "match" or not hot)
        same = all(one.tokens == found[False][0].tokens for passes in found.values() for one in passes)
        timed = {grammar: [one.seconds for one in passes[1:]] for grammar, passes in found.items()}
        ratios = [slow / fast for slow, fast in zip(timed[True], timed[False], strict=True)]
        right = same or not exact
        return {
            "rows": len(self._prompts),
            "structured_rows": self.structured,
            "equal": same if exact else None,
            "tpot_ms": {name: spread([1e3 * one for one in timed[name == "with"]]) for name in ("with", "without")} if right else None,
            "ratio": {"median": statistics.median(ratios), "rounds": ratios} if right else None,
            "masked": sum(one.masked for one in found[True]) / sum(one.cycles for one in found[True]),
        }

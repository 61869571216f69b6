"""What a grammar in a batch costs the rows without one: they are measured next to rows that follow a grammar, and next to the same without.

    python -m perf.grammar_rows [--rows 1] [--rounds 5] variant=eagle3 workload.batch=4 ...

With a grammar in the batch only one cycle is in flight, and the program is split where the host fills masks, for all of its rows. The words
are those of ``graphspec profile``; the configured engine and plain decoding are measured. Exit code 1: other rows had other tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphspec.api.llm import LLM
from graphspec.config.command_options import LaunchConfig
from graphspec.config.compose import load_config
from graphspec.engine.request import ResolvedParams, sampling_class
from graphspec.errors import ConfigError, ResourceError
from graphspec.lab.measure.engine_side import EngineSide
from graphspec.lab.measure.metrics import Timeline, spread
from graphspec.lab.measure.sides import plain_config, speculates
from graphspec.text.structured import Structured

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
        cycles, masked: cycles from the first of their prompts to the last of their ends, and how many of these had masks filled.
    """

    seconds: float
    tokens: list[list[int]]
    cycles: int
    masked: int


class GrammarRows:
    """A batch of requests; the first ``structured`` of them run with a grammar or without.

    Args:
        prompts: one per row of the batch.
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
            raise ResourceError("workload.output_tokens", "rows without a grammar that have two tokens or more", "one token each")
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


def grammar_rows(side: EngineSide, structured: int) -> GrammarRows:
    """A batch of the workload's requests of which ``structured`` follow a grammar, with its programs built.

    Raises:
        ConfigError: no row would be left without a grammar.
        ResourceError: a request that can't be served.
    """
    batch = side.workload.batch
    if structured not in range(1, batch):
        raise ConfigError("--rows", f"at least 1, and fewer than workload.batch = {batch}, so that other rows are left", structured)
    places = [place % len(side.params) for place in range(batch)]
    rows = GrammarRows(side.llm, [side.workload.requests[p].prompt for p in places], [side.params[p] for p in places], structured)
    together = rows.requests(grammar=True)
    side.check(*together)
    side.llm.warm_up(batch, sampling=sampling_class([*together[1], *side.params]))
    return rows


def spell(found: dict[str, Any]) -> str:
    """The result of :meth:`GrammarRows.measure` as a sentence without its full stop."""
    count, others = found["structured_rows"], found["rows"] - found["structured_rows"]
    where = f"next to {count} row{'s' * (count > 1)} with a grammar, {others} without {'have' if others > 1 else 'has'}"
    if found["equal"] is False:
        return f"{where} OTHER TOKENS than next to the same without a grammar"
    times = " against ".join(f"{found['tpot_ms'][name]['median']:.2f}" for name in ("with", "without"))
    note = "" if found["masked"] == 1 else f"; only {100 * found['masked']:.0f} % of their cycles had one"
    return f"{where} {found['ratio']['median']:.2f} times the time per token, {times} ms{note}"


def run(config: LaunchConfig, structured: int, rounds: int) -> int:
    """Measure the configured engine and plain decoding; prints a sentence and a JSON object of each. Returns the exit code."""
    code = 0
    for engine in (config, *([plain_config(config)] if speculates(config) else [])):
        side = EngineSide(engine)
        with side.llm:
            found = grammar_rows(side, structured).measure(rounds)
        print(f"{engine.variant.name}: {spell(found)}")
        print(json.dumps(found))
        code |= found["equal"] is False
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1, help="rows that follow a grammar")
    parser.add_argument("--rounds", type=int, default=5)
    options, words = parser.parse_known_args(argv)
    return run(load_config(*words), options.rows, options.rounds)


if __name__ == "__main__":
    raise SystemExit(main())

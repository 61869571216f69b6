"""Measures how long a running row waits while long prompts arrive.

``python -m perf.prefill_gap`` decodes one request on the demo model while prompts of 1,000 tokens arrive, and records the time between
results of that request, for several values of ``runtime.prefill_tokens_per_cycle``, the last of which reads whole prompts at once. Between
two results are the prefill launches before a cycle and the cycle itself. ``chunk`` is the 99th percentile of the time of prefill launches
before a cycle (later chunks of a prompt take longer); ``bound`` is that plus two median cycles.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from graphspec.api.llm import LLM
from graphspec.engine.request import Request, SamplingParams
from graphspec.engine.scheduler import Scheduler
from graphspec.graphs.cycle import Cycle, RingEntry
from graphspec.graphs.programs import Key, PrefillKey
from graphspec.graphs.stages.mailbox import Message
from graphspec.lab.measure.provenance import ROOT, provenance, result_file, within_repository, write_jsonl
from graphspec.shapes import GREEDY
from perf.speed import held_out_prompts

PROMPT, NEW, EVERY = 1000, 8, 40
"""Tokens of the prompts that arrive, new tokens of each, and steps between two arrivals."""


class Timed:
    """A cycle that records the time of each launch; on a CPU a launch returns when it has run."""

    def __init__(self, cycle: Cycle) -> None:
        self.cycle = cycle
        self.cycles: list[float] = []
        self.prompts: list[float] = []
        """Per cycle with prefill launches before it, their seconds."""
        self._since_cycle = 0.0

    def launch(self, key: Key, message: Message) -> int:
        started = time.perf_counter()
        ticket = self.cycle.launch(key, message)
        seconds = time.perf_counter() - started
        if isinstance(key, PrefillKey):
            self._since_cycle += seconds
        else:
            self.cycles.append(seconds)
            self.prompts += [self._since_cycle] if self._since_cycle else []
            self._since_cycle = 0.0
        return ticket

    def read(self, ticket: int) -> RingEntry:
        return self.cycle.read(ticket)

    @property
    def in_flight(self) -> int:
        return self.cycle.in_flight


@dataclass(frozen=True, slots=True)
class Gaps:
    """Results of one run, in seconds."""

    tokens_per_cycle: int
    gaps: list[float]
    first_tokens: list[float]
    cycle: float
    chunk: float
    output: list[int]

    def record(self) -> dict[str, Any]:
        cuts = statistics.quantiles(self.gaps, n=100)
        return {
            "tokens_per_cycle": self.tokens_per_cycle,
            "gaps": len(self.gaps),
            "p50": cuts[49],
            "p99": cuts[98],
            "max": max(self.gaps),
            "cycle": self.cycle,
            "chunk": self.chunk,
            "bound": 2 * self.cycle + self.chunk,
            "first_token": statistics.median(self.first_tokens),
        }


def measure(llm: LLM, prompts: Sequence[Sequence[int]], tokens_per_cycle: int, new_tokens: int) -> Gaps:
    """Run one request of ``new_tokens`` tokens while the other prompts arrive one after another."""
    plan, cycle = replace(llm.plan, prefill_tokens_per_cycle=tokens_per_cycle), Timed(llm.cycle)
    scheduler = Scheduler(plan, cycle, None)
    scheduler.add_programs(GREEDY, plan.buckets, llm.cycle.prefills(GREEDY))
    requests = [
        Request(index, list(prompt), SamplingParams(seed=0).resolve(), (), new_tokens if index == 0 else NEW)
        for index, prompt in enumerate(prompts)
    ]
    waiting, steps = list(requests), 0
    while waiting or scheduler.busy:
        if waiting and steps % EVERY == 0:
            waiting[0].metrics.arrived = time.perf_counter()
            scheduler.add(waiting.pop(0))
        scheduler.step()
        steps += 1
    times = [moment for moment, _ in requests[0].metrics.bursts]
    others = [request.metrics for request in requests[1:]]
    return Gaps(
        tokens_per_cycle,
        [later - earlier for earlier, later in pairwise(times)],
        [metrics.first_token - metrics.arrived for metrics in others if metrics.first_token is not None],
        statistics.median(cycle.cycles),
        statistics.quantiles(cycle.prompts, n=100, method="inclusive")[98],
        requests[0].output,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a line per budget, write the records to ``perf/results``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", default="compiled", choices=("eager", "compiled"))
    parser.add_argument("--variant", default="none")
    parser.add_argument("--budgets", type=int, nargs="+", default=[64, 256, 4096], help="of runtime.prefill_tokens_per_cycle")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=600)
    parser.add_argument("--out", type=Path, default=ROOT / "perf" / "results", help="folder of the result file")
    args = parser.parse_args(argv)
    llm = LLM(variant=args.variant, runtime=args.runtime, max_rows=4, buckets=[4])
    llm.warm_up(4)
    (short,), texts = (held_out_prompts(llm.tokenizer.encode, count, tokens) for count, tokens in ((1, 64), (args.prompts, PROMPT)))
    arriving = [texts[index % len(texts)] for index in range(args.prompts)]
    found = [measure(llm, [short, *arriving], budget, args.new_tokens) for budget in args.budgets]
    if any(one.output != found[0].output for one in found):
        raise SystemExit("the running request's tokens depend on the budget")
    records = [one.record() for one in found]
    for one in records:
        figures = ", ".join(f"{name} {1e3 * one[name]:.2f}" for name in ("p50", "p99", "max", "cycle", "chunk", "bound"))
        print(f"{one['tokens_per_cycle']} tokens per cycle: gaps in ms {figures}; first token after {one['first_token']:.2f} s")
    settings = {"kind": "settings", **vars(args), "out": within_repository(args.out)}
    write_jsonl(result_file(args.out, "prefill-gap"), [provenance(), settings, *records])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Metrics of a measured side: latencies, throughput, acceptance. Pure functions over timelines; standard library only.

The definitions are those that serving benchmarks share (``vllm bench serve``, ``trtllm-bench``), made precise where speculation matters:
one cycle gives several tokens at one moment. Such a *burst* is one event, so gaps between bursts are never zero; the time per output token,
which divides by tokens, is the figure to compare engines by.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

FINISHED = ("stop", "length")
"""Finish reasons of served requests; others count only as aborted."""
ITL_SAMPLES = 2000
TEXT_PARTS = 16
"""Parts of an output over which acceptance is followed."""
FIRST_TOKENS = 256
"""Tokens of the first request whose times are recorded."""


@dataclass(frozen=True, slots=True)
class CycleCount:
    """One cycle of one request.

    Attributes:
        depth: its draft depth; 0: plain decoding.
    """

    tokens: int
    depth: int
    drafted: int


@dataclass(slots=True)
class Timeline:
    """One request as its caller saw it; times in seconds of one clock.

    Attributes:
        bursts: ``(time, tokens)`` of every event that brought tokens, in order; the first is the prefill's.
        reason: ``stop``, ``length``, or why it was not served.
        cycles: its cycles in order, where the side reports them; the prefill's token belongs to none.
        cut: whether a stop id or the budget cut the last cycle short.
    """

    arrived: float
    bursts: list[tuple[float, int]]
    finished: float
    reason: str
    cycles: list[CycleCount] = field(default_factory=list)
    cut: bool = False

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Timeline:
        """The inverse of :func:`dataclasses.asdict` after a round trip through JSON, which has no tuples."""
        cycles = [CycleCount(**cycle) for cycle in row["cycles"]]
        return cls(**(row | {"bursts": [(time, tokens) for time, tokens in row["bursts"]], "cycles": cycles}))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def served(self) -> bool:
        return self.reason in FINISHED and bool(self.bursts)

    @property
    def tokens(self) -> int:
        """New tokens."""
        return sum(tokens for _, tokens in self.bursts)

    @property
    def ttft(self) -> float:
        """Time to first token: from arrival to the first burst."""
        return self.bursts[0][0] - self.arrived

    @property
    def e2e(self) -> float:
        """End to end: from arrival to the end."""
        return self.finished - self.arrived

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first: ``(E2E - TTFT) / (tokens - 1)``; None for a single token."""
        return (self.e2e - self.ttft) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies as a reader of the stream sees them: gaps between bursts."""
        times = [time for time, _ in self.bursts]
        return [later - time for time, later in pairwise(times)]

    @property
    def whole_cycles(self) -> list[CycleCount]:
        """Cycles that a stop id or the budget did not cut short; acceptance is measured on these."""
        return self.cycles[:-1] if self.cut else self.cycles


@dataclass(slots=True)
class Round:
    """One pass over the workload on one side: its requests, in the order in which they were submitted."""

    timelines: list[Timeline]

    @property
    def served(self) -> list[Timeline]:
        return [timeline for timeline in self.timelines if timeline.served]

    @property
    def seconds(self) -> float:
        """From the first arrival to the last end; requests overlap, so this is not their sum."""
        return max(t.finished for t in self.timelines) - min(t.arrived for t in self.timelines) if self.timelines else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens of served requests, prefill time included."""
        return sum(t.tokens for t in self.served) / self.seconds if self.seconds > 0 else 0.0

    @property
    def tokens_per_second_per_user(self) -> float:
        """Mean over served requests of new tokens divided by end-to-end time."""
        rates = [t.tokens / t.e2e for t in self.served if t.e2e > 0]
        return statistics.fmean(rates) if rates else 0.0


def closed_loop_arrivals(began: float, finished: Sequence[float], users: int) -> list[float]:
    """Arrival times of requests if each of ``users`` users sends the next request when the last one ends."""
    ends = sorted(finished)
    return [began if number < users else ends[number - users] for number in range(len(finished))]


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between the two nearest ranks, as numpy does by default.

    Args:
        share: from 0 to 100.
    """
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, 10th and 90th percentile over rounds, and the rounds themselves."""
    return {**quantiles(values), "rounds": list(values)}


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile."""
    return {"median": statistics.median(values), "p10": percentile(values, 10), "p90": percentile(values, 90)}


def latency(seconds: Sequence[float]) -> dict[str, float] | None:
    """Number of values, mean and percentiles in milliseconds; None without a value."""
    if not seconds:
        return None
    return {
        "count": len(seconds),
        "mean": 1e3 * statistics.fmean(seconds),
        **{f"p{share}": 1e3 * percentile(seconds, share) for share in (50, 90, 99)},
    }


def downsampled(values: Sequence[float], maximum: int) -> list[float]:
    """At most ``maximum`` of the values, at evenly spaced ranks, which keeps their distribution."""
    ordered = sorted(values)
    if len(ordered) <= maximum:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / (maximum - 1))] for i in range(maximum)]


def acceptance(cycles: Iterable[CycleCount]) -> dict[str, Any]:
    """Acceptance of whole cycles.

    Returns:
        ``acceptance_length``: new tokens per cycle, the bonus token included, over the cycles that drafted, or over all if none did; None
        without a cycle. ``acceptance_unconditional``: for depth 1, 2, ..., the share of the cycles that drafted at least to this depth
        whose draft there was accepted. ``acceptance_conditional``: the same among those whose drafts before it were accepted (None where
        there was no such cycle).
    """
    every = list(cycles)
    runs = [run for run in every if run.depth] or every
    unconditional: list[float] = []
    conditional: list[float | None] = []
    for position in range(1, max((run.depth for run in runs), default=0) + 1):
        deep = [run.tokens for run in runs if run.depth >= position]
        reached = [tokens for tokens in deep if tokens >= position]
        accepted = sum(tokens > position for tokens in deep)
        unconditional.append(accepted / len(deep))
        conditional.append(accepted / len(reached) if reached else None)
    return {
        "acceptance_length": sum(run.tokens for run in runs) / len(runs) if runs else None,
        "acceptance_unconditional": unconditional,
        "acceptance_conditional": conditional,
    }


def acceptance_within(rounds: Sequence[Round]) -> dict[str, Any]:
    """Acceptance lengths of parts of the workload, over whole cycles that drafted.

    Returns:
        ``acceptance_by_request``: by the number of the request. ``acceptance_along_text``: for consecutive stretches of ``stretch_tokens``
        new tokens, at most :data:`TEXT_PARTS`, the length of the cycles that began in each; None where none did. Empty, and 0 tokens,
        where nothing was drafted.
    """
    by_request: dict[int, list[int]] = {}
    by_place: list[tuple[int, int]] = []
    longest = 0
    for one in rounds:
        for number, timeline in enumerate(one.timelines):
            if not timeline.served:
                continue
            place = 1  # the prefill's token is before the first cycle
            for cycle in timeline.whole_cycles:
                if cycle.depth:
                    by_request.setdefault(number, []).append(cycle.tokens)
                    by_place.append((place, cycle.tokens))
                    longest = max(longest, timeline.tokens)
                place += cycle.tokens
    stretch = -(-longest // TEXT_PARTS)
    parts: list[list[int]] = [[] for _ in range(-(-longest // stretch) if stretch else 0)]
    for place, tokens in by_place:
        parts[place // stretch].append(tokens)
    return {
        "acceptance_by_request": {str(number): statistics.fmean(tokens) for number, tokens in sorted(by_request.items())},
        "acceptance_along_text": [statistics.fmean(tokens) if tokens else None for tokens in parts],
        "stretch_tokens": stretch,
    }


def first_request(rounds: Sequence[Round]) -> list[tuple[float, int]]:
    """Milliseconds since arrival, and tokens, of each delivery of request 0, up to :data:`FIRST_TOKENS` tokens; empty if it was not served.

    Of the round with the median speed; of two medians, the slower.
    """
    typical = sorted(rounds, key=lambda one: one.tokens_per_second)[(len(rounds) - 1) // 2]
    if not (typical.timelines and typical.timelines[0].served):
        return []
    request, found, tokens = typical.timelines[0], [], 0
    for moment, count in request.bursts:
        if tokens >= FIRST_TOKENS:
            break
        tokens += count
        found.append((1e3 * (moment - request.arrived), count))
    return found


def figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """All figures of one side's rounds, under the keys of a result record. Latencies pool the requests of all rounds."""
    served = [timeline for one in rounds for timeline in one.served]
    gaps = [gap for timeline in served for gap in timeline.itl]
    bursts = Counter(tokens for timeline in served for _, tokens in timeline.bursts[1:])
    seconds = sum(one.seconds for one in rounds)
    with_cycles = [timeline for timeline in served if timeline.cycles]
    drafted = sum(cycle.drafted for timeline in with_cycles for cycle in timeline.cycles)
    accepted = sum(cycle.tokens - 1 for timeline in with_cycles for cycle in timeline.cycles)
    return {
        "tokens_per_second": spread([one.tokens_per_second for one in rounds]),
        "tokens_per_second_per_user": spread([one.tokens_per_second_per_user for one in rounds]),
        "ttft_ms": latency([timeline.ttft for timeline in served]),
        "tpot_ms": latency([tpot for timeline in served if (tpot := timeline.tpot) is not None]),
        "itl_ms": latency(gaps),
        "e2e_ms": latency([timeline.e2e for timeline in served]),
        "itl_samples_ms": [1e3 * gap for gap in downsampled(gaps, ITL_SAMPLES)],
        "burst_tokens": {str(tokens): count for tokens, count in sorted(bursts.items())},
        **acceptance(cycle for timeline in with_cycles for cycle in timeline.whole_cycles),
        **acceptance_within(rounds),
        "first_request": first_request(rounds),
        "drafted_per_second": drafted / seconds if with_cycles and seconds else None,
        "accepted_per_second": accepted / seconds if with_cycles and seconds else None,
        "aborted": sum(not timeline.served for one in rounds for timeline in one.timelines),
    }


def ratio(rounds: Sequence[Round], others: Sequence[Round]) -> dict[str, Any]:
    """Tokens per second of one side divided by those of another, round by round, so that a slow phase of the machine cancels out."""
    ratios = [mine.tokens_per_second / other.tokens_per_second for mine, other in zip(rounds, others, strict=True)]
    return {"median": statistics.median(ratios), "rounds": ratios}

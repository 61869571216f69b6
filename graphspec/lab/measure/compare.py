"""Measures sides against each other: workers that take turns, round by round. Imports no torch.

Other load on the machine affects all sides alike, and ratios are taken within a round, so it cancels out. Only one worker runs at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ...config.command_options import CLOSED
from ...errors import ResourceError
from .equality import Reference, Texts, Tokens, Verdict, judge
from .metrics import Round, Timeline, figures, ratio
from .open_loop import describe
from .open_loop import figures as open_figures
from .process import WorkerProcess, pack
from .sides import PLAIN, SELF, SUBJECT, SideConfig

Say = Callable[[str], None]
CYCLE_KEYS = ("cycle_ms", "host_us", "gap_ms", "nodes", "stages", "floor_ms", "percent_of_floor", "bandwidth", "next_to_grammar")
"""Keys of a record that only sides of this package have."""


@dataclass(slots=True)
class Measured:
    """A side and its measurements.

    Attributes:
        side: its configuration.
        about: its description of itself.
        rounds: measured rounds.
        outputs: per round, tokens and texts of each request.
        core_wait: per round, the share of the time that its threads waited for a core; None if the system does not report it.
        cycles: times inside its cycles, where requested.
        generations: recorded generations.
        trace: Chrome trace events.
        verdict: whether its output is correct.
    """

    side: SideConfig
    about: dict[str, Any]
    rounds: list[Round] = field(default_factory=list)
    outputs: list[tuple[Tokens, Texts]] = field(default_factory=list)
    core_wait: list[float | None] = field(default_factory=list)
    cycles: dict[str, Any] = field(default_factory=dict)
    generations: list[dict[str, Any]] = field(default_factory=list)
    trace: list[dict[str, Any]] = field(default_factory=list)
    verdict: Verdict = field(default_factory=lambda: Verdict(None, "not compared"))

    @property
    def label(self) -> str:
        label: str = self.about["label"]
        return f"{label}, again" if self.side.role == SELF else label


@dataclass(frozen=True, slots=True)
class Schedule:
    """How sides are measured.

    Attributes:
        rounds: measured rounds of each.
        warm_up_seconds: each side first runs this long, and at least once.
        interleave: load all sides and let them take turns; False: one after the other.
        timeout_seconds: longest time that a worker may take to answer.
        cycles: also time the stages of the cycles of our sides, after the rounds.
        generations: generations of the first side to record.
        trace: also record the first side's spans.
    """

    rounds: int
    warm_up_seconds: float
    interleave: bool = True
    timeout_seconds: float = 1800.0
    cycles: bool = False
    generations: int = 0
    trace: bool = False


class Bench:
    """One comparison: workers, and the sides they hold.

    Args:
        schedule: how to measure.
        say: called with lines of progress.
    """

    def __init__(self, schedule: Schedule, say: Say = lambda text: None) -> None:
        self.schedule, self.say = schedule, say
        self._like: dict[str, str] | None = None
        self._digest: str | None = None
        self._bandwidth: float | None = None

    def measure(self, sides: Sequence[SideConfig]) -> list[Measured]:
        """Measure all of them; sides that are not ours take dtype and device of the first.

        Raises:
            GraphspecError: a worker refused, died or took too long; the others have been stopped.
        """
        if not self.schedule.interleave:
            return [self.measure_one(side, first=i == 0) for i, side in enumerate(sides)]
        with ExitStack() as stack:
            workers = [(stack.enter_context(WorkerProcess(side.role, self.schedule.timeout_seconds, self.say)), side) for side in sides[:1]]
            measured = [self._prepare(*workers[0])]
            for side in sides[1:]:
                worker = stack.enter_context(WorkerProcess(side.role, self.schedule.timeout_seconds, self.say))
                workers.append((worker, side))
                measured.append(self._prepare(worker, side))
            for (worker, _), one in zip(workers, measured, strict=True):
                self._warm_up(worker, one)
            for number in range(self.schedule.rounds):
                self.say(f"round {number + 1} of {self.schedule.rounds}")
                turns = list(zip(workers, measured, strict=True))
                # The last one goes first next, so that no side profits more often from warm caches and high clocks.
                for (worker, _), one in reversed(turns) if number % 2 else turns:
                    self._round(worker, one)
            for place, ((worker, _), one) in enumerate(zip(workers, measured, strict=True)):
                self._look_inside(worker, one, first=place == 0)
        return measured

    def measure_one(self, side: SideConfig, *, first: bool = False) -> Measured:
        """Load, warm up and measure one side, and close it."""
        with WorkerProcess(side.role, self.schedule.timeout_seconds, self.say) as worker:
            one = self._prepare(worker, side)
            self._warm_up(worker, one)
            for _ in range(self.schedule.rounds):
                self._round(worker, one)
            self._look_inside(worker, one, first=first)
        return one

    def reference(self, side: SideConfig) -> Measured:
        """Run the workload once without measuring; its outputs are the reference for other sides."""
        with WorkerProcess(side.role, self.schedule.timeout_seconds, self.say) as worker:
            one = self._prepare(worker, side)
            self.say(f"{one.label}: reference outputs")
            self._round(worker, one)
        return one

    def check(self, side: SideConfig) -> dict[str, Any]:
        """``equal`` and ``sentence``: whether the side's runtime equals its stages."""
        with WorkerProcess(side.role, self.schedule.timeout_seconds, self.say) as worker:
            self.say("check of the runtime")
            found: dict[str, Any] = worker.ask("check", config=pack(side.config))
        return found

    def _prepare(self, worker: WorkerProcess, side: SideConfig) -> Measured:
        self.say(f"preparing {side.role}")
        about = worker.ask("prepare", role=side.role, config=pack(side.config), command=list(sys.argv), like=self._like)
        if self._like is None:
            self._like = {"dtype": about["dtype"], "device": about["device"]}
        self._digest = self._digest or about["digest"]
        if about["digest"] != self._digest:
            raise ResourceError(f"side {about['label']!r}", f"the same prompts as the others, {self._digest}", about["digest"])
        return Measured(side, about)

    def _warm_up(self, worker: WorkerProcess, one: Measured) -> None:
        self.say(f"{one.label}: warm-up")
        worker.ask("warm_up", seconds=self.schedule.warm_up_seconds)

    def _round(self, worker: WorkerProcess, one: Measured) -> None:
        answer = worker.ask("round")
        one.rounds.append(Round([Timeline.from_json(row) for row in answer["timelines"]]))
        one.outputs.append((answer["tokens"], answer["texts"]))
        one.core_wait.append(answer["core_wait"])
        one.about["not_measured"] = one.about.get("not_measured", {}) | answer.get("not_measured", {})

    def _look_inside(self, worker: WorkerProcess, one: Measured, *, first: bool) -> None:
        if not one.side.ours:
            return
        if self.schedule.cycles:
            self.say(f"{one.label}: inside the cycle")
            one.cycles = worker.ask("profile", bandwidth=self._bandwidth)
            self._bandwidth = one.cycles["bandwidth"]
        if first and self.schedule.generations:
            self.say(f"{one.label}: generations")
            one.generations = worker.ask("generation", count=self.schedule.generations)
        if first and self.schedule.trace:
            one.trace = worker.ask("trace")


def set_verdicts(measured: Sequence[Measured], reference: Measured | None, checks: Sequence[dict[str, Any]] = ()) -> None:
    """Set the verdict of every side.

    Args:
        measured: the sides.
        reference: plain decoding's run; None: the plain side among ``measured``, else the first one.
        checks: answers to ``check``, for a synthetic subject.
    """
    plain = reference or next((one for one in measured if one.side.role == PLAIN), measured[0])
    right = Reference(*plain.outputs[0])
    for one in measured:
        one.verdict = judge(one.side, one.about, one.outputs, right, checks)


def records(case: str, measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """One record of kind ``side`` for each side, then its generations; a side whose output is wrong has no speed."""
    base = _base(measured)
    rows: list[dict[str, Any]] = []
    for one in measured:
        about, config = one.about, one.side.config
        row: dict[str, Any] = {
            "kind": "side", "case": case, "side": one.label, "role": one.side.role,
            **{key: about.get(key) for key in ("variant", "shape", "runtime", "attention", "dtype", "device", "temperature")},
            "ignore_eos": config.workload.ignore_eos, "batch": config.workload.batch, "requests": config.workload.requests,
            "input_tokens": about["input_tokens"], "output_tokens": config.workload.output_tokens, "arrivals": describe(config.workload),
            "equal": one.verdict.equal, "equality": one.verdict.sentence,
            "synthetic": bool(about.get("synthetic")), "lossy": bool(about.get("lossy")), "rounds": len(one.rounds),
            "core_wait": _median(one.core_wait),
        }  # fmt: skip
        if one.verdict.equal is not False:
            row |= figures(one.rounds) | {"build": about.get("build", []), "memory": about.get("memory", [])}
            if config.workload.arrivals == CLOSED:
                row["ratio"] = _ratio(one, measured[0] if one.side.role == SELF else base)
            else:
                # In an open loop, tokens per second follow from the load.
                row |= {"ratio": None, "open_loop": open_figures(one.rounds, config.workload, about["long_prompts"])}
            row |= (
                dict.fromkeys(CYCLE_KEYS)
                | {"stages": []}
                | one.cycles
                | {"not_measured": one.about.get("not_measured", {}) | one.cycles.get("not_measured", {})}
            )
            if "burst_tokens" in row["not_measured"]:
                row["burst_tokens"] = None
        rows.append(row)
        if one.verdict.equal is not False:
            rows += [{"kind": "generation", "case": case, "side": one.label, **generation} for generation in one.generations]
    return rows


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _base(measured: Sequence[Measured]) -> Measured | None:
    """The side that ratios refer to: plain decoding, else transformers, else the first that is not the subject."""
    for role in (PLAIN, "hf"):
        for one in measured:
            if one.side.role == role:
                return one
    return next((one for one in measured if one.side.role not in (SUBJECT, SELF)), None)


def _ratio(one: Measured, base: Measured | None) -> dict[str, Any] | None:
    if base is None or base is one or base.verdict.equal is False or not all(other.tokens_per_second for other in base.rounds):
        return None
    return {"to": base.label, **ratio(one.rounds, base.rounds)}

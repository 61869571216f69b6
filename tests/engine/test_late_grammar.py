"""Grammars over a device that runs everything as late as possible, and over one with a clock: how much mask work overlaps verification."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from graphspec import Structured
from graphspec.engine.request import Request, SamplingParams
from graphspec.engine.scheduler import Scheduler
from graphspec.graphs.cycle import Cycle
from graphspec.kernels import select_kernels
from graphspec.shapes import MASK_BITS, SamplingClass
from tests.engine.test_late_device import on_late_device
from tests.graphs.test_capture import keys_of
from tests.support.clocked import ClockedCapturer, ClockedDevice, Span
from tests.support.tiny import structure_plan, tiny_networks

if TYPE_CHECKING:
    from torch import Tensor

VOCAB, STOP = 61, 2
WITH = SamplingClass(noise=True, grammar=True)
WITHOUT = SamplingClass(noise=True)
PLACEHOLDER = Structured(regex="x")
"""Makes a request one with a grammar; the grammar itself is given."""
STAGES = {"verify": 1.0, "accept": 0.05, "draft_extend": 0.1, "draft_steps": 0.2, "ngram_match": 0.1, "prefill": 0.5}
SMALL: dict[str, Any] = {"buckets": [2], "max_rows": 2, "cycles_in_flight": 2, "prefill_chunks": [16], "prefill_lanes": 1}
HOST, FORCED = 0.1, 0.02
"""Seconds of a step of the scheduler, and of one row's forced run."""


class Arithmetic:
    """Every fourth token is forced; before others a third of the vocabulary is allowed, and never the end.

    Args:
        clock: advanced by the host's work; None: that work takes no time.
        walk: seconds of one walk over a tree.
    """

    def __init__(self, clock: ClockedDevice | None = None, walk: float = 0.0) -> None:
        self.clock, self.walk = clock, walk
        self.output: list[int] = []

    def _spend(self, seconds: float) -> None:
        if self.clock is not None:
            self.clock.now += seconds

    @staticmethod
    def allowed(output: Sequence[int]) -> set[int]:
        if len(output) % 4 == 3:
            return {3 + sum(output) % (VOCAB - 3)}
        return {token for token in range(3, VOCAB) if (token + output[-1] + len(output)) % 3 == 0} if output else set(range(3, VOCAB))

    def again(self) -> Arithmetic:
        return Arithmetic(self.clock, self.walk)

    def follow(self, output: Sequence[int]) -> bool:
        self.output = list(output)
        return all(output[place] in self.allowed(output[:place]) for place in range(len(output)))

    def forced(self, maximum: int) -> list[int]:
        self._spend(FORCED)
        run: list[int] = []
        while len(run) < maximum and len(found := self.allowed([*self.output, *run])) == 1:
            run += found
        return run

    def fill(self, token_N: Sequence[int], parent_N: Sequence[int], mask_NVw: Tensor) -> None:
        self._spend(self.walk)
        paths: dict[int, list[int]] = {0: self.output}
        for node, (token, parent) in enumerate(zip(token_N, parent_N, strict=True)):
            if node and token >= 0 and parent in paths and token in self.allowed(paths[parent]):
                paths[node] = [*paths[parent], token]
        for node, path in paths.items():
            words = [0] * mask_NVw.shape[1]
            for token in self.allowed(path):
                words[token // MASK_BITS] |= 1 << token % MASK_BITS
            for word, value in enumerate(words):
                mask_NVw[node, word] = value - 2**MASK_BITS if value >= 2 ** (MASK_BITS - 1) else value


def requests_of(count: int, longest: int, make: Any, *, every: int = 2) -> list[Request]:
    """Requests of random prompts and seeds; one in ``every`` has a grammar, the first among them."""
    rng, found = random.Random(4), []
    for index in range(count):
        follows = index % every == 0
        params = SamplingParams(
            max_tokens=longest - 3 * index, temperature=0.8 * (index % 3 > 0), seed=index, structured=PLACEHOLDER if follows else None
        )  # fmt: skip
        prompt = [rng.randrange(3, VOCAB) for _ in range(3 + 5 * index)]
        request = Request(index, prompt, params, (STOP,), params.max_tokens)
        request.grammar = make() if follows else None
        found.append(request)
    return found


def serve(cycle: Cycle, requests: list[Request]) -> list[tuple[list[int], str | None]]:
    """Tokens and reasons. There are programs for batches with a grammar and for others."""
    scheduler = Scheduler(cycle.plan, cycle, None, clear_row=cycle.clear_row)
    for sampling in (WITHOUT, WITH):
        cycle.prepare(keys_of(cycle.plan, sampling))
        scheduler.add_programs(sampling, cycle.plan.buckets)
    for request in requests:
        scheduler.add(request)
    for _ in range(2000):
        scheduler.step()
        if not scheduler.busy:
            return [(request.output, request.finish_reason) for request in requests]
    raise RuntimeError("requests that never end")


def clocked(structure: str, device: ClockedDevice, monkeypatch: pytest.MonkeyPatch) -> Cycle:
    """A cycle on that device, two in flight where no row has a grammar."""
    plan = structure_plan(structure, device="cpu", runtime="eager", **SMALL)
    monkeypatch.setattr(ClockedCapturer, "device", device, raising=False)
    return on_late_device(plan, device, monkeypatch, partial(ClockedCapturer, poisons=False))


@pytest.mark.parametrize("structure", ["chain", "tree", "own-history"])
def test_masks_and_trees_are_neither_overwritten_nor_read_too_early(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests than rows, with and without a grammar: the same tokens as on a device that does everything immediately."""
    plan = structure_plan(structure, device="cpu", runtime="eager", **SMALL)
    networks = tiny_networks(plan)
    expected = serve(
        Cycle(plan, networks.target, networks.draft, select_kernels("reference", "auto", "cpu")), requests_of(4, 20, Arithmetic)
    )
    assert {reason for _, reason in expected} <= {"length", "stop"}, "every token is one that the grammar allows"
    assert max(len(output) for output, _ in expected) == 20
    device = ClockedDevice({})
    found = serve(clocked(structure, device, monkeypatch), requests_of(4, 20, Arithmetic))
    assert found == expected
    assert device.waits > 10 and device.longest > 5


def segments(device: ClockedDevice, name: str) -> list[Span]:
    return [span for span in device.spans if name in span.stages and "prefill" not in span.stages]


def decode(structure: str, walk: float, monkeypatch: pytest.MonkeyPatch, *, copy: float = 0.0, grammars: bool = True) -> ClockedDevice:
    """Two rows side by side to the end of their budgets, every second of them with a grammar, or none."""
    device = ClockedDevice(STAGES, copy)
    cycle = clocked(structure, device, monkeypatch)
    requests = requests_of(2, 24, partial(Arithmetic, device, walk), every=2 if grammars else 99)
    if not grammars:
        requests[0].params, requests[0].grammar = requests[1].params, None

    launch = cycle.launch

    def after_a_step(key: Any, message: Any) -> int:
        device.now += HOST
        return launch(key, message)

    cycle.launch = after_a_step  # type: ignore[method-assign]
    serve(cycle, requests)
    return device


def exposed(device: ClockedDevice) -> list[float]:
    """Of every cycle with masks, the seconds between the end of verification and the beginning of acceptance."""
    ends = [span.end for span in segments(device, "verify")]
    begins = [span.begin for span in segments(device, "accept")]
    return [begin - end for begin, end in zip(begins, ends, strict=True)]


@pytest.mark.parametrize(
    ("structure", "walk", "hidden"), [("tree", 0.25, 1.0), ("tree", 0.9, 1.0), ("chain", 1.5, 2 / 3), ("own-history", 2.0, 1 / 2)]
)
def test_walks_overlap_verification(structure: str, walk: float, hidden: float, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = exposed(decode(structure, walk, monkeypatch))
    assert len(shown) > 4
    assert [1 - gap / walk for gap in shown] == pytest.approx([hidden] * len(shown))


def test_copies_of_masks_come_after_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device's one queue: the tree goes to the host before verification, the masks of a row come back after it."""
    device = decode("tree", 0.5, monkeypatch, copy=0.03)
    # Every bit is set first, then the one row's masks are copied.
    assert exposed(device) == pytest.approx([2 * 0.03] * len(exposed(device)))
    for draft, verify in zip(segments(device, "tree_build"), segments(device, "verify"), strict=True):
        assert verify.begin - draft.end == pytest.approx(2 * 0.03)


def test_work_between_two_cycles_is_not_overlapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """One cycle is in flight: the scheduler's step and the forced run keep the device waiting; without grammars nothing does."""
    with monkeypatch.context() as patch:
        device = decode("tree", 0.9, patch)
    idle = [span.idle for span in segments(device, "tree_build") if "verify" not in span.stages][1:]
    assert len(idle) > 4 and idle == pytest.approx([HOST + FORCED] * len(idle))
    whole = decode("tree", 0.9, monkeypatch, grammars=False)
    assert all({"tree_build", "verify", "accept"} <= set(span.stages) for span in segments(whole, "verify"))
    assert max(span.idle for span in segments(whole, "verify")[1:]) == 0.0

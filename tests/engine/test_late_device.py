"""The path to a GPU and back, over a device that does everything as late as it may (:class:`tests.support.fake_cuda.LateDevice`).

Messages that are still to be copied must not be overwritten, and results not be read before they were waited for, however many cycles are
in flight; and whatever stops a capture, the next one may begin.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from graphspec.engine.request import Request, SamplingParams
from graphspec.engine.scheduler import Scheduler
from graphspec.errors import CaptureError
from graphspec.graphs import capture
from graphspec.graphs import cycle as cycle_module
from graphspec.graphs.capture import Capturer, ran_out_of_memory
from graphspec.graphs.cycle import Cycle
from graphspec.graphs.graph_launch import graph_launch
from graphspec.graphs.stages.mailbox import MessageBuffer
from graphspec.kernels import select_kernels
from graphspec.plan.buffers import Arena
from graphspec.plan.plan import Plan
from graphspec.shapes import SamplingClass
from tests.graphs.test_capture import keys_of
from tests.support.fake_cuda import FakeDriver, LateDevice, fake_driver
from tests.support.tape import TapeCapturer
from tests.support.tiny import structure_plan, tiny_networks

__all__ = ["fake_driver"]

SAMPLING = SamplingClass(noise=True, logprobs=2)


class LateCapturer(TapeCapturer):
    """Tapes that are queued."""

    device: LateDevice

    def capture(self, program: Any) -> Any:
        tape = super().capture(program)
        queued = self.device.program(tape)
        return type("Queued", (), {"pool_bytes": 0, "__call__": lambda _: queued()})()


def on_late_device(plan: Plan, device: LateDevice, monkeypatch: pytest.MonkeyPatch, capturer: Any = LateCapturer) -> Cycle:
    """A cycle that takes itself to be on a GPU."""
    networks = tiny_networks(plan)
    device.install(monkeypatch)
    monkeypatch.setattr(LateCapturer, "device", device, raising=False)
    monkeypatch.setattr(cycle_module, "Arena", lambda plan, mail_size: Arena(plan, mail_size, device="cpu"))
    kernels = select_kernels("reference", "auto", "cpu")
    return Cycle(replace(plan, device="cuda"), networks.target, networks.draft, kernels, capturer=capturer)


def serve(cycle: Cycle, requests: int) -> list[tuple[list[int], list[Any]]]:
    """Tokens and log-probabilities; more requests than rows, so that rows and pages change hands while cycles are in flight."""
    cycle.prepare(keys_of(cycle.plan, SAMPLING))
    scheduler, submitted = Scheduler(cycle.plan, cycle, SAMPLING), []
    for index in range(requests):
        params = SamplingParams(max_tokens=7 + 3 * index, temperature=0.8 * (index % 2), seed=index, logprobs=2)
        submitted.append(Request(index, [(5 * index + i) % 58 + 3 for i in range(3 + 7 * index)], params, (2,), params.max_tokens))
        scheduler.add(submitted[-1])
    for _ in range(2000):
        scheduler.step()
        if not scheduler.busy:
            break
    else:
        raise RuntimeError("requests that never end")
    return [(r.output, r.logprobs) for r in submitted]


@pytest.mark.parametrize(("structure", "cycles_in_flight"), [("chain", 1), ("chain", 2), ("chain", 3), ("tree", 3)])
def test_nothing_is_overwritten_or_read_too_early(structure: str, cycles_in_flight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = structure_plan(structure, device="cpu", runtime="eager", buckets=[1, 2], max_rows=2, cycles_in_flight=cycles_in_flight)
    networks = tiny_networks(plan)
    direct = serve(Cycle(plan, networks.target, networks.draft, select_kernels("reference", "auto", "cpu")), 5)
    device = LateDevice()
    cycle = on_late_device(plan, device, monkeypatch)
    assert serve(cycle, 5) == direct
    assert device.waits > 10 and device.longest >= 5 * cycles_in_flight


def test_one_buffer_for_all_messages_would_be_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above tests something: with a single message buffer the device copies messages that were never sent."""
    plan = structure_plan("chain", device="cpu", runtime="eager", buckets=[1, 2], max_rows=2, cycles_in_flight=3)
    networks = tiny_networks(plan)
    direct = serve(Cycle(plan, networks.target, networks.draft, select_kernels("reference", "auto", "cpu")), 5)
    cycle = on_late_device(plan, LateDevice(), monkeypatch)
    cycle._mail = [MessageBuffer(cycle.layout, pinned=False)] * len(cycle._mail)
    try:
        found = serve(cycle, 5)
    except (RuntimeError, IndexError):
        return
    assert found != direct


class Stop(Exception):  # noqa: N818
    """What stops a program."""


def capturer() -> Capturer:
    arena = object.__new__(Arena)
    arena.device = torch.device("cuda")
    return Capturer(arena)


def test_a_capture_is_replayed_once_where_launches_will_be(fake_driver: FakeDriver) -> None:
    calls: list[bool] = []
    captured = capturer().capture(lambda: calls.append(fake_driver.capturing is not None))
    assert calls == [False, False, False, True] and fake_driver.replays == ["default"]
    filled = fake_driver.fills
    captured()
    assert fake_driver.replays == ["default"] * 2 and not fake_driver.directed
    assert fake_driver.fills == filled, "a launch is the graph alone, without torch's generator"


def test_where_torch_hides_the_launch_it_replays(fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "graph_launch", lambda: None)
    captured = capturer().capture(lambda: None)
    filled = fake_driver.fills
    captured()
    assert fake_driver.replays == ["default"] * 2 and fake_driver.fills > filled


def test_the_launch_is_that_of_torchs_own_runtime() -> None:
    launch = graph_launch()
    assert (launch is None) == (torch.version.cuda is None)
    if launch is not None:
        with pytest.raises(RuntimeError, match="CUDA error: "):
            launch(0, 0)


def test_a_program_that_draws_from_torchs_generator_is_refused(fake_driver: FakeDriver) -> None:
    """Its launches would repeat the numbers of the capture."""
    make = capturer()
    with pytest.raises(CaptureError, match=r"random numbers: expected noise keyed by seed and position.*found a program that draws"):
        make.capture(fake_driver.draw)
    make.capture(lambda: None)()
    assert sum(fake_driver.shares.values()) == 1, "the refused graph has left the pool"


@pytest.mark.parametrize("captured_before", [0, 1])
@pytest.mark.parametrize("how", ["stops", "stops, and can't be ended", "can't be ended", "can't be instantiated"])
def test_a_capture_can_follow_any_failed_one(how: str, captured_before: int, fake_driver: FakeDriver) -> None:
    make = capturer()
    kept = [make.capture(lambda: None) for _ in range(captured_before)]
    fake_driver.can_end, fake_driver.can_instantiate = "ended" not in how, "instantiated" not in how

    def program() -> None:
        if fake_driver.capturing is not None and "stops" in how:
            raise Stop

    with pytest.raises(Stop if "stops" in how else RuntimeError) as caught:
        make.capture(program)
    assert fake_driver.current == "default" and not fake_driver.directed
    assert ran_out_of_memory(caught.value) == ("instantiated" in how)
    fake_driver.can_end = fake_driver.can_instantiate = True
    # What the failure still holds on to (frames, and in them the graph) must not matter either.
    kept.append(make.capture(lambda: None))
    del caught
    kept.append(make.capture(lambda: None))
    shared = [shares for shares in fake_driver.shares.values() if shares]
    assert sum(shared) == len(kept)
    assert len(shared) == 1 + ("ended" in how and captured_before), "a pool of its own only after a capture that could not be ended"
    kept[0]()


def test_a_captured_product_has_its_workspace_in_the_pool(fake_driver: FakeDriver) -> None:
    """Memory outside the pool may be freed while replays still write to it."""
    used: list[tuple[bool, int]] = []
    make = capturer()
    make.capture(lambda: used.append((fake_driver.capturing is not None, fake_driver.multiply())))
    assert used == [(False, 0)] * 3 + [(True, make._pool)]
    assert fake_driver.workspace is None, "what runs directly gets one outside"

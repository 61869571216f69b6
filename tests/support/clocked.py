"""A simulated device with a clock: the test sets the times of programs, of copies and of the host's work."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphspec.graphs.stages.stage import HostStage
from tests.support.fake_cuda import LateDevice, LateEvent
from tests.support.tape import TapeCapturer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest


@dataclass(frozen=True)
class Span:
    """A program, or a segment of one, on the device; seconds.

    Attributes:
        stages: that ran.
        begin, end: of the run.
        idle: seconds for which the device was idle before.
    """

    stages: tuple[str, ...]
    begin: float
    end: float
    idle: float


class ClockedDevice(LateDevice):
    """Runs queued work in order, each item once it is queued and its predecessor has ended.

    Args:
        stages: seconds of each stage, 0 where not named.
        copy: seconds of a copy that does not block.
    """

    def __init__(self, stages: dict[str, float], copy: float = 0.0) -> None:
        super().__init__()
        self.stages, self.copy = stages, copy
        self.now = self.free_at = self.busy_until = 0.0
        """The host's time; when the device will have finished all queued work, and when the last work that takes time."""
        self.spans: list[Span] = []

    def put(self, work: Callable[[], None], seconds: float | None = None) -> None:
        super().put(work)
        takes = self.copy if seconds is None else seconds
        self.free_at = max(self.now, self.free_at) + takes
        if takes:
            self.busy_until = self.free_at

    def event(self) -> LateEvent:
        return ClockedEvent(self)

    def synchronize(self) -> None:
        super().synchronize()
        self.now = max(self.now, self.free_at)

    def run(self, work: Callable[[], None], stages: tuple[str, ...]) -> None:
        """Queue a program of these stages."""
        begin = max(self.now, self.free_at)
        idle = begin - self.busy_until
        self.put(work, sum(self.stages.get(name, 0.0) for name in stages))
        self.spans.append(Span(stages, begin, self.free_at, idle))

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().install(monkeypatch)
        for kind in HostStage.__subclasses__():
            forward = kind.forward

            def marked(stage: Any, v: Any, forward: Any = forward) -> None:
                with self._host():
                    forward(stage, v)

            monkeypatch.setattr(kind, "forward", marked)

    @contextmanager
    def _host(self) -> Iterator[None]:
        self.host_steps = True
        try:
            yield
        finally:
            self.host_steps = False


class ClockedEvent(LateEvent):
    """Waiting for it sets the host's clock to the time at which the device reached it."""

    _device: ClockedDevice
    _time = 0.0

    def record(self) -> None:
        super().record()
        self._time = max(self._device.now, self._device.free_at)

    def synchronize(self) -> None:
        super().synchronize()
        self._device.now = max(self._device.now, self._time)


class ClockedCapturer(TapeCapturer):
    """Tapes that are queued on a clocked device."""

    device: ClockedDevice

    def capture(self, program: Any) -> Any:
        tape, device, names = super().capture(program), self.device, stage_names(program)
        return type("Queued", (), {"pool_bytes": 0, "__call__": lambda _: device.run(tape, names)})()


def stage_names(program: Any) -> tuple[str, ...]:
    """The stages of what is captured: a whole program, or the stages between two that run on the host."""
    owner = getattr(program, "__self__", None)
    stages = owner.stages if owner is not None else [step.func for step in program.args[0]]
    return tuple(stage.name for stage in stages)

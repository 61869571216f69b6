"""A worker: runs one side and answers commands about it. :mod:`.process` starts it: ``python -m graphspec.lab.measure.worker``.

=============  ==================================================================  ====================================================
command        with                                                                answer
=============  ==================================================================  ====================================================
``prepare``    ``role``, ``config`` (packed), ``command``, ``like``                what the side is (:class:`Runner`), ``provenance``
``warm_up``    ``seconds``                                                         rounds run
``round``                                                                          ``timelines``, ``tokens`` and ``texts``; ``core_wait``
``profile``    ``bandwidth`` of this machine; null: measure it                     times inside the cycle; sides of our own only
``trace``                                                                          Chrome trace events; sides of our own only
``generation`` ``count``                                                           recorded generations; sides of our own only
``check``      ``config`` (packed)                                                 whether the runtime equals its stages
``depth_times``                                                                    ``[bucket, depth, seconds]`` rows; adaptive engines only
``close``
=============  ==================================================================  ====================================================

A :class:`~graphspec.errors.GraphspecError` is an answer; any other exception ends the process, and the controlling process shows its
traceback.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from ...config.command_options import LaunchConfig
from ...errors import GraphspecError
from ...host.core_wait import CoreWait
from .process import unpack
from .provenance import command_line, provenance
from .sides import API


class Runner(Protocol):
    """One side, ready to be measured."""

    def describe(self) -> dict[str, Any]:
        """``label``, ``variant``, ``shape``, ``runtime``, ``attention``, ``dtype``, ``device``, ``digest`` and other record fields."""
        ...

    def round(self) -> dict[str, Any]:
        """Run the workload once: ``timelines``, per request ``tokens`` and ``texts`` (or None), and ``not_measured`` if it changed."""
        ...


Progress = Callable[[str, int, int], None]
"""Called with a phase, the number of its units that are done, and their total."""


class Worker:
    """Executes commands; :func:`main` connects it to pipes.

    Args:
        progress: called during loading and compilation.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self.runner: Any = None
        self.progress = progress

    def answer(self, do: str, **values: Any) -> Any:
        """Execute one command.

        Raises:
            GraphspecError: the side can't do that.
        """
        method = getattr(self, f"do_{do}", None)
        if method is None:
            raise GraphspecError("do", "a command of this worker", repr(do))
        return method(**values)

    def do_prepare(self, role: str, config: str, command: list[str], like: dict[str, str] | None) -> dict[str, Any]:
        launch = unpack(config)
        self.runner = make_runner(role, launch, like, self.progress)
        described: dict[str, Any] = self.runner.describe()
        return described | {"provenance": provenance(launch, described.get("plan")) | {"command": command_line(command)}}

    def do_warm_up(self, seconds: float) -> int:
        end, rounds = time.perf_counter() + seconds, 0
        while rounds == 0 or time.perf_counter() < end:
            self.runner.round()
            rounds += 1
        return rounds

    def do_round(self) -> dict[str, Any]:
        watch = CoreWait()
        result: dict[str, Any] = self.runner.round()
        return result | {"core_wait": watch.share()}

    def do_profile(self, bandwidth: float | None) -> dict[str, Any]:
        result: dict[str, Any] = self.runner.profile(bandwidth)
        return result

    def do_trace(self) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self.runner.trace()
        return result

    def do_generation(self, count: int) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self.runner.generations(count)
        return result

    def do_check(self, config: str) -> dict[str, Any]:
        from .selfcheck import check_runtime

        return check_runtime(unpack(config))

    def do_depth_times(self) -> list[tuple[int, int, float]]:
        times: list[tuple[int, int, float]] = self.runner.depth_times()
        return times


def make_runner(role: str, config: LaunchConfig, like: dict[str, str] | None, progress: Progress | None = None) -> Runner:
    """Make the side of ``role``. Modules that import torch are imported here, in the process that needs them.

    Args:
        role: one of :data:`graphspec.lab.measure.sides.ROLES`.
        config: the whole configuration of this side.
        like: ``dtype`` and ``device`` of the side it is compared with; sides that are not ours take these.
        progress: called while a side of our own loads and compiles.
    """
    if role == API:
        from .api_side import ApiSide

        return ApiSide(config)
    if role.startswith("hf"):
        from .hf_side import HfSide

        assert like is not None
        return HfSide(role, config, like["dtype"], like["device"])
    from .engine_side import EngineSide

    return EngineSide(config, progress)


def main(kind: type[Worker] = Worker) -> None:
    """Execute commands until the pipe closes."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    # Libraries print to stdout; their output must not mix with answers.
    os.dup2(2, 1)

    def progress(phase: str, done: int, total: int) -> None:
        answers.write(json.dumps({"progress": [phase, done, total]}) + "\n")

    worker = kind(progress)
    for line in sys.stdin:
        question = json.loads(line)
        if question["do"] == "close":
            return
        try:
            answer: dict[str, Any] = {"ok": worker.answer(**question)}
        except GraphspecError as error:
            fields = {"key": error.key, "expected": str(error.expected), "found": str(error.found), "hint": error.hint}
            answer = {"error": fields}
        answers.write(json.dumps(answer, default=str) + "\n")


if __name__ == "__main__":
    main()

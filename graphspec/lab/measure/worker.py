"""A worker: runs one side and answers commands about it. :mod:`.process` starts it: ``python -m graphspec.lab.measure.worker``.

===============  ================================================================  ====================================================
command          with                                                              answer
===============  ================================================================  ====================================================
``prepare``      ``role``, ``config``, ``command``, ``like``                       what the side is (:class:`Runner`), ``provenance``
``warm_up``      ``seconds``                                                       rounds run
``round``                                                                          ``timelines``, ``tokens`` and ``texts``; ``core_wait``
``profile``      ``bandwidth`` of this machine; null: measure it                   times inside the cycle; sides of our own only
``trace``                                                                          Chrome trace events; sides of our own only
``generations``  ``count``                                                         recorded generations; sides of our own only
``call``         ``function`` (``module:name``), and its values                    what it returns; needs no ``prepare``
``depth_times``                                                                    ``[bucket, depth, seconds]`` rows; adaptive engines only
===============  ================================================================  ====================================================

A :class:`~graphspec.errors.GraphspecError` is an answer; any other exception ends the process, and the controlling process shows its
traceback.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Protocol

from ...config.catalog import load_object
from ...config.command_options import LaunchConfig
from ...errors import GraphspecError
from ...host.core_wait import CoreWait
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


OF_RUNNER = ("profile", "trace", "generations", "depth_times")
"""Commands that sides of our own execute themselves."""
Progress = Callable[[str, int, int], None]
"""Called with a phase, the number of its units that are done, and their total."""


class Worker:
    """Executes commands; :func:`main` connects it to pipes."""

    def __init__(self, progress: Progress | None = None) -> None:
        self.runner: Any = None
        self.progress = progress

    def answer(self, do: str, **values: Any) -> Any:
        """Execute one command."""
        method = getattr(self.runner, do) if do in OF_RUNNER else getattr(self, f"do_{do}", None)
        if method is None:
            raise GraphspecError("do", "a command of this worker", repr(do))
        return method(**values)

    def do_prepare(self, role: str, config: LaunchConfig, command: list[str], like: dict[str, str] | None) -> dict[str, Any]:
        self.runner = make_runner(role, config, like, self.progress)
        described: dict[str, Any] = self.runner.describe()
        return described | {"provenance": provenance(config, described.get("plan")) | {"command": command_line(command)}}

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

    def do_call(self, function: str, **values: Any) -> Any:
        return load_object(function)(**values)


def make_runner(role: str, config: LaunchConfig, like: dict[str, str] | None, progress: Progress | None = None) -> Runner:
    """Make the side of ``role``. Modules that import torch are imported here, in the process that needs them.

    Args:
        like: ``dtype`` and ``device`` of the side it is compared with; sides that are not ours take these.
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


def main() -> None:
    """Execute commands until the controlling process has left; the connection's number is the first argument."""
    connection = Connection(int(sys.argv[1]))
    worker = Worker(lambda *progress: connection.send({"progress": progress}))
    for do, values in _questions(connection):
        try:
            answer: dict[str, Any] = {"ok": worker.answer(do, **values)}
        except GraphspecError as error:
            fields = {"key": error.key, "expected": str(error.expected), "found": str(error.found), "hint": error.hint}
            answer = {"error": fields}
        # Plain values only: the controlling process imports no torch.
        connection.send(json.loads(json.dumps(answer, default=str)))


def _questions(connection: Connection[Any, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    with suppress(EOFError):
        while (question := connection.recv()) is not None:
            yield question


if __name__ == "__main__":
    main()

"""Workers: every measured side in its own process, controlled over a connection. The controlling end; imports no torch.

A command is its name and its values, its answer ``{"ok": ...}`` or ``{"error": ...}``, after any number of ``{"progress": [phase, done,
total]}``; :mod:`graphspec.lab.measure.worker` lists the commands. What a worker prints goes to a file whose end is shown when it fails.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from types import TracebackType
from typing import IO, Any, Self

from ...errors import GraphspecError, ResourceError

TAIL_LINES = 15
CLOSING_SECONDS = 10.0


class WorkerProcess:
    """A running worker."""

    def __init__(self, name: str, timeout: float, say: Callable[[str], None] = lambda text: None) -> None:
        self.name, self.timeout, self.say = name, timeout, say
        self._complaints: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - lives as long as the worker
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "graphspec.lab.measure.worker", str(theirs.fileno())],
            stdin=subprocess.DEVNULL, stdout=self._complaints, stderr=self._complaints, pass_fds=[theirs.fileno()],
        )  # fmt: skip
        theirs.close()

    def ask(self, do: str, **values: Any) -> Any:
        """Send one command and wait for its answer.

        Raises:
            GraphspecError: the worker refused; key, expected and found are the worker's, the hint names the side.
            ResourceError: it died or took too long, and is no longer running; the message has the last lines that it wrote.
        """
        key = f"side {self.name!r}, {do}"
        try:
            self._connection.send((do, values))
            answer = self._answer()
        except TimeoutError:
            self.kill()
            raise ResourceError(key, f"an answer within {self.timeout:g} seconds", "none", self._tail()) from None
        except (OSError, EOFError):
            code = self._process.wait()
            raise ResourceError(key, "an answer", f"the process ended with code {code}", self._tail()) from None
        if "error" in answer:
            error = answer["error"]
            hint = "; ".join(part for part in (error["hint"], f"side {self.name!r}") if part)
            raise GraphspecError(error["key"], error["expected"], error["found"], hint)
        return answer["ok"]

    def _answer(self) -> dict[str, Any]:
        """The next message other than progress.

        Raises:
            TimeoutError: the time limit has passed.
        """
        end = time.monotonic() + self.timeout
        while self._connection.poll(max(end - time.monotonic(), 0.0)):
            answer: dict[str, Any] = self._connection.recv()
            if "progress" not in answer:
                return answer
            phase, done, total = answer["progress"]
            self.say(f"{self.name}: {phase}, {done} of {total}")
        raise TimeoutError

    def _tail(self) -> str:
        self._complaints.seek(0)
        lines = [line for line in self._complaints.read().splitlines() if line.strip()]
        return "it last wrote: " + (" | ".join(lines[-TAIL_LINES:]) or "nothing")

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Ask the worker to exit, and kill it if it does not. May be called any number of times."""
        with suppress(OSError):
            self._connection.send(None)
        try:
            self._process.wait(CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._connection.close()
        self._complaints.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None and self._process.poll() is None:
            self.kill()
        self.close()

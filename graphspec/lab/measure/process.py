"""Workers: every measured side in its own process, controlled over pipes. The controlling end; imports no torch.

The protocol is one JSON object per line. A command is ``{"do": NAME, ...}``, its answer ``{"ok": ...}`` or ``{"error": ...}``, after any
number of ``{"progress": [phase, done, total]}``; :mod:`graphspec.lab.measure.worker` lists the commands. A worker prints nothing else to
its stdout; its stderr goes to a file whose end is shown when it fails.
"""

from __future__ import annotations

import base64
import json
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import IO, Any, Self

from ...config.command_options import LaunchConfig
from ...errors import GraphspecError, ResourceError

TAIL_LINES = 15
CLOSING_SECONDS = 10.0


def pack(config: LaunchConfig) -> str:
    """A configuration as one JSON string; JSON itself would lose the integer keys of its mappings."""
    return base64.b64encode(pickle.dumps(config)).decode("ascii")


def unpack(text: str) -> LaunchConfig:
    """The inverse of :func:`pack`; for text written by this package only."""
    config: LaunchConfig = pickle.loads(base64.b64decode(text))
    return config


class WorkerProcess:
    """A running worker.

    Args:
        name: of its side, for messages.
        timeout: seconds an answer may take.
        say: called with lines of the worker's progress.
        module: that the process runs.
    """

    def __init__(
        self, name: str, timeout: float, say: Callable[[str], None] = lambda text: None, module: str = "graphspec.lab.measure.worker"
    ) -> None:
        self.name, self.timeout, self.say = name, timeout, say
        self._complaints: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - lives as long as the worker
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._complaints, text=True, encoding="utf-8",
        )  # fmt: skip
        self._answers: queue.Queue[str | None] = queue.Queue()
        # Not every system can wait for a pipe with a time limit; a thread with a queue can.
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def ask(self, do: str, **values: Any) -> Any:
        """Send one command and wait for its answer.

        Raises:
            GraphspecError: the worker refused; key, expected and found are the worker's, the hint names the side.
            ResourceError: it died or took too long, and is no longer running; the message has the last lines of its stderr.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **values}) + "\n")
            self._process.stdin.flush()
            line = self._answer()
        except (BrokenPipeError, OSError):
            line = None
        except queue.Empty:
            self.kill()
            raise ResourceError(self._key(do), f"an answer within {self.timeout:g} seconds", "none", self._tail()) from None
        if line is None:
            code = self._process.wait()
            raise ResourceError(self._key(do), "an answer", f"the process ended with code {code}", self._tail())
        answer = json.loads(line)
        if "error" in answer:
            error = answer["error"]
            hint = "; ".join(part for part in (error["hint"], f"side {self.name!r}") if part)
            raise GraphspecError(error["key"], error["expected"], error["found"], hint)
        return answer["ok"]

    def _answer(self) -> str | None:
        """The next line other than progress; None: the worker has closed its pipe.

        Raises:
            queue.Empty: the time limit has passed.
        """
        end = time.monotonic() + self.timeout
        while True:
            line = self._answers.get(timeout=max(end - time.monotonic(), 0.0))
            if line is None or not line.startswith('{"progress"'):
                return line
            phase, done, total = json.loads(line)["progress"]
            self.say(f"{self.name}: {phase}, {done} of {total}")

    def _key(self, do: str) -> str:
        return f"side {self.name!r}, {do}"

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
        if self._process.poll() is None:
            try:
                assert self._process.stdin is not None
                self._process.stdin.write('{"do": "close"}\n')
                self._process.stdin.close()
                self._process.wait(CLOSING_SECONDS)
            except (OSError, ValueError, subprocess.TimeoutExpired):
                self.kill()
        for pipe in (self._process.stdin, self._process.stdout, self._complaints):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except OSError:
                    # The buffered rest has no reader.
                    continue

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None and self._process.poll() is None:
            self.kill()
        self.close()

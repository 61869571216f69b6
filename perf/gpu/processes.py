"""Runs a command in a new process group with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from graphspec.lab.measure.provenance import ROOT

GRACE = 8.0
"""Seconds between interrupting a command and killing it."""
REAPING = 2.0
"""Seconds to wait for a killed process; one that still exists hangs inside a driver call and is left to the system."""


def triton_cache() -> dict[str, str]:
    """The environment that gives every process the same folder for compiled kernels.

    Without it, Inductor sets another folder for Triton when it makes its first kernel, and kernels that were compiled before are compiled
    again.
    """
    return {"TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR") or str(Path.home() / ".triton" / "cache")}


def run_command(
    command: Sequence[str], seconds: float, log: Path, *, errors: Path | None = None, show: bool = False,
    environment: Mapping[str, str] | None = None,
) -> int | None:  # fmt: skip
    """Run a command; returns after at most ``seconds``.

    Args:
        command: program and arguments.
        seconds: time limit. Shortly before its end the command gets SIGINT, and is then killed with all processes it has started.
        log: file for its output.
        errors: file for its standard error instead.
        show: print its standard output here too.
        environment: variables in addition to those of this process.

    Returns:
        Its exit code; None if it did not end in time.
    """
    ends = time.monotonic() + seconds
    reaping = min(REAPING, seconds / 8)
    grace = min(GRACE, seconds / 4)
    with log.open("ab") as sink, (errors or log).open("ab") as error_sink:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **triton_cache(), **(environment or {})}, stdout=subprocess.PIPE if show else sink,
            stderr=error_sink, start_new_session=True,
        )  # fmt: skip
        reader = None
        if process.stdout is not None:
            # In a thread, because a process that can't be killed never closes its end.
            reader = threading.Thread(target=_copy, args=(process.stdout, log), daemon=True)
            reader.start()
        try:
            for until, sign in ((ends - reaping - grace, signal.SIGINT), (ends - reaping, signal.SIGKILL)):
                if (code := _waited(process, until)) is not None:
                    if reader is not None:
                        reader.join(max(0.0, min(2.0, ends - time.monotonic())))
                    return None if sign is signal.SIGKILL else code
                _signal(process, sign)
            _waited(process, ends)
            return None
        finally:
            # Kill its child processes too, which would occupy the device.
            _signal(process, signal.SIGKILL)


def _waited(process: subprocess.Popen[bytes], until: float) -> int | None:
    try:
        return process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _signal(process: subprocess.Popen[bytes], sign: signal.Signals) -> None:
    try:
        os.killpg(process.pid, sign)
    except ProcessLookupError:
        return


def _copy(source: IO[bytes], log: Path) -> None:
    with log.open("ab") as sink:
        for line in source:
            sink.write(line)
            sink.flush()
            print(line.decode(errors="replace"), end="", flush=True)

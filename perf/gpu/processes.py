"""A command in a process group of its own, which ends in time whatever it does."""

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
"""Seconds between asking a command to end and ending it."""
REAPING = 2.0
"""Seconds after which a process that was ended and is still there is left to the system: it hangs inside a driver call."""


def triton_cache() -> dict[str, str]:
    """The environment that gives every process the same folder for compiled kernels.

    Without it Inductor points Triton at a folder of its own as soon as it makes its first kernel, and what was compiled before is compiled
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
        seconds: for everything. Shortly before they are over it is asked to end (SIGINT), then ended with all it has started.
        log: gets what it prints.
        errors: gets its standard error instead.
        show: print its standard output here too.
        environment: variables in addition to those of this process.

    Returns:
        Its exit code; None when it was not over in time.
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
            # A thread, for a process that can't be ended never closes its side.
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
            # Also what it started and did not end, which would hold the device.
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

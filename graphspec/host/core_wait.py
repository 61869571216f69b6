"""The share of time that this process waited for a processor core: whether the machine was free while something was timed.

It does not show what occupied the cores: if this process has more threads than there are cores, they wait for each other.

Threads of one operation wait for each other, so a core that is busy with something else holds all of them up, in every operation. An engine
of microsecond operations can become a hundred times slower, and no median over rounds shows why. Imports no torch.
"""

from __future__ import annotations

import time
from pathlib import Path

TASKS = Path("/proc/self/task")
BUSY = 0.1
"""Share above which timings on a CPU are unreliable; a free machine stays below 0.02."""


def thread_waits() -> dict[str, int] | None:
    """Nanoseconds that each living thread was ready to run without a core; None if the system has no ``schedstat`` of threads."""
    waits: dict[str, int] = {}
    counted = False
    try:
        for task in TASKS.iterdir():
            try:
                _, nanoseconds, turns = (task / "schedstat").read_text(encoding="ascii").split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # a thread that ended meanwhile, or a system without the file
            waits[task.name] = int(nanoseconds)
            counted = counted or turns != "0"  # a kernel that does not count shows three zeros, even for this running thread
    except OSError:
        return None
    return waits if counted else None


class CoreWait:
    """Measures waiting from its construction on, over the threads that are alive when it is read."""

    def __init__(self) -> None:
        self._began, self._waits = time.perf_counter(), thread_waits()

    def share(self) -> float | None:
        """Seconds waited per second since construction; above 1 where several threads wait at once. None: not reported by the system."""
        waits, before = thread_waits(), self._waits
        if waits is None or before is None:
            return None
        # The number of an ended thread may be reused.
        waited = sum(max(nanoseconds - before.get(task, 0), 0) for task, nanoseconds in waits.items())
        return waited / 1e9 / max(time.perf_counter() - self._began, 1e-9)


def busy_caution(shares: dict[str, float | None]) -> str | None:
    """A caution if the machine was busy; None if it was free or that is unknown.

    Args:
        shares: :meth:`CoreWait.share` of what was timed, by name.
    """
    busy = {name: share for name, share in shares.items() if share is not None and share > BUSY}
    if not busy:
        return None
    waited = ", ".join(f"{name} {share:.2f}" for name, share in busy.items())
    return (
        "Other programs kept the processor busy, or there are more threads than cores. "
        f"Seconds that threads waited for a core, per second timed: {waited}. Threads wait for each other in every operation, so these "
        "speeds say little; measure again when nothing else runs, with no more threads than cores."
    )

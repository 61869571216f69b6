"""How much of the time this process stood in line for a processor core: whether the machine was free while something was timed.

It does not say for whom: threads of this process, where it has more than there are cores, stand in line for each other.

Threads of one operation wait for each other, so a core that is busy with something else holds all of them up, in every operation. An engine
of microsecond operations can be a hundred times slower for it, and no median over rounds shows why. Imports no torch.
"""

from __future__ import annotations

import time
from pathlib import Path

TASKS = Path("/proc/self/task")
BUSY = 0.1
"""Share from which figures of a CPU are not worth much; a free machine stays below 0.02."""


def seconds_waited() -> float | None:
    """Seconds that the living threads of this process were ready to run and had no core, together; None where the system doesn't tell."""
    waits = _waits()
    return sum(waits.values()) / 1e9 if waits is not None else None


def _waits() -> dict[str, int] | None:
    """Nanoseconds by living thread; None where the system doesn't tell. Linux does (``schedstat`` of every thread)."""
    waits: dict[str, int] = {}
    counted = False
    try:
        for task in TASKS.iterdir():
            try:
                _, nanoseconds, turns = (task / "schedstat").read_text(encoding="ascii").split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # a thread that ended meanwhile, or a system without the file
            waits[task.name] = int(nanoseconds)
            counted = counted or turns != "0"  # a kernel that doesn't count shows three zeros, and this thread has had its turn
    except OSError:
        return None
    return waits if counted else None


class CoreWait:
    """A watch, started when it is made. It looks at threads that live when it is read: what one waited that ended before is not counted."""

    def __init__(self) -> None:
        self._began, self._waits = time.perf_counter(), _waits()

    def share(self) -> float | None:
        """Seconds waited per second since; above 1 where several threads wait at once. None where the system doesn't tell."""
        waits, before = _waits(), self._waits
        if waits is None or before is None:
            return None
        # The number of a thread that ended may be a new one's.
        waited = sum(max(nanoseconds - before.get(task, 0), 0) for task, nanoseconds in waits.items())
        return waited / 1e9 / max(time.perf_counter() - self._began, 1e-9)


def busy_caution(shares: dict[str, float | None]) -> str | None:
    """A sentence for people where a machine was busy; None where it was free or nobody knows.

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

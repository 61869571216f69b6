"""Numbers of threads on a CPU: native ops have their own team, whose cores torch's loops around them should not take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_team: ContextVar[int | None] = ContextVar("team", default=None)


def team_threads() -> int:
    """Threads of native ops: as many as torch has, or had outside :func:`torch_loops`."""
    return _team.get() or torch.get_num_threads()


@contextmanager
def torch_loops(threads: int) -> Iterator[None]:
    """A context in which torch's loops in this thread use ``threads`` threads, and native ops as many as before.

    OpenMP keeps the number per thread, so other threads of the program are not affected.
    """
    before = torch.get_num_threads()
    token = _team.set(team_threads())
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _team.reset(token)

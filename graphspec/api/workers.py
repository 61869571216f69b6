"""Threads for work that an event loop must not do itself: encoding texts, compiling grammars."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")
_Jobs = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class Workers:
    """A fixed number of threads that take jobs in the order in which they were given.

    Unlike those of ``concurrent.futures`` they are daemons: a process that ends does not wait for a job.

    Args:
        name: of the threads.
        threads: how many.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._jobs: _Jobs = SimpleQueue()
        self._began: list[float | None] = [None] * threads
        """When each thread took its present job; None: it has none."""
        for place in range(threads):
            arguments = self._jobs, self._began, place
            threading.Thread(target=_work, args=arguments, name=f"graphspec {name} {place}", daemon=True).start()
        weakref.finalize(self, _end, self._jobs, threads)

    async def run(self, job: Callable[[], Result]) -> Result:
        """The result of ``job``, called by one of the threads. A job whose caller is cancelled before a thread takes it is dropped.

        Raises:
            Exception: what the job raises.
        """
        future: Future[Result] = Future()
        self._jobs.put((future, job))
        return await asyncio.wrap_future(future)

    @property
    def busy(self) -> bool:
        """Whether a thread is at a job."""
        return any(moment is not None for moment in self._began)

    @property
    def stuck_seconds(self) -> float:
        """How long every thread has been at its present job; 0 while one is free."""
        began, now = list(self._began), time.perf_counter()
        return 0.0 if None in began else min(now - moment for moment in began if moment is not None)


def _work(jobs: _Jobs, began: list[float | None], place: int) -> None:
    while (taken := jobs.get()) is not None:
        future, job = taken
        if not future.set_running_or_notify_cancel():
            continue
        began[place] = time.perf_counter()
        try:
            result = job()
        except BaseException as error:  # noqa: BLE001  it belongs to the caller
            future.set_exception(error)
        else:
            future.set_result(result)
        began[place] = None
        # A thread that waits holds on to nothing.
        result = taken = future = job = None  # type: ignore[assignment]


def _end(jobs: _Jobs, threads: int) -> None:
    for _ in range(threads):
        jobs.put(None)

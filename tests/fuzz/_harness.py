"""Shared by the fuzzers: running and judging one input, and choosing inputs by seed and budget."""

from __future__ import annotations

import random
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from graphspec.errors import GraphspecError

CPU_SECONDS, WALL_SECONDS = 5.0, 120.0
"""A hang: so much processor time for one input, whatever else the machine does; or so long a wait for nothing."""

Kind = Literal["accepted", "refused", "traceback", "hang"]


class Hang(BaseException):
    """Not an ``Exception``: no handler of the code under test may swallow it."""


@dataclass(frozen=True)
class Case:
    """One input.

    Attributes:
        name: what a report calls it; unique among its fuzzer's inputs.
        run: hands the input over. It returns, or raises what the user would see.
        wrong: the input has a wrong type or value, so taking it silently is a fault. False: it may be taken or refused.
    """

    name: str
    run: Callable[[], Any]
    wrong: bool = False


@dataclass(frozen=True)
class Verdict:
    kind: Kind
    detail: str = ""


@contextmanager
def _limited() -> Iterator[None]:
    """Raises :class:`Hang` inside when a limit is passed; main thread only."""

    def over(signum: int, _: object) -> None:
        raise Hang(signal.Signals(signum).name)

    before = {number: signal.signal(number, over) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def judge(case: Case) -> Verdict:
    """Run one input. A :class:`~graphspec.errors.GraphspecError` is a refusal; any other exception is a traceback."""
    try:
        with _limited():
            result = case.run()
    except GraphspecError as error:
        return Verdict("refused", f"{type(error).__name__}: {error}")
    except Hang as error:
        return Verdict("hang", f"{error}: {_where(error)}")
    except BaseException as error:  # noqa: BLE001  what a user would see as a traceback, SystemExit and KeyboardInterrupt included
        return Verdict("traceback", f"{type(error).__name__}: {str(error)[:200]} at {_where(error)}")
    return Verdict("accepted", repr(result)[:200])


def _where(error: BaseException) -> str:
    return " < ".join(
        f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in reversed(traceback.extract_tb(error.__traceback__)[-4:])
    )


def choose(listed: Sequence[Case], invent: Callable[[random.Random, int], Case] | None, *, seed: int, budget: int) -> list[Case]:
    """``budget`` inputs: listed ones in random order, and, when these are used up, invented ones.

    Args:
        listed: every input of the list.
        invent: makes one more input from a generator and a number; None: there are the listed ones only.
        seed: of order and inventions. The same seed and budget give the same inputs.
        budget: how many.
    """
    rng = random.Random(seed)
    chosen = rng.sample(list(listed), min(budget, len(listed)))
    return chosen + [invent(rng, number) for number in range(budget - len(chosen))] if invent is not None else chosen


def faults(cases: Sequence[Case], healthy: Callable[[], str] | None = None) -> list[str]:
    """Run ``cases``; returns a line for every traceback, hang and silent acceptance of a wrong value.

    Args:
        cases: the inputs.
        healthy: called after each of them; says what is wrong with the engine they share, or nothing.
    """
    found = []
    for case in cases:
        verdict = judge(case)
        if verdict.kind in ("traceback", "hang") or (verdict.kind == "accepted" and case.wrong):
            found.append(f"{case.name}: {verdict.kind}: {verdict.detail}")
        if healthy is not None and (complaint := healthy()):
            found.append(f"{case.name}: afterwards: {complaint}")
    return found

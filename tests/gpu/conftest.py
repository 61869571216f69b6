"""A check that hangs is ended, and a process that CUDA has given up on runs no further check: the next one gets a new process.

Both need pytest-xdist, which replaces a worker that is gone and reports what it was running.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from graphspec.engine import programmatic

SECONDS = 120.0
"""Longest a check may take, unless its marker ``seconds`` says otherwise: a number, or a function of the check's parameters."""
HERE = Path(__file__).resolve().parent
GIVEN_UP = 70
"""Exit code of such a process."""
stderr = pytest.StashKey[int]()
broken = pytest.StashKey[bool]()


@pytest.fixture(autouse=True)
def no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programmatic launch is off unless a check enables it, whatever was found on this machine before."""
    monkeypatch.setattr(programmatic, "verdict", lambda *_: None)


def pytest_configure(config: pytest.Config) -> None:
    # While a check runs, file descriptor 2 is pytest's.
    config.stash[stderr] = os.dup(2)


def seconds_of(item: pytest.Item) -> float:
    """Longest ``item`` may take."""
    marker = item.get_closest_marker("seconds")
    if marker is None:
        return SECONDS
    limit = marker.args[0]
    called = getattr(item, "callspec", None)
    return float(limit(**(called.params if called is not None else {})) if callable(limit) else limit)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: begun last, they would be waited for."""
    items.sort(key=lambda item: -seconds_of(item) if HERE in item.path.parents else 0.0)


def unusable(error: BaseException) -> bool:
    """After ``error`` nothing more can be expected of this process: the context is lost, or a capture was left half done."""
    if isinstance(error, RuntimeError) and "captur" in str(error).lower():
        return True
    try:
        torch.cuda.synchronize()
        torch.ones(1, device="cuda").item()
    except Exception:  # noqa: BLE001 - whatever it is
        return True
    return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.excinfo is not None and unusable(call.excinfo.value):
        item.config.stash[broken] = True
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if HERE not in item.path.parents:
        # Unlike a report's hook, this one is called for every test of a run that has loaded this file.
        return (yield)
    faulthandler.dump_traceback_later(seconds_of(item), exit=True, file=item.config.stash[stderr])
    try:
        done = yield
    finally:
        faulthandler.cancel_dump_traceback_later()
    if item.config.stash.get(broken, False):
        if hasattr(item.config, "workerinput"):
            # What there was to report was sent; at the usual end the process would wait for a device that does not answer.
            os._exit(GIVEN_UP)
        pytest.exit("the CUDA context is lost; with pytest-xdist the other checks would run in a new process", GIVEN_UP)
    return done

"""A pytest plugin that appends one JSON line to a file when a check ends: ``-p perf.gpu.records --records FILE``.

An interrupted run keeps its lines. Under pytest-xdist the controlling process writes, for all workers, and a worker that ends does not end
the run. ``--passed-before FILE`` lists checks, one per line, that are left out.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

MESSAGE = 2000


class Records:
    """Writes ``{"kind": "check", "name", "outcome", "seconds", "message"}``; outcome: passed, failed, error (outside the test), skipped."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._open: dict[str, dict[str, Any]] = {}
        self._written: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        begun = {"kind": "check", "name": report.nodeid, "outcome": "passed", "seconds": 0.0, "message": ""}
        record = self._open.setdefault(report.nodeid, begun)
        record["seconds"] = round(record["seconds"] + report.duration, 2)
        if report.failed and record["outcome"] != "failed":
            record |= {"outcome": "failed" if report.when not in ("setup", "teardown") else "error", "message": _end_of(report)}
        elif report.skipped and record["outcome"] == "passed":
            record |= {"outcome": "skipped", "message": _end_of(report)}
        # A worker that died is reported under another name, possibly for a check that it had reported before.
        if report.when not in ("setup", "call"):
            self._write(record)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write({"kind": "check", "name": report.nodeid, "outcome": "error", "seconds": 0.0, "message": _end_of(report)})

    def _write(self, record: dict[str, Any]) -> None:
        name = record["name"]
        self._open.pop(name, None)
        if name in self._written:
            return
        self._written.add(name)
        with self.file.open("a", encoding="utf-8") as sink:
            sink.write(json.dumps(record) + "\n")


def _end_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return f"{crash.message[:MESSAGE]} ({Path(crash.path).name}:{crash.lineno})"
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[-1])[:MESSAGE]
    return str(report.longrepr)[-MESSAGE:]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    parser.addoption("--records", type=Path, help="append one JSON line for each check to this file")
    parser.addoption("--passed-before", type=Path, help="leave out the checks that this file lists, one per line")


def pytest_configure(config: pytest.Config) -> None:
    """Start writing if ``--records`` is given, except in xdist's workers."""
    file = config.getoption("--records")
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Records(file))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Let xdist send to a worker that has just ended: it learns of the end next, and gives the worker's checks to another."""
    send = node.sendcommand

    def sendcommand(name: str, **arguments: object) -> None:
        with suppress(OSError):
            send(name, **arguments)

    node.sendcommand = sendcommand


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out checks that have passed, by whole names; ``--deselect`` would match beginnings."""
    file = config.getoption("--passed-before")
    passed = set(file.read_text(encoding="utf-8").splitlines()) if file is not None else set()
    out = [item for item in items if item.nodeid in passed]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item.nodeid not in passed]

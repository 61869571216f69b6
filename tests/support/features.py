"""docs/features.md from a test run: which features of which variant a green test showed. ``make features`` writes the page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphspec.config.catalog import VARIANTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "features.md"
HEAD = """# Features by variant

This page is written by `make features` from the tests that passed in that run (their marker `covers` says what they show). An empty
cell: no such test exists for the variant, or it has no meaning there. All of it on a CPU in float32; what a GPU has shown is in
[testing](testing.md).
"""


class FeatureTable:
    """A pytest plugin that collects the ``covers`` markers of tests by outcome."""

    def __init__(self) -> None:
        self.passed: dict[tuple[str, str], int] = defaultdict(int)
        self.failed: set[tuple[str, str]] = set()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        outcome = yield
        report = outcome.get_result()
        for marker in item.iter_markers("covers"):
            variant, *features = marker.args
            for feature in features:
                if report.failed:
                    self.failed.add((variant, feature))
                elif call.when == "call" and report.passed:
                    self.passed[variant, feature] += 1

    def pytest_sessionfinish(self) -> None:
        PAGE.write_text(page(self.passed, self.failed), encoding="utf-8")


def page(passed: dict[tuple[str, str], int], failed: set[tuple[str, str]]) -> str:
    """The page's text; a cell is the number of green tests, or ``failed``."""
    features = list(dict.fromkeys(feature for _, feature in (*passed, *failed)))
    names = list(VARIANTS)
    rows = [f"| feature | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for feature in sorted(features):
        cells = ["failed" if (n, feature) in failed else str(passed.get((n, feature), "")) for n in names]
        rows.append(f"| {feature} | {' | '.join(cells)} |")
    return "\n".join([HEAD, *rows]) + "\n"

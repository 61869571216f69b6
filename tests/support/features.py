"""docs/features.md from a test run: what green tests showed of each variant and of each family. ``make features`` writes the page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from graphspec.config.catalog import VARIANTS
from graphspec.facts.families import FAMILIES, find_family

PAGE = Path(__file__).resolve().parents[2] / "docs" / "features.md"
HEAD = """# What was tested with what

This page is written by `make features` from the tests that passed in that run: a number counts them, and an empty cell means that there is
no such test, or that it has no meaning there. All of it on a CPU in float32; what a GPU has shown is in [testing](testing.md).

"""
BY_VARIANT = """## By variant

Tests say what they show by their marker `covers`.

"""
BY_FAMILY = """## By family

Rows are those of `graphspec/facts/families.py`; tests name theirs by the marker `of_family`. *logits*: those of transformers. Variants,
*chain* and *tree*: greedy tokens of an engine are those of transformers. *compiled*: such tokens from compiled cycles. *native*: all layers
of a pass are one native op. *ranks*: logits of several ranks together. *codes*: weights of low precision in safetensors.

"""
COLUMNS = ("logits", "GGUF", "codes", *VARIANTS, "chain", "tree", "compiled", "native", "ranks")
"""Of the table by family."""


def of_family(architecture: str, *columns: str) -> pytest.MarkDecorator:
    """The marker of a test of a family.

    Args:
        architecture: one of the family's.
        columns: of the table, that a green run fills.
    """
    family = find_family(architecture)
    assert family is not None and not family.refused, architecture
    return pytest.mark.of_family(family.name, *_known(columns))


def shows(*columns: str) -> pytest.MarkDecorator:
    """The same where another marker of the test names the family."""
    return pytest.mark.of_family("", *_known(columns))


def _known(columns: tuple[str, ...]) -> tuple[str, ...]:
    assert set(columns) <= set(COLUMNS), columns
    return columns


def marked(names: Iterable[str], architecture: Callable[[str], str], *columns: str) -> list[Any]:
    """Cases of a test, each a name, with the marker of the family that ``architecture`` finds."""
    return [pytest.param(name, marks=of_family(architecture(name), *columns)) for name in names]


class FeatureTable:
    """A pytest plugin that counts the markers of tests by outcome and writes the page; with several processes, in the first of them."""

    def __init__(self) -> None:
        self.variants, self.families = Outcomes(), Outcomes()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        """Markers travel to the process that writes with the report."""
        outcome = yield
        properties = outcome.get_result().user_properties
        for marker in item.iter_markers("covers"):
            variant, *features = marker.args
            properties.append(("variants", [[variant], features]))
        markers = [marker.args for marker in item.iter_markers("of_family")]
        names = dict.fromkeys(name for name, *_ in markers if name)
        columns = dict.fromkeys(column for _, *columns in markers for column in columns)
        properties.append(("families", [list(names), list(columns)]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for table, value in report.user_properties:
            if table in ("variants", "families"):
                getattr(self, table).add(report, *value)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):
            PAGE.write_text(HEAD + variants_page(self.variants) + families_page(self.families), encoding="utf-8")


class Outcomes:
    """How many tests passed for a cell, and the cells in which one failed."""

    def __init__(self) -> None:
        self.passed: dict[tuple[str, str], int] = defaultdict(int)
        self.failed: set[tuple[str, str]] = set()

    def add(self, report: pytest.TestReport, names: Iterable[str], features: Iterable[str]) -> None:
        """Count one phase of a test in all of these cells."""
        for cell in ((name, feature) for name in names for feature in features):
            if report.failed:
                self.failed.add(cell)
            elif report.when == "call" and report.passed:
                self.passed[cell] += 1

    def cell(self, name: str, feature: str) -> str:
        """The number of green tests, or ``failed``."""
        return "failed" if (name, feature) in self.failed else str(self.passed.get((name, feature), ""))


def _table(corner: str, columns: Iterable[str], rows: Iterable[tuple[str, list[str]]]) -> str:
    columns = list(columns)
    lines = [f"| {corner} | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows)]) + "\n\n"


def variants_page(found: Outcomes) -> str:
    """The section by variant."""
    features = sorted({feature for _, feature in (*found.passed, *found.failed)})
    return BY_VARIANT + _table("feature", VARIANTS, ((each, [found.cell(name, each) for name in VARIANTS]) for each in features))


def families_page(found: Outcomes) -> str:
    """The section by family."""
    names = [family.name for family in FAMILIES if not family.refused]
    rows = ((name, [found.cell(name, column) for column in COLUMNS]) for name in names)
    return (BY_FAMILY + _table("family", COLUMNS, rows)).rstrip("\n") + "\n"

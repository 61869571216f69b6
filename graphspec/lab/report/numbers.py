"""Formats the numbers of the report. Imports neither torch nor plotly."""

from __future__ import annotations

import math

DASH = "\N{EN DASH}"
"""Shown in place of a missing value."""
TIMES = "\N{MULTIPLICATION SIGN}"


def spell(value: float | None, unit: str = "") -> str:
    """Three significant digits, thousands separated: ``12,345``, ``885``, ``1.68``, ``0.0421``; a dash for a missing value."""
    if value is None or not math.isfinite(value):
        return DASH
    size = abs(value)
    if size and size < 0.001:
        text = f"{value:.1e}"
    else:
        digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 or not size else 2 - math.floor(math.log10(size))
        text = f"{value:,.{digits}f}"
    return f"{text} {unit}".rstrip()


def spell_tick(value: float) -> str:
    """A round number on an axis: ``0.05``, ``2``, ``10,000``."""
    return f"{value:,g}"


def spell_count(count: float | None) -> str:
    """A mean of whole numbers: ``64``, ``63.5``; a dash for a missing value."""
    return DASH if count is None else f"{count:.1f}".removesuffix(".0")


def plural(count: int, word: str) -> str:
    """``1 round``, ``5 rounds``."""
    return f"{count} {word}" + ("" if count == 1 else "s")

"""What an engine is made of, printed: the plan, its buckets, every slot with its bytes, and one draft tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .report import draw_tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .engine.llm import LLM

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def show(llm: LLM, prompt: str, console: Console | None = None) -> None:
    """Print everything about ``llm``; ``prompt`` is what the drawn tree continues."""
    console = console or Console()
    described = llm.plan.describe()
    console.print(plan_table(described))
    console.print(buckets_table(described["buckets"], described["num_draft_tokens"], described["accept_width"]))
    console.print(slots_table(llm.slots()))
    if llm.plan.shape.num_steps:
        console.print("One draft tree (+ accepted, - rejected):")
        console.print(draw_tree(llm.draft_tree(prompt)))


def plan_table(described: Mapping[str, object]) -> Table:
    """Every number of the plan."""
    table = Table(title="plan", title_justify="left")
    table.add_column("key")
    table.add_column("value")
    for key, value in described.items():
        table.add_row(key, Text(str(value)))
    return table


def buckets_table(buckets: Sequence[int], nodes: int, accept_width: int) -> Table:
    """What one cycle of each bucket verifies and can commit."""
    table = Table(title="buckets", title_justify="left")
    for heading in ("lanes", "verify rows", "most tokens per cycle"):
        table.add_column(heading, justify="right")
    for lanes in buckets:
        table.add_row(str(lanes), str(lanes * nodes), str(lanes * accept_width))
    return table


def slots_table(slots: Iterable[tuple[str, Sequence[int], object, int]]) -> Table:
    """Name, shape, dtype and bytes of each static buffer, and their sum."""
    table = Table(title="slots", title_justify="left", show_footer=True)
    rows = list(slots)
    table.add_column("name", footer=f"{len(rows)} slots")
    table.add_column("shape")
    table.add_column("dtype")
    table.add_column("bytes", justify="right", footer=spell_bytes(sum(row[3] for row in rows)))
    for name, shape, dtype, size in rows:
        table.add_row(name, Text("[" + ", ".join(map(str, shape)) + "]"), str(dtype).removeprefix("torch."), spell_bytes(size))
    return table


def spell_bytes(size: float) -> str:
    """``1536`` as ``1.5 KiB``."""
    for unit in UNITS[:-1]:
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {UNITS[-1]}"

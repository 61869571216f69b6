"""``graphspec inspect``: the plan of an engine, its buckets, every slot with its bytes, and one draft tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ..errors import spell_bytes
from .draft_tree import draw_tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ..api.llm import LLM
    from ..graphs.capture import CaptureRecord
    from ..graphs.memory import MemoryPlan


def show(llm: LLM, prompt: str, console: Console | None = None) -> None:
    """Print everything about ``llm``; ``prompt`` is what the drawn tree continues.

    Raises:
        RequestError: a prompt that can't be served; nothing is printed.
    """
    console = console or Console()
    llm.check(prompt)
    described = llm.plan.describe()
    decoders = {f"{name} decoder": path for name, path in llm.decoders.items()}
    console.print(plan_table(described | decoders | {"ends of text": "; ".join(spelled_ends(llm)) or None}))
    console.print(buckets_table(described["buckets"], described["num_draft_tokens"], described["accept_width"]))
    console.print(slots_table(llm.slots()))
    console.print(memory_table(llm.memory))
    if llm.plan.shape.num_steps:
        console.print("One draft tree (+ accepted, - rejected):")
        console.print(draw_tree(llm.draft_tree(prompt)))
        console.print(programs_table(llm.capture_report()))


def spelled_ends(llm: LLM) -> list[str]:
    """Each id that ends a text, with its text and what says so."""
    return [f"{token} {llm.token_text(token)!r} ({source})" for token, source in sorted(llm.ends.items())]


def plan_table(described: Mapping[str, object]) -> Table:
    """Every number of the plan, and how decoder layers run."""
    table = Table("key", "value", title="plan", title_justify="left")
    for key, value in described.items():
        table.add_row(key, Text(str(value)))
    return table


def buckets_table(buckets: Sequence[int], nodes: int, accept_width: int) -> Table:
    """Nodes that one cycle of each bucket verifies, and tokens that it can commit."""
    headings = (Column(heading, justify="right") for heading in ("lanes", "verify rows", "most tokens per cycle"))
    table = Table(*headings, title="buckets", title_justify="left")
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


def memory_table(memory: MemoryPlan) -> Table:
    """Memory that the engine holds, line by line, and its budget."""
    table = Table(title="memory", title_justify="left", show_footer=True)
    table.add_column("what", footer=f"{spell_bytes(memory.budget)} allowed: {memory.fraction:g} of {spell_bytes(memory.available)}")
    table.add_column("bytes", justify="right", footer=spell_bytes(memory.total))
    for line in memory.lines:
        table.add_row(line.name, ("~" if line.estimate else "") + spell_bytes(line.size))
    table.add_row(f"(largest num_pages that fits: {memory.largest_num_pages})", f"{spell_bytes(memory.page_bytes)} a page")
    return table


def programs_table(records: Iterable[CaptureRecord]) -> Table:
    """Seconds and bytes of building each program."""
    headings = (Column(heading, justify="right") for heading in ("warm-up", "capture", "graph memory"))
    table = Table("program", *headings, title="programs", title_justify="left")
    for record in records:
        capture = "-" if record.capture_seconds is None else f"{record.capture_seconds:.2f} s"
        held = "-" if record.pool_bytes is None else spell_bytes(record.pool_bytes)
        table.add_row(record.name, f"{record.warm_up_seconds:.2f} s", capture, held)
    return table

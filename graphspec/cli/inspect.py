"""``graphspec inspect``: the plan of an engine, its buckets, every slot with its bytes, and one draft tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from ..errors import ResourceError, spell_bytes
from ..host.terminal import table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.table import Table

    from ..api.llm import LLM
    from ..api.outputs import TreeSnapshot
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
    return table("plan", ("key", "value"), ((key, str(value)) for key, value in described.items()), ("key", "value"))


def buckets_table(buckets: Sequence[int], nodes: int, accept_width: int) -> Table:
    """Nodes that one cycle of each bucket verifies, and tokens that it can commit."""
    rows = ((str(lanes), str(lanes * nodes), str(lanes * accept_width)) for lanes in buckets)
    return table("buckets", ("lanes", "verify rows", "most tokens per cycle"), rows)


def slots_table(slots: Iterable[tuple[str, Sequence[int], object, int]]) -> Table:
    """Name, shape, dtype and bytes of each static buffer, and their sum."""
    slots = list(slots)
    rows = [
        (name, "[" + ", ".join(map(str, shape)) + "]", str(dtype).removeprefix("torch."), spell_bytes(size))
        for name, shape, dtype, size in slots
    ]
    footers = (f"{len(rows)} slots", "", "", spell_bytes(sum(size for *_, size in slots)))
    return table("slots", ("name", "shape", "dtype", "bytes"), rows, ("name", "shape", "dtype"), footers=footers)


def memory_table(memory: MemoryPlan) -> Table:
    """Memory that the engine holds, line by line, and its budget."""
    rows = [(line.name, ("~" if line.estimate else "") + spell_bytes(line.size)) for line in memory.lines]
    rows.append((f"(largest num_pages that fits: {memory.largest_num_pages})", f"{spell_bytes(memory.page_bytes)} a page"))
    allowed = f"{spell_bytes(memory.budget)} allowed: {memory.fraction:g} of {spell_bytes(memory.available)}"
    return table("memory", ("what", "bytes"), rows, ("what",), footers=(allowed, spell_bytes(memory.total)))


def programs_table(records: Iterable[CaptureRecord]) -> Table:
    """Seconds and bytes of building each program."""
    rows = (
        (
            record.name,
            f"{record.warm_up_seconds:.2f} s",
            "-" if record.capture_seconds is None else f"{record.capture_seconds:.2f} s",
            "-" if record.pool_bytes is None else spell_bytes(record.pool_bytes),
        )
        for record in records
    )
    return table("programs", ("program", "warm-up", "capture", "graph memory"), rows, ("program",))


def draw_tree(snapshot: TreeSnapshot) -> Tree:
    """One speculated tree: the root on top, ``+`` and green where the target agreed. Nodes that hold no draft are left out.

    Raises:
        ResourceError: a node's parent does not come before it.
    """
    branches: dict[int, Tree] = {}
    for node, parent in enumerate(snapshot.parent_N):
        text, accepted = snapshot.text_N[node], snapshot.accepted[node]
        label = Text(f"{'+' if accepted or node == 0 else '-'} {text!r}", style="bold green" if accepted or node == 0 else "dim")
        if node == 0:
            branches[0] = Tree(label, guide_style="dim")
        elif snapshot.token_N[node] >= 0:
            if parent not in branches:
                raise ResourceError(f"parent_N[{node}]", "a node before it", parent)
            branches[node] = branches[parent].add(label)
    return branches[0]

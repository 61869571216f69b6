"""Loads and stores of one program that nothing orders, found in what the compiler made of a kernel.

The threads of a program run at different speeds. The compiler orders what they do to shared memory, never what they do to global memory: it
may give the store of a place to one thread and the load to another, or load in two layouts what the source loads once. So a load and a
store that may meet, whichever is first, need ``tl.debug_barrier()`` between them, and so do two stores that may meet: in two layouts one
place belongs to two threads, and either value may be the one that stays. The interpreter runs a program as one thread, and a GPU shows a
missing barrier only when it pleases.

Between programs it is a counter that orders: each stores its part, waits for its own threads, and adds 1 with acquire and release at the
scope of the GPU; the last to arrive loads the parts of all.

The other way to read too early is between kernels: with programmatic launch nothing may be read before ``gdc_wait`` but what no kernel
writes.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

DISJOINT: dict[str, frozenset[str]] = {
    # A level reads the scores of the levels before it and writes its own.
    "_draft_level": frozenset({"score"}),
    # The bin of top-p goes after that of top-k, which is read.
    "_kth_largest": frozenset({"chosen"}),
}
"""Arguments of a kernel that it reads in one place and writes in another, and why."""

STORED_ONCE: dict[str, frozenset[str]] = {
    # A block of tokens for every turn of a loop.
    "_block_tokens": frozenset({"out"}),
    # Header, state and tokens of a lane's message; a column of the features for every entry.
    "_commit_rows": frozenset({"ring", "window_feature"}),
    # A choice belongs to one turn of the loop, and so does a token of the sum.
    "_down": frozenset({"partial", "out"}),
    # Steps before this level, and this one.
    "_draft_level": frozenset({"beam_path"}),
    # A rank for every turn of the loop.
    "_draft_topk": frozenset({"score", "part_best", "token"}),
    # A choice belongs to one turn of the loop.
    "_gate_up": frozenset({"out"}),
    # Bin and rank of a row.
    "_histogram": frozenset({"chosen"}),
    # Bin of top-p and the mass before it; every step gets places in the list of its own from a counter.
    "_kth_largest": frozenset({"chosen", "values"}),
    # Latent and the two halves of the rotated key; the two halves of the rotated query.
    "_latent_kv_write": frozenset({"out", "pool"}),
    # Every step gets places in the list of its own from a counter.
    "_least": frozenset({"values"}),
    # Gate and up have a half each.
    "_linear": frozenset({"partial"}),
    # A level for every turn of the loop.
    "_marginal_pool": frozenset({"parent", "score", "token"}),
    # A message names a column of a row once.
    "_mail_apply": frozenset({"lane_table"}),
    # The two halves of a head that rotate, and the rest.
    "_rope_kv_write": frozenset({"out", "pool"}),
    # A token for every turn of a loop.
    "_scan_tokens": frozenset({"out"}),
    # One of three ways out of the kernel writes a row; peaks and totals have a half each, and a unit, a program and a row a slot; two
    # counters.
    "_tree_attention": frozenset({"out", "part_acc", "part_stat", "counters"}),
    # A block of steps for every turn of the loop.
    "_tree_walk": frozenset({"path"}),
    # A word for every turn of the loop.
    "_verify_rows": frozenset({"out_ancestors"}),
    # A node for every turn of a loop.
    "_walk_nodes": frozenset({"out"}),
}
"""Arguments of a kernel that it stores in more than one place, no place twice between two barriers, and why.

``tests/kernels/fused/test_stores.py`` holds both tables against the addresses of interpreted programs."""

CONSTANT: dict[str, frozenset[str]] = {
    "_latent_kv_write": frozenset({"weight"}),
    "_moe_route": frozenset({"bias"}),
}
"""Arguments that a kernel may read before it waits: weights."""

_NAME = re.compile(r"%[\w$.-]+")
_POINTER_ARGUMENT = re.compile(r"(%[\w$.-]+): !tt\.ptr")
_CARRIED = re.compile(r"(%[\w$.-]+) = (%[\w$.-]+)")
_RESULT = re.compile(r"(%[\w$.-]+)(?::\d+)? = (.*)")
_LOAD = re.compile(r"(?:tt\.load|ttg\.async_copy_global_to_local) (%[\w$.-]+)")
_STORE = re.compile(r"tt\.store (%[\w$.-]+)")
_ATOMIC = re.compile(r"tt\.atomic_\w+ (?:\w+, )?(\w+), (\w+), (%[\w$.-]+)")
_ORDERS = ("acq_rel", "gpu")
"""Order and scope of an atomic operation by which programs show each other what they stored."""
_BARRIERS = ("gpu.barrier", "ttg.barrier")
_LOOPS = ("scf.for", "scf.while")
_WAIT = "griddepcontrol.wait"


@dataclass(slots=True)
class _Operation:
    """A line, and the lines of its regions."""

    text: str
    regions: list[list[_Operation]] = field(default_factory=list)


def _parsed(lines: Iterator[str]) -> tuple[list[_Operation], str]:
    """Operations up to the end of the region, and the line that ends it."""
    operations: list[_Operation] = []
    for line in lines:
        text = line.strip()
        if text.startswith("}"):
            return operations, text
        operation = _Operation(text)
        while text.endswith("{"):
            region, text = _parsed(lines)
            operation.regions.append(region)
        operations.append(operation)
    return operations, ""


class _Walk:
    """Follows the control flow and remembers, for every argument, what was done to it.

    ``load``, ``store``: since the last barrier. ``part``: written, and no arrival since. ``counted``: a part when programs were counted by
    an operation that does not order. ``shared``: a part at an arrival, which other programs may load after theirs.
    """

    def __init__(self, uses: Counter[str]) -> None:
        self.uses = uses
        self.origins: dict[str, frozenset[str]] = {}
        self.crossed: set[str] = set()
        self.overwritten: set[str] = set()
        self.early: set[str] = set()
        self.unseen: set[str] = set()
        self.merged: set[str] = set()
        self.counts: set[str] = set()
        self.elected = False
        self.waited = False

    def arguments(self, name: str) -> frozenset[str]:
        """The kernel's arguments that a pointer comes from."""
        if name not in self.origins:
            raise ValueError(f"a pointer of unknown origin: {name}")
        return self.origins[name]

    def define(self, operation: _Operation) -> None:
        """Note where the pointers come from that an operation makes or carries."""
        text = operation.text
        if text.startswith("tt.func"):
            self.origins.update((name, frozenset({name[1:]})) for name in _POINTER_ARGUMENT.findall(text))
            return
        result = _RESULT.fullmatch(text)
        expression = result[2] if result else text
        if result and (_ATOMIC.match(expression) or self.counts.intersection(self._read(operation, expression))):
            self.counts.add(result[1])
        if expression.startswith(_LOOPS):
            carried = [(inner, outer) for inner, outer in _CARRIED.findall(expression) if outer in self.origins]
            self.origins.update((inner, self.origins[outer]) for inner, outer in carried)
        if result is None or _LOAD.match(expression):
            return
        names = self._read(operation, expression)
        if expression.startswith("tt.addptr"):
            names = names[:1]
        sources = [self.origins[name] for name in names if name in self.origins]
        if sources:
            self.origins[result[1]] = frozenset().union(*sources)

    @staticmethod
    def _read(operation: _Operation, expression: str) -> list[str]:
        """Names that an operation reads, and those that its regions yield."""
        yielded = (inner.text for region in operation.regions for inner in region if inner.text.startswith("scf.yield"))
        return [name for text in (expression, *yielded) for name in _NAME.findall(text)]

    def touch(self, text: str, touched: dict[str, set[str]]) -> None:
        """Note what one operation loads, stores or orders."""
        if any(barrier in text for barrier in _BARRIERS):
            for kinds in touched.values():
                kinds -= {"load", "store"}
        self.waited |= _WAIT in text
        if atomic := _ATOMIC.search(text):
            self.count(text, atomic, touched)
        for kind, other, match in (("load", "store", _LOAD.search(text)), ("store", "load", _STORE.search(text))):
            if match is None:
                continue
            for argument in self.arguments(match[1]):
                before = touched.setdefault(argument, set())
                if other in before:
                    self.crossed.add(argument)
                if kind == "store" and "store" in before:
                    self.overwritten.add(argument)
                before.add(kind)
                if kind == "store":
                    before.add("part")
                elif "counted" in before:
                    self.unseen.add(argument)
                elif "shared" in before:
                    self.merged.add(argument)
                if not self.waited:
                    self.early.add(argument)

    def count(self, text: str, atomic: re.Match[str], touched: dict[str, set[str]]) -> None:
        """Note an atomic operation: a store, and an arrival where its result is used and no earlier count decides who gets there."""
        result = _RESULT.fullmatch(text)
        if result is not None and self.uses[result[1]] > 1 and not self.elected:
            ordered = atomic.group(1, 2) == _ORDERS
            for argument, kinds in touched.items():
                if "part" not in kinds:
                    continue
                if ordered and "store" in kinds:
                    self.unseen.add(argument)
                if ordered:
                    kinds -= {"part", "counted"}
                kinds.add("shared" if ordered else "counted")
        for argument in self.arguments(atomic[3]):
            touched.setdefault(argument, set()).add("part")
            if not self.waited:
                self.early.add(argument)

    def run(self, operations: Sequence[_Operation], touched: dict[str, set[str]]) -> None:
        """Go through operations in their order; ``touched`` is what came before and what is left for those that follow."""
        for operation in operations:
            text = operation.text
            self.touch(text, touched)
            expression = text.partition(" = ")[2] if text.startswith("%") else text
            waited, elected = self.waited, self.elected
            if expression.startswith(("scf.if", "cf.cond_br")):
                self.elected |= _NAME.findall(expression)[0] in self.counts
            if expression.startswith("scf.if"):
                branches = [_copied(touched) for _ in range(2)]
                for region, branch in zip(operation.regions, branches, strict=False):
                    self.waited = waited
                    self.run(region, branch)
                # Not every path has waited.
                self.waited, self.elected = waited, elected
                touched.clear()
                _merge(touched, branches)
            elif expression.startswith(_LOOPS):
                self.define(operation)
                # Twice: the second time around meets what the first has left.
                for _ in range(2):
                    once = _copied(touched)
                    for region in operation.regions:
                        self.run(region, once)
                    _merge(touched, [once])
                self.waited = waited
            elif expression.startswith(("tt.func", "module")):
                self.define(operation)
                for region in operation.regions:
                    self.run(region, touched)
            self.define(operation)


def _copied(touched: dict[str, set[str]]) -> dict[str, set[str]]:
    return {argument: set(kinds) for argument, kinds in touched.items()}


def _merge(touched: dict[str, set[str]], others: Iterable[dict[str, set[str]]]) -> None:
    for other in others:
        for argument, kinds in other.items():
            touched.setdefault(argument, set()).update(kinds)


@functools.lru_cache(maxsize=1)
def _walked(ttgir: str) -> _Walk:
    # Locations end most lines; what opens a region has none.
    lines = [re.sub(r"\s+loc\(.*\)$", "", line) for line in ttgir.splitlines()]
    walk = _Walk(Counter(name for line in lines for name in _NAME.findall(line)))
    walk.run(_parsed(iter(lines))[0], {})
    return walk


def unordered(kernel: str, ttgir: str) -> list[str]:
    """Arguments of ``kernel`` that it both loads and stores with no barrier between, and that are not known to be disjoint.

    Args:
        kernel: name of the kernel.
        ttgir: Triton's GPU dialect, as in ``CompiledKernel.asm``. Atomic operations are no stores here.

    Raises:
        ValueError: a pointer can't be followed to an argument.
    """
    return sorted(_walked(ttgir).crossed - DISJOINT.get(kernel, frozenset()))


def overwritten(kernel: str, ttgir: str) -> list[str]:
    """Arguments of ``kernel`` that two stores reach with no barrier between, and that are not known to be stored in different places.

    A store in a loop is two. Those of one operation are not looked at: what it stores twice, it stores as the source says.

    Args:
        kernel: name of the kernel.
        ttgir: as for :func:`unordered`.

    Raises:
        ValueError: a pointer can't be followed to an argument.
    """
    return sorted(_walked(ttgir).overwritten - STORED_ONCE.get(kernel, frozenset()))


def unseen(ttgir: str) -> list[str]:
    """Arguments of a kernel that programs write parts of and load after an arrival that does not show them what the others wrote.

    The arrival must acquire and release at the scope of the GPU, with a barrier between it and the stores of its program's other threads.

    Args:
        ttgir: as for :func:`unordered`.

    Raises:
        ValueError: a pointer can't be followed to an argument.
    """
    return sorted(_walked(ttgir).unseen)


def merged(ttgir: str) -> list[str]:
    """Arguments of a kernel that programs write parts of and load after an arrival: what the last to arrive has from the others.

    Args:
        ttgir: as for :func:`unordered`.

    Raises:
        ValueError: a pointer can't be followed to an argument.
    """
    return sorted(_walked(ttgir).merged)


def early(kernel: str, ttgir: str) -> list[str]:
    """Arguments of ``kernel``, compiled for programmatic launch, that it touches before it waits though other kernels may write them.

    Args:
        kernel: name of the kernel.
        ttgir: as for :func:`unordered`.

    Raises:
        ValueError: a pointer can't be followed to an argument, or the kernel never waits.
    """
    walk = _walked(ttgir)
    if not walk.waited:
        raise ValueError(f"{kernel} does not wait for the kernel before it")
    return sorted(walk.early - CONSTANT.get(kernel, frozenset()))

"""Static detection of data races in global memory, from the GPU dialect of a compiled kernel.

Within a program: Triton synchronises threads around shared memory, never around global memory. It may assign the store of an address to one
thread and the load to another, or load in two layouts what the source loads once. So a load and a store of the same address, in either
order, need ``tl.debug_barrier()`` between them, and so do two stores: with different layouts an address belongs to two threads, and either
value may win. The interpreter runs a program as one thread, and a GPU shows a missing barrier only occasionally.

Between programs: each stores its part, synchronises its threads, and increments a counter with acquire-release semantics at GPU scope; the
last to arrive loads all parts.

Between kernels: with programmatic launch, only memory that no kernel writes may be read before ``gdc_wait``.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

DISJOINT: dict[str, frozenset[str]] = {
    # A level reads the scores of earlier levels and writes its own.
    "_draft_level": frozenset({"score"}),
    # Reads the bin and rank of top-k, writes those of top-p.
    "_kth_largest": frozenset({"chosen"}),
}
"""Arguments that a kernel reads and writes at different addresses, and why."""

STORED_ONCE: dict[str, frozenset[str]] = {
    # Each iteration stores its own block of tokens.
    "_block_tokens": frozenset({"out"}),
    # Header, state and tokens of a lane's ring entry; each feature entry has its own columns.
    "_commit_rows": frozenset({"ring", "window_feature"}),
    # Each choice belongs to one iteration, and so does each token of the sum.
    "_down": frozenset({"partial", "out"}),
    # Steps before this level, and this level.
    "_draft_level": frozenset({"beam_path"}),
    # Each iteration stores one rank.
    "_draft_topk": frozenset({"score", "part_best", "token"}),
    # Each choice belongs to one iteration.
    "_gate_up": frozenset({"out"}),
    # Bin and rank of a row.
    "_histogram": frozenset({"chosen"}),
    # Bin of top-p and the mass before it; a counter gives every step its own part of the list.
    "_kth_largest": frozenset({"chosen", "values"}),
    # Latent and the two halves of the rotated key; the two halves of the rotated query.
    "_latent_kv_write": frozenset({"out", "pool"}),
    # A counter gives every step its own part of the list.
    "_least": frozenset({"values"}),
    # Gate and up have a half each, and so have the halves of a head that rotates.
    "_linear": frozenset({"partial", "out", "pool"}),
    # As of _tree_attention; parts of blocks that the window reaches have their own rows for each token.
    "_position_attention": frozenset({"out", "part_acc", "part_stat", "counters"}),
    # Each iteration stores one level.
    "_marginal_pool": frozenset({"parent", "score", "token"}),
    # A message names each column of a row once.
    "_mail_apply": frozenset({"lane_table"}),
    # The two halves of a head that rotate, and the rest.
    "_rope_kv_write": frozenset({"out", "pool"}),
    # Each iteration stores one token.
    "_scan_tokens": frozenset({"out"}),
    # Each row is written on one of three exits; peaks and totals have separate halves, and every (unit or program, row) its own slot;
    # two counters.
    "_tree_attention": frozenset({"out", "part_acc", "part_stat", "counters"}),
    # Each iteration stores its own block of steps.
    "_tree_walk": frozenset({"path"}),
    # Each iteration stores one word.
    "_verify_rows": frozenset({"out_ancestors"}),
    # Each iteration stores one node.
    "_walk_nodes": frozenset({"out"}),
}
"""Arguments that several stores of a kernel write, never the same address twice between two barriers, and why.

``tests/kernels/fused/test_stores.py`` checks both tables against the addresses of interpreted programs."""

CONSTANT: dict[str, frozenset[str]] = {
    "_latent_kv_write": frozenset({"weight"}),
    "_moe_route": frozenset({"bias"}),
}
"""Arguments that a kernel may read before ``gdc_wait``: weights."""

_NAME = re.compile(r"%[\w$.-]+")
_POINTER_ARGUMENT = re.compile(r"(%[\w$.-]+): !tt\.ptr")
_CARRIED = re.compile(r"(%[\w$.-]+) = (%[\w$.-]+)")
_RESULT = re.compile(r"(%[\w$.-]+)(?::\d+)? = (.*)")
_LOAD = re.compile(r"(?:tt\.load|ttg\.async_copy_global_to_local) (%[\w$.-]+)")
_STORE = re.compile(r"tt\.store (%[\w$.-]+)")
_ATOMIC = re.compile(r"tt\.atomic_\w+ (?:\w+, )?(\w+), (\w+), (%[\w$.-]+)")
_ORDERS = ("acq_rel", "gpu")
"""Semantics and scope that an atomic operation needs to publish a program's stores."""
_BARRIERS = ("gpu.barrier", "ttg.barrier")
_LOOPS = ("scf.for", "scf.while")
_WAIT = "griddepcontrol.wait"


@dataclass(slots=True)
class _Operation:
    """A line of the listing, with the operations of its regions."""

    text: str
    regions: list[list[_Operation]] = field(default_factory=list)


def _parsed(lines: Iterator[str]) -> tuple[list[_Operation], str]:
    """Parse operations up to the end of the region; also returns the line that ends it."""
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
    """Follows the control flow and tracks accesses per argument.

    ``load``, ``store``: accessed since the last barrier. ``part``: written since the last arrival. ``counted``: a part at an atomic
    operation that counts programs without ordering memory. ``shared``: a part at an arrival, which later programs may load.
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
        """The kernel's arguments that a pointer may be derived from."""
        if name not in self.origins:
            raise ValueError(f"a pointer of unknown origin: {name}")
        return self.origins[name]

    def define(self, operation: _Operation) -> None:
        """Record which arguments the results of an operation are derived from."""
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
        """Operands of an operation, and of the yields of its regions."""
        yielded = (inner.text for region in operation.regions for inner in region if inner.text.startswith("scf.yield"))
        return [name for text in (expression, *yielded) for name in _NAME.findall(text)]

    def touch(self, text: str, touched: dict[str, set[str]]) -> None:
        """Record the accesses and barriers of one operation."""
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
        """Record an atomic operation: a store, and an arrival if its result is used and no earlier count decides which programs run it."""
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
        """Process operations in order; ``touched`` holds pending accesses and is updated in place."""
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
                # Only some paths have waited.
                self.waited, self.elected = waited, elected
                touched.clear()
                _merge(touched, branches)
            elif expression.startswith(_LOOPS):
                self.define(operation)
                # Twice: the second iteration may race with the first.
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
    # Most lines end in a location; lines that open a region have none.
    lines = [re.sub(r"\s+loc\(.*\)$", "", line) for line in ttgir.splitlines()]
    walk = _Walk(Counter(name for line in lines for name in _NAME.findall(line)))
    walk.run(_parsed(iter(lines))[0], {})
    return walk


def unordered(kernel: str, ttgir: str) -> list[str]:
    """Arguments that ``kernel`` loads and stores with no barrier between, except those in :data:`DISJOINT`.

    Args:
        kernel: name of the kernel.
        ttgir: Triton's GPU dialect, as in ``CompiledKernel.asm``. Atomic operations do not count as stores here.

    Raises:
        ValueError: a pointer can't be traced to an argument.
    """
    return sorted(_walked(ttgir).crossed - DISJOINT.get(kernel, frozenset()))


def overwritten(kernel: str, ttgir: str) -> list[str]:
    """Arguments that two stores of ``kernel`` write with no barrier between, except those known to be written at different addresses.

    A store in a loop counts as two. Addresses within one store operation are not compared.

    Args:
        kernel: name of the kernel.
        ttgir: as for :func:`unordered`.

    Raises:
        ValueError: a pointer can't be traced to an argument.
    """
    return sorted(_walked(ttgir).overwritten - STORED_ONCE.get(kernel, frozenset()))


def unseen(ttgir: str) -> list[str]:
    """Arguments of which programs write parts and load others' parts after an arrival that does not order memory.

    The arrival must have acquire-release semantics at GPU scope, with a barrier between it and the stores of the program's other threads.

    Args:
        ttgir: as for :func:`unordered`.

    Raises:
        ValueError: a pointer can't be traced to an argument.
    """
    return sorted(_walked(ttgir).unseen)


def merged(ttgir: str) -> list[str]:
    """Arguments of which programs write parts, and the last program to arrive loads all parts.

    Args:
        ttgir: as for :func:`unordered`.

    Raises:
        ValueError: a pointer can't be traced to an argument.
    """
    return sorted(_walked(ttgir).merged)


def early(kernel: str, ttgir: str) -> list[str]:
    """Arguments that ``kernel``, compiled for programmatic launch, accesses before ``gdc_wait`` although other kernels may write them.

    Args:
        kernel: name of the kernel.
        ttgir: as for :func:`unordered`.

    Raises:
        ValueError: a pointer can't be traced to an argument, or the kernel never waits.
    """
    walk = _walked(ttgir)
    if not walk.waited:
        raise ValueError(f"{kernel} does not wait for the kernel before it")
    return sorted(walk.early - CONSTANT.get(kernel, frozenset()))

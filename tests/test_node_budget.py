"""How many launches a compiled cycle is, counted in the wrapper Inductor writes for a GPU that is not there.

Every launch costs about a microsecond whatever it does, so the budgets here are speed that can be tested on any machine. A figure above its
budget is a regression; one below it is progress, and the budget follows.
"""

from __future__ import annotations

from typing import Any

from graphspec.shapes import CycleShape
from tests._codegen import Launches, launches_of
from tests._shapes_8b import fake_cycle

TREE, CHAIN, PLAIN = CycleShape(5, 4, 8), CycleShape(7, 1, 8), CycleShape(0, 1, 1)


def count(shape: CycleShape, num_layers: int, **keys: Any) -> Launches:
    with fake_cycle(shape, num_layers, **keys) as cycle:
        return launches_of(cycle.program())


def test_print() -> None:
    for shape in (TREE, CHAIN, PLAIN):
        found = count(shape, 4, numerics="batch_invariant")
        print(shape, len(found), found.kinds, found.host_marks)
        for kind, name in found.names:
            print("   ", kind, name)

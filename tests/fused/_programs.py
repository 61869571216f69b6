"""Programs of an interpreted kernel in another order than the interpreter's own."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from triton.runtime.interpreter import interpreter_builder


@contextmanager
def program_order(seed: int | None) -> Iterator[list[int]]:
    """Inside, every launch runs its programs backwards (``seed`` None) or shuffled. Yields how many programs each launch had."""
    place, rng, launches = interpreter_builder.set_grid_idx, random.Random(seed), []
    order: list[int] = []

    def moved(x: int, y: int, z: int) -> None:
        _, height, depth = interpreter_builder.grid_dim
        index = (x * height + y) * depth + z
        if index == 0:
            launches.append(math.prod(interpreter_builder.grid_dim))
            order[:] = range(launches[-1] - 1, -1, -1)
            if seed is not None:
                rng.shuffle(order)
        index = order[index]
        place(index // (height * depth), index // depth % height, index % depth)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter_builder, "set_grid_idx", moved)
        yield launches


ORDERS = pytest.mark.parametrize("order", [None, 1, 2], ids=["backwards", "shuffled", "shuffled-again"])

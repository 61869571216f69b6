"""Runs the programs of an interpreted kernel in other orders than the interpreter's own, or interleaved."""

from __future__ import annotations

import inspect
import math
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, interpreter_builder


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


class _Together:
    """A kernel whose programs run in one thread each, one at a time; the next is drawn at every atomic operation."""

    def __init__(self, kernel: Callable[..., None], rng: random.Random, steps: list[int]) -> None:
        # What the interpreter looks up in a kernel.
        self.__globals__, self.__annotations__, self.__signature__ = kernel.__globals__, kernel.__annotations__, inspect.signature(kernel)
        self.__name__ = kernel.__name__
        self.kernel, self.rng, self.steps = kernel, rng, steps
        self.programs: list[tuple[int, ...]] = []
        self.turn, self.waiting, self.changed = -1, set[int](), threading.Condition()
        self.ended = 0

    def __call__(self, **arguments: Any) -> None:
        """Notes a program; the last one of the launch starts them all."""
        self.programs.append(interpreter_builder.grid_idx)
        if len(self.programs) < math.prod(interpreter_builder.grid_dim):
            return
        threads = [threading.Thread(target=self._run, args=(index, arguments)) for index in range(len(self.programs))]
        self.waiting = set(range(len(threads)))
        for thread in threads:
            thread.start()
        self.draw()
        for thread in threads:
            thread.join()
        assert self.ended == len(threads), "a program failed; its thread has shown why"

    def draw(self) -> None:
        with self.changed:
            self.turn = self.rng.choice(sorted(self.waiting)) if self.waiting else -1
            self.steps.append(self.turn)
            self.changed.notify_all()

    def wait(self, index: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.turn == index)
        interpreter_builder.set_grid_idx(*self.programs[index])

    def give_way(self) -> None:
        """To another program that has not ended, or to itself."""
        index = self.turn
        self.draw()
        self.wait(index)

    def _run(self, index: int, arguments: dict[str, Any]) -> None:
        self.wait(index)
        try:
            self.kernel(**arguments)
            self.ended += 1
        finally:
            self.waiting.discard(index)
            self.draw()


@contextmanager
def side_by_side(seed: int) -> Iterator[list[int]]:
    """Inside, the programs of a launch run interleaved at their atomic operations. Yields which program each step was of."""
    rng, steps, running = random.Random(seed), list[int](), list[_Together]()
    started, atomic = GridExecutor.__init__, InterpreterBuilder.create_atomic_rmw

    def start(self: Any, fn: Callable[..., None], *arguments: Any) -> None:
        running[:] = [_Together(fn, rng, steps)]
        started(self, running[0], *arguments)

    def interleaved(self: Any, *arguments: Any) -> Any:
        running[0].give_way()
        return atomic(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__init__", start)
        patch.setattr(InterpreterBuilder, "create_atomic_rmw", interleaved)
        yield steps


ORDERS = pytest.mark.parametrize("order", [None, 1, 2], ids=["backwards", "shuffled", "shuffled-again"])

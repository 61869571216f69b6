"""Depth policies for tests."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from graphspec.graphs.programs import Key
from graphspec.graphs.stages.mailbox import Message
from graphspec.plan.plan import Plan
from graphspec.shapes import GraphKey


class RandomDepth:
    """Random depths of the bucket, each for some cycles, depth 0 for longer. Records its arguments."""

    def __init__(self, plan: Plan, seed: int = 0) -> None:
        self.plan, self.rng = plan, random.Random(seed)
        self.depth: int | None = None
        self.reported: list[tuple[int, int, list[int]]] = []

    def choose(self, bucket: int, lanes: int, drafts: int | None) -> int:
        depths = self.plan.depths_of(bucket)
        if self.depth not in depths or self.rng.random() > (0.5 if self.depth else 0.8):
            self.depth = self.rng.choice(depths)
        assert self.depth is not None
        return self.depth

    def observe(self, bucket: int, depth: int, accepted: Sequence[int]) -> None:
        assert all(0 <= run <= depth for run in accepted) and len(accepted) <= bucket
        self.reported.append((bucket, depth, list(accepted)))


class ScriptedDepth:
    """A given sequence of depths, then the last one."""

    def __init__(self, depths: Iterable[int]) -> None:
        self.depths = list(depths)

    def choose(self, bucket: int, lanes: int, drafts: int | None) -> int:
        return self.depths.pop(0) if len(self.depths) > 1 else self.depths[0]

    def observe(self, bucket: int, depth: int, accepted: Sequence[int]) -> None:
        pass


class Launches:
    """A launcher that records the programs of the cycles it launched."""

    def __init__(self, cycle: Any) -> None:
        self.cycle, self.keys = cycle, list[GraphKey]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cycle, name)

    def launch(self, key: Key, message: Message) -> int:
        if isinstance(key, GraphKey):
            self.keys.append(key)
        ticket: int = self.cycle.launch(key, message)
        return ticket

    @property
    def depths(self) -> set[int]:
        """Depths of the cycles; -1: one in which the drafter caught up."""
        return {-1 if key.catch_up else key.shape.num_steps for key in self.keys}

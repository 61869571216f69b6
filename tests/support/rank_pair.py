"""Two ranks that serve one engine after another: processes are expensive, and an engine whose group exists starts none."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from graphspec import LLM


class RankPair:
    """Rank 0 of two; :meth:`engine` makes engines of both."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child

    def engine(self, *arguments: Any, **keys: Any) -> LLM:
        """``LLM(*arguments, **keys)`` on both ranks. Close it before the next one is made."""
        assert self._child.stdin is not None
        pickle.dump((arguments, keys), self._child.stdin)
        self._child.stdin.flush()
        return LLM(*arguments, **keys, tensor_parallel=2)


@contextmanager
def rank_pair(folder: Path) -> Iterator[RankPair]:
    """Start the second rank; the rendezvous is a file in ``folder``."""
    store = folder / "store"
    child = subprocess.Popen([sys.executable, "-m", __name__, str(store)], stdin=subprocess.PIPE)
    try:
        join(store, 0)
        yield RankPair(child)
    finally:
        child.kill()
        child.wait()
        dist.destroy_process_group()


def join(store: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def follow(store: Path) -> None:
    """Serve rank 0 until it has ended: one engine after another, each until it is closed."""
    join(store, 1)
    while True:
        arguments, keys = pickle.load(sys.stdin.buffer)
        try:
            LLM(*arguments, **keys, tensor_parallel=2)
        except SystemExit:
            continue


if __name__ == "__main__":
    follow(Path(sys.argv[1]))

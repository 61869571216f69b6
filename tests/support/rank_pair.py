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

from graphspec import LLM, SamplingParams

CHAIN = {"num_steps": 4, "topk": 1, "num_draft_tokens": 5}
TREE = {"num_steps": 4, "topk": 3, "num_draft_tokens": 10}
PATHS = {"num_steps": 5, "topk": 3, "num_draft_tokens": 8}
NETWORKS = ("eagle", "eagle3", "mtp", "standalone", "p_eagle", "dflash")
ENGINE: dict[str, Any] = {"runtime": "eager", "debug": True, "max_rows": 3, "buckets": [3], "prefill_chunks": [32], "max_context": 96}
PROMPTS = ["def fib(n):\n    if n < 2:\n", "class Stack:\n    def __init__(self):\n", "import os\n\nfor name in os.listdir("]
TOKENS = 20
PARAMS = [
    SamplingParams(max_tokens=TOKENS, ignore_eos=True),
    SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.8, seed=7),
    SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=1.1, seed=3),
]
"""Greedy and seeded in one batch, so that one class of programs serves all."""


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


def _found(llm: LLM) -> tuple[list[list[int]], list[int]]:
    """Tokens, and the cycles they took: as many only if the same drafts are accepted."""
    with llm:
        outputs = llm.generate(PROMPTS, PARAMS)
    return [out.token_ids for out in outputs], [out.metrics.cycles for out in outputs]


def assert_same_drafts(pair: RankPair, variant: str, shape: dict[str, int], *, model: str = "demo", **keys: Any) -> None:
    """Over a demo model, two ranks emit the tokens of one and accept its drafts."""
    given = {"variant": variant, **shape, **ENGINE}
    alone = _found(LLM(model, **given))
    assert _found(pair.engine(model, **given, **keys)) == alone
    assert sum(alone[1]) < len(PROMPTS) * (TOKENS - 1), "no draft was ever accepted, so the cycles show nothing"


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

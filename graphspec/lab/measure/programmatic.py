"""The probe of programmatic dependent launch: ``python -m graphspec.lab.measure.programmatic``.

Engines with and without it must give the same tokens for the same requests to the demo models: chains and trees, float32 and bfloat16,
greedy and sampled, filters and penalties, batches that change, several rounds. The verdict is stored for
:func:`graphspec.engine.programmatic.resolve`.

What lies between kernels is not compiled, which would take most of the time: it has no part in this, since only our kernels start early.
``--compiled`` compiles it, as other engines do; then more of our kernels follow each other directly.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...api.llm import LLM
from ...engine.programmatic import CAPABILITY, remember
from ...engine.request import SamplingParams

SHAPES: Mapping[str, dict[str, Any]] = {
    "none": {"variant": "none"},
    "chain": {"variant": "eagle3", "num_steps": 7, "topk": 1, "num_draft_tokens": 8},
    "tree": {"variant": "eagle3", "num_steps": 5, "topk": 4, "num_draft_tokens": 16},
    "mtp": {"variant": "mtp", "num_steps": 3, "topk": 1, "num_draft_tokens": 4},
}
DTYPES = ("float32", "bfloat16")
ROUNDS = 4
TOKENS = 96
ENGINE: Mapping[str, Any] = {"max_rows": 4, "buckets": [1, 4], "prefill_chunks": [32], "sampling_classes": []}
"""Few programs: every engine has its own."""
PROMPTS = tuple([(7 * row + 3 * i) % 400 + 3 for i in range(9 + 5 * row)] for row in range(4))


@dataclass(frozen=True, slots=True)
class Finding:
    """One pair of engines.

    Attributes:
        difference: where the two first differ; empty: nowhere.
    """

    name: str
    tokens: int
    difference: str


def requests() -> list[SamplingParams]:
    """One per prompt; their lengths differ, so that batches shrink."""
    parameters: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 0.7, "seed": 2, "top_p": 0.9, "top_k": 40},
        {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.1, "min_p": 0.02},
    ]
    return [SamplingParams(max_tokens=TOKENS - 16 * i, ignore_eos=True, **one).resolve() for i, one in enumerate(parameters)]


def tokens_of(build: Callable[..., LLM], **keys: Any) -> list[list[int]]:
    """Tokens of every request of every round of one engine."""
    llm = build(**keys)
    return [out.token_ids for _ in range(ROUNDS) for out in llm.generate(list(PROMPTS), requests())]


def compare(
    build: Callable[..., LLM] = LLM, device: str = "cuda", runtime: str = "captured", mode: str = "fused", *, compiled: bool = False
) -> Iterator[Finding]:
    """A finding for each shape and dtype; ``compiled``: see ``kernels.compile_around``."""
    for name, shape in SHAPES.items():
        for dtype in DTYPES if device == "cuda" else DTYPES[:1]:
            keys = {**shape, "dtype": dtype, "device": device, "runtime": runtime, "mode": mode, "compile_around": compiled, **ENGINE}
            expected, found = (tokens_of(build, **keys, programmatic_launch=flag) for flag in (False, True))
            yield Finding(f"{name}, {dtype}", sum(map(len, expected)), first_difference(expected, found))


def first_difference(expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> str:
    """The first difference, in words; empty when there is none."""
    for request, (left, right) in enumerate(zip(expected, found, strict=True)):
        for place, (a, b) in enumerate(zip(left, right, strict=False)):
            if a != b:
                return f"request {request}, token {place}: {a} without, {b} with programmatic launch"
        if len(left) != len(right):
            return f"request {request}: {len(left)} tokens without, {len(right)} with programmatic launch"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the probe. Exit code 0: it may be used; 1: it may not; 2: this machine does not have it."""
    parser = argparse.ArgumentParser(
        prog="python -m graphspec.lab.measure.programmatic", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compiled", action="store_true", help="compile what lies between kernels; takes minutes")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < CAPABILITY:
        print("no CUDA device of compute capability 9.0 or later: nothing was compared, no verdict is kept")
        return 2
    passed = True
    for finding in compare(compiled=options.compiled):
        passed &= not finding.difference
        print(f"{finding.name:18} {finding.tokens} tokens: {finding.difference or 'equal'}", flush=True)
    path = remember(torch.device("cuda", torch.cuda.current_device()), passed)
    print(f"programmatic launch {'may' if passed else 'may not'} be used here; kept in {path}")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())

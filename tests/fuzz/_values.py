"""Values of every kind for the fuzzers of the Python API, and an independent copy of the rules of types and ranges."""

from __future__ import annotations

import math
import random
from collections import UserList
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from tests.support.engines import MIRROR_VOCAB

NAN, INF = float("nan"), float("inf")


class Evil:
    """Claims a length and can't be read."""

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("evil iter")

    def __len__(self) -> int:
        return 3


class EvilSequence(Evil, Sequence[Any]):
    def __getitem__(self, place: Any) -> Any:
        raise RuntimeError("evil item")


class EvilRepr:
    def __repr__(self) -> str:
        raise RuntimeError("evil repr")


class Text(str):
    """Text of another class."""


def values() -> list[Any]:
    """Numbers at every edge, and things that are no numbers; new ones at each call, for some can be read once."""
    return [
        None, "5", "", b"5", [], {}, (), True, False, NAN, INF, -INF, -1, 0, 1, 2, 1.0, 1.5, 0.5, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63,
        2**64 - 1, 2**64, 10**30, 10**400, -(2**63), -(2**63) - 1, -(10**30), 1e-45, 1e-320, 1e-6, 1e-5, 100.0, 1e5, 1e30, 1e39, 1e308,
        -0.0, -0.5, 1j, np.float32(0.5), np.float64(NAN), np.int64(3), np.uint8(1), np.bool_(True), np.array(1), np.array([1.5]),
        torch.tensor(1), torch.tensor([1, 2]), object(), Evil(), EvilRepr(), Text("5"), range(3), {1: 1.0}, [1], {1}, lambda: 1,
    ]  # fmt: skip


def is_whole(value: Any, minimum: float = -INF, maximum: float = INF) -> bool:
    number = int(value) if isinstance(value, np.integer) else value
    return type(number) is int and minimum <= number <= maximum


def is_real(value: Any, minimum: float, maximum: float) -> bool:
    number = float(value) if isinstance(value, np.floating) else value
    return (is_whole(number) or type(number) is float) and minimum <= number <= maximum


def is_whole_list(value: Any, minimum: float = 0, maximum: float = MIRROR_VOCAB - 1) -> bool:
    """Ids that the vocabulary has, in something that keeps them in order."""
    if isinstance(value, np.ndarray | torch.Tensor):
        value = value.tolist() if value.ndim == 1 else None
    return isinstance(value, list | tuple | range | UserList) and all(is_whole(entry, minimum, maximum) for entry in value)


def is_bias(value: Any) -> bool:
    return isinstance(value, dict) and all(is_whole(k, 0, MIRROR_VOCAB - 1) and is_real(v, -100, 100) for k, v in value.items())


FIELDS: dict[str, Callable[[Any], bool]] = {
    "max_tokens": lambda v: v is None or is_whole(v, 1, 2**63 - 1),
    "temperature": lambda v: v is None or is_real(v, 0, 1e5),
    "seed": lambda v: v is None or is_whole(v, -(2**63), 2**64 - 1),
    "top_k": lambda v: v is None or is_whole(v, -1, 2**63 - 1),
    "top_p": lambda v: v is None or is_real(v, 2.0**-126, 1),
    "min_p": lambda v: v is None or is_real(v, 0, 0) or is_real(v, 2.0**-126, 1),
    "repetition_penalty": lambda v: v is None or is_real(v, 0.01, 100),
    "presence_penalty": lambda v: is_real(v, -2, 2),
    "frequency_penalty": lambda v: is_real(v, -2, 2),
    "min_tokens": lambda v: is_whole(v, 0, 2**31 - 1),
    "logprobs": lambda v: v is None or is_whole(v, 0, 20),
    "ignore_eos": lambda v: type(v) is bool,
    "stop_token_ids": is_whole_list,
    "logit_bias": lambda v: v is None or is_bias(v),
}
"""Field of ``SamplingParams`` to whether a value may be taken."""


def _sizes(value: Any, maximum: int) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(is_whole(v, 1, maximum) for v in value)
        and sorted(set(value)) == list(value)
    )


def _optional(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _choice(*names: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in names


def _pairs(value: Any, key: Callable[[Any], bool], entry: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(key(k) and entry(v) for k, v in value.items())


IMPLEMENTATIONS = ("auto", "reference", "native", "fused")
KEYS: dict[str, Callable[[Any], bool]] = {
    "num_steps": _optional(lambda v: is_whole(v, 1, 127)),
    "topk": _optional(lambda v: is_whole(v, 1, MIRROR_VOCAB)),
    "num_draft_tokens": _optional(lambda v: is_whole(v, 2, 128)),
    "max_context": _optional(lambda v: is_whole(v, 2, 96)),
    "max_rows": lambda v: is_whole(v, 1, 65536),
    "page_size": lambda v: is_whole(v, 1, 65536),
    "num_pages": _optional(lambda v: is_whole(v, 1, 2**31 - 1)),
    "cycles_in_flight": lambda v: is_whole(v, 1, 64),
    "prefill_lanes": lambda v: is_whole(v, 1, 65536),
    "prefill_tokens_per_cycle": _optional(lambda v: is_whole(v, 1, 2**31 - 1)),
    "max_queued": _optional(lambda v: is_whole(v, 0, 2**31 - 1)),
    "memory_fraction": lambda v: is_real(v, 5e-324, 1),
    "max_stop_ids": lambda v: is_whole(v, 1, 65536),
    "max_logit_bias": lambda v: is_whole(v, 1, 65536),
    "max_logprobs": lambda v: is_whole(v, 1, 2**31 - 1),
    "generation_config": _choice("auto", "ignore"),
    "sampling_classes": lambda v: (
        v is None or (isinstance(v, list | tuple) and all(isinstance(c, str) and c in ("greedy", "everything") for c in v))
    ),
    "memory_gib": _optional(lambda v: is_real(v, 1e-9, 1e9)),
    "buckets": lambda v: _sizes(v, 65536),
    "prefill_chunks": _optional(lambda v: _sizes(v, 2**20)),
    "depth_per_bucket": lambda v: _pairs(v, lambda k: is_whole(k, 1, 2), lambda d: is_whole(d, 0, 3)),
    "depths": lambda v: isinstance(v, list | tuple) and all(is_whole(d, 0, 3) for d in v) and sorted(set(v)) == list(v),
    "backlog": lambda v: is_whole(v, 2, 2**31 - 1),
    "tree_choices": lambda v: (
        v is None or (isinstance(v, list | tuple) and all(isinstance(p, list | tuple) and p and is_whole_list(p) for p in v))
    ),
    "token_map": lambda v: v is None,
    "dtype": _choice("auto", "float32", "bfloat16", "float16"),
    "device": _choice("auto", "cpu"),
    "debug": lambda v: type(v) is bool,
    "linear": _choice(*IMPLEMENTATIONS),
    "attention": _choice(*IMPLEMENTATIONS, "flashinfer"),
    "mode": _choice("auto", "reference", "compiled", "fused"),
    "numerics": _choice("auto", "fast", "cycle_invariant", "batch_invariant"),
    "activations": _choice("full", "int8", "bfloat16"),
    "draft_activations": _choice("auto", "full"),
    "programmatic_launch": lambda v: v is None or type(v) is bool,
    "compile_around": lambda v: type(v) is bool,
    "rates": lambda v: isinstance(v, list | tuple) and all(is_real(r, 0, 1) for r in v),
    "times": lambda v: _pairs(
        v, lambda k: is_whole(k, 1, 65536), lambda t: _pairs(t, lambda d: is_whole(d, 0), lambda s: is_real(s, 1e-9, 1e9))
    ),
    "threshold_single": lambda v: is_real(v, 1, 1),
    "threshold_acc": lambda v: is_real(v, 1, 1),
    "rule": _choice("match", "target_only", "rejection"),
    "synthetic_length": lambda v: v is None,
    "synthetic_rates": lambda v: v is None,
    "draft_noise": _choice("coupled", "none"),
    "linear_table": lambda v: v is None,
    "ngram": lambda v: type(v).__name__ == "NgramSettings",
    "bandwidth_gbs": _optional(lambda v: is_real(v, 1e-9, 1e9)),
    "tflops": _optional(lambda v: is_real(v, 1e-9, 1e9)),
    "capacity_gib": _optional(lambda v: is_real(v, 1e-9, 1e9)),
    "threads": _optional(lambda v: is_whole(v, 1, 4096)),
}
"""Keyword of ``LLM`` to whether an engine over a tiny target may take a value."""


def key_values() -> list[Any]:
    """For :data:`KEYS`: lists and mappings of everything too."""
    return [
        *values(), "x", "auto", "cpu", "float32", [0], [-1], [NAN], ["a"], [3, 1], [1, 2], [1, 1], [10**9], [2**63], [True], [None],
        list(range(1, 3000)), {1: -1}, {"a": 1}, {1: NAN}, {99: 1}, {True: 1}, {1: 2}, {1: {0: 1.0}}, {1: {0: NAN}}, [[0], [0, 0]], [[5]],
        [[0], [9, 9]], [[]], [[0], [None]], [[0], [10**30]], [[1.5]], 10**9, -5, "captured", "\0", "\ud800", "/", ".",
    ]  # fmt: skip


def any_whole(rng: random.Random) -> int:
    """Every magnitude up to 2^70 alike."""
    return rng.choice((-1, 1)) * rng.getrandbits(rng.randrange(71)) + rng.choice((-1, 0, 0, 1))


def any_real(rng: random.Random) -> float:
    """Every magnitude of a float64 alike, and the ordinary ones more often."""
    if rng.random() < 0.5:
        return rng.choice((-1, 1)) * rng.random() * 10 ** rng.randrange(-3, 4)
    return rng.choice((-1, 1)) * math.ldexp(rng.random(), rng.randrange(-1074, 1024))


def any_value(rng: random.Random, depth: int = 2) -> Any:
    """Something of any type."""
    kind = rng.randrange(8 if depth else 5)
    if kind < 2:
        return any_whole(rng)
    if kind == 2:
        return any_real(rng)
    if kind < 5:
        return rng.choice(values())
    if kind == 5:
        return {any_value(rng, 0) if rng.random() < 0.1 else any_id(rng): any_real(rng) for _ in range(rng.randrange(4))}
    entries = [any_id(rng) if rng.random() < 0.8 else any_value(rng, depth - 1) for _ in range(rng.randrange(5))]
    return tuple(entries) if kind == 6 else entries


def any_id(rng: random.Random) -> Any:
    """A token id, as a rule one that exists."""
    return rng.randrange(MIRROR_VOCAB) if rng.random() < 0.95 else rng.choice([-1, MIRROR_VOCAB, True, 1.0, "1", None, 2**63, np.int64(3)])

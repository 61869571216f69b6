"""The requests of a measurement: prompts as token ids, each with a sampling seed, equal on all sides by a digest. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from ...config.command_options import CLOSED, LaunchConfig, WorkloadConfig
from ...config.paths import read_json, read_text
from ...config.schema import SamplingConfig
from ...errors import ConfigError
from .open_loop import TraceLine, arrivals, read_trace

HELD_OUT = "held_out.jsonl"
MAKE_HELD_OUT = "python -m recipes.held_out"


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request of the workload.

    Attributes:
        output_tokens: most new tokens; None: those of the workload.
    """

    prompt: list[int]
    seed: int
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """All requests of one round, and their common settings.

    Attributes:
        arrivals: seconds from the beginning of a round at which each request arrives; None: a closed loop.
        long: whether each request has a long prompt among shorter ones.
    """

    requests: list[WorkloadRequest]
    batch: int
    output_tokens: int
    ignore_eos: bool
    sampling: SamplingConfig
    arrivals: list[float] | None = None
    long: tuple[bool, ...] = ()

    @property
    def digest(self) -> str:
        """Digest of the requests: equal on two sides with the same workload."""
        described: list[object] = [[request.prompt, request.seed] for request in self.requests]
        if self.arrivals is not None:
            described += [[request.output_tokens for request in self.requests], self.arrivals]
        text = json.dumps(described)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def input_tokens(self) -> float:
        """Mean prompt length."""
        return sum(len(request.prompt) for request in self.requests) / len(self.requests)


def describe_outsider(config: LaunchConfig, workload: Workload, label: str, why: str, **more: Any) -> dict[str, Any]:
    """What a side that is no engine of this package says of itself; ``why`` it has no figures of cycles. ``more`` adds to it."""
    absent = ("acceptance_length", "drafted_per_second", "accepted_per_second", "stages", "cycle_ms", "host_us", "nodes", "gap_ms")
    return {
        "label": label,
        **dict.fromkeys(("variant", "shape", "runtime", "attention", "dtype", "device")),
        "digest": workload.digest,
        "input_tokens": workload.input_tokens,
        "temperature": config.sampling.stated_temperature,
        "not_measured": dict.fromkeys(absent, why),
        **more,
    }


def make_workload(config: LaunchConfig, encode: Callable[[str], list[int]], vocab_size: int) -> Workload:
    """The requests that ``config.workload`` describes.

    Args:
        vocab_size: of the target; random prompts draw from its ids.
    """
    workload = config.workload
    if workload.trace is not None:
        return _traced(config, read_trace(workload), encode, vocab_size)
    texts: list[str] = []
    if workload.source == "random":
        prompts = random_prompts(workload, vocab_size)
    else:
        texts = held_out_texts() if workload.source == "held_out" else file_texts(workload)
        prompts = [encode(text)[: workload.input_tokens] for text in texts]
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise ConfigError("workload.file", "prompts of at least one token", f"an empty prompt, number {number}")
    requests = [WorkloadRequest(prompts[i % len(prompts)], workload.seed + i) for i in range(workload.requests)]
    long = tuple(workload.long_every > 0 and (i + 1) % workload.long_every == 0 for i in range(workload.requests))
    if any(long):
        whole = prompts if workload.source == "random" else [encode(text) for text in texts]
        for i in (i for i, is_long in enumerate(long) if is_long):
            requests[i] = replace(requests[i], prompt=_long_prompt(whole, i, workload.long_input_tokens))
    moments = None if workload.arrivals == CLOSED else arrivals(workload)
    return Workload(requests, workload.batch, workload.output_tokens, workload.ignore_eos, config.sampling.stated(), moments, long)


def _long_prompt(texts: Sequence[Sequence[int]], first: int, length: int) -> list[int]:
    """Prompts from number ``first`` on, concatenated and cut to ``length``."""
    found: list[int] = []
    number = first
    while len(found) < length:
        found += texts[number % len(texts)]
        number += 1
    return found[:length]


def _traced(config: LaunchConfig, lines: Sequence[TraceLine], encode: Callable[[str], list[int]], vocab_size: int) -> Workload:
    """The requests of a trace. A line with only a length gets random ids; prompts of ``long_input_tokens`` or more count as long."""
    workload = config.workload
    drawn = random.Random(workload.seed)
    requests = []
    for number, line in enumerate(lines):
        prompt = [drawn.randrange(vocab_size) for _ in range(line.input_tokens)] if line.prompt is None else encode(line.prompt)
        if not prompt:
            raise ConfigError("workload.trace", "prompts of at least one token", f"an empty prompt, number {number}")
        requests.append(WorkloadRequest(prompt, workload.seed + number, line.output_tokens))
    long = tuple(len(request.prompt) >= workload.long_input_tokens for request in requests)
    moments = [line.arrival for line in lines]
    return Workload(requests, workload.batch, workload.output_tokens, workload.ignore_eos, config.sampling.stated(), moments, long)


def random_prompts(workload: WorkloadConfig, vocab_size: int) -> list[list[int]]:
    """Ids drawn uniformly from the vocabulary; lengths from ``input_tokens * (1 - spread)`` to ``input_tokens * (1 + spread)``."""
    assert workload.input_tokens is not None
    drawn = random.Random(workload.seed)
    minimum, maximum = (max(1, round(workload.input_tokens * (1 + sign * workload.input_spread))) for sign in (-1, 1))
    return [[drawn.randrange(vocab_size) for _ in range(drawn.randint(minimum, maximum))] for _ in range(workload.requests)]


def held_out_texts() -> list[str]:
    """The prompts that come with the package: Python source that no demo model was trained on (:data:`MAKE_HELD_OUT` cuts them)."""
    text = (files("graphspec.lab.measure") / "workloads" / HELD_OUT).read_text(encoding="utf-8")
    return [json.loads(line)["prompt"] for line in text.splitlines()]


def file_texts(workload: WorkloadConfig) -> list[str]:
    """The prompts of ``workload.file``: the whole file as one, or, in a ``.jsonl`` file, a string or an object with ``prompt`` per line."""
    if workload.file is None:
        raise ConfigError("workload.file", "the path of a file with workload.source=file", None)
    text = read_text("workload.file", workload.file)
    if not workload.file.endswith(".jsonl"):
        texts: Sequence[str] = [text] if text else []
    else:
        texts = [_prompt_of(f"{workload.file}:{number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not texts:
        raise ConfigError("workload.file", "at least one prompt", f"none in {workload.file}")
    return list(texts)


def _prompt_of(where: str, line: str) -> str:
    row = read_json(where, line)
    prompt = row.get("prompt") if isinstance(row, dict) else row
    if not isinstance(prompt, str):
        raise ConfigError(where, 'a string, or an object with "prompt"', line[:60])
    return prompt

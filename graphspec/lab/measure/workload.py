"""The requests of a measurement: prompts as token ids, one sampling seed each. Equal on every side, checked by a digest. No torch."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

from ...command_options import CLOSED, LaunchConfig, WorkloadConfig
from ...config import SamplingConfig
from ...errors import ConfigError
from ...paths import read_json, read_text
from .open_loop import TraceLine, arrivals, read_trace

HELD_OUT = "held_out.jsonl"
MAKE_HELD_OUT = "python -m recipes.held_out"


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request of the workload.

    Attributes:
        prompt: token ids.
        seed: of its sampling.
        output_tokens: most new tokens; None: those of the workload.
    """

    prompt: list[int]
    seed: int
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """All requests of one round, and their common settings.

    Attributes:
        requests: in order.
        batch: requests at once.
        output_tokens: most new tokens of each.
        ignore_eos: end-of-text ids do not end a request.
        sampling: temperature and the rest.
        arrivals: seconds from the beginning of a round at which each request arrives; None: a closed loop.
        long: which requests have a long prompt among shorter ones.
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


def make_workload(config: LaunchConfig, encode: Callable[[str], list[int]], vocab_size: int) -> Workload:
    """The requests that ``config.workload`` describes.

    Args:
        config: of the whole run.
        encode: the target's tokenizer.
        vocab_size: of the target; random prompts draw from its ids.

    Raises:
        ConfigError: a file that can't be read or holds no prompt, or a prompt that is empty.
    """
    asked = config.workload
    if asked.trace is not None:
        return _traced(config, read_trace(asked), encode, vocab_size)
    texts: list[str] = []
    if asked.source == "random":
        prompts = random_prompts(asked, vocab_size)
    else:
        texts = held_out_texts() if asked.source == "held_out" else file_texts(asked)
        prompts = [encode(text)[: asked.input_tokens] for text in texts]
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise ConfigError("workload.file", "prompts of at least one token", f"an empty prompt, number {number}")
    requests = [WorkloadRequest(prompts[i % len(prompts)], asked.seed + i) for i in range(asked.requests)]
    long = tuple(asked.long_every > 0 and (i + 1) % asked.long_every == 0 for i in range(asked.requests))
    if any(long):
        whole = prompts if asked.source == "random" else [encode(text) for text in texts]
        for i in (i for i, is_long in enumerate(long) if is_long):
            requests[i] = replace(requests[i], prompt=_long_prompt(whole, i, asked.long_input_tokens))
    moments = None if asked.arrivals == CLOSED else arrivals(asked)
    return Workload(requests, asked.batch, asked.output_tokens, asked.ignore_eos, config.sampling, moments, long)


def _long_prompt(texts: Sequence[Sequence[int]], first: int, length: int) -> list[int]:
    """Prompts one after another from number ``first`` on, cut to the length."""
    found: list[int] = []
    number = first
    while len(found) < length:
        found += texts[number % len(texts)]
        number += 1
    return found[:length]


def _traced(config: LaunchConfig, lines: Sequence[TraceLine], encode: Callable[[str], list[int]], vocab_size: int) -> Workload:
    """The requests of a trace. A prompt whose trace line has only a length is random ids; long ones have ``long_input_tokens`` or more."""
    asked = config.workload
    drawn = random.Random(asked.seed)
    requests = []
    for number, line in enumerate(lines):
        prompt = [drawn.randrange(vocab_size) for _ in range(line.input_tokens)] if line.prompt is None else encode(line.prompt)
        if not prompt:
            raise ConfigError("workload.trace", "prompts of at least one token", f"an empty prompt, number {number}")
        requests.append(WorkloadRequest(prompt, asked.seed + number, line.output_tokens))
    long = tuple(len(request.prompt) >= asked.long_input_tokens for request in requests)
    moments = [line.arrival for line in lines]
    return Workload(requests, asked.batch, asked.output_tokens, asked.ignore_eos, config.sampling, moments, long)


def random_prompts(asked: WorkloadConfig, vocab_size: int) -> list[list[int]]:
    """Ids drawn evenly from the vocabulary; lengths from ``input_tokens * (1 - spread)`` to ``input_tokens * (1 + spread)``."""
    assert asked.input_tokens is not None
    drawn = random.Random(asked.seed)
    least, most = (max(1, round(asked.input_tokens * (1 + sign * asked.input_spread))) for sign in (-1, 1))
    return [[drawn.randrange(vocab_size) for _ in range(drawn.randint(least, most))] for _ in range(asked.requests)]


def held_out_texts() -> list[str]:
    """The prompts that come with the package: Python source that no demo model was trained on (:data:`MAKE_HELD_OUT` cuts them)."""
    text = (files("graphspec.lab.measure") / "workloads" / HELD_OUT).read_text(encoding="utf-8")
    return [json.loads(line)["prompt"] for line in text.splitlines()]


def file_texts(asked: WorkloadConfig) -> list[str]:
    """The prompts of ``workload.file``: the whole file, or, of a ``.jsonl`` one, a string or an object with ``prompt`` per line.

    Raises:
        ConfigError: no file, an unreadable one, or a line that is neither.
    """
    if asked.file is None:
        raise ConfigError("workload.file", "the path of a file with workload.source=file", None)
    text = read_text("workload.file", asked.file)
    if not asked.file.endswith(".jsonl"):
        texts: Sequence[str] = [text] if text else []
    else:
        texts = [_prompt_of(f"{asked.file}:{number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not texts:
        raise ConfigError("workload.file", "at least one prompt", f"none in {asked.file}")
    return list(texts)


def _prompt_of(where: str, line: str) -> str:
    row = read_json(where, line)
    prompt = row.get("prompt") if isinstance(row, dict) else row
    if not isinstance(prompt, str):
        raise ConfigError(where, 'a string, or an object with "prompt"', line[:60])
    return prompt

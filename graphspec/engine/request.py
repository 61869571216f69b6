"""Requests: what is asked, what is checked at the door, and what the engine keeps about each one."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import RequestError
from ..plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    Attributes:
        max_tokens: most new tokens, at least 1.
        temperature: 0 is greedy.
        seed: 64-bit; two requests with one seed and one prompt get one output. Give samples of the same prompt different seeds.
        stop_token_ids: ids that end the request, besides the checkpoint's end-of-text ids; the id itself is part of the output.
        ignore_eos: the checkpoint's end-of-text ids do not end the request.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False


@dataclass(slots=True)
class RequestMetrics:
    """What one request cost.

    Attributes:
        cycles: cycles that emitted tokens of this request.
        cycle_tokens: tokens per cycle, in order; the prefill's token is not counted.
        cut: the last cycle was cut short by a stop id or the budget.
    """

    cycles: int = 0
    cycle_tokens: list[int] = field(default_factory=list)
    cut: bool = False
    arrived: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    finished: float | None = None

    def whole_cycles(self) -> list[int]:
        """Tokens of the cycles that were not cut short; those say how well the drafter does."""
        return self.cycle_tokens[:-1] if self.cut and len(self.cycle_tokens) > 1 else self.cycle_tokens


@dataclass(slots=True, eq=False)
class Request:
    """One request inside the engine."""

    index: int
    prompt: list[int]
    params: SamplingParams
    stop_ids: tuple[int, ...]
    budget: int
    output: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    row: int | None = None
    pages: list[int] = field(default_factory=list)
    last_ticket: int = -1
    queued_cycles: int = 0
    ready: bool = False
    """Its prefill has been launched to the end."""
    preempted: int = 0

    @property
    def committed(self) -> int:
        """Tokens known to have target KV once everything read so far is counted."""
        return len(self.prompt) + max(0, len(self.output) - 1)


def check_params(params: SamplingParams, plan: Plan, eos_ids: Sequence[int]) -> tuple[int, ...]:
    """Check ``params`` against the plan; returns the ids that stop the request.

    Raises:
        RequestError: names the field.
    """
    if params.max_tokens < 1:
        raise RequestError("sampling.max_tokens", "at least 1", params.max_tokens)
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise RequestError("sampling.temperature", "a finite number >= 0", params.temperature)
    if not -(2**63) <= params.seed < 2**64:
        raise RequestError("sampling.seed", "a 64-bit integer", params.seed)
    stops = tuple(dict.fromkeys([*params.stop_token_ids, *([] if params.ignore_eos else eos_ids)]))
    for stop in stops:
        if not 0 <= stop < plan.target.vocab_size:
            raise RequestError("sampling.stop_token_ids", f"ids from 0 to {plan.target.vocab_size - 1}", stop)
    if len(stops) > plan.max_stop_ids:
        raise RequestError(
            "sampling.stop_token_ids", f"at most runtime.max_stop_ids = {plan.max_stop_ids}, end-of-text ids included", len(stops)
        )
    return stops


def check_prompt(prompt: Sequence[int], plan: Plan) -> None:
    """Check a tokenised prompt.

    Raises:
        RequestError: empty, too long for the context or the page pool, or with an id outside the vocabulary.
    """
    if not prompt:
        raise RequestError("prompt", "at least one token", "an empty prompt")
    for position, token in enumerate(prompt):
        if not 0 <= token < plan.target.vocab_size:
            raise RequestError(f"prompt[{position}]", f"a token id from 0 to {plan.target.vocab_size - 1}", token)
    if len(prompt) >= plan.max_context:
        raise RequestError(
            "prompt", f"at most {plan.max_context - 1} tokens (max_context {plan.max_context}, one of them new)", f"{len(prompt)} tokens"
        )
    needed, available = plan.pages_for(len(prompt) + plan.tokens_in_flight), plan.num_pages - 1
    if needed > available:
        raise RequestError(
            "runtime.num_pages",
            f"{needed} pages of {plan.page_size} for a prompt of {len(prompt)} tokens and the window behind it",
            available,
        )

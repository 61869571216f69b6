"""Requests: what is asked, what is checked at the door, and what the engine keeps about each one."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..config import SamplingConfig
from ..errors import RequestError
from ..plan import Plan
from ..shapes import GREEDY, SamplingClass

PENALTY_LIMIT = 2.0
BIAS_LIMIT = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    Attributes:
        max_tokens: most new tokens, at least 1.
        temperature: 0 is greedy.
        seed: 64-bit; two requests with one seed and one prompt get one output. Give samples of the same prompt different seeds.
        stop_token_ids: ids that end the request, besides the checkpoint's end-of-text ids; the id itself is part of the output.
        ignore_eos: the checkpoint's end-of-text ids do not end the request.
        top_k: sample from the k most likely tokens; -1 or 0: all. Equal logits stay together.
        top_p: of those, from the most likely ones that together hold this share, 0 < top_p <= 1.
        min_p: of those, from the ones at least this share as likely as the most likely, 0 <= min_p <= 1.
        repetition_penalty: above 0; positive logits of tokens in the prompt or the output are divided by it, negative ones multiplied.
        presence_penalty: -2 to 2, taken off the logits of tokens in the output.
        frequency_penalty: -2 to 2, the same for each time they are in it.
        logit_bias: token id to what is added to its logit, -100 to 100.
        min_tokens: no stop id before so many tokens are out.
        logprobs: report each token's log-probability and so many most likely tokens; None: neither. They are the target's own, before any
            of the above.

    Filters act at temperatures above 0, everything else at 0 too.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int = 0
    logprobs: int | None = None

    @property
    def sampling_class(self) -> SamplingClass:
        """What this request asks of the sampler."""
        hot = self.temperature > 0
        return SamplingClass(
            noise=hot,
            truncate=hot and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0),
            penalties=(self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0),
            bias=bool(self.logit_bias) or self.min_tokens > 0,
            logprobs=-1 if self.logprobs is None else self.logprobs,
        )


def configured_params(config: SamplingConfig, **changes: Any) -> SamplingParams:
    """The request parameters that the ``sampling`` group describes, some of them changed."""
    values = {f.name: getattr(config, f.name) for f in fields(config)} | changes
    return SamplingParams(**(values | {"stop_token_ids": tuple(values["stop_token_ids"]), "logit_bias": dict(values["logit_bias"])}))


def sampling_class(params: Iterable[SamplingParams]) -> SamplingClass:
    """The class that serves all of these requests at once."""
    together = SamplingClass()
    for param in params:
        together = together | param.sampling_class
    return together


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """An emitted token as the target saw it: natural logarithms of ``softmax(logits)``, without temperature, penalties or filters.

    Attributes:
        token_id: the token.
        logprob: its log-probability.
        top: the most likely tokens and theirs, most likely first.
    """

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(slots=True)
class RequestMetrics:
    """What one request cost.

    Attributes:
        cycles: cycles that emitted tokens of this request.
        cycle_tokens: tokens per cycle, in order; the prefill's token is not counted.
        cycle_depths: draft depth of each of those cycles; 0 decoded plainly.
        cut: the last cycle was cut short by a stop id or the budget.
        bursts: when tokens became known and how many, the prefill's first; seconds of :func:`time.perf_counter`, as are the three below.
    """

    cycles: int = 0
    cycle_tokens: list[int] = field(default_factory=list)
    cycle_depths: list[int] = field(default_factory=list)
    cut: bool = False
    bursts: list[tuple[float, int]] = field(default_factory=list)
    arrived: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    finished: float | None = None

    def whole_cycles(self) -> list[int]:
        """Tokens of the cycles that were not cut short; those say how well the drafter does."""
        return self.cycle_tokens[:-1] if self.cut and len(self.cycle_tokens) > 1 else self.cycle_tokens

    def drafted_cycles(self) -> list[tuple[int, int]]:
        """``(tokens, depth)`` of those of them that drafted."""
        return [(tokens, depth) for tokens, depth in zip(self.whole_cycles(), self.cycle_depths, strict=False) if depth]


@dataclass(slots=True, eq=False)
class Request:
    """One request inside the engine."""

    index: int
    prompt: list[int]
    params: SamplingParams
    stop_ids: tuple[int, ...]
    budget: int
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    row: int | None = None
    pages: list[int] = field(default_factory=list)
    last_ticket: int = -1
    queued_cycles: int = 0
    window_bound: int = 1
    """Most entries its window can have on the device once everything launched so far has run; counted where plain cycles let it grow."""
    ready: bool = False
    """Its prefill has been launched to the end."""
    preempted: int = 0
    sampling: SamplingClass = GREEDY
    """What it asks of the sampler; the scheduler notes it."""
    verdict: tuple[int, int] | None = None
    """The status that ends it, and the length of the output it belongs to: written before the tokens it came with."""

    def leave_row(self) -> None:
        """It holds no row and no pages any more, and must be prefilled before it can go on."""
        self.row, self.pages, self.ready = None, [], False

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
    _check_filters(params)
    _check_penalties(params)
    _check_bias(params.logit_bias or {}, plan)
    if not 0 <= params.min_tokens <= params.max_tokens:
        raise RequestError("sampling.min_tokens", f"0 to max_tokens = {params.max_tokens}", params.min_tokens)
    if params.logprobs is not None and not 0 <= params.logprobs <= plan.max_logprobs:
        raise RequestError("sampling.logprobs", f"None, or 0 to runtime.max_logprobs = {plan.max_logprobs}", params.logprobs)
    # A synthetic run ends at its budget: its tokens mean nothing, a stop id among them neither.
    return () if plan.accept.synthetic else stops


def _check_filters(params: SamplingParams) -> None:
    if params.top_k < -1:
        raise RequestError("sampling.top_k", "-1 or 0 for all tokens, or at least 1", params.top_k)
    if not 0 < params.top_p <= 1:
        raise RequestError("sampling.top_p", "above 0, at most 1", params.top_p)
    if not 0 <= params.min_p <= 1:
        raise RequestError("sampling.min_p", "0 to 1", params.min_p)


def _check_penalties(params: SamplingParams) -> None:
    if not (math.isfinite(params.repetition_penalty) and params.repetition_penalty > 0):
        raise RequestError("sampling.repetition_penalty", "a finite number above 0", params.repetition_penalty)
    for key in ("presence_penalty", "frequency_penalty"):
        value = getattr(params, key)
        if not -PENALTY_LIMIT <= value <= PENALTY_LIMIT:
            raise RequestError(f"sampling.{key}", f"{-PENALTY_LIMIT} to {PENALTY_LIMIT}", value)


def _check_bias(bias: Mapping[int, float], plan: Plan) -> None:
    if len(bias) > plan.max_logit_bias:
        raise RequestError("sampling.logit_bias", f"at most runtime.max_logit_bias = {plan.max_logit_bias} tokens", len(bias))
    for token, value in bias.items():
        if not 0 <= token < plan.target.vocab_size:
            raise RequestError("sampling.logit_bias", f"token ids from 0 to {plan.target.vocab_size - 1}", token)
        if not -BIAS_LIMIT <= value <= BIAS_LIMIT:
            raise RequestError(f"sampling.logit_bias[{token}]", f"{-BIAS_LIMIT} to {BIAS_LIMIT}", value)


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

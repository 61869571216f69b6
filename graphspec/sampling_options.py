"""Sampling parameters of the command line, their bounds, and the neutral values. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from .checks import FLOAT32_LEAST, INT32_MOST, INT64_MOST, Errors, brief, check_fields, in_range
from .errors import ConfigError
from .shapes import SamplingClass, sampling_class_of

Temperature = TypeVar("Temperature", float, float | None)

MOST_SAMPLES = 65536
"""Most outputs of one prompt. Far above real use, to catch typing errors."""
TEMPERATURES = (0, 1e5)
"""Bounds of a temperature; noise multiplied by the largest stays finite in float32."""
REPETITIONS = (0.01, 100.0)
"""Bounds of the repetition penalty: what it makes of a logit is finite in float32 up to logits of 3e36."""
PENALTY_LIMIT = 2.0
BIAS_LIMIT = 100.0
SEEDS = (-(2**63), 2**64 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What a request is sampled with where it says nothing. Made without arguments, the neutral values: greedy, no filter, no penalty."""

    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def sampling_class(self) -> SamplingClass:
        """What a request that says nothing asks of the sampler."""
        return drawing_class(self)


NEUTRAL = SamplingDefaults()


def drawing_class(params: Any) -> SamplingClass:
    """What the fields of :class:`SamplingDefaults` ask of the sampler, none of them None. Filters act above temperature 0."""
    hot = params.temperature > 0
    truncate = hot and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    return SamplingClass(noise=hot, truncate=truncate, penalties=params.repetition_penalty != 1)


def prepared_classes(names: Sequence[str] | None, defaults: SamplingDefaults, logprobs: int) -> tuple[SamplingClass, ...]:
    """Classes whose programs an engine prepares.

    Args:
        names: ``runtime.sampling_classes``; None: greedy, that of requests that say nothing, and everything.
        defaults: of the checkpoint.
        logprobs: alternatives of a class with log-probabilities.
    """
    spelled = ("greedy", "everything") if names is None else names
    found = [each for name in spelled if (each := sampling_class_of(name, logprobs)) is not None]
    if names is None:
        found.insert(1, defaults.sampling_class)
    return tuple(dict.fromkeys(found))


def check_defaults(params: Any, prefix: str, error: Errors) -> None:
    """Check the bounds of the fields of :class:`SamplingDefaults`; their types are checked already. None passes: it says nothing.

    Raises:
        GraphspecError: of class ``error``; names ``prefix`` and the field.
    """
    in_range(f"{prefix}temperature", params.temperature, *TEMPERATURES, error=error)
    in_range(f"{prefix}top_k", params.top_k, -1, INT64_MOST, error=error)
    in_range(f"{prefix}repetition_penalty", params.repetition_penalty, *REPETITIONS, error=error)
    if params.top_p is not None and not FLOAT32_LEAST <= params.top_p <= 1:
        raise error(f"{prefix}top_p", f"a number above 0 ({FLOAT32_LEAST:.0e} or more), at most 1", params.top_p)
    if params.min_p and not FLOAT32_LEAST <= params.min_p <= 1:
        raise error(f"{prefix}min_p", f"0, or a number of {FLOAT32_LEAST:.0e} or more, at most 1", params.min_p)


def usable_temperature(temperature: Temperature) -> Temperature:
    """The temperature, or 0 for one below the smallest normal float32: devices flush it to 0."""
    return 0.0 if temperature is not None and 0 < temperature < FLOAT32_LEAST else temperature


def check_sampling(params: Any, error: Errors) -> None:
    """Check the bounds of :class:`SamplingConfig` and ``SamplingParams`` that depend on no engine; their types are checked already.

    Raises:
        GraphspecError: of class ``error``; names ``sampling.<field>``.
    """
    check_defaults(params, "sampling.", error)
    # Without a new token there is still a prompt to return.
    scores = getattr(params, "echo", False) or getattr(params, "prompt_logprobs", None) is not None
    limits: dict[str, tuple[float, float]] = {
        "max_tokens": (0 if scores else 1, INT64_MOST),
        "presence_penalty": (-PENALTY_LIMIT, PENALTY_LIMIT),
        "frequency_penalty": (-PENALTY_LIMIT, PENALTY_LIMIT),
    }
    for name, (least, most) in limits.items():
        in_range(f"sampling.{name}", getattr(params, name), least, most, error=error)
    if params.seed is not None and not SEEDS[0] <= params.seed <= SEEDS[1]:
        raise error("sampling.seed", "null, or a 64-bit integer", brief(params.seed))
    in_range("sampling.n", params.n, 1, MOST_SAMPLES, error=error)
    if params.n > 1 and params.temperature == 0:
        raise error("sampling.n", "1 at temperature 0, where all outputs would be the same", params.n)
    longest = INT64_MOST if params.max_tokens is None else params.max_tokens
    most = min(longest, INT32_MOST)
    if not 0 <= params.min_tokens <= most:
        whose = " = max_tokens" if most == longest else ""
        raise error("sampling.min_tokens", f"an integer >= 0, at most {most}{whose}", brief(params.min_tokens))
    in_range("sampling.logprobs", params.logprobs, 0, INT32_MOST, error=error)
    for name in ("stop_token_ids", "allowed_token_ids"):
        for place, token in enumerate(getattr(params, name) or ()):
            in_range(f"sampling.{name}[{place}]", token, 0, INT64_MOST, error=error)
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise error("sampling.allowed_token_ids", "null, or at least one token id", [])
    for name in ("stop", "bad_words"):
        for place, text in enumerate(getattr(params, name) or ()):
            if not text.strip() if name == "bad_words" else not text:
                raise error(f"sampling.{name}[{place}]", "text that is not empty", repr(text))
    for token, value in (params.logit_bias or {}).items():
        in_range("sampling.logit_bias", token, 0, INT64_MOST, error=error)
        in_range(f"sampling.logit_bias[{token}]", value, -BIAS_LIMIT, BIAS_LIMIT, error=error)


@dataclass(kw_only=True)
class SamplingConfig:
    """How the launcher's requests are sampled. The Python API takes a ``SamplingParams`` per request."""

    max_tokens: int | None = 128
    """Most new tokens; null: up to the end of the context."""
    temperature: float | None = None
    """0 is greedy, at most 1e5; null: the checkpoint's (model.generation_config), as for top_k, top_p, min_p and repetition_penalty."""
    n: int = 1
    """Outputs for each prompt, at a temperature above 0 if more than one."""
    seed: int | None = None
    """64 bits that decide every draw; null: a fresh one for each request, reported with its output. Output i has the seed seed + i."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Ids that end a request, in addition to the checkpoint's end-of-text ids."""
    ignore_eos: bool = False
    stop: list[str] = field(default_factory=list)
    """Texts that end a request when they occur in its output."""
    include_stop_str_in_output: bool = False
    """The text that ended a request is part of its output."""
    top_k: int | None = None
    """Keep the k most likely tokens; -1 or 0: all."""
    top_p: float | None = None
    """Of those, keep the most likely ones that together hold this share; 1: all."""
    min_p: float | None = None
    """Of those, keep the ones at least this share as likely as the most likely; 0: all."""
    repetition_penalty: float | None = None
    """Divides positive logits, multiplies negative ones, of tokens in the prompt or the output, 0.01 to 100; 1: none."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of a token that is in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token for each of its occurrences in the output."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""
    allowed_token_ids: list[int] | None = None
    """Sample from these token ids alone; null: from all."""
    bad_words: list[str] = field(default_factory=list)
    """Texts that never occur in the output; their last token is not sampled after the others."""
    min_tokens: int = 0
    """No stop id, and no text of stop, before this many tokens."""
    speculate: bool = True
    """false: decode these requests plainly, one token per cycle."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the output's text."""
    logprobs: int | None = None
    """Report each token's log-probability and this many alternatives; null: none."""

    def __post_init__(self) -> None:
        check_fields(self, "sampling")
        self.temperature = usable_temperature(self.temperature)
        check_sampling(self, ConfigError)

    def stated(self) -> SamplingConfig:
        """The same for what is measured or compared: neutral where it says nothing, so that no checkpoint's defaults change a figure.

        Raises:
            ConfigError: more than one output of a prompt.
        """
        if self.n != 1:
            raise ConfigError("sampling.n", "1 where requests are measured or compared", self.n)
        silent = {name: value for name, value in asdict(NEUTRAL).items() if getattr(self, name) is None}
        return replace(self, **silent)

    @property
    def stated_temperature(self) -> float:
        """That of :meth:`stated`."""
        return NEUTRAL.temperature if self.temperature is None else self.temperature

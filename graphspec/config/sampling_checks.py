"""Bounds of what a request may ask of the sampler. Standard library only."""

from __future__ import annotations

from typing import Any

from .checks import FLOAT32_MIN, INT32_MAX, INT64_MAX, Errors, brief, in_range

MAX_SAMPLES = 65536
"""Most outputs of one prompt. Far above real use, to catch typing errors."""
TEMPERATURES = (0, 1e5)
"""Bounds of a temperature; noise multiplied by the largest stays finite in float32."""
REPETITIONS = (0.01, 100.0)
"""Bounds of the repetition penalty: what it makes of a logit is finite in float32 up to logits of 3e36."""
PENALTY_LIMIT = 2.0
BIAS_LIMIT = 100.0
SEEDS = (-(2**63), 2**64 - 1)


def check_defaults(params: Any, prefix: str, error: Errors) -> None:
    """Check the bounds of the fields of :class:`SamplingDefaults`; their types are checked already. None passes: it says nothing.

    Raises:
        GraphspecError: of class ``error``; names ``prefix`` and the field.
    """
    in_range(f"{prefix}temperature", params.temperature, *TEMPERATURES, error=error)
    in_range(f"{prefix}top_k", params.top_k, -1, INT64_MAX, error=error)
    in_range(f"{prefix}repetition_penalty", params.repetition_penalty, *REPETITIONS, error=error)
    if params.top_p is not None and not FLOAT32_MIN <= params.top_p <= 1:
        raise error(f"{prefix}top_p", f"a number above 0 ({FLOAT32_MIN:.0e} or more), at most 1", params.top_p)
    if params.min_p and not FLOAT32_MIN <= params.min_p <= 1:
        raise error(f"{prefix}min_p", f"0, or a number of {FLOAT32_MIN:.0e} or more, at most 1", params.min_p)


def check_sampling(params: Any, error: Errors) -> None:
    """Check the bounds of :class:`SamplingConfig` and ``SamplingParams`` that depend on no engine; their types are checked already.

    Raises:
        GraphspecError: of class ``error``; names ``sampling.<field>``.
    """
    check_defaults(params, "sampling.", error)
    # Without a new token there is still a prompt to return.
    scores = getattr(params, "echo", False) or getattr(params, "prompt_logprobs", None) is not None
    limits: dict[str, tuple[float, float]] = {
        "max_tokens": (0 if scores else 1, INT64_MAX),
        "presence_penalty": (-PENALTY_LIMIT, PENALTY_LIMIT),
        "frequency_penalty": (-PENALTY_LIMIT, PENALTY_LIMIT),
    }
    for name, (minimum, maximum) in limits.items():
        in_range(f"sampling.{name}", getattr(params, name), minimum, maximum, error=error)
    if params.seed is not None and not SEEDS[0] <= params.seed <= SEEDS[1]:
        raise error("sampling.seed", "null, or a 64-bit integer", brief(params.seed))
    in_range("sampling.n", params.n, 1, MAX_SAMPLES, error=error)
    if params.n > 1 and params.temperature == 0:
        raise error("sampling.n", "1 at temperature 0, where all outputs would be the same", params.n)
    longest = INT64_MAX if params.max_tokens is None else params.max_tokens
    maximum = min(longest, INT32_MAX)
    if not 0 <= params.min_tokens <= maximum:
        whose = " = max_tokens" if maximum == longest else ""
        raise error("sampling.min_tokens", f"an integer >= 0, at most {maximum}{whose}", brief(params.min_tokens))
    in_range("sampling.logprobs", params.logprobs, 0, INT32_MAX, error=error)
    for name in ("stop_token_ids", "allowed_token_ids"):
        for place, token in enumerate(getattr(params, name) or ()):
            in_range(f"sampling.{name}[{place}]", token, 0, INT64_MAX, error=error)
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise error("sampling.allowed_token_ids", "null, or at least one token id", [])
    for name in ("stop", "bad_words"):
        for place, text in enumerate(getattr(params, name) or ()):
            if not text.strip() if name == "bad_words" else not text:
                raise error(f"sampling.{name}[{place}]", "text that is not empty", repr(text))
    for token, value in (params.logit_bias or {}).items():
        in_range("sampling.logit_bias", token, 0, INT64_MAX, error=error)
        in_range(f"sampling.logit_bias[{token}]", value, -BIAS_LIMIT, BIAS_LIMIT, error=error)

"""Constants that some models multiply their streams by (muP; Granite, Falcon-H1). Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from .keys import Keys, is_number


@dataclass(frozen=True, slots=True)
class Multipliers:
    """The defaults change nothing."""

    embedding: float = 1.0
    residual: float = 1.0
    """Factor of what a block adds to the residual stream."""
    attention: float | None = None
    """Factor of scores, in place of one over the root of the head's width."""
    embedding_rounded: bool = False
    """The embedding's factor is rounded to the dtype of the model (Gemma)."""
    logits: float = 1.0
    """Divides them."""
    score_softcap: float = 0.0
    """Bounds attention scores in the same way; 0: they are not."""
    softcap: float | None = None
    """Logits are bounded by ``cap * tanh(logits / cap)`` (Gemma 2, arXiv 2408.00118, section 2); None: they are not."""
    scores: float = 1.0
    """Factor of scores, in addition to ``attention``."""
    attention_output: float = 1.0
    ssm: tuple[float, ...] = (1.0,) * 5
    """Factors of what the input projection of Mamba-2 gives: output gate, x, B, C, steps."""
    ssm_output: float = 1.0
    mlp: tuple[float, ...] = (1.0,) * 2
    """Factors of the gate before its activation, and of what the MLP gives."""


NO_MULTIPLIERS = Multipliers()


def read_granite_multipliers(keys: Keys) -> Multipliers:
    """The four of Granite; absent or null means 1, in attention too.

    Raises:
        CheckpointError: a value that is no positive number.
    """
    return Multipliers(
        embedding=keys.number("embedding_multiplier", 1.0),
        residual=keys.number("residual_multiplier", 1.0),
        attention=keys.number("attention_multiplier", 1.0),
        logits=keys.number("logits_scaling", 1.0),
    )


def read_gemma_multipliers(keys: Keys) -> Multipliers:
    """The embedding's is the root of the hidden size; those of scores and the cap of logits are there where the config has their keys.

    Raises:
        CheckpointError: a value that is no positive number.
    """
    scalar, cap, scores = "query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping"
    return Multipliers(
        embedding=keys.integer("hidden_size") ** 0.5,
        embedding_rounded=True,
        attention=keys.number(scalar) ** -0.5 if keys.present(scalar) else None,
        score_softcap=keys.number(scores) if keys.present(scores) else 0.0,
        softcap=keys.number(cap) if keys.present(cap) else None,
    )


def read_gemma4_multipliers(keys: Keys) -> Multipliers:
    """Gemma's, without a factor of scores: queries and keys are normed.

    Raises:
        CheckpointError: a value that is no positive number.
    """
    cap = "final_logit_softcapping"
    return Multipliers(
        embedding=keys.integer("hidden_size") ** 0.5,
        embedding_rounded=True,
        attention=1.0,
        softcap=keys.number(cap) if keys.present(cap) else None,
    )


def read_falcon_multipliers(keys: Keys) -> Multipliers:
    """Reads Falcon-H1's multipliers; absent or null means 1. A projection has no bias, so a factor of its input is applied to its output.

    Raises:
        CheckpointError: a value that is no positive number, or a list of another length.
    """
    entering, ssm_in = keys.number("attention_in_multiplier", 1.0), keys.number("ssm_in_multiplier", 1.0)
    return Multipliers(
        embedding=keys.number("embedding_multiplier", 1.0),
        logits=1 / keys.number("lm_head_multiplier", 1.0),
        scores=entering**2 * keys.number("key_multiplier", 1.0),
        attention_output=entering * keys.number("attention_out_multiplier", 1.0),
        ssm=tuple(ssm_in * scale for scale in _numbers(keys, "ssm_multipliers", 5)),
        ssm_output=keys.number("ssm_out_multiplier", 1.0),
        mlp=_numbers(keys, "mlp_multipliers", 2),
    )


def _numbers(keys: Keys, key: str, count: int) -> tuple[float, ...]:
    value = keys.values.get(key)
    if value is None:
        return (1.0,) * count
    if not isinstance(value, list) or len(value) != count or not all(is_number(one) and 0 < one < inf for one in value):
        raise keys.error(key, f"{count} positive numbers")
    return tuple(map(float, value))

"""Constants that some models multiply their streams by (muP; Granite). Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from .keys import Keys


@dataclass(frozen=True, slots=True)
class Multipliers:
    """The defaults change nothing."""

    embedding: float = 1.0
    residual: float = 1.0
    """Of what a block adds to the residual stream."""
    attention: float | None = None
    """Of scores, in place of one over the root of the head's width."""
    logits: float = 1.0
    """Divides them."""


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

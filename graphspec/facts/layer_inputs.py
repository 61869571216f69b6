"""Inputs that each layer has for itself (Gemma 4's E models; per-layer embeddings of Gemma 3n). Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from .keys import MAX_VOCAB, MAX_WIDTH, Keys


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Each layer adds a small vector of the token to its stream, gated by the stream itself."""

    width: int
    """P: of a layer's vector."""
    vocab_size: int
    """Rows of its embedding."""


def read_layer_inputs(keys: Keys) -> LayerInputs | None:
    """Those of Gemma 4; a width of 0: there are none.

    Raises:
        CheckpointError: a number that is none.
    """
    width = keys.integer("hidden_size_per_layer_input", minimum=0, maximum=MAX_WIDTH)
    return LayerInputs(width, keys.integer("vocab_size_per_layer_input", maximum=MAX_VOCAB)) if width else None

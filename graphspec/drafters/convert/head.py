"""A draft that is being converted, and helpers that the converters of all kinds of drafts share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ...errors import CheckpointError
from ...facts import DraftFacts, ModelFacts
from ...facts.keys import Keys
from ...models.checkpoint import Checkpoint
from ..heads.eagle3_facts import TAP_KEY
from ..heads.tensors import read_vocab_map

_OF_A_LAYOUT = {
    "architectures", "auto_map", "aux_hidden_state_layer_ids", "bias", "block_size", "causal", "causal_head", "dflash_config",
    "draft_shift", "draft_vocab_size", "eagle_config", "fc_norm", "fusion_bias", "is_causal", "layernorms", "mask_token_id",
    "norm_before_fc", "norm_before_residual", "norm_output", "num_aux_hidden_states", "num_target_layers", "sample_from_anchor",
    "sliding_window_non_causal", "speculators_config", "speculators_model_type", "speculators_version", "target_hidden_size",
    "target_layer_ids", "use_aux_norm", TAP_KEY,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Head:
    """A draft that was read from its files, its tensors under our names."""

    facts: DraftFacts
    config: dict[str, Any]
    """Keys of its decoder layers."""
    tensors: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of draft, whose layouts all have the same tensors.

    Attributes:
        name: in words.
        written: per layout, patterns that match the beginning of our tensor names, and their replacements in its files.
        config: facts and keys of the decoder layers, from a folder in any layout; the target is None if it is not known.
        checkpoint: the tensors, and the facts with all that these settle.
        write: makes ``config.json`` and tensors, under our names, for a layout.
    """

    name: str
    written: dict[str, tuple[tuple[str, str], ...]]
    config: Callable[[Path, ModelFacts | None], tuple[Any, Keys]]
    checkpoint: Callable[[Any], tuple[Checkpoint, Any]]
    write: Callable[[Head, str, ModelFacts | None], tuple[dict[str, Any], dict[str, Tensor]]]

    def read(self, path: Path, target: ModelFacts | None) -> Head:
        """The draft in a folder.

        Raises:
            CheckpointError: a draft that can't be read.
            ConfigError: no target although one is needed.
        """
        facts, keys = self.config(path, target)
        checkpoint, facts = self.checkpoint(facts)
        read_vocab_map(checkpoint, facts.decoder.vocab_size, facts.draft_vocab_size)
        return Head(facts, keys.values, {name: checkpoint.raw(name) for name in checkpoint.names()})


def refuse(path: Path, layout: str, can: set[str], needs: dict[str, bool]) -> None:
    """Refuse a draft that the layout can't express.

    Raises:
        CheckpointError: one of ``needs`` is true and not in ``can``; names the first.
    """
    for what, needed in needs.items():
        if needed and what not in can:
            raise CheckpointError(f"{path}: {what}", f"a head that the layout {layout} can express", f"one with {what}")


def decoder_needs(decoder: ModelFacts) -> dict[str, bool]:
    """Options of decoder layers, as the ``needs`` of :func:`refuse`."""
    both = decoder.attention_bias and decoder.output_bias
    return {
        "attention_bias": both,
        "q, k, v biases": decoder.attention_bias and not both,
        "o_proj bias": decoder.output_bias and not both,
        "mlp_bias": decoder.mlp_bias,
        "query and key norms": decoder.qk_norm,
        "sliding_window": any(decoder.sliding_window),
        "latent attention": decoder.latent is not None,
    }


def decoder_config(keys: dict[str, Any], decoder: ModelFacts) -> dict[str, Any]:
    """Config keys of the decoder layers, without those of a particular layout."""
    kept = {key: value for key, value in keys.items() if key not in _OF_A_LAYOUT}
    sizes = {"num_hidden_layers": decoder.num_layers, "num_key_value_heads": decoder.num_kv_heads, "head_dim": decoder.head_dim}
    biases = {"attention_bias": decoder.attention_bias and decoder.output_bias, "mlp_bias": decoder.mlp_bias}
    return kept | {"model_type": "qwen3" if decoder.qk_norm else "llama"} | sizes | biases


def speculators(kind: str, architecture: str, target: ModelFacts | None) -> dict[str, Any]:
    """Top-level keys of every config of speculators."""
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    verifier = {"name_or_path": str(target.path) if target else None, "architectures": [target.architecture] if target else []}
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": verifier,
        },
    }


def meaning(facts: DraftFacts) -> DraftFacts:
    """The facts that a conversion must not change: without folder, layout, class names and tapped layers, which may be the default."""
    decoder = replace(facts.decoder, path=Path(), architecture="", eos_token_ids=())
    # The tensors say which norms an EAGLE-1/2 head has.
    ours: dict[str, Any] = {key: value for key, value in {"layout": "", "layernorms": None}.items() if hasattr(facts, key)}
    return replace(facts, path=Path(), decoder=decoder, tap_layers=(), **ours)

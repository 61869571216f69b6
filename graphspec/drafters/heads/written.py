"""Tables of the layouts that drafts are published in, and what writes a draft by one of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...facts import DraftFacts, ModelFacts
from ...facts.keys import Keys
from ...facts.quantisation import stored_quantisation
from ...models.checkpoint import Checkpoint
from .eagle3_facts import TAP_KEY
from .tensors import read_vocab_map, renamed

_NO_VERIFIER: dict[str, Any] = {"name_or_path": None, "architectures": []}
_OF_A_LAYOUT = {
    "architectures", "auto_map", "aux_hidden_state_layer_ids", "bias", "block_size", "causal", "causal_head", "dflash_config",
    "draft_shift", "draft_vocab_size", "eagle_config", "fc_norm", "fusion_bias", "is_causal", "layernorms", "mask_token_id",
    "norm_before_fc", "norm_before_residual", "norm_output", "num_aux_hidden_states", "num_target_layers", "quantization_config",
    "sample_from_anchor",
    "sliding_window_non_causal", "speculators_config", "speculators_model_type", "speculators_version", "target_hidden_size",
    "target_layer_ids", "use_aux_norm", TAP_KEY,
}  # fmt: skip


Stored = dict[str, Tensor]
"""A tensor as files have it: itself under its name, or codes and scales of a weight of low precision."""


@dataclass(frozen=True, slots=True)
class Head:
    """A draft that was read from its files, its tensors under our names."""

    facts: DraftFacts
    config: dict[str, Any]
    """Keys of its decoder layers."""
    tensors: dict[str, Stored]
    quantisation: Any
    """``quantization_config``, its layers under our names; None: all weights are numbers."""


class Fact(NamedTuple):
    """A value in the config of a layout that is the draft's own; where it is None, its key is left out."""

    name: str
    """A field of the draft's facts, ``layers``, or what :attr:`Kind.describe` adds."""


@dataclass(frozen=True, slots=True)
class Written:
    """A layout: what it can express, and how it spells it.

    Attributes:
        expresses: options, as :attr:`Kind.describe` and :func:`decoder_needs` call them.
        config: ``config.json``, with a :class:`Fact` for each value of the draft. Keys of decoder layers stand next to these, unless they
            are nested as ``transformer_layer_config``.
        renamed: patterns that match the beginning of our tensor names, and their replacements in its files.
        dropped: tensors that it does not store.
    """

    expresses: set[str]
    config: dict[str, Any]
    renamed: tuple[tuple[str, str], ...] = ()
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of draft, whose layouts all have the same tensors.

    Attributes:
        name: in words.
        marks, lacks: patterns; every draft has tensors that match each of the first, and none that matches one of the second.
        layouts: by name.
        config: facts and keys of the decoder layers, from a folder in any layout; the target is None if it is not known.
        checkpoint: the tensors, and the facts with all that these settle.
        describe: ``(draft, layout, target)`` to options by whether the draft has them, and further values of the config.
    """

    name: str
    marks: tuple[str, ...]
    lacks: tuple[str, ...]
    layouts: dict[str, Written]
    config: Callable[[Path, ModelFacts | None], tuple[Any, Keys]]
    checkpoint: Callable[[Any], tuple[Checkpoint, Any]]
    describe: Callable[[Head, str, ModelFacts | None], tuple[dict[str, bool], dict[str, Any]]]

    @property
    def called(self) -> str:
        """The name with its article."""
        return f"{'an' if self.name[0] in 'AEIOU' else 'a'} {self.name}"

    def fits(self, names: Collection[str]) -> bool:
        """Whether a draft with tensors of these names is of this kind."""

        def there(pattern: str) -> bool:
            return any(re.fullmatch(pattern, name) for name in names)

        return all(map(there, self.marks)) and not any(map(there, self.lacks))

    def read(self, path: Path, target: ModelFacts | None) -> Head:
        """The draft in a folder.

        Raises:
            CheckpointError: a draft that can't be read.
            ConfigError: no target although one is needed.
        """
        facts, keys = self.config(path, target)
        checkpoint, facts = self.checkpoint(facts)
        read_vocab_map(checkpoint, facts.decoder.vocab_size, facts.draft_vocab_size)
        found = stored_quantisation(path)
        quantisation = None if found is None else _with_layers(found[0], checkpoint.rename)
        return Head(facts, keys.values, {name: checkpoint.stored(name) for name in checkpoint.names()}, quantisation)

    def write(self, head: Head, layout: str, target: ModelFacts | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """``config.json`` and the tensors in a layout.

        Raises:
            CheckpointError: the layout can't express the draft; names the first option.
        """
        row, facts, tensors = self.layouts[layout], head.facts, dict(head.tensors)
        needs, values = self.describe(head, layout, target)
        for what, needed in (needs | decoder_needs(facts.decoder)).items():
            if needed and what not in row.expresses:
                raise CheckpointError(f"{facts.path}: {what}", f"a head that the layout {layout} can express", f"one with {what}")
        if "d2t" in tensors and "t2d" not in tensors:
            marks = torch.zeros(facts.decoder.vocab_size, dtype=torch.bool)
            [offset_Vd] = tensors["d2t"].values()
            tensors["t2d"] = {"t2d": marks.index_fill(0, offset_Vd + torch.arange(facts.draft_vocab_size), True)}
        layers = _decoder_config(head.config, facts.decoder)
        verifier = {"name_or_path": str(target.path), "architectures": [target.architecture]} if target else _NO_VERIFIER
        known = {field.name: getattr(facts, field.name) for field in fields(facts)}
        config = _render(row.config, known | {"layers": layers, "verifier": verifier} | values)
        kept = {name: part for own, parts in tensors.items() if own not in row.dropped for name, part in parts.items()}
        if head.quantisation is not None:
            config["quantization_config"] = _with_layers(head.quantisation, lambda name: renamed(name, row.renamed))
        config = config if "transformer_layer_config" in config else layers | config
        return config, {renamed(name, row.renamed): tensor for name, tensor in kept.items()}


def _with_layers(quantisation: Any, rename: Callable[[str], str]) -> Any:
    """``quantization_config`` with other names of layers, in its lists of them; patterns stay."""
    if isinstance(quantisation, dict):
        return {key: _with_layers(value, rename) for key, value in quantisation.items()}
    if not isinstance(quantisation, list):
        return quantisation
    # The prefixes of a layer end with a point.
    return [rename(f"{one}.")[:-1] if isinstance(one, str) else one for one in quantisation]


def _render(template: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    rendered: dict[str, Any] = {}
    for key, value in template.items():
        if not isinstance(value, Fact):
            rendered[key] = _render(value, values) if isinstance(value, dict) else value
        elif values[value.name] is not None:
            rendered[key] = values[value.name]
    return rendered


def decoder_needs(decoder: ModelFacts) -> dict[str, bool]:
    """Options of decoder layers, by whether the draft has them."""
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


def _decoder_config(keys: dict[str, Any], decoder: ModelFacts) -> dict[str, Any]:
    """Config keys of the decoder layers, without those of a particular layout."""
    kept = {key: value for key, value in keys.items() if key not in _OF_A_LAYOUT}
    sizes = {"num_hidden_layers": decoder.num_layers, "num_key_value_heads": decoder.num_kv_heads, "head_dim": decoder.head_dim}
    biases = {"attention_bias": decoder.attention_bias and decoder.output_bias, "mlp_bias": decoder.mlp_bias}
    return kept | {"model_type": "qwen3" if decoder.qk_norm else "llama"} | sizes | biases


def speculator(kind: str, architecture: str) -> dict[str, Any]:
    """Top-level keys of every config of speculators."""
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    proposals = {"algorithm": kind, "default_proposal_method": "greedy", "proposal_methods": [method], "verifier": Fact("verifier")}
    return {"architectures": [architecture], "speculators_model_type": kind, "speculators_config": proposals}


def meaning(facts: DraftFacts) -> DraftFacts:
    """The facts that a conversion must not change: without folder, layout, class names and tapped layers, which may be the default."""
    decoder = replace(facts.decoder, path=Path(), architecture="", eos_token_ids=())
    # The tensors say which norms an EAGLE-1/2 head has.
    ours: dict[str, Any] = {key: value for key, value in {"layout": "", "layernorms": None}.items() if hasattr(facts, key)}
    return replace(facts, path=Path(), decoder=decoder, tap_layers=(), **ours)

"""P-EAGLE heads: what their ``config.json`` says, checked against the target. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ...facts.draft import DraftPass
from ...facts.keys import Keys, read_architecture, read_config
from ...facts.model import ModelFacts
from ...shapes import CycleShape
from ..heads.config import check_speculator, other_draft
from ..heads.eagle3_facts import Eagle3Facts, check_target, eagle3_config
from ..heads.eagle3_facts import assumed_facts as assumed_eagle3

MASK_KEYS = ("mask_token_id", "ptd_token_id", "pard_token")
"""Keys for the mask token in configs, in order of precedence."""
_PARALLEL = {*MASK_KEYS, "parallel_drafting", "mask_hidden"}
_LAYERS = 4  # of the published heads


@dataclass(frozen=True, slots=True, kw_only=True)
class PEagleFacts(Eagle3Facts):
    """A P-EAGLE head (arXiv 2602.01469) that was checked against its target."""

    mask_token_id: int
    """Its embedding is used for tokens that are not known yet."""

    def passes(self, shape: CycleShape) -> tuple[DraftPass, ...]:
        """One pass over the window and a mask for every level but the first."""
        return (DraftPass("p_eagle", shape.accept_width + shape.num_steps - 1, shape.num_steps),)


def _of(facts: Eagle3Facts, **more: Any) -> PEagleFacts:
    return PEagleFacts(**{field.name: getattr(facts, field.name) for field in fields(facts)}, **more)


def _as_eagle3(keys: Keys) -> Keys:
    """The config as that of an EAGLE-3 head: without the keys of masks.

    Raises:
        CheckpointError: another kind of draft.
    """
    values = {key: value for key, value in keys.values.items() if key not in _PARALLEL}
    if keys.present("speculators_model_type"):
        check_speculator(keys, "peagle")
        # As in vLLM; for an EAGLE-3 head of this layout, an absent key means true.
        residual = values["norm_before_residual"] if keys.present("norm_before_residual") else False
        return Keys({**values, "speculators_model_type": "eagle3", "norm_before_residual": residual}, keys.where)
    expected = "a P-EAGLE head (PEagleDraftModel, PeagleLlamaForCausalLM, or LlamaForCausalLMEagle3 with a mask token)"
    architecture = read_architecture(keys, expected)
    masked = any(keys.present(key) for key in MASK_KEYS)
    if "peagle" not in architecture.lower() and not (masked and "eagle3" in architecture.lower()):
        raise keys.error("architectures", expected, other_draft(keys, architecture))
    return Keys({**values, "architectures": ["LlamaForCausalLMEagle3"]}, keys.where)


def p_eagle_config(path: Path, keys: Keys) -> tuple[PEagleFacts, Keys]:
    """Facts of a head from its config alone, and the keys of its decoder layers; see
    :func:`~graphspec.drafters.heads.eagle3_facts.eagle3_config`.

    Raises:
        CheckpointError: as :func:`read_p_eagle_facts`, except for what concerns the target.
    """
    facts, decoder_keys = eagle3_config(path, _as_eagle3(keys))
    key = next((key for key in MASK_KEYS if keys.present(key)), MASK_KEYS[0])
    mask = keys.integer(key, minimum=0)
    if mask >= facts.decoder.vocab_size:
        raise keys.error(key, f"a token of the vocabulary of {facts.decoder.vocab_size}")
    return _of(facts, mask_token_id=mask), decoder_keys


def read_p_eagle_facts(path: str | Path, target: ModelFacts) -> PEagleFacts:
    """Facts of a P-EAGLE head, checked against the target it drafts for.

    Everything but the mask is read as in an EAGLE-3 head (:func:`graphspec.drafters.heads.eagle3_facts.read_eagle3_facts`).

    Raises:
        CheckpointError: as for an EAGLE-3 head; also no mask token, or one outside the vocabulary.
    """
    keys = read_config(Path(path))
    return check_target(*p_eagle_config(Path(path), keys), keys, target)


def assumed_facts(folder: Path, target: ModelFacts) -> tuple[PEagleFacts, str]:
    """See :attr:`graphspec.config.catalog.Variant.assumed`."""
    facts, _ = assumed_eagle3(folder, target)
    decoder = replace(facts.decoder, num_layers=_LAYERS, sliding_window=(None,) * _LAYERS)
    taps = len(facts.tap_layers)
    masked = _of(replace(facts, decoder=decoder), mask_token_id=0)
    return masked, f"{_LAYERS} layers over {taps} tapped ones, {facts.draft_vocab_size} tokens"

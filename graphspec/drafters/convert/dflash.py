"""Block drafters from layout to layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from ...errors import ConfigError
from ...facts import ModelFacts
from ...facts.keys import Keys
from ..dflash.facts import DFlashFacts, read_dflash_config
from ..dflash.network import dflash_checkpoint
from .head import Head, Kind, decoder_config, decoder_needs, refuse, speculators

_EXPRESSES: dict[str, set[str]] = {
    "z-lab": {"query and key norms", "sliding_window", "rows that look ahead", "sliding layers that look ahead", "causal layers"},
    "jetspec": {"query and key norms", "sliding_window", "causal layers", "proposals from the anchor"},
    "speculators": {
        "query and key norms", "sliding_window", "rows that look ahead", "sliding layers that look ahead", "proposals from the anchor",
        "lm_head",
    },
}  # fmt: skip


def _config(path: Path, target: ModelFacts | None) -> tuple[DFlashFacts, Keys]:
    if target is None:
        expected = "the folder of the target, whose depth says which layers a block drafter taps"
        raise ConfigError("target", expected, "nothing")
    return read_dflash_config(path, target)


def _write(head: Head, layout: str, target: ModelFacts | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    facts = head.facts
    assert isinstance(facts, DFlashFacts) and target is not None
    decoder, causal = facts.decoder, all(facts.causal)
    sliding = [window is not None for window in decoder.sliding_window]
    # A layout has one flag for all layers without a window, and one for all layers with one.
    sliding_ahead = any(slides and not is_causal for slides, is_causal in zip(sliding, facts.causal, strict=True))
    needs = {
        "causal layers": any(is_causal and not slides for slides, is_causal in zip(sliding, facts.causal, strict=True)),
        "rows that look ahead": not causal,
        "sliding layers that look ahead": sliding_ahead,
        "proposals from the anchor": facts.from_anchor,
        "lm_head": "lm_head.weight" in head.tensors,
    }
    refuse(facts.path, layout, _EXPRESSES[layout], needs | decoder_needs(decoder))
    config = decoder_config(head.config, decoder)
    mask, block = {"mask_token_id": facts.mask_token_id}, {"block_size": facts.block_size}
    if layout == "speculators":
        outer = speculators("dflash", "DFlashSpeculator", target) | mask | block | {"draft_vocab_size": facts.draft_vocab_size}
        # Ids of the layers entered; the target's output stream ends the list, though no draft reads it.
        outer |= {"aux_hidden_state_layer_ids": [*facts.tap_layers, target.num_layers], "sample_from_anchor": facts.from_anchor}
        return outer | {"sliding_window_non_causal": sliding_ahead, "transformer_layer_config": config}, dict(head.tensors)
    own: dict[str, Any] = mask | block | {"target_layer_ids": [i - 1 for i in facts.tap_layers]}
    if layout == "jetspec":
        own |= {"causal_head": causal, "draft_shift": facts.from_anchor}
    elif causal or sliding_ahead:
        own |= {"causal": causal}
    flat = {"architectures": ["DFlashDraftModel"], "num_target_layers": target.num_layers, "dflash_config": own}
    return config | flat, dict(head.tensors)


DFLASH = Kind("block drafter", {"z-lab": (), "jetspec": (), "speculators": ()}, _config, dflash_checkpoint, _write)

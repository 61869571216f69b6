"""The layouts of block drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...facts import ModelFacts
from ...facts.keys import Keys
from ..heads.written import Fact, Head, Kind, Written, speculator
from .facts import DFlashFacts, read_dflash_config
from .network import dflash_checkpoint

_BLOCK = {"mask_token_id": Fact("mask_token_id"), "block_size": Fact("block_size")}
_OWN = _BLOCK | {"target_layer_ids": Fact("outputs")}
_FLAT = {"architectures": ["DFlashDraftModel"], "num_target_layers": Fact("depth")}
_AHEAD = ("rows that look ahead", "sliding layers that look ahead")
_LAYOUTS = {
    "z-lab": Written(
        {"query and key norms", "sliding_window", "causal layers", *_AHEAD}, _FLAT | {"dflash_config": _OWN | {"causal": Fact("stated")}}
    ),
    "jetspec": Written(
        {"query and key norms", "sliding_window", "causal layers", "proposals from the anchor"},
        _FLAT | {"dflash_config": _OWN | {"causal_head": Fact("all_causal"), "draft_shift": Fact("from_anchor")}},
    ),
    "speculators": Written(
        {"query and key norms", "sliding_window", "proposals from the anchor", "lm_head", *_AHEAD},
        {
            **speculator("dflash", "DFlashSpeculator"), **_BLOCK, "draft_vocab_size": Fact("draft_vocab_size"),
            "aux_hidden_state_layer_ids": Fact("entered"), "sample_from_anchor": Fact("from_anchor"),
            "sliding_window_non_causal": Fact("sliding_ahead"), "transformer_layer_config": Fact("layers"),
        },
    ),
}  # fmt: skip


def _config(path: Path, target: ModelFacts | None) -> tuple[DFlashFacts, Keys]:
    if target is None:
        raise ConfigError("target", "the folder of the target, whose depth says which layers a block drafter taps", "nothing")
    return read_dflash_config(path, target)


def _describe(head: Head, layout: str, target: ModelFacts | None) -> tuple[dict[str, bool], dict[str, Any]]:
    facts = head.facts
    assert isinstance(facts, DFlashFacts) and target is not None
    # A layout has one flag for all layers without a window, and one for all layers with one.
    layers = [(window is not None, causal) for window, causal in zip(facts.decoder.sliding_window, facts.causal, strict=True)]
    causal, sliding_ahead = all(facts.causal), (True, False) in layers
    needs = {
        "causal layers": (False, True) in layers,
        "rows that look ahead": not causal,
        "sliding layers that look ahead": sliding_ahead,
        "proposals from the anchor": facts.from_anchor,
        "lm_head": "lm_head.weight" in head.tensors,
    }
    return needs, {
        "all_causal": causal,
        "sliding_ahead": sliding_ahead,
        "stated": causal if causal or sliding_ahead else None,
        "outputs": [i - 1 for i in facts.tap_layers],
        # The target's output stream ends the list, though no draft reads it.
        "entered": [*facts.tap_layers, target.num_layers],
        "depth": target.num_layers,
    }


DFLASH = Kind(
    name="block drafter",
    marks=(r"fc\.weight", r"hidden_norm\.weight"),
    lacks=("mask_hidden",),
    layouts=_LAYOUTS,
    config=_config,
    checkpoint=dflash_checkpoint,
    describe=_describe,
)

"""The layouts of EAGLE-3 heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...errors import CheckpointError
from ...facts import ModelFacts
from ...facts.keys import read_config
from .eagle3_facts import DEFAULT_TAPS, TAP_KEY, Eagle3Facts, default_taps, eagle3_config
from .eagle3_loading import EAGLE3_WRITTEN, eagle3_checkpoint
from .written import Fact, Head, Kind, Written, speculator

_SIZES = {"draft_vocab_size": Fact("draft_vocab_size"), "target_hidden_size": Fact("other_width")}
_FLAT = _SIZES | {"architectures": ["LlamaForCausalLMEagle3"]}
_TAPS = {TAP_KEY: Fact("outputs"), "use_aux_hidden_state": Fact("reads_taps")}
_NORMS = {name: Fact(name) for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
_LAYOUTS = {
    "safeailab": Written({"target_hidden_size", "embed_tokens"}, _SIZES | {"architectures": ["LlamaForCausalLM"]}),
    "sglang": Written(
        {
            "target_hidden_size", "embed_tokens", "num_hidden_layers", "norm_before_fc", "fc_norm", "norm_output", "fc bias", "no lm_head",
            "no taps", TAP_KEY,
        },
        {
            **_FLAT, "draft_vocab_size": Fact("own_vocabulary"), "fc_norm": Fact("fc_norm"), "norm_output": Fact("norm_output"),
            "bias": Fact("fc_bias"), "num_aux_hidden_states": Fact("taps"), "eagle_config": _TAPS | {"norm_before_fc": Fact("normed")},
        },
    ),
    "speculators": Written(
        {
            "target_hidden_size", "embed_tokens", "num_hidden_layers", "norm_before_fc", "fc_norm", "norm_output", "norm_before_residual",
            "no lm_head", TAP_KEY, "attention_bias", "mlp_bias", "query and key norms", "sliding_window",
        },
        {
            **speculator("eagle3", "Eagle3Speculator"), **_SIZES, **_NORMS, TAP_KEY: Fact("entered"),
            "transformer_layer_config": Fact("layers"),
        },
    ),
    "modelopt": Written(
        {"num_hidden_layers", "no lm_head", "no taps", TAP_KEY, "attention_bias", "mlp_bias"},
        {
            **_FLAT,
            "eagle_config": {
                **_TAPS, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
                "next_layer_regular": True, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": None,
            },
        },
        dropped=("t2d",),
    ),
}  # fmt: skip
EAGLE3_LAYOUTS = {name: replace(row, renamed=EAGLE3_WRITTEN[name]) for name, row in _LAYOUTS.items()}


def describe_eagle3(head: Head, layout: str, target: ModelFacts | None) -> tuple[dict[str, bool], dict[str, Any]]:
    """See :attr:`graphspec.drafters.heads.written.Kind.describe`."""
    facts = head.facts
    assert isinstance(facts, Eagle3Facts)
    decoder, taps, own_head = facts.decoder, facts.tap_layers, "lm_head.weight" in head.tensors
    if taps and layout == "safeailab":
        if target is None or taps != default_taps(target.num_layers):
            expected, hint = (
                "the default layers, the only ones that this layout can express",
                "target=FOLDER decides whether they are the default",
            )
            raise CheckpointError(f"{facts.path}: {TAP_KEY}", expected, f"layers {taps}", hint)
        taps = ()
    other_width = facts.target_hidden_size != decoder.hidden_size
    needs = {
        "num_hidden_layers": decoder.num_layers > 1,
        "target_hidden_size": other_width,
        "norm_before_residual": facts.norm_before_residual,
        "norm_before_fc": bool(facts.norm_before_fc),
        "fc_norm": bool(facts.fc_norm),
        "norm_output": facts.norm_output,
        "fc bias": bool(facts.fc_bias),
        "no lm_head": not own_head,
        "embed_tokens": "embed_tokens.weight" in head.tensors,
        "no taps": not facts.reads_taps,
        TAP_KEY: bool(taps),
    }
    return needs, {
        "other_width": facts.target_hidden_size if other_width else None,
        "own_vocabulary": facts.draft_vocab_size if own_head or decoder.tie_word_embeddings else None,
        "entered": list(taps) or None,
        "outputs": [i - 1 for i in taps] or None,  # ids of the layers whose output is tapped
        "taps": (len(taps) or DEFAULT_TAPS) if facts.reads_taps else None,
        "normed": facts.norm_before_fc or None,
    }


EAGLE3 = Kind(
    name="EAGLE-3 head",
    marks=(r".+\.hidden_norm\.weight",),
    lacks=("mask_hidden", r"hidden_norm\.weight"),
    layouts=EAGLE3_LAYOUTS,
    config=lambda path, _: eagle3_config(path, read_config(path)),
    checkpoint=eagle3_checkpoint,
    describe=describe_eagle3,
)

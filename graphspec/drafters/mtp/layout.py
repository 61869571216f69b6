"""Tensor names of multi-token-prediction heads. Standard library only."""

from __future__ import annotations

from ...facts.layouts import Layout, TensorRule, decoder_rules, mixer_rules, qwen_expert_rules

LAYERS = {"deepseek": "model.layers.*.", "qwen": "mtp.layers.*.", "mimo": "model.mtp_layers.*.", "nemotron": "mtp.layers.*."}
"""Per layout, the prefix of the layer of a head; of Nemotron-H's, of each of its layers."""


def _prediction_head(
    prefix: str, embedding_norm: str, hidden_norm: str, projection: str, norm: str, layer: str, ignored: tuple[str, ...] = ()
) -> Layout:
    return Layout(
        rules=(
            TensorRule("embedding_norm.weight", (f"{prefix}{embedding_norm}.weight",)),
            TensorRule("hidden_norm.weight", (f"{prefix}{hidden_norm}.weight",)),
            TensorRule("projection.weight", (f"{prefix}{projection}.weight",)),
            *qwen_expert_rules("layer.", layer),
            *decoder_rules("layer.", layer),
            TensorRule("norm.weight", (f"{prefix}{norm}.weight",)),
        ),
        ignored=(f"{layer}self_attn.rotary_emb.inv_freq", *(f"{prefix}{name}" for name in ignored)),
    )


NEXTN_LAYOUT = _prediction_head(
    "model.layers.*.", "enorm", "hnorm", "eh_proj", "shared_head.norm", LAYERS["deepseek"],
    ignored=("embed_tokens.weight", "shared_head.head.weight"),  # copies of the target's, which are used instead
)  # fmt: skip
"""DeepSeek's NextN heads: layers after the target's last one, or numbered from 0 in a separate file."""


QWEN_MTP_LAYOUT = _prediction_head("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", LAYERS["qwen"])
"""The one head of Qwen3-Next and Qwen3.5."""


MIMO_MTP_LAYOUT = _prediction_head(
    "model.mtp_layers.*.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", LAYERS["mimo"]
)
"""MiMo's heads."""


NEMOTRON_MTP_LAYOUT = Layout(
    rules=(
        TensorRule("embedding_norm.weight", ("mtp.layers.0.enorm.weight",)),
        TensorRule("hidden_norm.weight", ("mtp.layers.0.hnorm.weight",)),
        TensorRule("projection.weight", ("mtp.layers.0.eh_proj.weight",)),
        *mixer_rules("layer.*.", "mtp.layers.*."),
        TensorRule("norm.weight", ("mtp.layers.*.final_layernorm.weight",)),
    ),
)
"""The one head of Nemotron-H: layers of one net each. The first has the projection and the norms before it, the last the norm after it
(``nemotron_h_mtp.py`` of vLLM loads these names)."""


MTP_LAYOUTS = {"deepseek": NEXTN_LAYOUT, "qwen": QWEN_MTP_LAYOUT, "mimo": MIMO_MTP_LAYOUT, "nemotron": NEMOTRON_MTP_LAYOUT}
"""Each the layout of one prediction head. ``*`` is its number, or of Nemotron-H's that of its last layer, where the parameter has none."""

"""How EAGLE-1/2 heads name their tensors. Standard library only."""

from __future__ import annotations

from ...layouts import Layout, TensorRule, decoder_rules

EAGLE_LAYOUT = Layout(
    rules=(
        *(TensorRule(name, (name,)) for name in ("fc.weight", "fc.bias")),
        *(TensorRule(f"{name}.weight", (f"{name}.weight",)) for name in ("embed_layernorm", "hidden_layernorm", "lm_head_layernorm")),
        *decoder_rules("layer.", "layers.0."),
    ),
    ignored=(
        "embed_tokens.weight",  # a copy of the target's, which is used instead; its shape is checked
        "layers.0.self_attn.rotary_emb.inv_freq",  # derived from config.json
    ),
    renamed=(
        ("fusion_fc.", "fc."),
        ("transformer.", "layers.0."),
        ("transformer.input_layernorm.", "hidden_layernorm."),
        ("embedding_layernorm.", "embed_layernorm."),
        ("pre_lm_head_layernorm.", "lm_head_layernorm."),
    ),
)
"""EAGLE-1/2 heads, with or without the norms of HASS; the renamed prefixes are those of speculators before it dropped EAGLE-1."""


EAGLE_WRITTEN: dict[str, tuple[tuple[str, str], ...]] = {
    "safeailab": (),
    "hass": (),
    "speculators-old": (
        (r"fc\.", "fusion_fc."),
        (r"layers\.0\.", "transformer."),
        (r"hidden_layernorm\.", "transformer.input_layernorm."),
        (r"embed_layernorm\.", "embedding_layernorm."),
        (r"lm_head_layernorm\.", "pre_lm_head_layernorm."),
    ),
}
"""Per layout of EAGLE-1/2 heads: patterns at the beginning of the names above, and what stands there in its files."""

"""How EAGLE-3 heads name their tensors. Standard library only."""

from __future__ import annotations

from ...layouts import Layout, TensorRule, decoder_rules

EAGLE3_LAYOUT = Layout(
    rules=(
        *(TensorRule(name, (name,)) for name in ("fc.weight", "fc.bias", "input_norm.weight", "fc_norm.*.weight")),
        TensorRule("embed_tokens.weight", ("embed_tokens.weight",)),
        *decoder_rules("layers.*.", "layers.*."),
        TensorRule("norm.weight", ("norm.weight",)),
        TensorRule("lm_head.weight", ("lm_head.weight",)),
    ),
    ignored=(
        "layers.*.self_attn.rotary_emb.inv_freq",  # derived from config.json
        "t2d",  # the inverse of d2t: checked against it, then dropped
        "d2t",  # becomes the buffer target_token_Vd
    ),
    renamed=(
        ("midlayer.", "layers.0."),
        ("aux_norm_low.", "fc_norm.0."),
        ("aux_norm_mid.", "fc_norm.1."),
        ("aux_norm_high.", "fc_norm.2."),
    ),
)
"""The first published heads and SpecForge say ``midlayer``; speculators, ModelOpt and vLLM say ``layers.0``."""


EAGLE3_WRITTEN: dict[str, tuple[tuple[str, str], ...]] = {
    "safeailab": ((r"layers\.0\.", "midlayer."),),
    "sglang": ((r"layers\.0\.", "midlayer."), (r"layers\.([1-9]\d*)\.input_layernorm\.", r"layers.\1.hidden_norm.")),
    "speculators": (),
    "modelopt": (),
}
"""Per layout of EAGLE-3 heads: patterns at the beginning of the names above, and what stands there in its files."""

"""How checkpoints name their tensors: tables that :mod:`graphspec.weights` interprets. Data only, standard library only.

``*`` stands for a layer index. A rule with several sources concatenates them along the output rows, in order. ``#`` in a source stands
for the number of an expert: the parameter has one more dimension in front, and every expert fills its part of it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorRule:
    """One parameter of ours, and the checkpoint tensors it is made of."""

    ours: str
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The whole table of one kind of checkpoint."""

    rules: tuple[TensorRule, ...]
    ignored: tuple[str, ...] = ()
    """Tensors that may be there and aren't loaded, each for the reason beside it."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Prefixes in circulation, and what the rules call them."""


_LAYER_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "post_feedforward_layernorm")


def _decoder(ours: str, theirs: str, *, fused: bool = False) -> tuple[TensorRule, ...]:
    def rule(name: str, *sources: str) -> tuple[TensorRule, ...]:
        return tuple(TensorRule(f"{ours}{name}.{kind}", tuple(f"{theirs}{s}.{kind}" for s in sources)) for kind in ("weight", "bias"))

    return (
        *rule("self_attn.qkv_proj", *(["self_attn.qkv_proj"] if fused else (f"self_attn.{one}_proj" for one in "qkv"))),
        *rule("self_attn.o_proj", "self_attn.o_proj"),
        *rule("mlp.gate_up_proj", *(["mlp.gate_up_proj"] if fused else ["mlp.gate_proj", "mlp.up_proj"])),
        *rule("mlp.down_proj", "mlp.down_proj"),
        *(
            TensorRule(f"{ours}{name}.weight", (f"{theirs}{name}.weight",))
            for name in ("self_attn.q_norm", "self_attn.k_norm", *_LAYER_NORMS)
        ),
        *rule("self_attn.qkv_a_proj", "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
        *rule("self_attn.q_proj", "self_attn.q_proj"),
        *rule("self_attn.kv_a_proj", "self_attn.kv_a_proj_with_mqa"),
        *rule("self_attn.q_b_proj", "self_attn.q_b_proj"),
        *(
            TensorRule(f"{ours}self_attn.{name}.weight", (f"{theirs}self_attn.{name}.weight",))
            for name in ("q_a_layernorm", "kv_a_layernorm")
        ),
        TensorRule(f"{ours}self_attn.kv_b_QDL", (f"{theirs}self_attn.kv_b_proj.weight",)),
        TensorRule(f"{ours}mlp.router.weight", (f"{theirs}mlp.gate.weight",)),
        TensorRule(f"{ours}mlp.correction_E", (f"{theirs}mlp.gate.e_score_correction_bias",)),
        TensorRule(f"{ours}mlp.gate_up_EFH", (f"{theirs}mlp.experts.#.gate_proj.weight", f"{theirs}mlp.experts.#.up_proj.weight")),
        TensorRule(f"{ours}mlp.down_EHF", (f"{theirs}mlp.experts.#.down_proj.weight",)),
        *rule("mlp.shared_experts.gate_up_proj", "mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        *rule("mlp.shared_experts.down_proj", "mlp.shared_experts.down_proj"),
    )


def _target(*, fused: bool) -> Layout:
    return Layout(
        rules=(
            TensorRule("embed_tokens.weight", ("model.embed_tokens.weight",)),
            *_decoder("layers.*.", "model.layers.*.", fused=fused),
            TensorRule("norm.weight", ("model.norm.weight",)),
            TensorRule("lm_head.weight", ("lm_head.weight",)),
        ),
        ignored=("model.layers.*.self_attn.rotary_emb.inv_freq",),  # derived from config.json
    )


SPLIT_LAYOUT = _target(fused=False)
"""A target with one tensor per projection. Which of the rules hold for a layer follows from the parameters it has: biases, query / key
norms, norms after attention and MLP, latent attention, a mixture of experts."""

FUSED_LAYOUT = _target(fused=True)
"""The same with queries, keys and values in one tensor, and gate and up in another."""

EAGLE3_LAYOUT = Layout(
    rules=(
        *(TensorRule(name, (name,)) for name in ("fc.weight", "fc.bias", "input_norm.weight", "fc_norm.*.weight")),
        TensorRule("embed_tokens.weight", ("embed_tokens.weight",)),
        *_decoder("layers.*.", "layers.*."),
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

EAGLE_LAYOUT = Layout(
    rules=(
        *(TensorRule(name, (name,)) for name in ("fc.weight", "fc.bias")),
        *(TensorRule(f"{name}.weight", (f"{name}.weight",)) for name in ("embed_layernorm", "hidden_layernorm", "lm_head_layernorm")),
        *_decoder("layer.", "layers.0."),
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


def _prediction_head(
    prefix: str, embedding_norm: str, hidden_norm: str, projection: str, norm: str, layer: str, ignored: tuple[str, ...] = ()
) -> Layout:
    return Layout(
        rules=(
            TensorRule("embedding_norm.weight", (f"{prefix}{embedding_norm}.weight",)),
            TensorRule("hidden_norm.weight", (f"{prefix}{hidden_norm}.weight",)),
            TensorRule("projection.weight", (f"{prefix}{projection}.weight",)),
            *_decoder("layer.", layer),
            TensorRule("norm.weight", (f"{prefix}{norm}.weight",)),
        ),
        ignored=(f"{layer}self_attn.rotary_emb.inv_freq", *(f"{prefix}{name}" for name in ignored)),
    )


NEXTN_LAYOUT = _prediction_head(
    "model.layers.*.", "enorm", "hnorm", "eh_proj", "shared_head.norm", "model.layers.*.",
    ignored=("embed_tokens.weight", "shared_head.head.weight"),  # copies of the target's, which are used instead
)  # fmt: skip
"""DeepSeek's NextN heads: layers behind the target's last one, or numbered from 0 in a file of their own."""

QWEN_MTP_LAYOUT = _prediction_head("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "mtp.layers.*.")
"""The one head of Qwen3-Next and Qwen3.5."""

MIMO_MTP_LAYOUT = _prediction_head(
    "model.mtp_layers.*.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", "model.mtp_layers.*."
)
"""MiMo's heads."""

MTP_LAYOUTS = {"deepseek": NEXTN_LAYOUT, "qwen": QWEN_MTP_LAYOUT, "mimo": MIMO_MTP_LAYOUT}
"""The tables of one prediction head each; ``*`` is where the head stands."""

PREDICTION_HEADS = ("mtp.", "model.mtp_layers.")
"""Prefixes of prediction heads in the file of a target, which plain decoding leaves unread; NextN heads are layers past the last one."""

"""How checkpoints name their tensors: tables that :mod:`graphspec.models.checkpoint` interprets. Data only, standard library only.

``*`` stands for a layer index. A rule with several sources concatenates them along the output rows, in order. ``#`` in a source stands
for the number of an expert: the parameter has one more dimension in front, and every expert fills its part of it. Where a parameter has
several rules, the first one whose tensors a checkpoint has holds.
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
    """Tensors that may be there and aren't loaded, each for the reason next to it."""
    unread: tuple[str, ...] = ()
    """Prefixes of tensors that belong to other parts of the checkpoint's model."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Prefixes in circulation, and what the rules call them."""


_LAYER_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "post_feedforward_layernorm")


def decoder_rules(ours: str, theirs: str, *, fused: bool = False) -> tuple[TensorRule, ...]:
    """The rules of a decoder layer.

    Args:
        ours: prefix of its parameters.
        theirs: prefix of its tensors.
        fused: queries, keys and values are one tensor, and gate and up another.
    """

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


def _hybrid_rules(ours: str, theirs: str, *projections: str) -> tuple[TensorRule, ...]:
    """A gated delta net with its projections in this order, and a shared expert. They stand before the rules of other decoders."""
    net = {"A_log": "A_log", "dt_bias": "dt_bias", "conv_weight_E1O": "conv1d.weight", "norm.weight": "norm.weight"}
    net["out_proj.weight"] = "out_proj.weight"
    shared = {"shared_experts.down_proj": "shared_expert.down_proj", "shared_gate": "shared_expert_gate"}
    return (
        TensorRule(f"{ours}self_attn.in_proj.weight", tuple(f"{theirs}linear_attn.{name}.weight" for name in projections)),
        *(TensorRule(f"{ours}self_attn.{mine}", (f"{theirs}linear_attn.{name}",)) for mine, name in net.items()),
        TensorRule(
            f"{ours}mlp.shared_experts.gate_up_proj.weight", tuple(f"{theirs}mlp.shared_expert.{one}_proj.weight" for one in ("gate", "up"))
        ),
        *(TensorRule(f"{ours}mlp.{mine}.weight", (f"{theirs}mlp.{name}.weight",)) for mine, name in shared.items()),
    )


def _stacked_experts(ours: str, theirs: str, gate_up: str, down: str) -> tuple[TensorRule, ...]:
    """Experts of a layer in one tensor per projection."""
    return TensorRule(f"{ours}mlp.gate_up_EFH", (f"{theirs}{gate_up}",)), TensorRule(f"{ours}mlp.down_EHF", (f"{theirs}{down}",))


def _ssm_rules(ours: str, theirs: str) -> tuple[TensorRule, ...]:
    """A Mamba-2 layer; its input projection is one tensor: output gate, x, B, C, steps."""
    names = {"conv_weight_E1O": "conv1d.weight", "conv_bias_E": "conv1d.bias", "skip_H": "D", "A_log": "A_log", "dt_bias": "dt_bias"}
    names |= {"norm.weight": "norm.weight"}
    names |= {name: name for one in ("in_proj", "out_proj") for name in (f"{one}.weight", f"{one}.bias")}
    return tuple(TensorRule(f"{ours}{mine}", (f"{theirs}{name}",)) for mine, name in names.items())


def _target(*further: TensorRule, fused: bool = False, renamed: tuple[tuple[str, str], ...] = (), unread: tuple[str, ...] = ()) -> Layout:
    return Layout(
        rules=(
            *further,
            TensorRule("embed_tokens.weight", ("model.embed_tokens.weight",)),
            *decoder_rules("layers.*.", "model.layers.*.", fused=fused),
            TensorRule("norm.weight", ("model.norm.weight",)),
            TensorRule("lm_head.weight", ("lm_head.weight",)),
        ),
        ignored=("model.layers.*.self_attn.rotary_emb.inv_freq",),  # derived from config.json
        renamed=renamed,
        unread=unread,
    )


SPLIT_LAYOUT = _target()
"""A target with one tensor per projection. Which of the rules hold for a layer follows from the parameters it has: biases, query / key
norms, norms after attention and MLP, latent attention, a mixture of experts."""

FUSED_LAYOUT = _target(fused=True)
"""The same with queries, keys and values in one tensor, and gate and up in another."""

_STACKED = _stacked_experts("layers.*.", "model.layers.*.", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")

QWEN3_5_LAYOUT = _target(
    *_hybrid_rules("layers.*.", "model.layers.*.", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    *_STACKED,
    renamed=(("model.language_model.", "model."),),
    unread=("model.visual.",),
)
"""Qwen3.5; the language model of a checkpoint that also sees images. Experts are stored in one tensor, or one by one."""

QWEN3_NEXT_LAYOUT = _target(*_hybrid_rules("layers.*.", "model.layers.*.", "in_proj_qkvz", "in_proj_ba"))
"""Qwen3-Next, whose projections are stored key head by key head."""


def _renamed(prefix: str, theirs: str, *names: tuple[str, str]) -> tuple[TensorRule, ...]:
    """Rules of matrices, and of their biases where a layer has them."""
    return tuple(
        TensorRule(f"layers.*.{prefix}{mine}.{kind}", (f"model.layers.*.{theirs}{name}.{kind}",))
        for mine, name in names
        for kind in ("weight", "bias")
    )


GRANITE_LAYOUT = _target(
    *_ssm_rules("layers.*.self_attn.", "model.layers.*.mamba."),
    *(
        rule
        for ours in ("mlp.", "mlp.shared_experts.")
        for rule in _renamed(ours, "shared_mlp.", ("gate_up_proj", "input_linear"), ("down_proj", "output_linear"))
    ),
    *_renamed("mlp.", "block_sparse_moe.", ("router", "router.layer")),
    *_stacked_experts("layers.*.", "model.layers.*.", "block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
)
"""Granite 4 (``granitemoehybrid``)."""

BAMBA_LAYOUT = _target(
    TensorRule("norm.weight", ("model.final_layernorm.weight",)),
    TensorRule("layers.*.post_attention_layernorm.weight", ("model.layers.*.pre_ff_layernorm.weight",)),
    *(rule for ours in ("self_attn", "mamba") for rule in _ssm_rules(f"layers.*.{ours}.", "model.layers.*.mamba.")),
    *(
        TensorRule(f"layers.*.mlp.gate_up_proj.{kind}", tuple(f"model.layers.*.feed_forward.{one}_proj.{kind}" for one in ("gate", "up")))
        for kind in ("weight", "bias")
    ),
    *_renamed("mlp.", "feed_forward.", ("down_proj", "down_proj")),
)
"""Bamba, and Falcon-H1, whose layers have Mamba-2 next to attention."""

NEMOTRON_LAYOUT = Layout(
    rules=(
        TensorRule("embed_tokens.weight", ("model.embeddings.weight",)),
        TensorRule("layers.*.norm.weight", ("model.layers.*.norm.weight",)),
        *_ssm_rules("layers.*.mixer.", "model.layers.*.mixer."),
        *(
            TensorRule(f"layers.*.mixer.qkv_proj.{kind}", tuple(f"model.layers.*.mixer.{one}_proj.{kind}" for one in "qkv"))
            for kind in ("weight", "bias")
        ),
        *_renamed("mixer.", "mixer.", *((name, name) for name in ("o_proj", "up_proj", "down_proj"))),
        *_renamed("mixer.", "mixer.", ("router", "gate")),
        *_renamed("mixer.shared_experts.", "mixer.shared_experts.", ("up_proj", "up_proj"), ("down_proj", "down_proj")),
        TensorRule("layers.*.mixer.correction_E", ("model.layers.*.mixer.gate.e_score_correction_bias",)),
        TensorRule("layers.*.mixer.gate_up_EFH", ("model.layers.*.mixer.experts.#.up_proj.weight",)),
        TensorRule("layers.*.mixer.down_EHF", ("model.layers.*.mixer.experts.#.down_proj.weight",)),
        TensorRule("norm.weight", ("model.norm_f.weight",)),
        TensorRule("lm_head.weight", ("lm_head.weight",)),
    ),
    renamed=(("backbone.", "model."),),
)
"""Nemotron-H: one mixer in each layer."""


PREDICTION_HEADS = ("mtp.", "model.mtp_layers.")
"""Prefixes of prediction heads in the file of a target, which plain decoding leaves unread; NextN heads are layers past the last one."""

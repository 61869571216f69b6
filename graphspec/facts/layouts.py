"""How checkpoints name their tensors: tables that :mod:`graphspec.models.checkpoint` interprets. Data only, standard library only.

``*`` stands for a layer index. A rule with several sources concatenates them along the output rows, in order. ``#`` in a source stands
for the number of an expert: the parameter has one more dimension in front, and every expert fills its part of it. Where a parameter has
several rules, the first one whose tensors a checkpoint has holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True, slots=True)
class TensorRule:
    """One parameter of ours, and the checkpoint tensors it is made of."""

    ours: str
    sources: tuple[str, ...]
    transposed: bool = False
    """Matrices are stored with their input channels first; codes of low precision are not."""
    interleaved: bool = False
    """Rows of two projections take turns: gate, up, gate, up, ..."""
    flat: bool = False
    """A vector that may be stored as a matrix of one row."""


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


def _tensors(ours: str, theirs: str, names: Mapping[str, str]) -> tuple[TensorRule, ...]:
    """Rules of parameters under ``ours``: the name of each, and of the tensors under ``theirs`` that it is made of, separated by spaces."""
    return tuple(TensorRule(ours + mine, tuple(theirs + name for name in sources.split())) for mine, sources in names.items())


def _matrices(ours: str, theirs: str, names: Mapping[str, str]) -> tuple[TensorRule, ...]:
    """The same for matrices, and for their biases where a layer has them."""
    return tuple(
        TensorRule(f"{ours}{mine}.{kind}", tuple(f"{theirs}{name}.{kind}" for name in sources.split()))
        for mine, sources in names.items()
        for kind in ("weight", "bias")
    )


_NORMS = (
    "self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "hidden_norm", "post_attention_layernorm", "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm",
)  # fmt: skip


def decoder_rules(ours: str, theirs: str, *, fused: bool = False) -> tuple[TensorRule, ...]:
    """The rules of a decoder layer.

    Args:
        ours: prefix of its parameters.
        theirs: prefix of its tensors.
        fused: queries, keys and values are one tensor, and gate and up another.
    """
    matrices = {
        "self_attn.qkv_proj": "self_attn.qkv_proj" if fused else "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "self_attn.o_proj": "self_attn.o_proj",
        "mlp.gate_up_proj": "mlp.gate_up_proj" if fused else "mlp.gate_proj mlp.up_proj",
        "mlp.down_proj": "mlp.down_proj",
        "self_attn.qkv_a_proj": "self_attn.q_a_proj self_attn.kv_a_proj_with_mqa",
        "self_attn.q_proj": "self_attn.q_proj",
        "self_attn.kv_a_proj": "self_attn.kv_a_proj_with_mqa",
        "self_attn.q_b_proj": "self_attn.q_b_proj",
        "mlp.shared_experts.gate_up_proj": "mlp.shared_experts.gate_proj mlp.shared_experts.up_proj",
        "mlp.shared_experts.down_proj": "mlp.shared_experts.down_proj",
    }
    tensors = {
        "self_attn.kv_b_QDL": "self_attn.kv_b_proj.weight",
        "mlp.router.weight": "mlp.gate.weight",
        "mlp.correction_E": "mlp.gate.e_score_correction_bias",
        "mlp.gate_up_EFH": "mlp.experts.#.gate_proj.weight mlp.experts.#.up_proj.weight",
        "mlp.down_EHF": "mlp.experts.#.down_proj.weight",
    }
    norms = {f"{name}.weight": f"{name}.weight" for name in _NORMS}
    return (*_matrices(ours, theirs, matrices), *_tensors(ours, theirs, norms | tensors))


_STACKED = {"gate_up_EFH": "gate_up_proj", "down_EHF": "down_proj"}
"""Experts in one tensor. These rules stand before :func:`decoder_rules`, which know experts one by one."""


def qwen_expert_rules(ours: str, theirs: str) -> tuple[TensorRule, ...]:
    """A gated shared expert, and experts stored in one tensor. They stand before :func:`decoder_rules`, which know experts one by one.

    Args:
        ours, theirs: as there.
    """
    names = {
        "mlp.shared_experts.gate_up_proj.weight": "mlp.shared_expert.gate_proj.weight mlp.shared_expert.up_proj.weight",
        "mlp.shared_experts.down_proj.weight": "mlp.shared_expert.down_proj.weight",
        "mlp.shared_gate.weight": "mlp.shared_expert_gate.weight",
    }
    return (*_tensors(ours, theirs, names), *_tensors(f"{ours}mlp.", f"{theirs}mlp.experts.", _STACKED))


def _gpt_oss_rules(ours: str, theirs: str) -> tuple[TensorRule, ...]:
    """Experts of gpt-oss, whose gates and up projections take turns, its router, and attention sinks. A GGUF file has them apart."""
    router, each = _matrices(ours, theirs, {"mlp.router": "mlp.router"}), f"{theirs}mlp.experts.#."
    return (
        *router,
        TensorRule(f"{ours}self_attn.sink_Q", (f"{theirs}self_attn.sinks",)),
        TensorRule(f"{ours}mlp.gate_up_EFH", (f"{theirs}mlp.experts.gate_up_proj",), transposed=True, interleaved=True),
        TensorRule(f"{ours}mlp.down_EHF", (f"{theirs}mlp.experts.down_proj",), transposed=True),
        TensorRule(f"{ours}mlp.gate_up_bias_EF", (f"{theirs}mlp.experts.gate_up_proj_bias",), interleaved=True),
        TensorRule(f"{ours}mlp.down_bias_EH", (f"{theirs}mlp.experts.down_proj_bias",)),
        TensorRule(f"{ours}mlp.gate_up_EFH", (f"{each}gate_proj.weight", f"{each}up_proj.weight")),
        TensorRule(f"{ours}mlp.down_EHF", (f"{each}down_proj.weight",)),
        TensorRule(f"{ours}mlp.gate_up_bias_EF", (f"{each}gate_proj.bias", f"{each}up_proj.bias")),
        TensorRule(f"{ours}mlp.down_bias_EH", (f"{each}down_proj.bias",)),
    )


def _hybrid_rules(*projections: str) -> tuple[TensorRule, ...]:
    """A gated delta net with its projections in this order, and Qwen's experts."""
    names = {
        "self_attn.in_proj.weight": " ".join(f"linear_attn.{name}.weight" for name in projections),
        "self_attn.conv_weight_E1O": "linear_attn.conv1d.weight",
        **{f"self_attn.{name}": f"linear_attn.{name}" for name in ("A_log", "dt_bias", "norm.weight", "out_proj.weight")},
    }
    return (*_tensors("layers.*.", "model.layers.*.", names), *qwen_expert_rules("layers.*.", "model.layers.*."))


def _ssm_rules(ours: str, theirs: str) -> tuple[TensorRule, ...]:
    """A Mamba-2 layer; its input projection is one tensor: output gate, x, B, C, steps."""
    names = {"conv_weight_E1O": "conv1d.weight", "conv_bias_E": "conv1d.bias", "skip_H": "D", "A_log": "A_log", "dt_bias": "dt_bias"}
    projections = {"in_proj": "in_proj", "out_proj": "out_proj"}
    return (*_tensors(ours, theirs, names | {"norm.weight": "norm.weight"}), *_matrices(ours, theirs, projections))


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

QWEN3_5_LAYOUT = _target(
    *_hybrid_rules("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    renamed=(("model.language_model.", "model."),),
    unread=("model.visual.",),
)
"""Qwen3.5; the language model of a checkpoint that also sees images. Experts are stored in one tensor, or one by one."""

_SEEING = ("vision_tower.", "multi_modal_projector.", "visual.")
_HEARING = ("embed_vision.", "audio_tower.", "embed_audio.")
_language = partial(
    _target,
    renamed=(("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.lm_head.", "lm_head.")),
    unread=tuple(prefix + name for prefix in ("model.", "") for name in _SEEING),
)
LANGUAGE_LAYOUT = _language()
"""The language model of a checkpoint that also sees images, under older and newer names."""

MISTRAL4_LAYOUT = _language(*_tensors("layers.*.mlp.", "model.layers.*.mlp.experts.", _STACKED))
"""The same with the experts of a layer in one tensor, or one by one."""


def _gemma4_rules(ours: str, theirs: str) -> tuple[TensorRule, ...]:
    """What Gemma 4's layers have beyond Llama's: a number, inputs of their own, and experts next to a dense MLP, each with norms."""
    names = {
        "scale_1": "layer_scalar",
        "layer_input.gate.weight": "per_layer_input_gate.weight",
        "layer_input.proj.weight": "per_layer_projection.weight",
        "layer_input.norm.weight": "post_per_layer_input_norm.weight",
        "mlp.dense.gate_up_proj.weight": "mlp.gate_proj.weight mlp.up_proj.weight",
        "mlp.dense.down_proj.weight": "mlp.down_proj.weight",
        "mlp.dense_norm.weight": "post_feedforward_layernorm_1.weight",
        "mlp.entering_norm.weight": "pre_feedforward_layernorm_2.weight",
        "mlp.mixture_norm.weight": "post_feedforward_layernorm_2.weight",
        "mlp.mixture.router.weight": "router.proj.weight",
        "mlp.mixture.router_scale_H": "router.scale",
        "mlp.mixture.expert_scale_E": "router.per_expert_scale",
        "mlp.mixture.gate_up_EFH": "experts.gate_up_proj",
        "mlp.mixture.down_EHF": "experts.down_proj",
    }
    one_by_one = {
        "mlp.mixture.gate_up_EFH": "experts.#.gate_proj.weight experts.#.up_proj.weight",
        "mlp.mixture.down_EHF": "experts.#.down_proj.weight",
    }
    both = {"mlp.mixture.gate_up_EFH": "experts.#.gate_up_proj.weight"}  # of a GGUF file
    entering = {"self_attn.qk_proj": "self_attn.q_proj self_attn.k_proj"}
    tables = (names, one_by_one, both)
    return (*(rule for table in tables for rule in _tensors(ours, theirs, table)), *_matrices(ours, theirs, entering))


_LAYER_INPUTS = {
    "layer_inputs.embed_tokens.weight": "embed_tokens_per_layer.weight",
    "layer_inputs.proj.weight": "per_layer_model_projection.weight",
    "layer_inputs.norm.weight": "per_layer_projection_norm.weight",
}
GEMMA4_LAYOUT = _language(
    *_gemma4_rules("layers.*.", "model.layers.*."),
    *_tensors("", "model.", _LAYER_INPUTS),
    unread=tuple(prefix + name for prefix in ("model.", "") for name in (*_SEEING, *_HEARING)),
)
"""Gemma 4: of a checkpoint that also sees and hears, the language model."""

QWEN3_NEXT_LAYOUT = _target(*_hybrid_rules("in_proj_qkvz", "in_proj_ba"))
"""Qwen3-Next, whose projections are stored key head by key head."""

GPT_OSS_LAYOUT = _target(*_gpt_oss_rules("layers.*.", "model.layers.*."))
"""gpt-oss: the experts of a layer in one tensor, of numbers or of MXFP4 codes."""

MIXTRAL_LAYOUT = _target(
    *_tensors(
        "layers.*.mlp.",
        "model.layers.*.block_sparse_moe.",
        {
            "router.weight": "gate.weight",
            "correction_E": "e_score_correction_bias",
            "gate_up_EFH": "experts.#.w1.weight experts.#.w3.weight",
            "down_EHF": "experts.#.w2.weight",
        },
    )
)
"""Mixtral and MiniMax-M2."""

QWEN_MOE_LAYOUT = _target(*qwen_expert_rules("layers.*.", "model.layers.*."))
"""Qwen2-MoE, with a gated shared expert."""

ERNIE_MOE_LAYOUT = _target(TensorRule("layers.*.mlp.correction_E", ("model.layers.*.mlp.moe_statics.e_score_correction_bias",), flat=True))
"""Ernie 4.5 with experts."""

_GATE_UP = TensorRule("layers.*.mlp.gate_up_proj.weight", ("model.layers.*.mlp.gate_up_proj.weight",))

GLM_LAYOUT = _target(_GATE_UP)
"""GLM: gate and up in one tensor, queries, keys and values apart."""

GLM4_LAYOUT = _target(
    _GATE_UP,
    *_tensors(
        "layers.*.",
        "model.layers.*.",
        {
            "post_attention_layernorm.weight": "post_self_attn_layernorm.weight",
            "pre_feedforward_layernorm.weight": "post_attention_layernorm.weight",
            "post_feedforward_layernorm.weight": "post_mlp_layernorm.weight",
        },
    ),
)
"""GLM-4, which has norms after attention and MLP as well, under names of its own."""

_SHARED = {"gate_up_proj": "input_linear", "down_proj": "output_linear"}

GRANITE_LAYOUT = _target(
    *_ssm_rules("layers.*.self_attn.", "model.layers.*.mamba."),
    *_matrices("layers.*.mlp.", "model.layers.*.shared_mlp.", _SHARED),
    *_matrices("layers.*.mlp.shared_experts.", "model.layers.*.shared_mlp.", _SHARED),
    *_matrices("layers.*.mlp.", "model.layers.*.block_sparse_moe.", {"router": "router.layer"}),
    *_tensors(
        "layers.*.mlp.", "model.layers.*.block_sparse_moe.", {"gate_up_EFH": "input_linear.weight", "down_EHF": "output_linear.weight"}
    ),
)
"""Granite 4 (``granitemoehybrid``)."""

BAMBA_LAYOUT = _target(
    TensorRule("norm.weight", ("model.final_layernorm.weight",)),
    TensorRule("layers.*.post_attention_layernorm.weight", ("model.layers.*.pre_ff_layernorm.weight",)),
    *(rule for ours in ("self_attn", "mamba") for rule in _ssm_rules(f"layers.*.{ours}.", "model.layers.*.mamba.")),
    *_matrices("layers.*.mlp.", "model.layers.*.feed_forward.", {"gate_up_proj": "gate_proj up_proj", "down_proj": "down_proj"}),
)
"""Bamba, and Falcon-H1, whose layers have Mamba-2 next to attention."""

_UP_DOWN = {"up_proj": "up_proj", "down_proj": "down_proj"}
_MIXERS = {
    "qkv_proj": "q_proj k_proj v_proj", "o_proj": "o_proj", "router": "gate", "latent_in": "fc1_latent_proj",
    "latent_out": "fc2_latent_proj", **_UP_DOWN,
}  # fmt: skip


def mixer_rules(ours: str, theirs: str) -> tuple[TensorRule, ...]:
    """A layer of one net after one norm; arguments of :func:`decoder_rules`."""
    names = {
        "correction_E": "gate.e_score_correction_bias", "gate_up_EFH": "experts.#.up_proj.weight", "down_EHF": "experts.#.down_proj.weight",
    }  # fmt: skip
    return (
        TensorRule(f"{ours}norm.weight", (f"{theirs}norm.weight",)),
        *_ssm_rules(f"{ours}mixer.", f"{theirs}mixer."),
        *_matrices(f"{ours}mixer.", f"{theirs}mixer.", _MIXERS),
        *_matrices(f"{ours}mixer.shared_experts.", f"{theirs}mixer.shared_experts.", _UP_DOWN),
        *_tensors(f"{ours}mixer.", f"{theirs}mixer.", names),
    )


NEMOTRON_LAYOUT = Layout(
    rules=(
        TensorRule("embed_tokens.weight", ("model.embeddings.weight",)),
        *mixer_rules("layers.*.", "model.layers.*."),
        TensorRule("norm.weight", ("model.norm_f.weight",)),
        TensorRule("lm_head.weight", ("lm_head.weight",)),
    ),
    renamed=(("backbone.", "model."),),
)
"""Nemotron-H: one mixer in each layer."""


PREDICTION_HEADS = (
    "mtp.", "model.mtp_layers.", "model.mtp_block.", "model.mtp_emb_norm.", "model.mtp_hidden_norm.", "model.mtp_linear_proj.",
)  # fmt: skip
"""Prefixes of prediction heads in the file of a target, which plain decoding leaves unread; NextN heads are layers past the last one."""

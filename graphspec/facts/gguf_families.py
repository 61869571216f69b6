"""How GGUF files call what our families have: one row for each of llama.cpp's architectures. Standard library only.

Sources: the converters of llama.cpp (``conversion/``) for what files hold, its models (``src/models/``) for what they leave unsaid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from .gguf import ARCHITECTURE, GgufHeader
from .keys import is_integer, is_number

NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer", "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}  # fmt: skip
"""Tensors outside layers."""
_ATTENTION = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_BEFORE = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_NEXT = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
"""Norms before attention and MLP; llama.cpp calls the second by either name."""
_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_AROUND = {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm", **_AFTER}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.#.gate_proj", "ffn_up_exps": "mlp.experts.#.up_proj",
    "ffn_down_exps": "mlp.experts.#.down_proj",
}  # fmt: skip
_SHARED = {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias", "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj", "ffn_down_shexp": "mlp.shared_experts.down_proj",
}  # fmt: skip
_SINKS = {"attn_sinks.weight": "self_attn.sinks"}
_USUAL = MappingProxyType({**_ATTENTION, **_MLP, **_BEFORE})
SLIDING_WINDOW, EXPERTS = "attention.sliding_window", "expert_count"
KEY_HEADS, MLP_WIDTH = "attention.head_count_kv", "feed_forward_length"
"""Keys that may have one number for each layer."""
_SIGMOID = 2
"""``expert_gating_func`` of DeepSeek-V3's routing."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A row.

    Attributes:
        name: of the class in transformers.
        interleaved: query and key heads have the halves of a rotation next to each other, as the first Llama had them.
        windowed: its class in transformers with a sliding window; None: there is none.
        config: keys of ``config.json`` that don't follow from the metadata in the usual way.
        names: of a layer's tensors in a Hugging Face checkpoint, by those here without their last part, or with it (``ssm_a.`` has none);
            ``#`` stands for an expert's number.
        offset: the file has norm weights as they are applied, a Hugging Face checkpoint minus 1.
        reads: keys of the architecture that ``config`` reads.
        activation: ``hidden_act``.
        tiled: value heads of recurrent layers lie as ggml repeats key heads: all first ones, then all second ones.
        skips_heads: prediction heads, which the file counts as layers, are not read.
        truncates: the ends of a YaRN rotation's ramp are rounded to whole channels.
        ropes: ``rope_parameters`` by kind of layer, from those of layers that see everything; None: all are alike.
        stands: divisors of frequencies say which pairs of a head turn; otherwise they are those of Llama 3's scaling.
    """

    name: str
    interleaved: bool = False
    windowed: str | None = None
    config: Callable[[GgufHeader], dict[str, Any]] = lambda _: {}
    names: Mapping[str, str] = field(default_factory=lambda: _USUAL)
    offset: bool = False
    reads: frozenset[str] = frozenset()
    activation: str = "silu"
    tiled: bool = False
    skips_heads: bool = False
    truncates: bool = True
    ropes: Callable[[GgufHeader, dict[str, Any]], dict[str, Any]] | None = None
    stands: bool = False


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a tensor's value heads lie, one of which has ``size`` rows, or columns.

    Attributes:
        key_heads: each of them serves ``repeats`` value heads.
        repeats: of these.
        size: of a value head.
        before: rows in front of them.
        columns: they are columns.
    """

    key_heads: int
    repeats: int
    size: int
    before: int = 0
    columns: bool = False


def integer(header: GgufHeader, key: str, default: int | None = None) -> int:
    """A whole number above 0, or a list of equal ones, 0 where a layer has none.

    Raises:
        CheckpointError: something else.
    """
    value = header.metadata.get(key, default)
    if isinstance(value, list) and len(found := {entry for entry in value if entry != 0}) == 1:
        value = found.pop()
    if type(value) is not int or value < 1:
        raise header.error(key, "a whole number above 0, the same in every layer")
    return value


def number(header: GgufHeader, key: str, default: float | None = None) -> float:
    """A finite number.

    Raises:
        CheckpointError: something else.
    """
    value = header.metadata.get(key, default)
    if not is_number(value) or not math.isfinite(value):
        raise header.error(key, "a finite number")
    # A float32 that stands for a decimal number is that number.
    return float(f"{value:.7g}")


def _key(header: GgufHeader, name: str) -> str:
    return f"{header.metadata[ARCHITECTURE]}.{name}"


def _biased(header: GgufHeader) -> bool:
    return "blk.0.attn_q.bias" in header.tensors


def _llama(header: GgufHeader) -> dict[str, Any]:
    return {"attention_bias": _biased(header), "mlp_bias": "blk.0.ffn_up.bias" in header.tensors}


def _qwen3(header: GgufHeader) -> dict[str, Any]:
    return {"attention_bias": _biased(header)}


def _seed_oss(header: GgufHeader) -> dict[str, Any]:
    return {**_llama(header), "attention_out_bias": "blk.0.attn_output.bias" in header.tensors}


def _granite(header: GgufHeader) -> dict[str, Any]:
    names = {
        "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale", "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }  # fmt: skip
    found = {ours: number(header, _key(header, theirs)) for ours, theirs in names.items() if header.metadata.get(_key(header, theirs))}
    return {**_llama(header), **found}


def _kinds(header: GgufHeader, period: int, windowed: bool) -> list[str]:
    """Kinds of layers: as the file lists them, else every ``period``-th sees everything."""
    key = _key(header, "attention.sliding_window_pattern")
    count, stated = integer(header, _key(header, "block_count")), header.metadata.get(key)
    if is_integer(stated) and stated > 0:
        period, stated = stated, None
    if stated is not None and (not isinstance(stated, list) or len(stated) != count or not all(flag in (0, 1) for flag in stated)):
        raise header.error(key, f"{count} flags, or every how many layers one sees everything")
    flags = [(layer + 1) % period != 0 for layer in range(count)] if stated is None else stated
    return ["sliding_attention" if flag and windowed else "full_attention" for flag in flags]


def _window(header: GgufHeader) -> int | None:
    key = _key(header, SLIDING_WINDOW)
    return integer(header, key) if header.metadata.get(key) else None


def _olmo2(header: GgufHeader) -> dict[str, Any]:
    window = _window(header)
    if window is None:
        return {"attention_bias": _biased(header)}
    kinds = _kinds(header, 4, windowed=True)
    return {"architectures": ["Olmo3ForCausalLM"], "attention_bias": _biased(header), "sliding_window": window, "layer_types": kinds}


def _exaone4(header: GgufHeader) -> dict[str, Any]:
    window = _window(header)
    return {"sliding_window": window, "layer_types": _kinds(header, 4, windowed=window is not None)}


def _query_scalar(header: GgufHeader, exception: int) -> float:
    """What queries are scaled by the root of, which no key says: the width of a head, but in the 27B models, known by their layers."""
    heads, width = integer(header, _key(header, "attention.head_count")), integer(header, _key(header, "embedding_length"))
    usual = integer(header, _key(header, "attention.key_length"))
    return width / heads if integer(header, _key(header, "block_count")) == exception else usual


def _caps(header: GgufHeader) -> dict[str, Any]:
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    return {name: number(header, _key(header, name)) if header.metadata.get(_key(header, name)) else None for name in names}


def _gemma2(header: GgufHeader) -> dict[str, Any]:
    window = integer(header, _key(header, SLIDING_WINDOW), 4096)
    kinds = _kinds(header, 2, windowed=True)
    return {**_caps(header), "query_pre_attn_scalar": _query_scalar(header, 46), "sliding_window": window, "layer_types": kinds}


def _gemma3(header: GgufHeader) -> dict[str, Any]:
    """Its windowed layers have a base of their own, and no scaling."""
    window = _window(header)
    return {
        **_caps(header), "query_pre_attn_scalar": _query_scalar(header, 62), "sliding_window": window,
        "layer_types": _kinds(header, 6, windowed=window is not None),
        "rope_local_base_freq": number(header, _key(header, "rope.freq_base_swa"), 10000.0),
    }  # fmt: skip


def _by_layer(header: GgufHeader, name: str) -> list[int]:
    """One whole number above 0 for each layer, which files may have as one number for all."""
    key, count = _key(header, name), integer(header, _key(header, "block_count"))
    value = header.metadata.get(key)
    found: list[Any] = value if isinstance(value, list) else [value] * count
    if len(found) != count or not all(type(entry) is int and entry > 0 for entry in found):
        raise header.error(key, f"a whole number above 0, or {count} of them")
    return found


def _gemma4(header: GgufHeader) -> dict[str, Any]:
    """Its keys about heads are those of layers that see everything, and, with ``_swa``, of the others."""
    kinds, heads, widths = _kinds(header, 6, windowed=True), _by_layer(header, KEY_HEADS), _by_layer(header, MLP_WIDTH)
    counts = dict(zip(kinds, heads, strict=True))
    shared = header.metadata.get(_key(header, "attention.shared_kv_layers"), 0)
    own = kinds[: len(kinds) - shared] if isinstance(shared, int) and shared > 0 else kinds
    wide = integer(header, _key(header, "attention.key_length"))
    inputs = header.metadata.get(_key(header, "embedding_length_per_layer_input"), 0)
    experts = bool(header.metadata.get(_key(header, EXPERTS)))
    mixture = {
        "num_experts": integer(header, _key(header, EXPERTS)),
        "top_k_experts": integer(header, _key(header, "expert_used_count")),
        "moe_intermediate_size": integer(header, _key(header, "expert_feed_forward_length")),
    } if experts else {}  # fmt: skip
    if inputs:
        mixture["vocab_size_per_layer_input"] = header.tensors["per_layer_token_embd.weight"].shape[0]
    return {
        **mixture, "attention_bias": _biased(header), "enable_moe_block": experts, "layer_types": kinds, "sliding_window": _window(header),
        "final_logit_softcapping": _caps(header)["final_logit_softcapping"], "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0], "num_kv_shared_layers": shared, "hidden_size_per_layer_input": inputs,
        "head_dim": integer(header, _key(header, "attention.key_length_swa"), wide), "global_head_dim": wide,
        "num_key_value_heads": counts.get("sliding_attention", heads[0]), "num_global_key_value_heads": counts.get("full_attention"),
        "attention_k_eq_v": any(
            kind == "full_attention" and f"blk.{layer}.attn_v.weight" not in header.tensors for layer, kind in enumerate(own)
        ),
    }  # fmt: skip


def _gemma4_ropes(header: GgufHeader, rope: dict[str, Any]) -> dict[str, Any]:
    """Its windowed layers have a base of their own, and turn whole."""
    return {"full_attention": rope, "sliding_attention": {"rope_theta": number(header, _key(header, "rope.freq_base_swa"), 10000.0)}}


def _qwen3_experts(header: GgufHeader) -> dict[str, Any]:
    return {
        "attention_bias": _biased(header),
        "num_experts": integer(header, _key(header, EXPERTS)),
        "num_experts_per_tok": integer(header, _key(header, "expert_used_count")),
        "moe_intermediate_size": integer(header, _key(header, "expert_feed_forward_length")),
        "norm_topk_prob": True,
    }


def _qwen2_experts(header: GgufHeader) -> dict[str, Any]:
    shared = integer(header, _key(header, "expert_shared_feed_forward_length"))
    unlike = {"norm_topk_prob": False, "qkv_bias": _biased(header), "shared_expert_intermediate_size": shared}
    return {**_qwen3_experts(header), **unlike}


def _olmoe(header: GgufHeader) -> dict[str, Any]:
    return {
        "attention_bias": _biased(header),
        "num_experts": integer(header, _key(header, EXPERTS)),
        "num_experts_per_tok": integer(header, _key(header, "expert_used_count")),
        "norm_topk_prob": False,
    }


def _ernie(header: GgufHeader) -> dict[str, Any]:
    return {"use_bias": _biased(header)}


def _ernie_experts(header: GgufHeader) -> dict[str, Any]:
    return {
        **_ernie(header),
        "moe_num_experts": integer(header, _key(header, EXPERTS)),
        "moe_k": integer(header, _key(header, "expert_used_count")),
        "moe_intermediate_size": integer(header, _key(header, "expert_feed_forward_length")),
        "moe_num_shared_experts": header.metadata.get(_key(header, "expert_shared_count"), 0),
        "moe_layer_start_index": header.metadata.get(_key(header, "leading_dense_block_count"), 0),
        "moe_layer_interval": integer(header, _key(header, "interleave_moe_layer_step"), 1),
    }


def _glm4(header: GgufHeader) -> dict[str, Any]:
    return {"attention_bias": _biased(header), "partial_rotary_factor": 1.0}  # the last as long as rope.dimension_count says nothing


def _correcting(header: GgufHeader) -> dict[str, Any]:
    """DeepSeek-V3's routing in one group."""
    if (function := header.metadata.get(_key(header, "expert_gating_func"), _SIGMOID)) != _SIGMOID:
        raise header.error(_key(header, "expert_gating_func"), f"{_SIGMOID} (sigmoid)", f"found {function}")
    return {
        "n_routed_experts": integer(header, _key(header, EXPERTS)),
        "num_experts_per_tok": integer(header, _key(header, "expert_used_count")),
        "moe_intermediate_size": integer(header, _key(header, "expert_feed_forward_length")),
        "n_shared_experts": integer(header, _key(header, "expert_shared_count"), 1),
        "first_k_dense_replace": header.metadata.get(_key(header, "leading_dense_block_count"), 0),
        "routed_scaling_factor": number(header, _key(header, "expert_weights_scale"), 1.0),
        "norm_topk_prob": header.metadata.get(_key(header, "expert_weights_norm"), True),
        "n_group": 1,
        "topk_group": 1,
    }


def _dots1(header: GgufHeader) -> dict[str, Any]:
    return {**_correcting(header), "attention_bias": _biased(header), "sliding_window": None}


def _glm4_moe(header: GgufHeader) -> dict[str, Any]:
    return {
        **_correcting(header),
        "attention_bias": _biased(header), "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,
    }  # fmt: skip


def _gpt_oss(header: GgufHeader) -> dict[str, Any]:
    return {
        "num_local_experts": integer(header, _key(header, EXPERTS)),
        "num_experts_per_tok": integer(header, _key(header, "expert_used_count")),
        "intermediate_size": integer(header, _key(header, "expert_feed_forward_length")),
        "attention_bias": _biased(header), "sliding_window": _window(header), "layer_types": _kinds(header, 2, windowed=True),
    }  # fmt: skip


def prediction_heads(header: GgufHeader) -> int:
    """How many the file has, which it counts as layers."""
    key = _key(header, "nextn_predict_layers")
    return integer(header, key) if header.metadata.get(key) else 0


def _delta(header: GgufHeader) -> tuple[int, int, int, int]:
    """Key heads and value heads of recurrent layers, and the widths of each."""
    keys, values = integer(header, _key(header, "ssm.group_count")), integer(header, _key(header, "ssm.time_step_rank"))
    inner = integer(header, _key(header, "ssm.inner_size"))
    if values % keys or inner % values:
        raise header.error(_key(header, "ssm.time_step_rank"), f"a multiple of {keys} that divides {inner}")
    return keys, values, integer(header, _key(header, "ssm.state_size")), inner // values


def _qwen3_5(header: GgufHeader) -> dict[str, Any]:
    keys, values, key_dim, value_dim = _delta(header)
    return {
        "attention_bias": _biased(header), "attn_output_gate": True,
        "full_attention_interval": integer(header, _key(header, "full_attention_interval"), 4),
        "linear_num_key_heads": keys, "linear_num_value_heads": values, "linear_key_head_dim": key_dim, "linear_value_head_dim": value_dim,
        "linear_conv_kernel_dim": integer(header, _key(header, "ssm.conv_kernel")),
    }  # fmt: skip


def _qwen3_5_experts(header: GgufHeader) -> dict[str, Any]:
    shared = integer(header, _key(header, "expert_shared_feed_forward_length"))
    return {**_qwen3_experts(header), **_qwen3_5(header), "shared_expert_intermediate_size": shared}


_TILED = {
    "attn_qkv": (True, True), "ssm_conv1d": (True, True), "attn_gate": (True, False), "ssm_out": (True, False), "ssm_beta": (False, False),
    "ssm_alpha": (False, False), "ssm_a": (False, False), "ssm_dt": (False, False),
}  # fmt: skip
"""Tensors with value heads: whether a head is as wide as its values, and whether queries and keys lie before them."""


def tiling(header: GgufHeader, name: str) -> Tiling | None:
    """How the value heads of a tensor lie; None: it has none, or they lie as in a Hugging Face checkpoint."""
    part = name.split(".")[2] if name.startswith("blk.") and name.count(".") >= 2 else ""
    if not ARCHITECTURES[header.metadata[ARCHITECTURE]].tiled or part not in _TILED:
        return None
    keys, values, key_dim, value_dim = _delta(header)
    wide, after = _TILED[part]
    return Tiling(keys, values // keys, value_dim if wide else 1, 2 * keys * key_dim if after else 0, part == "ssm_out")


_LINEAR = {
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z", "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a", "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj", "ssm_a.": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias",
}  # fmt: skip
_GATED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
_GLM4 = {
    "attn_norm": "input_layernorm", "post_attention_norm": "post_self_attn_layernorm", "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_GEMMA4 = {
    "layer_output_scale.weight": "layer_scalar", "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm", "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1", "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj", "ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps": "experts.#.gate_up_proj", "ffn_gate_exps": "experts.#.gate_proj", "ffn_up_exps": "experts.#.up_proj",
    "ffn_down_exps": "experts.#.down_proj",
}  # fmt: skip
_CAPS = frozenset(("attn_logit_softcapping", "final_logit_softcapping"))
_GELU = "gelu_pytorch_tanh"

ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", True, "MistralForCausalLM", _llama),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM", config=_qwen3),
    "qwen3vl": Architecture("Qwen3ForCausalLM", config=_qwen3),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM", config=_qwen3_experts, names={**_USUAL, **_EXPERTS}, reads=frozenset((EXPERTS,))
    ),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM", config=_qwen2_experts, names={**_USUAL, **_EXPERTS, **_GATED}, reads=frozenset((EXPERTS,))
    ),
    "olmoe": Architecture("OlmoeForCausalLM", config=_olmoe, names={**_USUAL, **_EXPERTS}, reads=frozenset((EXPERTS,))),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", config=_ernie),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM", config=_ernie_experts, reads=frozenset((EXPERTS,)),
        names={**_USUAL, **_EXPERTS, **_SHARED, "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
    ),
    "glm4": Architecture("Glm4ForCausalLM", config=_glm4, names={**_ATTENTION, **_GLM4}),
    "gemma": Architecture("GemmaForCausalLM", offset=True, activation=_GELU),
    "gemma2": Architecture(
        "Gemma2ForCausalLM", config=_gemma2, names={**_ATTENTION, **_MLP, **_AROUND}, offset=True, activation=_GELU,
        reads=_CAPS | {SLIDING_WINDOW},
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM", config=_gemma3, names={**_ATTENTION, **_MLP, **_AROUND}, offset=True, activation=_GELU,
        reads=_CAPS | {SLIDING_WINDOW},
    ),
    "gemma4": Architecture(
        "Gemma4ForCausalLM", config=_gemma4, names={**_ATTENTION, **_MLP, **_AROUND, **_GEMMA4}, activation=_GELU,
        reads=_CAPS | {SLIDING_WINDOW, EXPERTS, KEY_HEADS, MLP_WIDTH}, ropes=_gemma4_ropes, stands=True,
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", config=_olmo2, names={**_ATTENTION, **_MLP, **_AFTER}, reads=frozenset((SLIDING_WINDOW,))),
    "exaone4": Architecture(
        "Exaone4ForCausalLM", config=_exaone4, names={**_ATTENTION, **_MLP, **_AFTER}, reads=frozenset((SLIDING_WINDOW,))
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", True, config=_llama),
    "granite": Architecture(
        "GraniteForCausalLM", True, config=_granite,
        reads=frozenset(("attention.scale", "embedding_scale", "residual_scale", "logit_scale")),
    ),
    "seed_oss": Architecture("SeedOssForCausalLM", config=_seed_oss, names={**_ATTENTION, **_MLP, **_NEXT}),
    "dots1": Architecture(
        "Dots1ForCausalLM", config=_dots1, names={**_USUAL, **_EXPERTS, **_SHARED}, reads=frozenset((EXPERTS,))
    ),
    "qwen35": Architecture(
        "Qwen3_5ForCausalLM", config=_qwen3_5, names={**_ATTENTION, **_MLP, **_NEXT, **_LINEAR}, offset=True, tiled=True, skips_heads=True
    ),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM", config=_qwen3_5_experts, names={**_ATTENTION, **_NEXT, **_LINEAR, **_EXPERTS, **_GATED}, offset=True,
        reads=frozenset((EXPERTS,)), tiled=True, skips_heads=True,
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM", config=_gpt_oss, names={**_ATTENTION, **_NEXT, **_SINKS, **_EXPERTS, "ffn_gate_inp": "mlp.router"},
        reads=frozenset((EXPERTS, SLIDING_WINDOW)), truncates=False,
    ),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM", config=_glm4_moe, names={**_ATTENTION, **_MLP, **_NEXT, **_EXPERTS, **_SHARED},
        reads=frozenset((EXPERTS,)), skips_heads=True,
    ),
}  # fmt: skip
"""By ``general.architecture``."""

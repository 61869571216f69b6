"""The config keys of published drafts, and a tiny checkpoint for every set of them.

A row has the keys of one group of configs that differ in numbers alone, with the values that say how something is computed; the sizes are
those of the tiny tensors. Sources: SpecForge (``configs/``), SafeAILab/EAGLE (``eagle/train``, ``eagle/traineagle3``, ``eagle/testbug``),
speculators (its config classes), ModelOpt (its exports of Hugging Face and Megatron models) and AngelSlim (``train/configs``). Heads of
gpt-oss have their names on the Hub: their tapped layers are those that pull request 32334 of SGLang lists for NVIDIA's, and the model card
of LMSYS's; numbers of layers are those of the tiny target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tests.support.checkpoints import (
    LATENT,
    MODELOPT,
    VOCAB_SIZE,
    build_hf,
    eagle3_tensors,
    eagle_tensors,
    latent_eagle3_tensors,
    llama_config,
    write_folder,
    write_hf,
)
from tests.support.hybrid_checkpoints import build_hybrid
from tests.support.moe_checkpoints import build_mixture

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

DEPTH, HIDDEN, MASK = 9, 48, VOCAB_SIZE - 1
TAP_KEY = "eagle_aux_hidden_state_layer_ids"
MIXED = {"hidden_size": HIDDEN, "num_hidden_layers": DEPTH}
TARGETS: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: build_hf(name, num_hidden_layers=DEPTH, num_key_value_heads=1) for name in ("llama", "qwen2", "qwen3")},
    "qwen3_moe": lambda: build_mixture("qwen3_moe", **MIXED),
    "deepseek_v2": lambda: build_mixture("deepseek_v2", **MIXED),
    "deepseek_v3": lambda: build_mixture("deepseek_v3", **MIXED),
    "qwen3_5": lambda: build_hybrid("qwen3_5_moe", **MIXED),
    "gpt_oss": lambda: build_mixture("gpt_oss", **MIXED),
}
"""Targets by family; those of families that don't load as targets stand in by Llama."""


def dflash_tensors(num_layers: int = 2, num_taps: int = 2) -> dict[str, Tensor]:
    """A block drafter of 3 heads over one."""
    head = eagle3_tensors(num_taps=num_taps, num_layers=num_layers + 1, extras=("qk_norm",))
    layers = {name: tensor for name, tensor in head.items() if name.startswith("layers.")}
    renamed = {f"layers.{int(name.split('.')[1]) - 1}.{name.split('.', 2)[2]}": tensor for name, tensor in layers.items()}
    return {
        "fc.weight": head["fc.weight"],
        "hidden_norm.weight": head["midlayer.hidden_norm.weight"],
        "norm.weight": head["norm.weight"],
        **renamed,
    }


def p_eagle_tensors() -> dict[str, Tensor]:
    """As SpecForge and speculators save it: with an embedding, and the dimensions of batch and length."""
    tensors = eagle3_tensors(num_layers=2, extras=("embedding",))
    tensors["mask_hidden"] = 0.3 * torch.randn(1, 1, 3 * HIDDEN, generator=torch.Generator().manual_seed(9))
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def megatron_eagle() -> dict[str, Tensor]:
    """An EAGLE-1 head of ModelOpt with a norm before the attention and one before the language-model head."""
    tensors = eagle_tensors(extras=("norms",))
    tensors["layers.0.input_layernorm.weight"] = tensors.pop("hidden_layernorm.weight")
    tensors["norm.weight"] = tensors.pop("lm_head_layernorm.weight")
    return without(tensors, "embed_layernorm.weight")


MADE: dict[str, Callable[[], dict[str, Tensor]]] = {
    "eagle3": eagle3_tensors,
    "one state": lambda: without(eagle3_tensors(), "fc.weight"),
    "latent": latent_eagle3_tensors,
    "latent 3.1": lambda: without(latent_eagle3_tensors(draft_vocab_size=VOCAB_SIZE, extras=("fc_norm",)), "d2t", "t2d"),
    "3.1": lambda: eagle3_tensors(extras=("fc_norm",)),
    "full vocabulary": lambda: eagle3_tensors(draft_vocab_size=VOCAB_SIZE),
    "with embedding": lambda: eagle3_tensors(extras=("embedding",)),
    "norm before fc": lambda: eagle3_tensors(extras=("input_norm",)),
    "norm before fc, with embedding": lambda: eagle3_tensors(extras=("input_norm", "embedding")),
    "no head": lambda: without(eagle3_tensors(draft_vocab_size=VOCAB_SIZE), "lm_head.weight", "d2t", "t2d"),
    "one state, no head": lambda: without(eagle3_tensors(draft_vocab_size=VOCAB_SIZE), "fc.weight", "lm_head.weight", "d2t", "t2d"),
    "qwen3 layer": lambda: eagle3_tensors(extras=("qk_norm", "embedding")),
    "deep": lambda: eagle3_tensors(num_layers=24),
    "p_eagle": p_eagle_tensors,
    "eagle": lambda: eagle_tensors(extras=("fc_bias", "embedding")),
    "eagle, a head of keys for every query": lambda: eagle_tensors(num_kv_heads=3, extras=("fc_bias",)),
    "eagle of Megatron": megatron_eagle,
    "dflash": dflash_tensors,
    "dflash of one tap": lambda: dflash_tensors(num_taps=1),
}


@dataclass(frozen=True)
class Published:
    """A group of published configs.

    Attributes:
        keys: with the values that matter; None is null. ``"size"``: that of the tensors.
        variant: which reads it.
        tensors: key of :data:`MADE`.
        layer: keys nested in ``transformer_layer_config``.
        target: key of :data:`TARGETS`.
        refused: what the one message says; empty: it loads.
        runs: it differs in structure from the rows above it, so an engine runs it.
    """

    keys: dict[str, Any]
    variant: str = "eagle3"
    tensors: str = "eagle3"
    layer: dict[str, Any] | None = None
    target: str = "llama"
    refused: str = ""
    runs: bool = False

    def write(self, path: Path) -> Path:
        """The checkpoint."""
        tensors = MADE[self.tensors]()
        prefix = next(name for name in ("midlayer.", "layers.0.") if f"{name}mlp.down_proj.weight" in tensors)
        sizes = llama_config(tensors, prefix)
        sizes |= {"num_hidden_layers": sum(name.endswith("mlp.down_proj.weight") for name in tensors)}
        sizes |= {"draft_vocab_size": tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else VOCAB_SIZE}
        sizes |= {"num_attention_heads": sizes.get("num_attention_heads", 4)}

        def filled(keys: dict[str, Any]) -> dict[str, Any]:
            always = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
            given = {key: sizes[key] if value == "size" else value for key, value in keys.items()}
            return {"hidden_act": "silu", "initializer_range": 0.02, "use_cache": True, **{key: sizes[key] for key in always}, **given}

        config = filled(self.keys) if self.layer is None else {**self.keys, "transformer_layer_config": filled(self.layer)}
        config |= {key: sizes[key] for key, value in config.items() if value == "size"}
        return write_folder(path, tensors, config)


SIZES = {"num_key_value_heads": "size", "draft_vocab_size": "size", "max_position_embeddings": 4096, "rms_norm_eps": 1e-6}
WIDE = {**SIZES, "head_dim": "size"}
QWEN_IDS = {"bos_token_id": 151643, "eos_token_id": 151645}
OFF = {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 64}
LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 4096, "rope_type": "llama3"}
EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    **SIZES,
}
YARN = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096, "rope_type": "yarn",
}  # fmt: skip
QWEN = {**EAGLE3, **QWEN_IDS, **OFF, "attention_bias": False, "attention_dropout": 0.0, "rope_scaling": None, "rope_theta": 1000000.0}
BLOCK = {
    "attention_bias": False, "attention_dropout": 0.0, "block_size": 6, "dtype": "bfloat16", "head_dim": "size",
    "num_key_value_heads": "size", "layer_types": ["full_attention"] * 2, "max_position_embeddings": 40960, "model_type": "qwen3",
    "num_target_layers": DEPTH, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
QWEN_BLOCK = {**BLOCK, **QWEN_IDS, **OFF, "max_window_layers": 5, "rope_scaling": None, "rope_theta": 1000000}
DFLASH = {"architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}
TAPPED = {"mask_token_id": MASK, "target_layer_ids": [1, 5]}
DSPARK = {
    **TAPPED, "attention_mode": "gqa", "projector_type": "dspark", "markov_rank": 256, "markov_head_type": "vanilla",
    "confidence_head_alpha": 1.0, "confidence_head_with_markov": True, "enable_confidence_head": True,
}  # fmt: skip
DOMINO = {**TAPPED, "projector_type": "domino", "pure_draft_prefix_len": 1, "emb_dim": 256, "gru_hidden_dim": 1024, "shift_label": True}
SPECFORGE = {
    "deepseek-v2-lite": Published({**EAGLE3, **OFF, "bos_token_id": 100000, "eos_token_id": 100001, "head_dim": "size",
        "attention_bias": False, "rope_scaling": YARN, "rope_theta": 10000}, target="deepseek_v2", runs=True),
    "deepseek-v3": Published({**EAGLE3, **QWEN_IDS, "eagle_config": {TAP_KEY: [1, 3, 5], "use_aux_hidden_state": True},
        "pad_token_id": 0, "torch_dtype": "float16"}, target="deepseek_v3"),
    "gemma3": Published({**EAGLE3, **WIDE, "bos_token_id": 2, "eos_token_id": 1, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": 512, "use_sliding_window": False, "target_model_type": "gemma3_text"}),
    "llama3-8B, ling-flash": Published({**EAGLE3, "bos_token_id": 163584, "eos_token_id": 163585, "pad_token_id": 0}),
    "llama3-70B": Published({**EAGLE3, **WIDE, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "rope_scaling": LLAMA3,
        "rope_theta": 500000.0, "torch_dtype": "torch.float16"}),
    "llama4": Published({**EAGLE3, "pad_token_id": 0, "max_position_embeddings": 2048}),
    "qwen3, longcat": Published({**QWEN, "head_dim": "size"}, target="qwen3_moe"),
    "a full vocabulary": Published({**QWEN, "head_dim": "size"}, tensors="full vocabulary", target="qwen3"),
    "phi4": Published({**EAGLE3, "model_type": "phi3", "attention_bias": False, "bos_token_id": 100257, "eos_token_id": 100257,
        "rope_theta": 250000.0}),
    "qwen2.5-vl": Published({**QWEN, "head_dim": "size", "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "sliding_window": 32768, "target_model_type": "qwen2_5_vl"}, target="qwen2"),
    "qwen2.5": Published({**QWEN, "sliding_window": 131072}, target="qwen2"),
    "qwen3-235B": Published({**QWEN, "head_dim": "size", "eagle_config": {TAP_KEY: [1, 3, 7], "use_aux_hidden_state": True}},
        target="qwen3_moe"),
    "qwen3-30B, EAGLE-3.1": Published({**QWEN, "head_dim": "size", "fc_norm": True, "norm_output": True}, tensors="3.1",
        target="qwen3_moe", runs=True),
    "qwen3-coder-next": Published({**EAGLE3, **WIDE, **QWEN_IDS, "attention_bias": False, "rope_scaling": None, "rope_theta": 1000000.0},
        target="qwen3_5"),
    "qwen3.5": Published({**EAGLE3, **WIDE, **QWEN_IDS, "decoder_sparse_step": 1, "rope_scaling": None, "rope_theta": 10000000,
        "use_sliding_window": False}, target="qwen3_5", runs=True),
    "qwq": Published({**EAGLE3, **QWEN_IDS, **OFF, "model_type": "qwen2", "sliding_window": 32768, "rope_theta": 1000000.0},
        target="qwen2"),
    "deepseek with latent attention": Published({**EAGLE3, **LATENT, "architectures": ["DeepseekV3ForCausalLMEagle3"],
        "model_type": "deepseek_v3", "num_key_value_heads": None, "q_lora_rank": 10, "rope_scaling": None}, tensors="latent",
        target="deepseek_v3", runs=True),
    "qwen3-8b-peagle": Published({**QWEN, "architectures": ["PEagleDraftModel"], "head_dim": "size"}, "p_eagle", "p_eagle",
        target="qwen3", refused="mask_token_id: expected an integer"),
    "qwen3-8b-peagle with its mask": Published({**QWEN, "architectures": ["PEagleDraftModel"], "head_dim": "size",
        "mask_token_id": MASK}, "p_eagle", "p_eagle", target="qwen3", runs=True),
    "qwen3-8b-dflash, longcat": Published({**QWEN_BLOCK, **DFLASH, "dflash_config": TAPPED}, "dflash", "dflash", target="qwen3",
        runs=True),
    "lfm2.5-dflash": Published({**BLOCK, **DFLASH, "bos_token_id": 1, "eos_token_id": 7, "num_target_layers": 16,
        "rope_theta": 1000000.0, "tie_word_embeddings": True, "dflash_config": TAPPED}, "dflash", "dflash"),
    "qwen3.5-dflash": Published({**QWEN_BLOCK, **DFLASH, "pad_token_id": 248044, "tie_word_embeddings": True, "dflash_config": TAPPED},
        "dflash", "dflash", target="qwen3_5"),
    "the last layer of a target": Published({**QWEN_BLOCK, **DFLASH, "dflash_config": {**TAPPED, "target_layer_ids": [3, DEPTH - 1]}},
        "dflash", "dflash", runs=True),
    "dspark": Published({**QWEN_BLOCK, "architectures": ["DSparkDraftModel"], "dflash_config": DSPARK}, "dflash", "dflash",
        refused="DSpark is not supported"),
    "kimi-k3-dspark": Published({**BLOCK, "architectures": ["DSparkDraftModel"], "dflash_config": DSPARK,
        "rope_parameters": {"rope_type": "default"}}, "dflash", "dflash", refused="DSpark is not supported"),
    "domino": Published({**QWEN_BLOCK, "architectures": ["DominoDraftModel"], "emb_dim": 256, "dflash_config": DOMINO}, "dflash",
        "dflash", refused="Domino is not supported"),
}  # fmt: skip
FIRST = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "model_type": "llama", "pad_token_id": 0,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": "float16",
}  # fmt: skip
SAFEAILAB = {
    "vicuna": Published({**FIRST, "max_position_embeddings": 2048}, "eagle", "eagle, a head of keys for every query"),
    "llama-2-70B": Published({**FIRST, "max_position_embeddings": 4096, "num_key_value_heads": "size", "pretraining_tp": 1,
        "rope_scaling": None}, "eagle", "eagle", runs=True),
    "mixtral": Published({**FIRST, "max_position_embeddings": 4096, "model_type": "mixtral", "num_key_value_heads": "size"}, "eagle",
        "eagle"),
    "max_sequence_length": Published({**FIRST, "max_sequence_length": 2048, "num_key_value_heads": "size", "bias": True}, "eagle",
        "eagle", runs=True),
    "traineagle3": Published({**FIRST, **SIZES, "bos_token_id": 128000, "eos_token_id": 128001, "max_position_embeddings": 2048}),
}  # fmt: skip
VERIFIER = {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "org/model"}
GREEDY = {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}


def speculator(kind: str, **keys: Any) -> dict[str, Any]:
    """Top-level keys of a config of speculators."""
    method = {"algorithm": kind, "default_proposal_method": "greedy", "proposal_methods": [GREEDY], "verifier": VERIFIER}
    return {
        "architectures": [f"{kind.capitalize()}Speculator"], "auto_map": {"": "speculators.config"}, "draft_vocab_size": "size",
        "dtype": "bfloat16", "speculators_config": method, "speculators_model_type": kind, "speculators_version": "0.5.0",
        "target_hidden_size": None, "tie_word_embeddings": False, "transformers_version": "5.2.0", **keys,
    }  # fmt: skip


LAYER = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": 128009, "head_dim": "size",
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_key_value_heads": "size", "pad_token_id": None,
    "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_parameters": {**LLAMA3, "rope_theta": 500000.0}, "tie_word_embeddings": False,
    "torch_dtype": "torch.bfloat16",
}  # fmt: skip
QWEN3_LAYER = {**LAYER, **QWEN_IDS, **OFF, "model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 1000000}}
HEAD_KEYS = {
    "embed_requires_grad": False, "fc_norm": False, "norm_before_fc": False, "norm_before_residual": True, "norm_output": False,
    TAP_KEY: [2, 4, 6],
}  # fmt: skip
PARTIAL = {
    "mrope_interleaved": True,
    "mrope_section": [2, 1, 1],
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000000,
    "rope_type": "default",
}
SPECULATORS = {
    "eagle3": Published(speculator("eagle3", norm_before_residual=True), layer=LAYER, tensors="with embedding"),
    "eagle3, qwen3 layers": Published(speculator("eagle3", **HEAD_KEYS), layer={**QWEN3_LAYER, "layer_types": ["full_attention"]},
        tensors="qwen3 layer", target="qwen3", runs=True),
    "eagle3, sliding": Published(speculator("eagle3", **HEAD_KEYS), layer={**QWEN3_LAYER, "layer_types": ["sliding_attention"],
        "sliding_window": 8}, tensors="qwen3 layer", target="qwen3", runs=True),
    "eagle3, partial rotary": Published(speculator("eagle3", **HEAD_KEYS), layer={**QWEN3_LAYER, "rope_parameters": PARTIAL},
        tensors="qwen3 layer", target="qwen3_5", runs=True),
    "eagle3, the last layer": Published(speculator("eagle3", **{**HEAD_KEYS, TAP_KEY: [2, 4, DEPTH]}), layer=LAYER, runs=True),
    "eagle3, mistral layers": Published(speculator("eagle3", **HEAD_KEYS), layer={**LAYER, "model_type": "mistral"},
        refused="model_type: expected one of llama"),
    "peagle": Published(speculator("peagle", **HEAD_KEYS, mask_token_id=MASK), "p_eagle", "p_eagle", layer=LAYER, runs=True),
    "dflash": Published(speculator("dflash", aux_hidden_state_layer_ids=[2, 6], block_size=6, mask_token_id=MASK,
        sample_from_anchor=False, sliding_window_non_causal=False), "dflash", "dflash", layer={**QWEN3_LAYER,
        "layer_types": ["full_attention"] * 2}, target="qwen3", runs=True),
    "dspark": Published(speculator("dspark", block_size=7, markov_rank=256), "dflash", "dflash", layer=QWEN3_LAYER,
        refused="DSpark is not supported"),
    "mtp": Published(speculator("mtp"), layer=QWEN3_LAYER, refused="speculators_model_type: expected 'eagle3'"),
}  # fmt: skip
OLDER = {key: value for key, value in MODELOPT.items() if key.startswith("use_")}
ALONE = {TAP_KEY: [], "use_aux_hidden_state": False}
KIMI = {
    **dict.fromkeys(("aux_loss_alpha", "bos_token_id", "ep_size", "pruned_heads", "sep_token_id", "tie_encoder_decoder")),
    "architectures": ["Eagle3DeepseekV2ForCausalLM"], "first_k_dense_replace": 1, "model_type": "kimi_k2", "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8,
    "num_key_value_heads": 4, "num_nextn_predict_layers": 0, "q_lora_rank": 10, "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid", "seq_aux": True, "topk_group": 1, "topk_method": "noaux_tc",
}  # fmt: skip
EXPORTED = {
    **EAGLE3, **WIDE, "attention_bias": False, "bos_token_id": 128000, "eos_token_id": [128001, 128008], "mlp_bias": False,
    "pretraining_tp": 1, "rope_scaling": {**LLAMA3, "factor": 32.0}, "rope_theta": 500000.0,
}  # fmt: skip
LATENT_EXPORT = {**without(EXPORTED, "head_dim"), **LATENT, **KIMI}
UNSET = {**EXPORTED, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "sep_token_id": None}
MODELOPT_ROWS = {
    "export of 2025": Published({**EXPORTED, "eagle_config": {**OLDER, TAP_KEY: [1, 3, 5], "use_aux_hidden_state": True}}),
    "export of 2026": Published({**EXPORTED, "eagle_config": {**MODELOPT, TAP_KEY: [1, 3, 5], "use_aux_hidden_state": True}}, runs=True),
    "layers that are not named": Published({**EXPORTED, "eagle_config": {**MODELOPT, TAP_KEY: [], "use_aux_hidden_state": True}}),
    "Kimi K2": Published({**LATENT_EXPORT, "rope_scaling": YARN, "eagle_config": {**MODELOPT, TAP_KEY: [2, 4, 7],
        "use_aux_hidden_state": True}}, tensors="latent", target="deepseek_v3", runs=True),
    "Kimi K3, EAGLE-3.1": Published({**LATENT_EXPORT, "fc_norm": True, "norm_output": True, "num_aux_hidden_states": 3,
        "eagle_config": {TAP_KEY: [2, 4, 7], "use_aux_hidden_state": True}}, tensors="latent 3.1", target="deepseek_v3"),
    "Megatron": Published({**UNSET, "eagle_config": {**MODELOPT, TAP_KEY: [1, 3, 5], "use_aux_hidden_state": True}}),
    "the final hidden state alone": Published({**UNSET, "eagle_config": {**OLDER, **ALONE}}, tensors="one state", runs=True),
    "EAGLE-1 of Megatron": Published({**UNSET, "architectures": ["LlamaForCausalLMEagle"], "draft_vocab_size": VOCAB_SIZE,
        "eagle_config": {**MODELOPT, **ALONE}}, "eagle", "eagle of Megatron", runs=True),
    "parallel heads": Published({**UNSET, "eagle_config": {**MODELOPT, TAP_KEY: [1, 3, 5], "parallel_draft_step": 4,
        "parallel_draft_heads_num_layers": 1}}, refused="parallel_draft"),
    "MTP norms": Published({**UNSET, "eagle_config": {**MODELOPT, **ALONE, "use_mtp_layernorm": True}}, refused="use_mtp_layernorm"),
}  # fmt: skip
SLIM = {**EAGLE3, "architectures": ["Eagle3LlamaForCausalLM"], "attention_dropout": 0.0}
HUNYUAN = {
    **SLIM, **WIDE, "add_classification_head": False, "attention_bias": False, "attention_head_dim": 128, "bos_token_id": 1,
    "cla_share_factor": 2, "class_num": 0, "dense_list": [2048, 0], "eod_token_id": 120026, "eos_token_id": 120020, "im_end_id": 5,
    "mask_init_id": 12, "mlp_bias": False, "norm_type": "rms", "org_vocab_size": 120818, "pad_id": 120002, "pool_type": "last",
    "rope_theta": 10000.0, "target_model_type": "hunyuan_v1_dense", "tie_word_embeddings": True, "use_cla": False, "use_qk_norm": True,
    "use_rotary_pos_emb": True,
}  # fmt: skip
IMAGES = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
    "modal_type": "VLM",
}
INTERLEAVED = {"type": "default", "rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]}
ANGELSLIM = {
    "hunyuan-1.8b": Published({**HUNYUAN, "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0, "type": "dynamic"}}, tensors="with embedding"),
    "hunyuan-4b": Published(HUNYUAN, tensors="with embedding"),
    "hunyuan_ocr": Published({**without(HUNYUAN, "torch_dtype", "rope_scaling"), **IMAGES, "dtype": "bfloat16"}, tensors="with embedding"),
    "qwen2-audio": Published({**without(SLIM, "torch_dtype"), **WIDE, **QWEN_IDS, "dtype": "bfloat16", "modal_type": "Audio",
        "rope_theta": 10000}, tensors="with embedding"),
    "qwen2.5": Published({**SLIM, **QWEN_IDS, **OFF, "sliding_window": 32768, "tie_word_embeddings": True, "use_mrope": False,
        "rope_theta": 1000000.0}, tensors="with embedding", target="qwen2", runs=True),
    "qwen2.5-vl": Published({**SLIM, **QWEN_IDS, **OFF, **IMAGES, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "rope_theta": 1000000.0, "tie_word_embeddings": True}, tensors="with embedding", target="qwen2"),
    "qwen3": Published({**SLIM, **WIDE, **QWEN_IDS, **OFF, "tie_word_embeddings": True, "target_model_type": "qwen3",
        "rope_scaling": None}, target="qwen3", tensors="with embedding"),
    "qwen3-30b-a3b": Published({**SLIM, **WIDE, **QWEN_IDS, **OFF, "decoder_sparse_step": 1, "output_router_logits": False,
        "router_aux_loss_coef": 0.001}, target="qwen3_moe", tensors="with embedding"),
    "qwen3-vl": Published({**SLIM, **WIDE, **QWEN_IDS, **IMAGES, "rope_scaling": INTERLEAVED, "rope_theta": 5000000}, target="qwen3",
        tensors="with embedding"),
    "cosyvoice3": Published({**SLIM, **QWEN_IDS, **OFF, "architectures": ["CosyVoice3Eagle3LlamaForCausalLM"],
        "tie_word_embeddings": True}, tensors="deep", target="qwen2"),
    "qwen3-dflash": Published({**QWEN_BLOCK, "architectures": ["QwenDFlashDraftModel"], "torch_dtype": "bfloat16",
        "tie_word_embeddings": True, "num_anchors": 512, "loss_decay_gamma": 7.0, "attention_backend": "flex_attention",
        "dflash_config": TAPPED}, "dflash", "dflash", target="qwen3"),
    "qwen3-dflare": Published({**QWEN_BLOCK, "architectures": ["QwenDFlareDraftModel"], "dflash_config": TAPPED}, "dflash", "dflash",
        refused="architectures: expected a block drafter"),
}  # fmt: skip
NVIDIA = {**MODELOPT, "parallel_draft_heads_num_layers": 1}
NO_HEAD = {**UNSET, "draft_vocab_size": None}
GPT_OSS = {
    "nvidia/gpt-oss-120b-Eagle3-v3": Published({**EXPORTED, "eagle_config": {**NVIDIA, TAP_KEY: [5, 7, DEPTH - 1],
        "norm_before_fc": True, "use_aux_hidden_state": True}}, tensors="norm before fc", target="gpt_oss", runs=True),
    "nvidia/gpt-oss-120b-Eagle3-long-context": Published({**NO_HEAD, "eagle_config": {**NVIDIA, TAP_KEY: [0, 4, 7],
        "use_aux_hidden_state": True}}, tensors="no head", target="gpt_oss", runs=True),
    "nvidia/gpt-oss-120b-Eagle3-short-context": Published({**NO_HEAD, "eagle_config": {**NVIDIA, **ALONE}}, tensors="one state, no head",
        target="gpt_oss", runs=True),
    "RedHatAI/gpt-oss-20b-speculator.eagle3": Published(speculator("eagle3", **{**HEAD_KEYS, "norm_before_fc": True}), layer=LAYER,
        tensors="norm before fc, with embedding", target="gpt_oss", runs=True),
    "lmsys/EAGLE3-gpt-oss-120b-bf16": Published({**EAGLE3, **WIDE, "eagle_config": {TAP_KEY: [1, 4, 7]}, "pad_token_id": 0},
        target="gpt_oss", runs=True),
    "a hidden state after the norm": Published({**EXPORTED, "eagle_config": {**NVIDIA, TAP_KEY: [1, 4, 7], "use_aux_hidden_state": True,
        "return_hidden_post_norm": True}}, target="gpt_oss", runs=True),
}  # fmt: skip
_SOURCES = {
    "SpecForge": SPECFORGE,
    "SafeAILab": SAFEAILAB,
    "speculators": SPECULATORS,
    "ModelOpt": MODELOPT_ROWS,
    "AngelSlim": ANGELSLIM,
    "gpt-oss": GPT_OSS,
}
ROWS = {f"{source}: {name}": row for source, rows in _SOURCES.items() for name, row in rows.items()}


def write_target(path: Path, family: str) -> Path:
    return write_hf(TARGETS[family](), path)

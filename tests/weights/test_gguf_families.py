"""GGUF files of every family that has a row: names by the ``gguf`` package's table, logits by transformers over the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from graphspec.errors import CheckpointError
from graphspec.facts import read_model_facts
from graphspec.facts.gguf_families import ARCHITECTURES
from graphspec.facts.gguf_model import gguf_folder
from graphspec.models.target import load_target
from tests.support.checkpoints import VOCAB_SIZE, DenseAttention, architecture_of, build_hf, write_hf
from tests.support.engines import assert_tokens_of
from tests.support.features import marked, of_family
from tests.support.gemma4 import BASE, SHAPES, build_gemma4
from tests.support.gguf_files import copy_gguf, write_gguf
from tests.support.moe_checkpoints import add_heads, build_mixture, head_tensors, mixture_of

SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4, "head_dim": 16,
    "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 12}
ROUTING = {**EXPERTS, "expert_shared_count": 2, "leading_dense_block_count": 1, "expert_gating_func": 2}
MULTIPLIERS = {"embedding_multiplier": 1.5, "residual_multiplier": 0.6, "attention_multiplier": 0.2, "logits_scaling": 3.0}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma": ("gemma", {}, {}),
    "gemma2": (
        "gemma2", {"sliding_window": 5, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16},
        {"attention.sliding_window": 5, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "gemma3", {"num_hidden_layers": 7, "sliding_window": 5, "query_pre_attn_scalar": 16}, {"attention.sliding_window": 5},
    ),
    "olmo2": ("olmo2", {"head_dim": None}, {}),
    "olmo2, version 3": (
        "olmo3", {"head_dim": None, "sliding_window": 5},
        {"attention.sliding_window": 5, "attention.sliding_window_pattern": [True, True, True, False]},
    ),
    "exaone4": (
        "exaone4", {"sliding_window": 5, "sliding_window_pattern": 4},
        {"attention.sliding_window": 5, "attention.sliding_window_pattern": [True, True, True, False]},
    ),
    "exaone4, without windows": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}, {}),
    "smollm3": ("smollm3", {"head_dim": None, "rope_theta": 5e4}, {}),
    "granite": (
        "granite", {**MULTIPLIERS, "head_dim": None},
        {"embedding_scale": 1.5, "residual_scale": 0.6, "attention.scale": 0.2, "logit_scale": 3.0},
    ),
    "seed_oss": ("seed_oss", {"attention_bias": True, "attention_out_bias": False}, {}),
    "qwen3vl": ("qwen3", {}, {}),
    "qwen3moe": ("qwen3_moe", {}, EXPERTS | {"expert_count": 6}),
    "qwen2moe": ("qwen2_moe", {}, {**EXPERTS, "expert_count": 6, "expert_shared_feed_forward_length": 20}),
    "olmoe": ("olmoe", {}, {"expert_count": 6, "expert_used_count": 3}),
    "ernie4_5": ("ernie4_5", {}, {}),
    "ernie4_5-moe": (
        "ernie4_5_moe", {},
        {
            **EXPERTS, "expert_count": 6, "expert_shared_count": 2, "expert_shared_feed_forward_length": 24,
            "leading_dense_block_count": 1, "interleave_moe_layer_step": 1,
        },
    ),
    "glm4": ("glm4", {}, {"rope.dimension_count": 8}),
    "dots1": ("dots1", {"sliding_window": None, "routed_scaling_factor": 1.5}, {**ROUTING, "expert_weights_scale": 1.5}),
    "gpt-oss": (
        "gpt_oss", {"sliding_window": 5, "swiglu_limit": 7.0},
        {
            "expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 24, "attention.sliding_window": 5,
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16,
        },
    ),
    "glm4moe": (
        "glm4_moe", {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5},
        {**ROUTING, "expert_weights_scale": 2.5, "expert_weights_norm": True, "rope.dimension_count": 4},
    ),
}  # fmt: skip
MIXTURES = ("qwen3_moe", "qwen2_moe", "olmoe", "ernie4_5_moe", "dots1", "glm4_moe", "gpt_oss")
REPEATING, NGRAM = [5, 9, 3, 22, 5, 9, 3], {"variant": "ngram", "num_steps": 3, "topk": 2}
READ_BY_TRANSFORMERS = ("gemma2", "gemma3", "qwen3moe", "qwen2moe")


def architecture(name: str) -> str:
    """The class of transformers of a case."""
    family = CASES[name][0]
    return (mixture_of if family in MIXTURES else architecture_of)(family)


def make(name: str, folder: Path, **options: Any) -> tuple[Path, Path]:
    """A file, and the folder with the same numbers for transformers."""
    family, overrides, metadata = CASES[name]
    arch = name.split(",", maxsplit=1)[0]
    build = build_mixture if family in MIXTURES else build_hf
    sizes = {} if family in MIXTURES else SIZES
    source = write_hf(build(family, **{**sizes, **overrides}), folder / "source")
    file = folder / "model.gguf"
    return file, write_gguf(source, file, {}, arch=arch, metadata={f"{arch}.{key}": value for key, value in metadata.items()}, **options)


def logits(file: Path) -> torch.Tensor:
    facts = read_model_facts(gguf_folder(file))
    ours = load_target(facts, (), 40, torch.float32, "cpu")
    return ours.logits(ours(tokens(), DenseAttention.prompt(2, 40)).hidden_BTH)


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE - 1, (2, 40), generator=torch.Generator().manual_seed(3))


def test_every_architecture_has_a_case() -> None:
    assert {name.split(",")[0] for name in CASES} | {"llama", "qwen2", "qwen3", "qwen35", "qwen35moe", "gemma4"} == set(ARCHITECTURES)
    assert set(ARCHITECTURES) <= set(gguf.MODEL_ARCH_NAMES.values())


@pytest.mark.parametrize("name", marked(CASES, architecture, "GGUF"))
@torch.inference_mode()
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    file, plain = make(name, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
    torch.testing.assert_close(logits(file), model(input_ids=tokens()).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
@torch.inference_mode()
def test_transformers_reads_the_same_from_the_file(name: str, tmp_path: Path) -> None:
    """An oracle of what the file means that knows nothing of these tests."""
    file, plain = make(name, tmp_path)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(plain), attn_implementation="eager"
    ).eval()
    found = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    missing, unknown = model.load_state_dict(found, strict=False)
    assert (set(missing) - {"lm_head.weight"}, unknown) == (set(), [])
    torch.testing.assert_close(logits(file), model(input_ids=tokens()).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", marked(("gemma3", "granite", "glm4moe", "glm4", "ernie4_5-moe"), architecture, "GGUF", "ngram", "tree"))
def test_engines_draft_over_them(name: str, tmp_path: Path) -> None:
    file, plain = make(name, tmp_path, default=Type.F16 if CASES[name][0] in MIXTURES else Type.Q8_0)
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    assert_tokens_of(model, file, [REPEATING], 20, NGRAM)


@of_family("GptOssForCausalLM", "GGUF", "none", "ngram", "tree")
def test_experts_of_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    """As llama.cpp publishes them: experts in MXFP4, everything else in 8 bits."""
    source = write_hf(build_mixture("gpt_oss", hidden_size=64, intermediate_size=32, swiglu_limit=7.0), tmp_path / "source")
    metadata = CASES["gpt-oss"][2] | {"expert_feed_forward_length": 32, "attention.sliding_window": 7}
    file, experts = tmp_path / "model.gguf", ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    plain = write_gguf(
        source, file, dict.fromkeys(experts, Type.MXFP4), arch="gpt-oss", default=Type.Q8_0,
        metadata={f"gpt-oss.{key}": value for key, value in metadata.items()},
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
    assert_tokens_of(model, file, [REPEATING], 20, {"variant": "none"}, NGRAM)


def write_gemma4(kind: str, folder: Path, **options: Any) -> tuple[Path, Path]:
    """As llama.cpp's converter has it: numbers for each layer, and divisors that make pairs of a head stand still."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32, "head_dim": 16, "global_head_dim": 32}
    source, file = write_hf(build_gemma4(kind, **sizes), folder / "source"), folder / "model.gguf"
    config = {**BASE, **SHAPES[kind], **sizes}
    layers, shared, heads = config["num_hidden_layers"], config.get("num_kv_shared_layers", 0), config["num_attention_heads"]
    windowed = [layer == "sliding_attention" for layer in config["layer_types"]]
    full = config.get("num_global_key_value_heads", config["num_key_value_heads"])
    metadata = {
        "attention.key_length": 32, "attention.value_length": 32, "attention.key_length_swa": 16, "attention.value_length_swa": 16,
        "attention.head_count": heads, "attention.head_count_kv": [config["num_key_value_heads"] if one else full for one in windowed],
        "attention.shared_kv_layers": shared, "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": windowed, "rope.dimension_count": 32, "rope.dimension_count_swa": 16,
        "rope.freq_base_swa": 100.0, "final_logit_softcapping": 4.0,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "feed_forward_length": [32 * (1 + (layer >= layers - shared)) for layer in range(layers)],
    }  # fmt: skip
    if kind == "experts":
        metadata |= {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 32}
    divisors = torch.tensor([1.0] * 4 + [1e30] * 12)
    named = {f"gemma4.{key}": value for key, value in metadata.items()}
    return file, write_gguf(source, file, {}, arch="gemma4", metadata=named, more={"rope_freqs.weight": divisors}, **options)


@of_family("Gemma4ForCausalLM", "GGUF")
@pytest.mark.parametrize("kind", SHAPES)
@torch.inference_mode()
def test_gemma4_has_numbers_for_each_layer(kind: str, tmp_path: Path) -> None:
    file, plain = write_gemma4(kind, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
    torch.testing.assert_close(logits(file), model(input_ids=tokens()).logits, rtol=1e-4, atol=1e-4)
    lists = gguf.GGUFValueType
    refused(
        file, tmp_path, {"gemma4.attention.head_count_kv": ([2, 0], lists.ARRAY, lists.UINT32)}, "head_count_kv: expected a whole number"
    )


def refused(file: Path, tmp_path: Path, metadata: dict[str, tuple[Any, ...]], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        gguf_folder(copy_gguf(file, tmp_path / "changed.gguf", metadata=metadata))


def test_metadata_that_is_wrong_is_named(tmp_path: Path) -> None:
    kinds = gguf.GGUFValueType
    file, _ = make("glm4moe", tmp_path)
    refused(file, tmp_path, {"glm4moe.expert_gating_func": (1, kinds.UINT32)}, r"expert_gating_func: expected 2 \(sigmoid\)")
    refused(file, tmp_path, {"glm4moe.expert_count": (0, kinds.UINT32)}, "expert_count: expected a whole number above 0")
    (tmp_path / "olmo").mkdir()
    file, _ = make("olmo2, version 3", tmp_path / "olmo")
    pattern = {"olmo2.attention.sliding_window_pattern": ([True], kinds.ARRAY, kinds.BOOL)}
    refused(file, tmp_path, pattern, "sliding_window_pattern: expected 4 flags")


@of_family("Qwen3MoeForCausalLM", "GGUF")
@torch.inference_mode()
def test_experts_of_low_precision_load(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "moe_intermediate_size": 32}
    source = write_hf(build_mixture("qwen3_moe", **sizes), tmp_path / "source")
    metadata = {f"qwen3moe.{key}": value for key, value in (EXPERTS | {"expert_count": 6, "expert_feed_forward_length": 32}).items()}
    file = tmp_path / "model.gguf"
    plain = write_gguf(source, file, {}, arch="qwen3moe", metadata=metadata)
    kept: dict[str, torch.Tensor] = {}

    def pack(tensors: Any) -> Any:
        found = dict(tensors)
        for name, (data, _) in tensors.items():
            if "_exps." in name:
                codes = gguf.quants.quantize(data.astype("float32"), Type.Q8_0)
                kept[name], found[name] = torch.from_numpy(gguf.quants.dequantize(codes, Type.Q8_0)), (codes, Type.Q8_0)
        return found

    packed = copy_gguf(file, tmp_path / "packed.gguf", pack)
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
    for layer in range(model.config.num_hidden_layers):
        experts = model.model.layers[layer].mlp.experts
        gate, up, down = (kept[f"blk.{layer}.ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
        experts.gate_up_proj.copy_(torch.cat((gate, up), 1))
        experts.down_proj.copy_(down)
    torch.testing.assert_close(logits(packed), model(input_ids=tokens()).logits, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_prediction_heads_are_left_unread(tmp_path: Path) -> None:
    keys = {"n_group": 1, "topk_group": 1}
    model = build_mixture("glm4_moe", **keys)
    source = add_heads(write_hf(model, tmp_path / "source"), head_tensors("glm4_moe", **keys))
    metadata = {**CASES["glm4moe"][2], "expert_weights_scale": 1.0, "block_count": 4, "nextn_predict_layers": 1}
    file = tmp_path / "model.gguf"
    write_gguf(source, file, {}, arch="glm4moe", default=Type.F32, metadata={f"glm4moe.{key}": value for key, value in metadata.items()})
    torch.testing.assert_close(logits(file).argmax(-1), model(input_ids=tokens()).logits.argmax(-1))

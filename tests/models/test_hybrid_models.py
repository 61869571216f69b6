"""Hybrid targets: logits against transformers, configs and checkpoints in all spellings, and refusals."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphspec.config.schema import Config, HardwareConfig, KernelsConfig, ModelConfig, RuntimeConfig, VariantConfig
from graphspec.errors import CheckpointError, ConfigError
from graphspec.facts import ModelFacts, read_model_facts
from graphspec.facts.keys import Keys
from graphspec.facts.recurrent import read_gated_delta
from graphspec.graphs.memory import plan_memory
from graphspec.kernels import select_kernels
from graphspec.models.recurrence import RecurrentStates, RunRecurrence
from graphspec.models.recurrent_net import RecurrentNet
from graphspec.models.target import load_target
from graphspec.plan.buffers import declare_slots, plan_sizes
from graphspec.plan.plan import make_plan
from tests.support.checkpoints import VOCAB_SIZE, DenseAttention, edit_json, write_hf
from tests.support.features import marked
from tests.support.hybrid_checkpoints import build_hybrid, hybrid_of
from tests.support.tiny import model_facts

if TYPE_CHECKING:
    from pathlib import Path

LENGTH = 80
"""More than one block of the chunked rule."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5", {}),
    "qwen3_5-one-value-head-per-key-head": ("qwen3_5", {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 3, "attention_bias": True}),
    "qwen3_5-every-second-tied": (
        "qwen3_5",
        {"layer_types": ["full_attention", "linear_attention"] * 2, "tie_word_embeddings": True, "num_key_value_heads": 3},
    ),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_5_moe": ("qwen3_5_moe", {}),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h-biases": ("nemotron_h", {"mlp_bias": True, "use_bias": True, "use_conv_bias": False}),
    "nemotron_h-experts": ("nemotron_h_moe", {}),
    "nemotron_h-experts-over-a-compressed-stream": ("nemotron_h_latent", {}),
    "granite": ("granite", {"tie_word_embeddings": True}),
    "granite-rope-one-group": ("granite", {"position_embedding_type": "rope", "mamba_n_groups": 1, "attention_bias": True}),
    "granite-experts": ("granite_moe", {"mamba_d_conv": 3, "mamba_conv_bias": False, "mamba_proj_bias": True}),
    "granite-attention-only": ("granite", {"layer_types": ["full_attention"] * 4, "position_embedding_type": "rope"}),
    "bamba": ("bamba", {}),
    "bamba-biases": ("bamba", {"mlp_bias": True, "attention_bias": True, "mamba_proj_bias": True, "tie_word_embeddings": True}),
    "falcon_h1": ("falcon_h1", {}),
    "falcon_h1-norm": (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_conv_bias": False, "mamba_d_ssm": None},
    ),
    "qwen3_5_moe-keys-of-qwen3_next": (
        "qwen3_5_moe",
        {"norm_topk_prob": False, "mlp_only_layers": [1], "decoder_sparse_step": 2},
    ),
    "qwen3_next-dense-layers": ("qwen3_next", {"mlp_only_layers": [1, 3], "norm_topk_prob": False, "linear_num_key_heads": 4}),
}


def states(facts: ModelFacts, rows: int) -> RecurrentStates:
    assert facts.recurrent is not None
    return RecurrentStates(*(torch.full((rows, facts.recurrent.count, *state.shape), torch.nan) for state in facts.recurrent.states))


def whole_prompts(facts: ModelFacts, batch: int, length: int, *, exact: bool = False) -> DenseAttention:
    """Prompts of one length in rows that held something else."""
    attention = DenseAttention.prompt(batch, length)
    lengths, fresh = torch.full((batch,), length), torch.ones(batch, dtype=torch.bool)
    kernels = select_kernels("reference", "reference", "cpu")
    if facts.recurrent is not None:
        attention.recurrence = RunRecurrence(kernels, states(facts, batch), torch.arange(batch), lengths, fresh, exact)
    return attention


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """As far apart as sums in another order are after four layers: 256 roundings of the largest value."""
    torch.testing.assert_close(found, expected, rtol=0, atol=256 * torch.finfo(torch.float32).eps * float(expected.abs().max()))


@pytest.mark.parametrize("name", marked(CASES, lambda name: hybrid_of(CASES[name][0]), "logits"))
@torch.inference_mode()
def test_logits_and_taps_equal_transformers(name: str, tmp_path: Path) -> None:
    family, overrides = CASES[name]
    model = build_hybrid(family, **overrides)
    facts = read_model_facts(write_hf(model, tmp_path))
    ours = load_target(facts, (1, 3), LENGTH, torch.float32, "cpu")
    token_BT = torch.randint(0, VOCAB_SIZE, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    theirs = model(token_BT, output_hidden_states=True, use_cache=False)
    for exact in (False, True):
        found = ours(token_BT, whole_prompts(facts, 2, LENGTH, exact=exact))
        logits = ours.logits(found.hidden_BTH)
        assert_near(logits, theirs.logits)
        assert torch.equal(logits.argmax(-1), theirs.logits.argmax(-1))
        for feature, tap in zip(found.feature_BTF.chunk(2, dim=-1), (1, 3), strict=True):
            assert_near(feature, theirs.hidden_states[tap])


@torch.inference_mode()
def test_the_language_model_of_one_that_sees_images(tmp_path: Path) -> None:
    """Its config is nested, its tensors have a longer prefix, and the tower for images is left unread."""
    model = build_hybrid("qwen3_5")
    plain = write_hf(model, tmp_path / "plain")
    expected = load_target(read_model_facts(plain), (), 16, torch.float32, "cpu")
    path = write_hf(model, tmp_path / "seeing")
    config = model.config.to_dict()
    names = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "rms_norm_eps")
    edit_json(path / "config.json", *names, architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5", text_config=config)
    file = path / "model.safetensors"
    tensors = {name.replace("model.", "model.language_model.", 1): tensor.clone() for name, tensor in load_file(file).items()}
    save_file({**tensors, "model.visual.patch_embed.proj.weight": torch.ones(3, 3)}, file)
    facts = read_model_facts(path)
    found = load_target(facts, (), 16, torch.float32, "cpu")
    for (name, mine), theirs in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    edit_json(path / "config.json", text_config=[1])
    with pytest.raises(CheckpointError, match="text_config: expected an object"):
        read_model_facts(path)


@torch.inference_mode()
def test_experts_in_one_tensor(tmp_path: Path) -> None:
    """As Qwen3.5's published checkpoints have them."""
    path = write_hf(build_hybrid("qwen3_5_moe"), tmp_path)
    one_by_one = load_target(read_model_facts(path), (), 16, torch.float32, "cpu")
    tensors = load_file(path / "model.safetensors")
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = ([tensors.pop(f"{prefix}{expert}.{one}_proj.weight") for expert in range(6)] for one in ("gate", "up", "down"))
        tensors[f"{prefix}gate_up_proj"] = torch.stack([torch.cat(both) for both in zip(gate, up, strict=True)])
        tensors[f"{prefix}down_proj"] = torch.stack(down)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    stacked = load_target(read_model_facts(path), (), 16, torch.float32, "cpu")
    for (name, mine), theirs in zip(stacked.named_parameters(), one_by_one.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_older_configs_of_mamba_hybrids_say_the_same(tmp_path: Path) -> None:
    """A pattern of letters, another key for the epsilon, and older names of kinds."""
    path = write_hf(build_hybrid("nemotron_h_moe"), tmp_path / "nemotron")
    new = read_model_facts(path)
    edit_json(path / "config.json", "layers_block_type", "layer_norm_epsilon", hybrid_override_pattern="ME*ME", rms_norm_eps=1e-6)
    assert read_model_facts(path) == new and new.mixers == ("recurrent", "mlp", "attention", "recurrent", "mlp")
    assert new.kv_layers == 1 and [new.place(layer) for layer in (0, 2, 3)] == [0, 0, 1]
    path = write_hf(build_hybrid("granite"), tmp_path / "granite")
    new = read_model_facts(path)
    edit_json(path / "config.json", "time_step_limit", layer_types=["mamba", "mamba", "attention", "mamba"], mamba_d_head="auto")
    assert read_model_facts(path) == new


@torch.inference_mode()
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "nemotron_h", "granite", "falcon_h1"])
def test_low_precision_follows_transformers_casts(family: str, tmp_path: Path) -> None:
    """Error against float32 at most twice that of transformers in bfloat16."""
    model = build_hybrid(family)
    facts = read_model_facts(write_hf(model, tmp_path))
    low = copy.deepcopy(model).to(torch.bfloat16)
    token_BT = torch.arange(24)[None]
    exact = copy.deepcopy(low).float()(token_BT, use_cache=False).logits
    ours = load_target(facts, (), 24, torch.bfloat16, "cpu")
    assert facts.recurrent is not None
    attention = whole_prompts(facts, 1, 24)
    matrix, column = states(facts, 1)
    attention.recurrence = replace(attention.recurrence, states=RecurrentStates(matrix, column.bfloat16()))  # type: ignore[type-var]
    logits = ours.logits(ours(token_BT, attention).hidden_BTH)
    assert (logits - exact).abs().max() <= 2 * (low(token_BT, use_cache=False).logits.float() - exact).abs().max()


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "falcon_h1"])
def test_convolutions_of_all_layers_are_held_once(family: str, tmp_path: Path) -> None:
    """In one tensor, for the commit; each layer's own is a part of it."""
    path = write_hf(build_hybrid(family), tmp_path)
    target = load_target(read_model_facts(path), (), 16, torch.float32, "cpu")
    whole, stored = target.stacked_convolution(), load_file(path / "model.safetensors")
    nets = [module for module in target.modules() if isinstance(module, RecurrentNet)]
    assert [net.layer for net in nets] == list(range(len(whole.weight_EO)))
    named = {name: [stored[key] for key in stored if key.endswith(f"conv1d.{name}")] for name in ("weight", "bias")}
    for place, (net, weight) in enumerate(zip(nets, named["weight"], strict=True)):
        assert net.conv_weight_E1O.data_ptr() == whole.weight_EO[place].data_ptr() and torch.equal(net.conv_weight_E1O, weight)
        if whole.bias_E is not None:
            assert net.conv_bias_E is not None and net.conv_bias_E.data_ptr() == whole.bias_E[place].data_ptr()
            assert torch.equal(net.conv_bias_E, named["bias"][place])
    assert (whole.bias_E is None) == (family == "qwen3_5")


def test_two_nets_side_by_side_are_refused_on_several_ranks(tmp_path: Path) -> None:
    facts = read_model_facts(write_hf(build_hybrid("falcon_h1"), tmp_path))
    assert facts.kv_layers == facts.num_layers and [facts.place(layer) for layer in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match=r"runtime\.tensor_parallel: expected 1 for FalconH1ForCausalLM"):
        facts.of_rank(0, 2)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown kind": ({"layer_types": ["linear_attention", "sliding_attention"] * 2}, "layer_types: expected 4 entries"),
    "too few kinds": ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types: expected 4 entries"),
    "no attention": ({"layer_types": ["linear_attention"] * 4}, "layer_types: expected at least one entry of full_attention"),
    "heads": ({"linear_num_value_heads": 5}, "linear_num_value_heads: expected a multiple of linear_num_key_heads = 2"),
    "no convolution": ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim: expected an integer >= 2"),
    "no gate": ({"attn_output_gate": False}, "attn_output_gate: expected true"),
    "vector gates": ({"architectures": ["KimiLinearForCausalLM"]}, "the gates of its recurrent layers are vectors"),
}


MAMBA_REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "clamped steps": ("granite", {"time_step_limit": [0.01, 1.0]}, r"time_step_limit: expected \[0.0, Infinity\]"),
    "no compressed stream": ("nemotron_h_moe", {"moe_latent_size": 0}, "moe_latent_size: expected an integer >= 1"),
    "another activation": ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act: expected 'relu2'"),
    "unknown letter": ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "M*X"}, "hybrid_override_pattern: expected"),
    "no attention by letters": (
        "nemotron_h",
        {"layers_block_type": None, "hybrid_override_pattern": "M-"},
        "at least one layer that attends",
    ),
    "no attention": ("granite", {"layer_types": ["mamba"] * 4}, "layer_types: expected at least one layer that attends"),
    "unknown kind": ("granite", {"layer_types": ["mamba", "moe"]}, "layer_types: expected a list of linear_attention or full_attention"),
    "too few kinds": ("granite", {"layer_types": ["mamba", "attention"]}, "layer_types: expected 4 entries"),
    "bamba without attention": ("bamba", {"attn_layer_indices": None}, "attn_layer_indices: expected at least one layer that attends"),
    "bamba beyond": ("bamba", {"attn_layer_indices": [4]}, "attn_layer_indices: expected a list of layers from 0 to 3"),
    "groups": ("granite", {"mamba_n_groups": 3}, "mamba_n_heads: expected a multiple of mamba_n_groups = 3"),
    "positions": ("granite", {"position_embedding_type": "alibi"}, "position_embedding_type: expected rope, nope or null"),
    "a norm before the gate": ("falcon_h1", {"mamba_rms_norm": True}, "mamba_norm_before_gate: expected false"),
    "scaled biases": ("falcon_h1", {"projectors_bias": True}, "projectors_bias: expected false"),
    "another width": ("falcon_h1", {"mamba_d_ssm": 90}, "mamba_d_ssm: expected mamba_n_heads = 4 times mamba_d_head"),
    "too few multipliers": ("falcon_h1", {"ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers: expected 5 positive numbers"),
    "multiplier": ("granite", {"residual_multiplier": -1}, "residual_multiplier: expected a positive number"),
}


@pytest.mark.parametrize("name", MAMBA_REFUSED)
def test_mamba_hybrids_refused_by_config(name: str, tmp_path: Path) -> None:
    family, changes, message = MAMBA_REFUSED[name]
    path = write_hf(build_hybrid(family), tmp_path)
    edit_json(path / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        read_model_facts(path)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_config(name: str, tmp_path: Path) -> None:
    changes, message = REFUSED[name]
    path = write_hf(build_hybrid("qwen3_5"), tmp_path)
    edit_json(path / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        read_model_facts(path)


def published() -> ModelFacts:
    """The recurrent layers of Qwen3-Next-80B-A3B, by the defaults of its config, in a model that is small elsewhere."""
    facts = model_facts(48)
    return replace(facts, sliding_window=(None,) * 48, recurrent=read_gated_delta(Keys({}, "config.json"), 48))


def config(**kernels: str) -> Config:
    return Config(
        variant=VariantConfig(name="ngram", num_steps=5, topk=4, num_draft_tokens=16),
        model=ModelConfig(path="tiny", max_context=96),
        runtime=RuntimeConfig(name="eager", max_rows=4, buckets=[4]),
        kernels=KernelsConfig(**kernels),
        hardware=HardwareConfig(dtype="bfloat16"),
    )


def test_a_node_costs_its_inputs_and_no_state() -> None:
    """Sixteen nodes of Qwen3-Next cost a row at most 12 MiB, next to its state of 72 MiB; the pool has rows of attention layers only."""
    plan = make_plan(config(), published(), None, device="cpu")
    sizes = plan_sizes(plan)
    slots = declare_slots(plan, 1)
    size = {slot.name: math.prod(sizes[d] if isinstance(d, str) else d for d in slot.dims) * slot.dtype.itemsize for slot in slots}
    rows, lanes, mib = plan.max_rows + 1, max(plan.buckets), 2**20
    assert size["matrix_RUHKV"] == rows * 72 * mib
    assert size["column_RUOE"] < rows * 1.7 * mib
    records = size["record_input_UBNE"] + size["record_gate_UBNG"]
    assert 9 * mib < records / lanes <= 12 * mib
    facts = plan.target.recurrent
    assert facts is not None
    assert (facts.state_bytes(2) * rows, facts.record_bytes(2) * 16 * lanes) == (size["matrix_RUHKV"] + size["column_RUOE"], records)
    assert next(slot for slot in slots if slot.name == "target_kv").dims[0] == plan.target.kv_layers == 12
    assert [slot.name for slot in slots if "N" in slot.dims and size[slot.name] > mib] == ["record_input_UBNE"], "nothing else per node"
    lines = {line.name: line.size for line in plan_memory(plan, config(), (0, 0)).lines}
    assert lines["recurrent states"] == size["matrix_RUHKV"] + size["column_RUOE"] + records

"""Recurrent layers sharded over ranks, as threads of one process: logits, what each rank reads and keeps, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphspec.config.schema import Config, ModelConfig, RuntimeConfig, VariantConfig
from graphspec.errors import ConfigError
from graphspec.facts import ModelFacts, read_model_facts
from graphspec.graphs.memory import plan_memory
from graphspec.kernels import select_kernels
from graphspec.models.recurrence import RecurrentStates, RunRecurrence
from graphspec.models.target import load_target
from graphspec.plan.buffers import declare_slots
from graphspec.plan.plan import make_plan
from tests.support.checkpoints import VOCAB_SIZE, DenseAttention, write_hf
from tests.support.features import marked
from tests.support.hybrid_checkpoints import build_hybrid, hybrid_of
from tests.support.rank_threads import count_numbers_read, run_ranks

LENGTH = 70
"""More than one block of the chunked rules."""
TAPS = (0, 2)
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2}
UNCLAMPED = {"time_step_min": 1e-9}  # transformers clamps the steps of Nemotron-H's prompts, and of no decoded token
UNEVEN = {"mamba_n_heads": 12, "mamba_d_head": 8, "mamba_n_groups": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "part-by-part": ("qwen3_5", {}),
    "key-head-by-key-head": ("qwen3_next", {}),
    "key-heads-across-ranks": ("qwen3_next", {"linear_num_key_heads": 3, "linear_num_value_heads": 12}),
    "one-value-head-per-key-head": ("qwen3_next", {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 3, "mlp_only_layers": [1, 3]}),
    "experts-in-one-tensor": ("qwen3_5_moe", {}),
    "one-net-per-layer": ("nemotron_h", {}),
    "one-net-per-layer-biases": ("nemotron_h", {"mlp_bias": True, "use_bias": True, "use_conv_bias": False, "n_groups": 4, **UNCLAMPED}),
    "experts-without-a-gate": ("nemotron_h_moe", {}),
    "experts-over-a-compressed-stream": ("nemotron_h_latent", {}),
    "one-group": ("granite", {"mamba_n_groups": 1, "mamba_proj_bias": True, "tie_word_embeddings": True}),
    "groups-across-ranks": ("granite_moe", UNEVEN),
    "bamba": ("bamba", {"mlp_bias": True, "attention_bias": True, "mamba_proj_bias": True}),
}
NORMS = {
    ("one-net-per-layer", 4): 2, ("experts-without-a-gate", 4): 2, ("experts-over-a-compressed-stream", 4): 2, ("one-group", 2): 3,
    ("one-group", 4): 3, ("groups-across-ranks", 2): 3, ("groups-across-ranks", 4): 3, ("bamba", 4): 2,
}  # fmt: skip
"""By case and ranks, the layers in which a group of heads lies on several ranks, and is normed over them."""


def build(name: str, path: Path) -> Any:
    family, overrides = CASES[name]
    model = build_hybrid(family, **{**ATTENTION, **overrides})
    write_hf(model, path)
    if name == "experts-in-one-tensor":
        stack_experts(path / "model.safetensors")
    return model


def stack_experts(file: Path) -> None:
    """As Qwen3.5's published checkpoints have them."""
    tensors = load_file(file)
    for prefix in {name.partition("experts.0.")[0] + "experts." for name in tensors if "experts.0." in name}:
        parts = {one: [tensors.pop(f"{prefix}{expert}.{one}_proj.weight") for expert in range(6)] for one in ("gate", "up", "down")}
        tensors[f"{prefix}gate_up_proj"] = torch.stack([torch.cat(both) for both in zip(parts["gate"], parts["up"], strict=True)])
        tensors[f"{prefix}down_proj"] = torch.stack(parts["down"])
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


def prompts(facts: ModelFacts) -> DenseAttention:
    """Whole prompts, in rows that held something else."""
    assert facts.recurrent is not None
    attention = DenseAttention.prompt(2, LENGTH)
    states = RecurrentStates(*(torch.full((2, facts.recurrent.count, *state.shape), torch.nan) for state in facts.recurrent.states))
    kernels = select_kernels("reference", "reference", "cpu")
    attention.recurrence = RunRecurrence(
        kernels, states, torch.arange(2), torch.full((2,), LENGTH), torch.ones(2, dtype=torch.bool), exact=False
    )
    return attention


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", marked(CASES, lambda name: hybrid_of(CASES[name][0]), "ranks"))
def test_ranks_together_have_the_logits_of_transformers(name: str, size: int, tmp_path: Path) -> None:
    model = build(name, tmp_path)
    facts, token_BT = read_model_facts(tmp_path), torch.randint(0, VOCAB_SIZE, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    logits, features, calls = run_ranks(facts, size, TAPS, token_BT, prompts)
    one_net = facts.mixers is not None
    assert calls == {"sums": 1 + (1 if one_net else 2) * facts.num_layers, "gathers": 1 + NORMS.get((name, size), 0)}
    with torch.inference_mode():
        theirs = model(token_BT, output_hidden_states=True, use_cache=False)
    for found, expected in ((logits, theirs.logits), (features, torch.cat([theirs.hidden_states[tap] for tap in TAPS], -1))):
        # As far apart as sums in another order are after four layers: 256 roundings of the largest value.
        torch.testing.assert_close(found, expected, rtol=0, atol=256 * torch.finfo(torch.float32).eps * float(expected.abs().max()))
    assert torch.equal(logits.argmax(-1), theirs.logits.argmax(-1))


@pytest.mark.parametrize("name", ["part-by-part", "key-head-by-key-head", "experts-in-one-tensor", "experts-without-a-gate", "bamba"])
def test_a_rank_reads_its_part_of_the_bytes_and_no_more(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(name, tmp_path)
    facts, read = read_model_facts(tmp_path), count_numbers_read(monkeypatch)
    for rank, size, share in ((0, 2, 0.6), (0, 4, 0.42), (1, 4, 0.42)):
        read[0] = 0
        model = load_target(facts.of_rank(rank, size), (), LENGTH, torch.float32, "cpu")
        assert read[0] == sum(parameter.numel() for parameter in model.parameters())
        held, read[0] = read[0], 0
        load_target(facts, (), LENGTH, torch.float32, "cpu")
        assert held < share * read[0]


@pytest.mark.parametrize("name", ["part-by-part", "experts-without-a-gate"])
def test_a_rank_keeps_the_states_of_its_heads(name: str, tmp_path: Path) -> None:
    build(name, tmp_path)
    facts = read_model_facts(tmp_path)
    whole = facts.recurrent
    assert whole is not None and (whole.value_heads, whole.key_heads, whole.taps) == (4, 2, 4)
    config = Config(
        variant=VariantConfig(name="ngram", num_steps=3, topk=2, num_draft_tokens=6),
        model=ModelConfig(path="tiny", max_context=64),
        runtime=RuntimeConfig(name="eager", max_rows=3, buckets=[3]),
    )
    found = []
    for size, heads, key_heads in ((1, 4, 2), (2, 2, 1), (4, 1, 1)):
        plan = make_plan(config, facts.of_rank(size - 1, size), None, device="cpu")
        channels = 2 * key_heads * whole.key_dim + heads * whole.value_dim
        slots = {slot.name: slot.dims for slot in declare_slots(plan, 1)}
        assert slots["matrix_RUHKV"][1:] == (whole.count, heads, whole.key_dim, whole.value_dim)
        assert slots["column_RUOE"][1:] == (whole.count, 3, channels)
        per_row = whole.count * 4 * (heads * whole.key_dim * whole.value_dim + 3 * channels)
        per_node = whole.count * 4 * (channels + 2 * heads)
        found.append({line.name: line.size for line in plan_memory(plan, config, (0, 0)).lines}["recurrent states"])
        assert found[-1] == 4 * per_row + 3 * 6 * per_node
    assert found[0] > found[1] > found[2]


@pytest.mark.parametrize("family", ["qwen3_5", "bamba"])
def test_heads_that_do_not_divide_are_refused(family: str, tmp_path: Path) -> None:
    model = build_hybrid(family, num_attention_heads=6, num_key_value_heads=3, intermediate_size=42)
    facts = read_model_facts(write_hf(model, tmp_path))
    with pytest.raises(ConfigError, match=r"runtime.tensor_parallel: expected a divisor of the heads of recurrent layers = 4, found 3"):
        facts.of_rank(0, 3)

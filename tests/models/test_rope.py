"""Rotary embedding against transformers' frequencies, positions and clamping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

from graphspec.errors import CheckpointError
from graphspec.facts import RopeFacts, read_model_facts
from graphspec.facts.families import QWEN3
from graphspec.facts.hybrid_families import QWEN3_5
from graphspec.facts.keys import Keys
from graphspec.facts.model import read_decoder
from graphspec.facts.rope import NO_ROPE
from graphspec.kernels.formulas import apply_rope
from graphspec.models.attention import RotaryEmbedding, rope_frequency
from graphspec.models.target import load_target
from tests.support.checkpoints import VOCAB_SIZE, DenseAttention, build_hf, edit_json, write_hf

PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    "yarn-untruncated": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "truncate": False, "beta_fast": 16},
    "yarn-without-a-ramp": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6},
    "yarn-factor": {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "attention_factor": 1.5},
    "yarn-mscale": {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.7, "mscale_all_dim": 1.0},
}


def read_both(tmp_path: Any, parameters: dict[str, Any], **overrides: Any) -> tuple[RopeFacts, Any]:
    """One config as our facts and as transformers' rotary embedding."""
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "max_position_embeddings": 16384, "head_dim": 128, **overrides}
    config = LlamaConfig(rope_parameters={"rope_theta": 500000.0, **parameters}, architectures=["LlamaForCausalLM"], **sizes)
    config.save_pretrained(tmp_path)
    return read_model_facts(tmp_path).rope, LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("name", PARAMETERS)
def test_frequencies_and_attention_factor_equal_transformers(name: str, tmp_path: Any) -> None:
    rope, theirs = read_both(tmp_path, PARAMETERS[name])
    assert torch.equal(rope_frequency(rope, 128), theirs.inv_freq)
    assert rope.attention_factor == theirs.attention_scaling


@pytest.mark.parametrize("name", PARAMETERS)
def test_cos_and_sin_equal_transformers_at_every_position(name: str, tmp_path: Any) -> None:
    rope, theirs = read_both(tmp_path, PARAMETERS[name])
    position_BT = torch.tensor([[0, 1, 2, 77, 4095], [4096, 5000, 9999, 16382, 16383]])
    cos, sin = RotaryEmbedding(rope, 128, 16384)(position_BT, position_BT + 1).cos_sin(torch.float32)
    their_cos, their_sin = theirs(torch.zeros(1), position_BT)
    assert torch.equal(cos, their_cos[..., :64])
    assert torch.equal(sin, their_sin[..., :64])


def test_dynamic_grows_with_each_tokens_own_length(tmp_path: Any) -> None:
    rope, _ = read_both(tmp_path, PARAMETERS["dynamic"], max_position_embeddings=32)
    ours = RotaryEmbedding(rope, 128, 64)
    position_BT, rope_length_BT = torch.tensor([[3, 40, 40, 50]]), torch.tensor([[4, 41, 60, 60]])
    cos, sin = ours(position_BT, rope_length_BT).cos_sin(torch.float32)
    for index in range(4):
        # a fresh instance each time, for transformers' grows with what it has seen
        _, theirs = read_both(tmp_path, PARAMETERS["dynamic"], max_position_embeddings=32)
        whole = torch.arange(int(rope_length_BT[0, index]))[None]
        their_cos, their_sin = theirs(torch.zeros(1), whole)
        at = int(position_BT[0, index])
        assert torch.equal(cos[0, index], their_cos[0, at, :64])
        assert torch.equal(sin[0, index], their_sin[0, at, :64])
    assert not torch.equal(cos[0, 1], cos[0, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotation_equals_transformers_bitwise(dtype: torch.dtype) -> None:
    rotary = RotaryEmbedding(RopeFacts(10000.0), 16, 32)
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 9, 5, 16, generator=generator).to(dtype), torch.randn(2, 9, 1, 16, generator=generator).to(dtype)
    position_BT = torch.randint(0, 32, (2, 9), generator=generator)
    cos, sin = rotary(position_BT, position_BT + 1).cos_sin(dtype)
    full_cos, full_sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
    their_query, their_key = apply_rotary_pos_emb(query, key, full_cos, full_sin, unsqueeze_dim=2)
    assert torch.equal(apply_rope(query, cos, sin), their_query)
    assert torch.equal(apply_rope(key, cos, sin), their_key)


def test_positions_outside_the_table_are_clamped() -> None:
    rotary = RotaryEmbedding(RopeFacts(10000.0), 8, 4)
    position_BT = torch.tensor([[-1, 4, 2**40]])
    cos, _ = rotary(position_BT, position_BT + 1).cos_sin(torch.float32)
    inside, _ = rotary(torch.tensor([[0, 3, 3]]), position_BT).cos_sin(torch.float32)
    assert torch.equal(cos, inside)


def test_yarn_factor_null_means_the_ratio_of_the_contexts(tmp_path: Any) -> None:
    import json

    read_both(tmp_path, PARAMETERS["yarn"])
    values = json.loads((tmp_path / "config.json").read_text())
    values["rope_parameters"]["factor"] = None
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_model_facts(tmp_path).rope.factor == 16384 / 4096


def read_partial(rope_parameters: dict[str, Any] | None, **keys: Any) -> RopeFacts:
    """RoPE of a layer that rotates part of a head of 64."""
    values = {"hidden_size": 128, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    values |= {"vocab_size": 9, "num_hidden_layers": 4, "rms_norm_eps": 1e-6, "max_position_embeddings": 16384, **keys}
    return read_decoder(Keys({**values, "rope_parameters": rope_parameters}, "config"), Path("nowhere"), "any", QWEN3_5).rope


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("name", ["default", "linear", "llama3", "yarn", "yarn-mscale"])
def test_partial_rotation_equals_transformers(name: str, factor: float) -> None:
    parameters = {"rope_theta": 500000.0, "partial_rotary_factor": factor, **PARAMETERS[name]}
    rope = read_partial(parameters)
    theirs = modeling_qwen3_next.Qwen3NextRotaryEmbedding(
        Qwen3NextConfig(hidden_size=128, num_attention_heads=2, head_dim=64, max_position_embeddings=16384, rope_parameters=parameters)
    )
    assert rope.rotary_dim(64) == int(64 * factor)
    assert torch.equal(rope_frequency(rope, 64), theirs.inv_freq)
    position_BT = torch.tensor([[0, 1, 77, 4095], [4096, 9999, 16382, 16383]])
    cos, sin = RotaryEmbedding(rope, 64, 16384)(position_BT, position_BT + 1).cos_sin(torch.float32)
    their_cos, their_sin = theirs(torch.zeros(1), position_BT)
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 4, 3, 64, generator=generator), torch.randn(2, 4, 1, 64, generator=generator)
    their_query, their_key = modeling_qwen3_next.apply_rotary_pos_emb(query, key, their_cos, their_sin, unsqueeze_dim=2)
    assert torch.equal(apply_rope(query, cos, sin), their_query)
    assert torch.equal(apply_rope(key, cos, sin), their_key)
    assert torch.equal(apply_rope(query, cos, sin)[..., int(64 * factor) :], query[..., int(64 * factor) :])


def test_dynamic_grows_by_the_rotated_part() -> None:
    rope = read_partial({"rope_type": "dynamic", "factor": 3.0, "partial_rotary_factor": 0.25}, max_position_embeddings=32)
    length = torch.tensor([[60]])
    cos, _ = RotaryEmbedding(rope, 64, 64)(torch.tensor([[50]]), length).cos_sin(torch.float32)
    base = 10000.0 * (3.0 * 60 / 32 - 2) ** (16 / 14)
    expected = torch.tensor([50 / base ** (2 * i / 16) for i in range(8)]).cos()
    torch.testing.assert_close(cos[0, 0], expected, rtol=0, atol=1e-5)


def test_partial_factor_is_read_in_every_place_it_is_written_in() -> None:
    assert read_partial(None, rope_theta=7.0, partial_rotary_factor=0.5).partial_rotary_factor == 0.5
    assert read_partial({"rope_type": "default", "rope_theta": 7.0}).partial_rotary_factor == 0.25
    for factor in (1.5, 0.02, 0.046875):  # more than all of the head, nothing of it, 3 of 64
        with pytest.raises(CheckpointError, match=r"partial_rotary_factor: expected at most 1, and an even number"):
            read_partial({"rope_type": "default", "partial_rotary_factor": factor})


NESTED = {"rope_type": "linear", "factor": 2.5, "rope_theta": 700.0}


def read_nested(rope_parameters: dict[str, Any], *kinds: str, **keys: Any) -> RopeFacts:
    """RoPE of Qwen3 layers of these kinds."""
    windows = {"use_sliding_window": True, "sliding_window": 8} if "sliding_attention" in kinds else {}
    values = {"hidden_size": 32, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, **windows}
    values |= {"vocab_size": 9, "rms_norm_eps": 1e-6, "num_hidden_layers": len(kinds), "layer_types": list(kinds), **keys}
    return read_decoder(Keys({**values, "rope_parameters": rope_parameters}, "config"), Path("nowhere"), "any", QWEN3).rope


def test_parameters_nested_by_kind_of_layer_are_those_of_the_kinds_there_are() -> None:
    full, both = ("full_attention",) * 2, ("full_attention", "sliding_attention")
    flat = read_nested(NESTED, *full)
    assert flat == RopeFacts(700.0, "linear", 2.5)
    other = {**NESTED, "factor": 4.0}
    assert read_nested({"full_attention": NESTED}, *full) == flat
    assert read_nested({"full_attention": NESTED, "sliding_attention": other}, *full) == flat
    assert read_nested({"full_attention": other, "sliding_attention": NESTED}, "sliding_attention") == flat
    assert read_nested({"full_attention": NESTED, "sliding_attention": dict(reversed(NESTED.items()))}, *both) == flat
    assert read_nested({"full_attention": NESTED, "sliding_attention": None}, *full, layer_types=None) == flat
    theta = {"rope_type": "linear", "factor": 2.5}
    assert read_nested({"full_attention": theta, "sliding_attention": NESTED}, *both, rope_theta=700.0) == flat


@pytest.mark.parametrize(
    ("parameters", "part"),
    [
        (
            {"full_attention": NESTED, "sliding_attention": {"rope_type": "dynamic", "factor": 4.0}},
            "rope_parameters: expected no dynamic scaling where layers are rotated differently",
        ),
        ({"full_attention": NESTED}, "rope_parameters: sliding_attention: expected the parameters of this kind of layer, .* no such key"),
        ({"full_attention": NESTED, "rope_theta": 9.0}, "rope_parameters: expected parameters, or an object .*, not both"),
        ({"full_attention": NESTED, "sliding_attention": {"rope_type": "linear"}}, "rope_parameters: sliding_attention: factor: expected"),
    ],
)
def test_nested_parameters_that_cannot_be_followed_are_named(parameters: dict[str, Any], part: str) -> None:
    with pytest.raises(CheckpointError, match=part):
        read_nested(parameters, "full_attention", "sliding_attention")


def test_layers_are_rotated_by_the_parameters_of_their_kind() -> None:
    other = {**NESTED, "factor": 4.0}
    kinds = ("sliding_attention", "full_attention", "sliding_attention")
    values = {"hidden_size": 32, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    values |= {"vocab_size": 9, "rms_norm_eps": 1e-6, "num_hidden_layers": 3, "layer_types": list(kinds), "sliding_window": 8}
    parameters = {"full_attention": NESTED, "sliding_attention": other}
    keys = Keys({**values, "use_sliding_window": True, "rope_parameters": parameters}, "config")
    facts = read_decoder(keys, Path("nowhere"), "any", QWEN3)
    full, sliding = RopeFacts(700.0, "linear", 2.5), RopeFacts(700.0, "linear", 4.0)
    assert (facts.rope, facts.layer_rope, facts.ropes) == (full, (sliding, full, sliding), ((full, sliding),))
    assert [facts.rope_index(layer) for layer in range(3)] == [1, 0, 1]
    assert facts.layers_from(1).layer_rope == (full, sliding)
    with pytest.raises(CheckpointError, match="one rotation for all layers of a draft"):
        facts.rotated_alike("config")
    assert facts.layers_from(2).rotated_alike("config").rope == sliding
    table = RotaryEmbedding(full, 16, 8, (sliding, RopeFacts(0.0, NO_ROPE))).table_LD
    apart = [RotaryEmbedding(rope, 16, 8).table_LD for rope in (full, sliding)]
    assert torch.equal(table[:16], torch.cat(apart))
    assert torch.equal(table[16:], torch.cat((torch.ones(8, 8), torch.zeros(8, 8)), dim=1)), "no rotation"


@torch.inference_mode()
def test_yarn_added_by_hand_reaches_factor_times_the_original_context(tmp_path: Path) -> None:
    """As model cards of Qwen advise: ``max_position_embeddings`` stays. Logits equal those of transformers past it."""
    path = write_hf(build_hf("qwen3", num_hidden_layers=2, max_position_embeddings=40), tmp_path)
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    edit_json(path / "config.json", "rope_parameters", rope_theta=10000.0, rope_scaling=scaling)
    facts = read_model_facts(path)
    assert (facts.max_position_embeddings, facts.longest_context) == (40, 128)
    token_BT = torch.randint(0, VOCAB_SIZE, (1, 128), generator=torch.Generator().manual_seed(3))
    theirs = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")(token_BT).logits
    ours = load_target(facts, (), 128, torch.float32, "cpu")
    found = ours.logits(ours(token_BT, DenseAttention.prompt(1, 128)).hidden_BTH)
    torch.testing.assert_close(found, theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        (RopeFacts(1e4), 64),
        (RopeFacts(1e4, "yarn", 4.0, 64), 256),
        (RopeFacts(1e4, "yarn", 4.0, 8), 64),
        (RopeFacts(1e4, "dynamic", 2.5, 64), 160),
        (RopeFacts(1e4, "linear", 4.0), 64),
        (RopeFacts(1e4, "llama3", 32.0, 8), 64),
    ],
)
def test_contexts_of_scaled_models(rope: RopeFacts, longest: int) -> None:
    assert rope.context(64) == longest

"""A hybrid target in training: the network, its prediction head against transformers' own layer, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

from graphspec.config.compose import load_config
from graphspec.config.train_options import TargetConfig, TrainConfig
from graphspec.errors import CheckpointError, ConfigError
from graphspec.train.drafter import Target, load_target, network_of, trained_variants, unrolled
from graphspec.train.export import export_draft, export_target
from graphspec.train.run import run
from graphspec.train.target import build_target, settings
from tests.support.drafts import HYBRID, build, draft_logits, random_text, tiny_target

SHAPE = {"architecture": "qwen3_5", "vocab_size": 300, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4}
SHAPE |= {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8, "linear_num_key_heads": 1, "linear_num_value_heads": 2}
SHAPE |= {"linear_key_head_dim": 8, "linear_value_head_dim": 6, "max_position_embeddings": 64, "full_attention_interval": 2}


def test_a_target_is_built_and_written_as_transformers_reads_it(tmp_path: Path) -> None:
    model = build_target(TargetConfig(**SHAPE), 3)
    assert type(model) is Qwen3_5ForCausalLM
    assert model.config.layer_types == ["linear_attention", "full_attention"] * 2
    export_target(model, tmp_path, tmp_path / "target")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    assert type(loaded) is Qwen3_5ForCausalLM
    assert loaded.config.rope_parameters == model.config.rope_parameters
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter.bfloat16().float()), name
    different = {key for key, value in model.config.to_dict().items() if loaded.config.to_dict().get(key) != value}
    assert different <= {"architectures", "dtype", "_name_or_path", "transformers_version", "use_cache"}


def test_what_writes_to_the_stream_starts_smaller_in_layers_of_both_kinds() -> None:
    model = build_target(TargetConfig(**SHAPE), 3)
    width = {name: p.std() for name, p in model.named_parameters() if name.endswith("proj.weight") or "in_proj" in name}
    writes = [value for name, value in width.items() if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight"))]
    reads = [value for name, value in width.items() if name.endswith(("in_proj_qkv.weight", "q_proj.weight", "up_proj.weight"))]
    assert len(writes) == 8 and max(writes) < 0.6 * min(reads)


def test_a_llama_is_recorded_without_the_keys_of_a_hybrid() -> None:
    kept = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"}
    assert set(settings(TrainConfig())["target"]) == {*kept, "max_position_embeddings"}
    assert set(settings(TrainConfig(target=TargetConfig(**SHAPE)))["target"]) == set(SHAPE)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"architecture": "mamba"}, "architecture"),
        ({"head_dim": 12}, "head_dim"),
        ({"linear_num_value_heads": 3, "linear_num_key_heads": 2}, "linear_num_value_heads"),
        ({"full_attention_interval": 1}, "full_attention_interval"),
        ({"full_attention_interval": 5}, "full_attention_interval"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim"),
    ],
)
def test_shapes_that_cannot_be_are_refused(changes: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TargetConfig(**{**SHAPE, **changes})
    assert caught.value.key == f"train.target.{key}"


def transformers_head(
    config: Qwen3_5TextConfig, tensors: dict[str, torch.Tensor], embed: torch.Tensor, feature: torch.Tensor
) -> torch.Tensor:
    """The head's hidden states ``[B, T, H]`` by transformers' layer and norms, from the published tensors alone."""

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        made = Qwen3_5RMSNorm(x.shape[-1], config.rms_norm_eps)
        made.load_state_dict({"weight": tensors[f"mtp.{name}.weight"]})
        return made(x)

    layer = Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention")).eval()
    layer.load_state_dict({name.removeprefix("mtp.layers.0."): t for name, t in tensors.items() if name.startswith("mtp.layers.0.")})
    x = torch.cat((norm("pre_fc_norm_embedding", embed), norm("pre_fc_norm_hidden", feature)), -1) @ tensors["mtp.fc.weight"].T
    rows = x.shape[1]
    angles = Qwen3_5ForCausalLM(config).model.rotary_emb(x, torch.arange(rows).view(1, 1, -1).expand(3, 1, -1))
    mask = torch.full((rows, rows), float("-inf")).triu(1)[None, None]
    return norm("norm", layer(x, position_embeddings=angles, attention_mask=mask))


@torch.no_grad()
def test_the_published_head_equals_a_layer_of_transformers(tmp_path: Path) -> None:
    target, tokens = tiny_target(HYBRID), random_text(2, 12)
    features, _ = Target(target).view(tokens, ())
    assert torch.equal(features, target.model(tokens).last_hidden_state)
    drafter = build("mtp", target)
    facts, tensors = drafter.published(target)
    assert facts["architectures"] == ["Qwen3_5ForCausalLM"] and facts["mtp_num_hidden_layers"] == 1
    expected = transformers_head(target.config, tensors, target.model.embed_tokens(tokens)[:, 1:], features[:, :11])
    torch.testing.assert_close(next(unrolled(drafter, features, tokens, 1)), expected, rtol=1e-4, atol=1e-5)
    export_draft(drafter, target, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert {name: t.shape for name, t in written.items()} == {name: t.shape for name, t in tensors.items()}
    assert json.loads((tmp_path / "config.json").read_text())["layer_types"] == target.config.layer_types


@torch.no_grad()
def test_unrolled_steps_equal_drafting_row_by_row() -> None:
    target, tokens = tiny_target(HYBRID), random_text(1, 14)
    drafter = build("mtp", target)
    features, _ = Target(target).view(tokens, ())
    for k, hidden in enumerate(unrolled(drafter, features, tokens, 4)):
        for row in (0, 4, 9):
            expected = draft_logits(drafter, features, tokens, row, tokens[0, row + 2 : row + 2 + k].tolist())
            torch.testing.assert_close(drafter.logits(hidden[0, row]), expected, rtol=1e-4, atol=1e-4)


def test_a_fresh_head_starts_from_the_norm_of_the_target() -> None:
    target = tiny_target(HYBRID)
    fresh = network_of("mtp").build(target, network_of("mtp").Settings(), None)
    _, tensors = fresh.published(target)
    torch.testing.assert_close(tensors["mtp.norm.weight"], target.model.norm.weight, rtol=0, atol=1e-6)


def test_other_drafts_and_several_heads_are_refused(tmp_path: Path) -> None:
    target = tiny_target(HYBRID)
    target.save_pretrained(tmp_path / "target")
    assert load_target(tmp_path / "target").config.layer_types == target.config.layer_types
    (tmp_path / "text.txt").write_text("some text " * 400)
    overrides = [
        f"model.path='{tmp_path}/target'",
        f"train.data=['{tmp_path}/text.txt']",
        f"train.out='{tmp_path}/out'",
        "hardware.device=cpu",
    ]
    for variant in trained_variants():
        if not network_of(variant).reads_hybrids:
            with pytest.raises(
                CheckpointError, match=r"layer_types: expected attention in every layer, found linear_attention \(.*: mtp\)"
            ):
                run(load_config(f"variant={variant}", *overrides))
    with pytest.raises(ConfigError, match=r"train\.network\.num_heads: expected 1"):
        build("mtp", target, num_heads=2)

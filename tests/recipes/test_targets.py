"""Targets from nothing: the networks, shapes that are refused, runs that are interrupted, a draft for what was trained."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM

from graphspec.api.llm import LLM, SamplingParams
from graphspec.config.compose import load_config
from graphspec.config.train_options import TrainConfig
from graphspec.errors import ConfigError
from graphspec.train.run import run
from recipes import target
from recipes.settings import TargetConfig
from recipes.target import build_target, export_target, main, options, weight_settings
from tests.train.test_train import FAST, interrupt_at, texts, weights_of, words

__all__ = ["texts"]
TARGET = ["train.phases=[[20,4,24],[4,2,40]]", "target.vocab_size=288", "target.hidden_size=16"]
TARGET += ["target.intermediate_size=24", "target.num_hidden_layers=3", "target.num_attention_heads=2"]
TARGET += ["target.num_key_value_heads=1", "target.max_position_embeddings=128", "hardware.device=cpu", *FAST[5:]]
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
    assert set(weight_settings(TrainConfig(), TargetConfig())["target"]) == {*kept, "max_position_embeddings"}
    assert set(weight_settings(TrainConfig(), TargetConfig(**SHAPE))["target"]) == set(SHAPE)


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
    assert caught.value.key == f"target.{key}"


def test_a_target_and_its_draft_from_nothing_interrupted_and_not(tmp_path, texts, monkeypatch):
    """The whole way: train a target, train a draft for it, each interrupted and each in one go, load both, generate."""
    drafts = [
        "variant=eagle3",
        "train.network.tap_layers=[1,2]",
        "train.network.draft_vocab_size=64",
        "train.phases=[[14,4,24]]",
        *FAST[:2],
    ]
    drafts += FAST[3:]
    for side in ("whole", "halves"):
        broken = side == "halves"
        command = words(texts, tmp_path / side / "target", *TARGET, "train.checkpoint_steps=6", "train.log_steps=4")
        if broken:
            # Ctrl-C: the step is finished and kept.
            interrupt_at(monkeypatch, 10, lambda: os.kill(os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                target.run(*options(command))
            monkeypatch.undo()
            assert torch.load(tmp_path / side / "target.work" / "target.pt")["step"] == 10
        figures = target.run(*options(command))
        records = [json.loads(line) for line in (tmp_path / side / "target.work" / "target.jsonl").read_text().splitlines()]
        assert [record["step"] for record in records] == [4, 8, 12, 16, 20, 24]
        assert records[-1]["tokens"] == figures["training"]["tokens"] == 20 * 96 + 4 * 80
        command = words(texts, tmp_path / side / "draft", *drafts, f"model.path={tmp_path / side / 'target'}", "train.checkpoint_steps=4")
        if broken:
            # No time to do anything: what was trained since the last checkpoint is trained again.
            def die() -> None:
                raise SystemExit

            interrupt_at(monkeypatch, 7, die)
            with pytest.raises(SystemExit):
                run(load_config(*command))
            monkeypatch.undo()
            assert torch.load(tmp_path / side / "draft.work" / "eagle3.pt")["step"] == 4
        run(load_config(*command))
    for name in ("target", "draft"):
        assert weights_of(tmp_path / "whole" / name) == weights_of(tmp_path / "halves" / name), name
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    common = {"model": str(tmp_path / "whole" / "target"), "runtime": "eager", "device": "cpu", "max_rows": 1, "buckets": [1]}
    [drafted] = LLM(variant="eagle3", draft=str(tmp_path / "whole" / "draft"), num_steps=2, topk=1, num_draft_tokens=3, **common).generate(
        ["abc abd"], params
    )
    [plain] = LLM(variant="none", **common).generate(["abc abd"], params)
    assert drafted.token_ids == plain.token_ids and len(plain.token_ids) == 12


@pytest.mark.parametrize(
    ("words_", "key"),
    [
        (["train.sequence_length=4096"], "train.sequence_length"),
        (["target.vocab_size=300", "train.acceptance.prompt_length=4096"], "train.acceptance.prompt_length"),
        (["target.num_attention_heads=5"], "target.hidden_size"),
        (["target.depth=5"], "target.depth"),
        (["train.rate=3"], "train.rate"),
    ],
)
def test_bad_settings_name_their_key(words_: list[str], key: str, texts: Path, tmp_path: Path) -> None:
    small = [] if "prompt_length" in key else FAST[5:]
    with pytest.raises(ConfigError) as caught:
        target.run(*options(words(texts, tmp_path / "out", *small, *words_)))
    assert caught.value.key == key


def test_the_command_shows_progress_and_its_output(tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = words(texts, tmp_path / "out", *TARGET)
    main(command)
    out, err = capsys.readouterr()
    assert out.startswith("held out: ") and f"target written to {tmp_path / 'out'}" in out
    assert "target 20/24 loss" in err and "tokens/s" in err
    with pytest.raises(SystemExit, match=r"recipes\.target: .*clip"):
        main([*command, "train.clip=2.0"])

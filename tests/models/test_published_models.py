"""Configs of published models, shrunk: each builds and runs, runs by transformers' modules, or is refused by one message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from graphspec.errors import CheckpointError
from graphspec.facts import read_model_facts
from graphspec.models.decoder import Decoder
from graphspec.models.own_modules import load_own_modules, read_own_facts
from tests.models.test_hybrid_models import whole_prompts

ROWS = {row["name"]: row for row in json.loads(Path(__file__).with_name("published_models.json").read_text(encoding="utf-8"))}
VOCABULARY, LENGTH, LAYERS = 64, 12, 8
WIDTHS = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 24, "intermediate_size_mlp": 24, "num_attention_heads": 4,
    "head_dim": 8, "global_head_dim": 16, "num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16, "moe_intermediate_size": 12,
    "moe_num_experts": 16, "shared_expert_intermediate_size": 12, "moe_shared_expert_intermediate_size": 12,
    "kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "mamba_num_heads": 8,
    "mamba_head_dim": 8, "ssm_state_size": 8,
    "moe_latent_size": 8, "rotary_dim": 4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
}  # fmt: skip
"""Sizes that say nothing about how a model computes; every other key and value is kept."""


def shrink(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a model of the same kind with narrow and few layers."""
    layers, small = config.get("num_hidden_layers"), dict(config)
    for key, value in config.items():
        if isinstance(value, dict) and key.endswith("text_config"):
            small[key] = shrink(value)
        elif key in WIDTHS and value:
            small[key] = WIDTHS[key]
        elif key in ("num_key_value_heads", "num_global_key_value_heads"):
            small[key] = 4 if value == config["num_attention_heads"] else 2
        elif key in ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "top_k_experts", "moe_k"):
            small[key] = min(value, 3)
        elif key == "num_kv_shared_layers":
            small[key] = min(value, 2)
        elif key == "sliding_window" and value:
            small[key] = 5
        elif key.endswith("token_id") and value is not None:
            small[key] = 2
        elif key == "num_hidden_layers":
            small[key] = min(value, LAYERS)
        elif isinstance(value, list | str) and layers and len(value) == layers:
            small[key] = value[:LAYERS]
    return small


@pytest.fixture(params=ROWS)
def row(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[dict[str, Any], Path]:
    found = ROWS[request.param]
    (tmp_path / "config.json").write_text(json.dumps(shrink(found["config"])), encoding="utf-8")
    return found, tmp_path


def answer(folder: Path) -> CheckpointError | None:
    try:
        read_model_facts(folder)
    except CheckpointError as error:
        return error
    return None


@torch.inference_mode()
def test_it_runs_or_one_message_says_why_not(row: tuple[dict[str, Any], Path]) -> None:
    published, folder = row
    refusal = answer(folder)
    whole = folder / "whole"
    whole.mkdir()
    (whole / "config.json").write_text(json.dumps(published["config"]), encoding="utf-8")
    assert (answer(whole) is None) == (refusal is None), "a smaller model gets another answer"
    if refusal is not None:
        assert refusal.key.startswith(f"{folder / 'config.json'}: ") and "\n" not in str(refusal)
        assert published["missing"], "the table says what is missing"
        if published["through"]:
            facts = read_own_facts(folder)
            assert load_own_modules(facts, torch.float32, torch.device("meta")).facts.num_layers == facts.num_layers
        else:
            with pytest.raises(CheckpointError):
                read_own_facts(folder)
        return
    facts = read_model_facts(folder)
    model = Decoder(facts, (), LENGTH).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    if facts.recurrent is not None:
        model.stacked_convolution()
    token_BT = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
    logits = model.logits(model(token_BT, whole_prompts(facts, 2, LENGTH)).hidden_BTH)
    assert logits.shape == (2, LENGTH, VOCABULARY) and bool(logits.isfinite().all())
    assert float(logits.std()) > 0


@pytest.mark.parametrize(
    ("name", "key", "said"),
    [
        ("DeepSeek-V3.2", "architectures", "indexer"),
        ("GLM-5", "architectures", "indexer"),
        ("Kimi-Linear-48B-A3B", "architectures", "gates of its recurrent layers are vectors"),
        ("Llama-4-Scout", "architectures", "within chunks"),
        ("Command R7B", "architectures", "model.family=transformers"),
    ],
)
def test_the_message_says_what_is_missing(name: str, key: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ROWS[name]["config"]), encoding="utf-8")
    refusal = answer(tmp_path)
    assert refusal is not None and refusal.key.endswith(f": {key}")
    assert said in refusal.hint

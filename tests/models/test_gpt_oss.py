"""gpt-oss as target and as draft: against transformers on the same checkpoint, in numbers and with experts in MXFP4."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from graphspec import LLM, SamplingParams
from graphspec.errors import CheckpointError
from graphspec.facts import read_model_facts
from graphspec.models.experts import MixtureOfExperts
from graphspec.models.packed_weight import PackedWeight
from graphspec.models.stack import pack_network
from graphspec.models.target import load_target
from tests.support.checkpoints import VOCAB_SIZE, DenseAttention, eagle3_tensors, edit_json, write_eagle3, write_hf
from tests.support.engines import ids, prompts
from tests.support.features import of_family
from tests.support.float_law import assert_float_law
from tests.support.moe_checkpoints import HIDDEN, build_mixture, greedy, write_mixture
from tests.support.plans import plan
from tests.support.quantised_checkpoints import quantise_gpt_oss

from .test_models import in_float64

if TYPE_CHECKING:
    from pathlib import Path

LENGTH = 24
WIDE = {"hidden_size": 64, "intermediate_size": 32}
"""Channels in whole blocks of MXFP4."""
CASES: dict[str, dict[str, Any]] = {
    "window-shorter-than-the-text": {},
    "odd-sizes": {"hidden_size": 36, "intermediate_size": 17, "num_local_experts": 5, "num_experts_per_tok": 2, "num_hidden_layers": 4},
    "one-expert": {"num_local_experts": 1, "num_experts_per_tok": 1},
    "all-experts": {"num_local_experts": 4, "num_experts_per_tok": 4},
    "no-window": {"layer_types": ["full_attention"] * 3},
    "every-window": {"layer_types": ["sliding_attention"] * 3, "sliding_window": 3},
    "no-biases": {"attention_bias": False},
    "one-key-head": {"num_key_value_heads": 1},
    "another-gate": {"swiglu_alpha": 1.1, "swiglu_limit": 0.05},
    "yarn-truncated": {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "original_max_position_embeddings": 8}
    },
    "plain-rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}


def assert_equals_transformers(folder: Path, model: Any, taps: tuple[int, ...], native: bool = False) -> None:
    """Logits and tapped streams, those after the last layer among them; ``native``: with experts in C++."""
    facts = read_model_facts(folder)
    ours = load_target(facts, taps, LENGTH, torch.float32, "cpu")
    if native:
        assert pack_network(ours, plan()) == "mixtures of experts"
        assert all(module.native_down is not None for module in ours.modules() if isinstance(module, MixtureOfExperts))
    token_BT = torch.randint(0, VOCAB_SIZE, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    streams: list[dict[int, torch.Tensor]] = []
    outputs = []
    for each in (model, in_float64(model)):
        found: dict[int, torch.Tensor] = {}

        def keep(layer: Any, _: Any, out: Any, found: dict[int, torch.Tensor] = found) -> None:
            found[layer.self_attn.layer_idx + 1] = out[0] if isinstance(out, tuple) else out

        hooks = [layer.register_forward_hook(keep) for layer in each.model.layers]
        outputs.append(each(token_BT).logits)
        found[0] = each.model.embed_tokens(token_BT)
        streams.append(found)
        for hook in hooks:
            hook.remove()
    out = ours(token_BT, DenseAttention.prompt(2, LENGTH))
    assert out.feature_BTF is not None
    pairs = [(ours.logits(out.hidden_BTH), *outputs)]
    pairs += [(part, *(own[tap] for own in streams)) for part, tap in zip(out.feature_BTF.chunk(len(taps), -1), taps, strict=True)]
    for mine, theirs, exact in pairs:
        assert_float_law(mine, theirs, exact)
    assert torch.equal(pairs[0][0].argmax(-1), outputs[0].argmax(-1))


@of_family("GptOssForCausalLM", "logits")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_logits_and_taps_equal_transformers(name: str, seed: int, tmp_path: Path) -> None:
    model = build_mixture("gpt_oss", seed=seed, **CASES[name])
    assert_equals_transformers(write_hf(model, tmp_path), model, (0, 2, len(model.model.layers)))


@pytest.mark.parametrize("name", ["window-shorter-than-the-text", "odd-sizes", "all-experts", "another-gate"])
@torch.inference_mode()
def test_native_experts_equal_transformers(name: str, tmp_path: Path) -> None:
    model = build_mixture("gpt_oss", **CASES[name])
    assert_equals_transformers(write_hf(model, tmp_path), model, (1, 3), native=True)


@torch.inference_mode()
def test_every_part_of_a_gate_has_its_place(tmp_path: Path) -> None:
    """Gate and up take turns in the file, and lie one after the other here."""
    path, model = write_mixture(tmp_path, "gpt_oss")
    block, experts = load_target(read_model_facts(path), (), 8, torch.float32, "cpu").layers[1].mlp, model.model.layers[1].mlp.experts
    stored = experts.gate_up_proj.transpose(1, 2)
    assert torch.equal(block.gate_up_EFH, torch.cat((stored[:, ::2], stored[:, 1::2]), 1))
    assert torch.equal(block.gate_up_bias_EF, torch.cat((experts.gate_up_proj_bias[:, ::2], experts.gate_up_proj_bias[:, 1::2]), 1))
    assert torch.equal(block.down_EHF, experts.down_proj.transpose(1, 2))


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    path = tmp_path_factory.mktemp("gpt-oss")
    return quantise_gpt_oss(write_mixture(path / "source", "gpt_oss", easy=True, max_position_embeddings=96, **WIDE)[0], path)


@of_family("GptOssForCausalLM", "codes")
@pytest.mark.parametrize("native", [False, True])
@torch.inference_mode()
def test_experts_in_mxfp4_have_the_numbers_of_transformers(mxfp4: tuple[Path, Path], native: bool) -> None:
    from safetensors.torch import load_file

    stored = load_file(mxfp4[0] / "model.safetensors")
    ours = load_target(read_model_facts(mxfp4[0]), (), 8, torch.float32, "cpu")
    for layer, decoder in enumerate(ours.layers):
        for name, leaf in (("gate_up_proj", "gate_up_EFH"), ("down_proj", "down_EHF")):
            stem = f"model.layers.{layer}.mlp.experts.{name}"
            expected = convert_moe_packed_tensors(stored[f"{stem}_blocks"], stored[f"{stem}_scales"], dtype=torch.float32).transpose(1, 2)
            if name == "gate_up_proj":
                expected = torch.cat((expected[:, ::2], expected[:, 1::2]), 1)
            weight = getattr(decoder.mlp, leaf)
            assert isinstance(weight, PackedWeight) and torch.equal(weight.dequantise(), expected.flatten(0, 1))
            assert weight.nbytes == expected.numel() // 2 + expected.numel() // 32
    model = GptOssForCausalLM.from_pretrained(mxfp4[1], attn_implementation="eager", experts_implementation="eager").eval()
    assert_equals_transformers(mxfp4[0], model, (0, 3), native)


CHAIN, TREE = {"num_steps": 3, "topk": 1, "num_draft_tokens": 4}, {"num_steps": 3, "topk": 2, "num_draft_tokens": 6}


@of_family("GptOssForCausalLM", "none", "ngram", "eagle3", "standalone", "chain", "tree")
@pytest.mark.parametrize("packed", [False, True], ids=["numbers", "mxfp4"])
def test_output_is_the_targets_own(packed: bool, mxfp4: tuple[Path, Path], tmp_path: Path) -> None:
    target = mxfp4[0] if packed else mxfp4[1]
    model = GptOssForCausalLM.from_pretrained(mxfp4[1], attn_implementation="eager", experts_implementation="eager").eval()
    small = write_hf(build_mixture("gpt_oss", easy=True, num_hidden_layers=1, max_position_embeddings=96, **WIDE), tmp_path / "small")
    tensors = eagle3_tensors(hidden_size=WIDE["hidden_size"], target_hidden_size=WIDE["hidden_size"], vocab_size=VOCAB_SIZE, num_taps=2)
    # Of three layers, the last tap is what leaves the last one.
    taps = {"eagle_aux_hidden_state_layer_ids": [0, 2], "use_aux_hidden_state": True}
    eagle3 = write_eagle3(tmp_path / "eagle3", tensors, eagle_config=taps, max_position_embeddings=96)
    prompt_ids = prompts(3, vocab=VOCAB_SIZE)
    expected = [greedy(model, prompt, 16) for prompt in prompt_ids]
    for variant in (
        {"variant": "none"},
        {"variant": "ngram"},
        {"variant": "eagle3", "draft": eagle3, **CHAIN},
        {"variant": "eagle3", "draft": eagle3, **TREE},
        {"variant": "standalone", "draft": small, **TREE},
    ):
        llm = LLM(target, runtime="eager", max_rows=2, prefill_chunks=[4, 8], **variant)
        assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=16))) == expected, variant


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "kinds of layers": ({"layer_types": ["sliding_attention"]}, "layer_types: expected 3 entries"),
    "limit": ({"swiglu_limit": -1.0}, "swiglu_limit: expected a positive number"),
    "experts": ({"num_experts_per_tok": 7}, "num_experts_per_tok: expected at most the 6 experts, found 7"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_configs_are_refused(name: str, tmp_path: Path) -> None:
    changes, message = BAD[name]
    path, _ = write_mixture(tmp_path, "gpt_oss")
    edit_json(path / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        read_model_facts(path)


def test_a_config_without_defaults_is_that_of_transformers(tmp_path: Path) -> None:
    """What the published config leaves out is what transformers takes for it."""
    path, _ = write_mixture(tmp_path, "gpt_oss")
    before = read_model_facts(path)
    values = json.loads((path / "config.json").read_text())
    for key in ("layer_types", "attention_bias", "swiglu_alpha"):
        del values[key]
    (path / "config.json").write_text(json.dumps(values))
    assert read_model_facts(path) == before
    assert before.sliding_window == (7, None, 7) and before.attention_bias and before.output_bias and before.hidden_size == HIDDEN

"""The language models of checkpoints that also see images: logits are those of transformers for text."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from graphspec import LLM, SamplingParams
from graphspec.facts import read_model_facts
from graphspec.models.target import load_target
from tests.support.checkpoints import VOCAB_SIZE, DenseAttention, edit_json, write_hf
from tests.support.engines import ids, prompts
from tests.support.features import marked, of_family

if TYPE_CHECKING:
    from pathlib import Path

TEXT = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "bos_token_id": 1,
    "eos_token_id": VOCAB_SIZE - 1, "pad_token_id": None,
}  # fmt: skip
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
SEEING = {"depth": 1, "hidden_size": 32, "intermediate_size": 24, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3", "gemma3_text", {"sliding_window": 6, "sliding_window_pattern": 2}, VISION),
    "mistral3": ("Mistral3", "mistral", {"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, VISION),
    "mistral4": (
        "Mistral3", "mistral4",
        {
            "head_dim": 10, "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6,
            "v_head_dim": 5, "n_routed_experts": 8, "moe_intermediate_size": 12, "n_shared_experts": 1, "num_experts_per_tok": 3,
            "rope_parameters": YARN,
        },
        VISION,
    ),
    "ministral3": ("Mistral3", "ministral3", {"rope_parameters": YARN}, VISION),
    "qwen2_5_vl": ("Qwen2_5_VL", "qwen2_5_vl_text", {"rope_parameters": MROPE}, {**SEEING, "out_hidden_size": 32}),
    "qwen3_vl": (
        "Qwen3VL", "qwen3_vl_text", {"rope_parameters": {**MROPE, "mrope_interleaved": True}},
        {**SEEING, "out_hidden_size": 32, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
}  # fmt: skip


def architecture(name: str) -> str:
    """That of a case's row."""
    return "Mistral4ForCausalLM" if name == "mistral4" else f"{CASES[name][0]}ForConditionalGeneration"


def build(name: str) -> Any:
    """A random model that sees images, of tiny parts."""
    prefix, model_type, text, vision = CASES[name]
    # transformers writes into what it is given.
    text = copy.deepcopy({**TEXT, "model_type": model_type, **text})
    if prefix == "Qwen2_5_VL":
        del text["head_dim"]
    config_type, model_type = getattr(transformers, f"{prefix}Config"), getattr(transformers, f"{prefix}ForConditionalGeneration")
    seen = {"vision_config": {**vision, "model_type": "pixtral"}} if prefix == "Mistral3" else {"vision_config": vision}
    model = model_type(config_type(text_config=text, **seen, tie_word_embeddings=False)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in key else 0.2 * noise)
    return model


@pytest.mark.parametrize("name", marked(CASES, architecture, "logits"))
@torch.inference_mode()
def test_logits_for_text_equal_transformers(name: str, tmp_path: Path) -> None:
    model = build(name)
    facts = read_model_facts(write_hf(model, tmp_path))
    ours = load_target(facts, (), 40, torch.float32, "cpu")
    token_BT = torch.randint(0, VOCAB_SIZE - 1, (2, 40), generator=torch.Generator().manual_seed(3))
    found = ours.logits(ours(token_BT, DenseAttention.prompt(2, 40)).hidden_BTH)
    torch.testing.assert_close(found, model(input_ids=token_BT).logits, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_older_and_newer_names_are_the_same_model(tmp_path: Path) -> None:
    """Published as ``language_model.model.``; transformers 5 calls it ``model.language_model.``."""
    path = write_hf(build("mistral3"), tmp_path)
    weights = path / "model.safetensors"
    tensors, found = load_file(weights), []
    for prefixes in (("language_model.model.", "language_model."), ("model.language_model.", "")):
        renamed = {}
        for name, tensor in tensors.items():
            bare = name.removeprefix("model.").removeprefix("language_model.").removeprefix("model.")
            sees = bare.startswith(("vision_tower.", "multi_modal_projector."))
            renamed[name if sees else prefixes[bare.startswith("lm_head.")] + bare] = tensor
        assert any(name.startswith(prefixes[0]) for name in renamed)
        save_file(renamed, weights, metadata={"format": "pt"})
        found.append(list(load_target(read_model_facts(path), (), 16, torch.float32, "cpu").parameters()))
    assert all(torch.equal(older, newer) for older, newer in zip(*found, strict=True))


@of_family("Mistral3ForConditionalGeneration", "none", "ngram", "standalone", "tree")
def test_an_engine_drafts_and_verifies_over_it(tmp_path: Path) -> None:
    """Queries that grow with the position, in trees and chains."""
    model = build("ministral3")
    path = write_hf(model, tmp_path)
    prompt_ids = prompts(3, (14, 21, 9), VOCAB_SIZE)
    with torch.no_grad():
        wanted = [model.generate(torch.tensor([ids_]), do_sample=False, max_new_tokens=14)[0, len(ids_) :].tolist() for ids_ in prompt_ids]
    for keys in ({"variant": "none"}, {"variant": "ngram"}, {"variant": "standalone", "draft": path, "num_steps": 3, "topk": 2}):
        llm = LLM(path, runtime="eager", max_rows=2, page_size=4, **keys)
        assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=14))) == wanted


def test_a_published_config_may_leave_most_to_the_defaults(tmp_path: Path) -> None:
    """As ``gemma-3-4b-it`` does."""
    edit = {
        "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text("{}")
    edit_json(tmp_path / "config.json", **edit)
    facts = read_model_facts(tmp_path)
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.vocab_size, facts.eos_token_ids) == (8, 4, 256, 262208, (1, 106))
    assert (facts.rope.theta, facts.rope.kind, facts.rope.factor) == (1e6, "linear", 8.0)
    assert facts.sliding_window[:6] == (1024,) * 5 + (None,) and facts.layer_rope[0].theta == 1e4 and facts.layer_rope[5] == facts.rope
    assert (facts.tie_word_embeddings, facts.dtype, facts.score_scale(0)) == (True, "bfloat16", 256**-0.5)

"""``model.family=transformers``: any model of transformers by its own modules; tokens are those of ``generate``, the rest is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from graphspec import LLM, SamplingParams
from graphspec.cli.main import main
from graphspec.errors import CheckpointError, ConfigError
from graphspec.facts import read_model_facts
from graphspec.facts.families import OWN_MODULES, find_family
from graphspec.graphs.memory import parameter_bytes
from graphspec.models.own_modules import read_own_facts
from tests.support.checkpoints import VOCAB_SIZE, build_hf, edit_tensors, write_hf
from tests.support.engines import CHAIN, SMALL, TREE, Pair, ids, prompts

if TYPE_CHECKING:
    from pathlib import Path

BASE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 3,
    "num_key_value_heads": 3, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": VOCAB_SIZE - 1, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "StableLm": {"partial_rotary_factor": 0.25},
    "Cohere2": {"sliding_window": 6, "head_dim": 16, "num_hidden_layers": 5, "logit_scale": 0.3},
    "GPTNeoX": {"rotary_pct": 0.25},
    "Starcoder2": {"sliding_window": 7, "num_key_value_heads": 1},
    "Phi": {"partial_rotary_factor": 0.5},
    "Nemotron": {"partial_rotary_factor": 0.5},
    "OPT": {"ffn_dim": 40, "word_embed_proj_dim": 48},
    "Mixtral": EXPERTS,
    "GptOss": {**EXPERTS, "head_dim": 16, "sliding_window": 5, "num_hidden_layers": 2},
}
"""StableLM, Cohere 2 and GPT-NeoX are tried with every kind of drafter."""
THREE = ("StableLm", "Cohere2", "GPTNeoX")


def build(name: str, **overrides: Any) -> Any:
    """A random model: norms around 1, biases away from 0."""
    config = getattr(transformers, f"{name}Config")(**{**BASE, **MODELS.get(name, {}), **overrides})
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            norm = "norm" in key and not key.endswith("bias")
            parameter.copy_(1 + 0.2 * noise if norm else (0.3 if parameter.dim() == 1 else 0.15) * noise)
    return model


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Checkpoints by name, and for all of them one small Llama of the same vocabulary."""
    folder = tmp_path_factory.mktemp("own")
    draft = write_hf(build_hf("llama", num_hidden_layers=1, eos_token_id=VOCAB_SIZE - 1), folder / "draft")
    models = {name: build(name) for name in MODELS}
    return {name: Pair(write_hf(model, folder / name), draft, model) for name, model in models.items()}


def generate(pair: Pair, count: int = 3, **overrides: Any) -> tuple[list[list[int]], list[list[int]], int]:
    """Tokens of an engine, those of transformers, and how many drafted tokens were accepted."""
    draft = pair.draft if overrides["variant"] == "standalone" else None
    with LLM(pair.target, family="transformers", draft=draft, max_rows=2, buckets=[2], **{**SMALL, **overrides}) as llm:
        prompt_ids = [prompt * 2 for prompt in prompts(count, (4, 7, 11), VOCAB_SIZE - 1)]
        outputs = llm.generate(prompt_ids, SamplingParams(max_tokens=24))
        accepted = sum(len(output.token_ids) for output in outputs) - sum(output.metrics.cycles for output in outputs) - count
        return ids(outputs), [pair.greedy(prompt, 24) for prompt in prompt_ids], accepted


@pytest.mark.parametrize("name", THREE)
@pytest.mark.parametrize(
    ("variant", "shape"),
    [("none", {}), ("ngram", CHAIN), ("ngram_trie", TREE), ("standalone", CHAIN), ("standalone", TREE)],
    ids=["none", "ngram", "trie", "standalone-chain", "standalone-tree"],
)
def test_tokens_equal_generate(pairs: dict[str, Pair], name: str, variant: str, shape: dict[str, int]) -> None:
    found, expected, accepted = generate(pairs[name], variant=variant, **shape)
    assert found == expected
    assert accepted > 0 or variant in ("none", "standalone")


@pytest.mark.parametrize("name", [name for name in MODELS if name not in THREE])
def test_trees_over_other_models(pairs: dict[str, Pair], name: str) -> None:
    """Among them learned positions, experts, sinks, and keys of one head for all queries."""
    found, expected, _ = generate(pairs[name], variant="ngram_trie", page_size=5, **TREE)
    assert found == expected


def test_seeded_samples_equal_plain_decoding(pairs: dict[str, Pair]) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=5)
    prompt_ids = prompts(2, (5, 9), VOCAB_SIZE - 1)
    outputs = []
    for options in ({"variant": "none"}, {"variant": "ngram_trie", **TREE}):
        with LLM(pairs["Cohere2"].target, family="transformers", max_rows=2, buckets=[2], **SMALL, **options) as llm:
            outputs.append(ids(llm.generate(prompt_ids, params)))
    assert outputs[0] == outputs[1]


def test_facts_come_from_the_attention_calls(pairs: dict[str, Pair]) -> None:
    facts = read_own_facts(pairs["Cohere2"].target)
    assert facts.sliding_window == (6, 6, 6, None, 6)
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.family) == (3, 3, 16, OWN_MODULES)
    assert read_own_facts(pairs["Starcoder2"].target).kv_rows == ((2, 1, 16),)
    assert read_own_facts(pairs["StableLm"].target).eos_token_ids == (VOCAB_SIZE - 1,)
    assert all(find_family(type(pairs[name].hf).__name__) is None for name in THREE), "models that have a family by now"


def test_memory_counts_its_parameters(pairs: dict[str, Pair]) -> None:
    with LLM(pairs["StableLm"].target, family="transformers", variant="none", **SMALL) as llm:
        held = sum(p.numel() for p in pairs["StableLm"].hf.parameters()) * 4
        assert held <= parameter_bytes(llm.plan)[0] < held + 4096
        assert llm.plan.runtime.name == "eager"


def test_runtime_auto_is_eager_and_slowness_is_said(pairs: dict[str, Pair], caplog: pytest.LogCaptureFixture) -> None:
    with LLM(pairs["GPTNeoX"].target, family="transformers", variant="none", prefill_chunks=[8]) as llm:
        assert str(llm.plan.runtime) == "eager (model.family=transformers)"
    assert sum("slower" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("options", "key", "said"),
    [
        ({"variant": "eagle3"}, "variant", "none or standalone or ngram or ngram_trie"),
        ({"variant": "mtp"}, "variant", "no drafter reads such a target"),
        ({"variant": "none", "runtime": "compiled"}, "runtime", "eager"),
        ({"variant": "none", "runtime": "captured"}, "runtime", "eager"),
        ({"variant": "none", "mode": "compiled"}, "kernels.mode", "reference"),
        ({"variant": "none", "numerics": "batch_invariant"}, "kernels.numerics", "fast"),
        ({"variant": "none", "attention": "flashinfer"}, "kernels.attention", "another"),
        ({"variant": "none", "tensor_parallel": 2}, "runtime.tensor_parallel", "1"),
    ],
)
def test_what_the_engine_can_not_do_is_refused(pairs: dict[str, Pair], options: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(pairs["StableLm"].target, family="transformers", **options)
    assert caught.value.key == key
    assert said in caught.value.expected
    assert "model.family=transformers" in str(caught.value)


def test_an_unknown_family_is_refused(pairs: dict[str, Pair]) -> None:
    with pytest.raises(ConfigError, match=r"model\.family: expected one of auto, transformers"):
        LLM(pairs["StableLm"].target, family="stablelm", variant="none")


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        ("Falcon", {}, "does not go through transformers' attention interface"),
        ("Bloom", {}, "its positions can't be given"),
        ("Jamba", {"num_experts": 2}, "recurrent layers"),
        ("Mamba", {}, "positions can't be given"),
        ("DeepseekV3", {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}, "different widths"),
        ("Llama4Text", {"attention_chunk_size": 8, "head_dim": 16}, "layers of kind chunked_attention"),
        ("Phi", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "depends on the length"),
        ("Gemma3", {"text_config": {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 3}}, "does not read texts alone"),
        ("Gemma4Text", {"head_dim": 16, "global_head_dim": 32}, "heads of different shapes"),
        ("StableLm", {"hidden_size": 45, "partial_rotary_factor": 0.3}, "heads have a width of 15"),
    ],
)
def test_models_that_it_can_not_serve_are_refused(name: str, overrides: dict[str, Any], said: str, tmp_path: Path) -> None:
    config = getattr(transformers, f"{name}Config")(**(overrides if "text_config" in overrides else {**BASE, **overrides}))
    config.architectures = [f"{name.removesuffix('Text')}ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        read_own_facts(tmp_path)
    assert caught.value.key == f"{tmp_path / 'config.json'}: architectures"
    assert said in caught.value.found


def test_a_mask_of_its_own_is_refused(pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.stablelm import modeling_stablelm

    def only_even(**options: Any) -> Any:
        return transformers.masking_utils.create_causal_mask(**options, and_mask_function=lambda b, h, q, k: (q - k) % 2 == 0)

    monkeypatch.setattr(modeling_stablelm, "create_causal_mask", only_even)
    with pytest.raises(CheckpointError, match="attention masks of its own"):
        read_own_facts(pairs["StableLm"].target)


def test_a_model_that_transformers_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}')
    with pytest.raises(CheckpointError, match="a language model that transformers has"):
        read_own_facts(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.family=transformers may run it"):
        read_model_facts(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = write_hf(build("StableLm"), tmp_path)
    edit_tensors(path / "model.safetensors", "model.layers.1.mlp.up_proj.weight")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*missing"):
        LLM(path, family="transformers", variant="none", **SMALL)


@pytest.mark.parametrize("command", ["diff", "plan", "profile", "train", "tune"])
def test_commands_that_measure_families_refuse_it(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "model=demo", "model.family=transformers", "variant=none"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"graphspec: model.family: expected auto with graphspec {command}, found transformers\n"

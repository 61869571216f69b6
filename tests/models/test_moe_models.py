"""Mixtures of experts over keys and values as target and as draft: against transformers on one checkpoint, and what is refused."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from graphspec import LLM, SamplingParams
from graphspec.errors import CheckpointError
from graphspec.facts import read_model_facts
from graphspec.kernels import select_kernels
from graphspec.models.layers import use_kernels
from graphspec.models.target import load_target
from tests.support.checkpoints import VOCAB_SIZE, DenseAttention, eagle3_tensors, edit_json, write_eagle3, write_hf
from tests.support.engines import ids, prompts
from tests.support.features import marked, of_family, shows
from tests.support.moe_checkpoints import HIDDEN, LAYERS, assert_refused, build_mixture, greedy, mixture_of, write_mixture

from .test_models import assert_logits_and_taps, in_float64

if TYPE_CHECKING:
    from pathlib import Path

LENGTH = 24
OTHERS = (
    "dots1", "glm4_moe", "glm4_moe, plain", "gpt_oss", "mixtral", "minimax_m2", "qwen2_moe", "qwen2_moe, windows, one dense layer", "olmoe",
    "ernie4_5_moe",
)  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights-as-they-come": {"norm_topk_prob": False},
    "dense-layers-by-name": {"mlp_only_layers": [1]},
    "every-second-layer": {"decoder_sparse_step": 2, "num_hidden_layers": 4},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True},
    "sliding-window": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    "one-expert-of-two": {"num_experts": 2, "num_experts_per_tok": 1},
    "all-experts": {"num_experts": 3, "num_experts_per_tok": 3},
    "default-head-size": {"head_dim": None},
}


def mixture(name: str) -> str:
    """The family of a case."""
    return name if name in OTHERS else "qwen3_moe"


@pytest.mark.parametrize("name", marked((*CASES, *OTHERS), lambda name: mixture_of(mixture(name)), "logits"))
@torch.inference_mode()
def test_logits_and_taps_equal_transformers(name: str, tmp_path: Path) -> None:
    model = build_mixture(mixture(name), **CASES.get(name, {}))
    assert_logits_and_taps(model, write_hf(model, tmp_path, shard_size="40KB" if name == "tied" else None), LENGTH, (0, 2))


@torch.inference_mode()
def test_low_precision_follows_transformers(tmp_path: Path) -> None:
    model = build_mixture("qwen3_moe")
    facts = read_model_facts(write_hf(model, tmp_path))
    low = copy.deepcopy(model).to(torch.bfloat16)
    token_BT = torch.arange(24)[None]
    exact = in_float64(low)(token_BT).logits
    ours = load_target(facts, (), 24, torch.bfloat16, "cpu")
    logits = ours.logits(ours(token_BT, DenseAttention.prompt(1, 24)).hidden_BTH)
    # A token near a tie may go to another expert in either; the median does not see it.
    assert (logits - exact).abs().median() <= 2 * (low(token_BT).logits - exact).abs().median()


@torch.inference_mode()
def test_experts_lie_in_two_tensors_and_every_part_has_its_place(tmp_path: Path) -> None:
    path, model = write_mixture(tmp_path, "qwen3_moe")
    calls: list[tuple[int, int]] = []
    ours = load_target(read_model_facts(path), (), 8, torch.float32, "cpu", lambda done, total: calls.append((done, total)))
    block, experts = ours.layers[2].mlp, model.model.layers[2].mlp.experts
    assert torch.equal(block.gate_up_EFH, experts.gate_up_proj)
    assert torch.equal(block.down_EHF, experts.down_proj)
    assert calls == [(i + 1, len(load_file(path / "model.safetensors"))) for i in range(len(calls))]


@torch.inference_mode()
def test_tokens_that_are_not_valid_go_to_no_expert(tmp_path: Path) -> None:
    """Their rows hold NaN in every expert's reach; the others are what they are alone."""
    path, _ = write_mixture(tmp_path, "qwen3_moe")
    block = load_target(read_model_facts(path), (), 8, torch.float32, "cpu").layers[0]
    x_BTH = torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(1))
    valid_BT = torch.tensor([[True, False, True], [False, True, False]])
    poisoned = torch.where(valid_BT[..., None], x_BTH, float("nan"))
    norm, everyone = block.post_attention_layernorm, torch.ones_like(valid_BT)
    alone = block.mlp(x_BTH, norm, torch.zeros_like(x_BTH), valid=everyone)
    found = block.mlp(poisoned, norm, torch.zeros_like(x_BTH), valid=valid_BT)
    torch.testing.assert_close(found[valid_BT], alone[valid_BT])
    seen: list[torch.Tensor] = []
    block.mlp.mix = lambda x, index, weight, *rest: seen.append(index) or torch.zeros_like(x)
    block.mlp(poisoned, norm, torch.zeros_like(x_BTH), valid=valid_BT)
    assert torch.equal((seen[0] < 0).all(-1), ~valid_BT.flatten())
    assert torch.equal((seen[0] >= 0).all(-1), valid_BT.flatten())


def test_ops_of_the_chosen_set_are_run(tmp_path: Path) -> None:
    from dataclasses import replace

    path, _ = write_mixture(tmp_path, "qwen3_moe")
    ours = load_target(read_model_facts(path), (), 8, torch.float32, "cpu")
    kernels, called = select_kernels("reference", "reference", "cpu"), []

    def spy(name: str) -> Any:
        return lambda *args: called.append(name) or getattr(kernels, name)(*args)

    use_kernels(replace(kernels, moe_route=spy("moe_route"), moe_mlp=spy("moe_mlp")), ours)
    ours(torch.tensor([[1, 2]]), DenseAttention.prompt(1, 2))
    assert called == ["moe_route", "moe_mlp"] * LAYERS


@torch.inference_mode()
def test_forward_is_one_graph(tmp_path: Path) -> None:
    """Few tokens and many: the experts are gathered, or gone through."""
    path, _ = write_mixture(tmp_path, "qwen3_moe")
    model = load_target(read_model_facts(path), (), 16, torch.float32, "cpu")
    for length in (1, 12):
        attention = DenseAttention.prompt(1, length)

        def step(token_BT: torch.Tensor, attention: DenseAttention = attention) -> torch.Tensor:
            return model.logits(model(token_BT, attention).hidden_BTH)

        token_BT = torch.arange(length)[None]
        assert torch.equal(torch.compile(step, fullgraph=True, dynamic=False, backend="eager")(token_BT), step(token_BT))


BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "no experts": ({"num_local_experts": None}, "num_local_experts: expected an integer >= 1"),
    "more than there are": ({"num_experts_per_tok": 7}, "num_experts_per_tok: expected at most the 6 experts, found 7"),
    "dense layers": ({"mlp_only_layers": "1"}, "mlp_only_layers: expected a list of layer numbers"),
    "step": ({"decoder_sparse_step": 0}, "decoder_sparse_step: expected an integer >= 1"),
    "an unknown method": ({"quantization_config": {"quant_method": "hqq"}}, "quant_method: expected one of fp8"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act: expected 'silu'"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_configs_are_refused(name: str, tmp_path: Path) -> None:
    changes, message = BAD_CONFIGS[name]
    path, _ = write_mixture(tmp_path, "qwen3_moe")
    edit_json(path / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        read_model_facts(path)


def test_the_published_spelling_is_read(tmp_path: Path) -> None:
    path, _ = write_mixture(tmp_path, "qwen3_moe")
    facts = read_model_facts(path)
    assert facts.experts is not None
    edit_json(path / "config.json", "num_local_experts", num_experts=6)
    assert read_model_facts(path).experts == facts.experts


BAD_TENSORS: dict[str, tuple[str, tuple[int, ...] | None, str]] = {
    "expert missing": ("mlp.experts.5.up_proj.weight", None, r"layers\.1\.mlp\.experts\.5\.up_proj\.weight: expected a tensor of shape"),
    "expert too many": ("mlp.experts.6.up_proj.weight", (12, 32), r"experts\.6\.up_proj\.weight: expected no such tensor"),
    "another width": ("mlp.experts.0.down_proj.weight", (32, 13), r"down_proj\.weight: expected shape \[32, 12\], found shape \[32, 13\]"),
    "router": ("mlp.gate.weight", (5, 32), r"mlp\.gate\.weight: expected shape \[6, 32\], found shape \[5, 32\]"),
    "shared experts": ("mlp.shared_expert.up_proj.weight", (12, 32), r"shared_expert\.up_proj\.weight: expected no such tensor"),
    "quantised": ("mlp.experts.0.up_proj.weight_scale_inv", (1, 1), "this looks like a quantised checkpoint"),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_bad_tensors_are_refused(name: str, tmp_path: Path) -> None:
    assert_refused(write_mixture(tmp_path, "qwen3_moe")[0], *BAD_TENSORS[name])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path | None], Path, Any]:
    """A target, and a draft of every kind with random weights."""
    path = tmp_path_factory.mktemp("qwen3-moe")
    target, model = write_mixture(path / "target", "qwen3_moe", easy=True, max_position_embeddings=96)
    small = build_mixture("qwen3_moe", easy=True, num_hidden_layers=1, max_position_embeddings=96)
    with torch.no_grad():
        for part in ("embed_tokens", "norm"):
            getattr(small.model, part).weight.copy_(getattr(model.model, part).weight)
        small.lm_head.weight.copy_(model.lm_head.weight)
    tensors = eagle3_tensors(hidden_size=HIDDEN, target_hidden_size=HIDDEN, vocab_size=VOCAB_SIZE, num_taps=2)
    taps = {"eagle_aux_hidden_state_layer_ids": [-1, 1], "use_aux_hidden_state": True}
    eagle3 = write_eagle3(path / "eagle3", tensors, eagle_config=taps, max_position_embeddings=96)
    return {"none": None, "eagle3": eagle3, "standalone": write_hf(small, path / "small"), "ngram": None}, target, model


CHAIN, TREE = {"num_steps": 3, "topk": 1, "num_draft_tokens": 4}, {"num_steps": 3, "topk": 2, "num_draft_tokens": 6}


OVER_KEYS = ("dots1", "glm4_moe", "mixtral", "minimax_m2", "qwen2_moe, windows, one dense layer", "olmoe", "ernie4_5_moe")
DRAFTED = (*OVER_KEYS, "mistral4")


@pytest.mark.parametrize("family", marked(DRAFTED, mixture_of, "none", "ngram", "standalone", "chain", "tree"))
def test_other_mixtures_draft_and_verify(family: str, tmp_path: Path) -> None:
    target, model = write_mixture(tmp_path, family, easy=True, max_position_embeddings=96)
    prompt_ids = prompts(3, vocab=VOCAB_SIZE)
    expected = [greedy(model, prompt, 16) for prompt in prompt_ids]
    whole = {"variant": "standalone", "draft": target}
    for variant in ({"variant": "none"}, {"variant": "ngram"}, {**whole, **CHAIN}, {**whole, **TREE}):
        assert ids(LLM(target, runtime="eager", max_rows=2, **variant).generate(prompt_ids, SamplingParams(max_tokens=16))) == expected


COMPILED = ("qwen3_moe", *OVER_KEYS, "gpt_oss")


@pytest.mark.full
@pytest.mark.parametrize("family", marked(COMPILED, mixture_of, "ngram", "tree", "compiled"))
def test_compiled_mixtures_decode_the_same(family: str, tmp_path: Path) -> None:
    """Their experts are one native op, next to compiled ones."""
    target, model = write_mixture(tmp_path, family, easy=True, max_position_embeddings=96)
    prompt_ids = prompts(3, vocab=VOCAB_SIZE)
    llm = LLM(target, runtime="compiled", variant="ngram", max_rows=2, buckets=[2], **TREE)
    assert llm.decoders["target"] == "op by op: mixtures of experts"
    assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=16))) == [greedy(model, prompt, 16) for prompt in prompt_ids]


@of_family("Qwen3MoeForCausalLM")
@pytest.mark.parametrize(
    ("variant", "shape", "page_size", "rows"),
    [
        pytest.param("none", {}, 16, 1, marks=shows("none")),
        pytest.param("none", {}, 1, 3, marks=shows("none")),
        pytest.param("eagle3", CHAIN, 16, 3, marks=shows("eagle3", "chain")),
        pytest.param("eagle3", TREE, 1, 1, marks=shows("eagle3", "tree")),
        pytest.param("standalone", CHAIN, 1, 3, marks=shows("standalone", "chain")),
        pytest.param("standalone", TREE, 16, 3, marks=shows("standalone", "tree")),
        pytest.param("ngram", {}, 16, 3, marks=shows("ngram")),
    ],
)
def test_output_is_the_targets_own(checkpoints: Any, variant: str, shape: dict[str, Any], page_size: int, rows: int) -> None:
    drafts, target, model = checkpoints
    keys = {"runtime": "eager", "page_size": page_size, "max_rows": rows, "prefill_chunks": [4, 8]}
    llm = LLM(target, variant=variant, draft=drafts[variant], **shape, **keys)
    prompt_ids = prompts(rows + 1, vocab=VOCAB_SIZE)
    assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=16))) == [greedy(model, prompt, 16) for prompt in prompt_ids]
    if variant == "standalone":
        assert llm.metrics is not None and 1.2 < llm.metrics.acceptance_length < 3.95

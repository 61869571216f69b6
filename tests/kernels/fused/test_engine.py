"""Whole engines on fused kernels, run by Triton's interpreter: token for token what transformers and the references emit.

The pair's draft equals its target, so every off-by-one in a slot, a position, a mask or a beam shows as a shorter run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from graphspec.api.llm import LLM, generate_through
from graphspec.engine.request import SamplingParams
from graphspec.errors import ConfigError
from graphspec.kernels import OPS, select_kernels
from graphspec.kernels.fused.launch import semaphores
from tests.support.checkpoints import VOCAB_SIZE, build_hf, write_hf
from tests.support.depths import Launches, ScriptedDepth
from tests.support.engines import CHAIN, SMALL, TREE, Pair, ids, mirror_pair, prompts, random_pair
from tests.support.gemma4 import CLUSTERS, assisted_sizes, build_assisted, build_gemma4
from tests.support.gemma4 import SHAPES as SHAPES_OF_GEMMA
from tests.support.hybrid_checkpoints import build_hybrid
from tests.support.parallel_checkpoints import dflash_tensors, favouring_target, p_eagle_tensors, write_dflash, write_p_eagle
from tests.support.quantised_checkpoints import quantise

FUSED = {"mode": "fused", "max_rows": 2, "buckets": [2], "page_size": 4, "max_context": 64, "prefill_chunks": [4]}
LENGTH = 8
SHAPES = {"chain": CHAIN, "tree": TREE, "none": {"variant": "none"}}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return mirror_pair(tmp_path_factory.mktemp("mirror"))


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_equals_transformers(pair: Pair, shape: str) -> None:
    llm = pair.llm(**FUSED, **SHAPES[shape])
    prompt_ids = prompts(2, lengths=(2, 5))
    assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=LENGTH))) == [pair.greedy(p, LENGTH) for p in prompt_ids]
    if shape == "chain":
        assert llm.metrics is not None and llm.metrics.acceptance_length > 4.5


def test_the_drafter_catches_up_after_a_pause(pair: Pair) -> None:
    """Four plain cycles on top of a full run: the window is read in one wide pass, and the next draft is as right as the first."""
    llm = pair.llm(**FUSED, num_steps=2, topk=1, num_draft_tokens=3, depths=[0], backlog=7, prefill_tokens_per_cycle=4096)
    llm.depth_policy, launcher = ScriptedDepth([2, 0, 0, 0, 0, 2]), Launches(llm.cycle)
    prompt_ids = prompts(2, lengths=(2, 5))
    outputs = generate_through(llm, launcher, prompt_ids, SamplingParams(max_tokens=12, ignore_eos=True))
    assert ids(outputs) == [pair.greedy(prompt, 12, ignore_eos=True) for prompt in prompt_ids]
    assert [-1 if key.catch_up else key.shape.num_steps for key in launcher.keys][:6] == [2, 0, 0, 0, 0, -1]
    assert all(output.timing.cycle_tokens[6] == 3 for output in outputs)


@pytest.mark.parametrize("layout", ["awq", "nvfp4-compressed"])
def test_a_target_of_low_precision_decodes_as_one_of_its_numbers(layout: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    source = write_hf(build_hf("llama", head_dim=16, max_position_embeddings=128, **sizes), tmp_path / "source")
    found = []
    for folder in quantise(source, tmp_path, layout):
        llm = LLM(str(folder), **{**SMALL, **FUSED, "variant": "none", "max_rows": 1, "buckets": [1]})
        found.append(ids(llm.generate([[5, 9, 3]], SamplingParams(max_tokens=3, ignore_eos=True))))
    assert found[0] == found[1] and len(found[0][0]) == 3


@pytest.mark.parametrize("kind", SHAPES_OF_GEMMA)
def test_heads_of_two_shapes(kind: str, tmp_path: Path) -> None:
    """A tree over two pools; the last layer of the E model reads the second layer's keys and values."""
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    shared = {"num_kv_shared_layers": 1} if kind == "inputs" else {}
    model = build_gemma4(kind, num_hidden_layers=3, layer_types=kinds, sliding_window=7, **shared)
    found = random_pair(tmp_path, model)
    prompt_ids = prompts(1, lengths=(9,), vocab=VOCAB_SIZE)
    llm = found.llm(**FUSED, **TREE)
    assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=4))) == [found.greedy(prompt, 4) for prompt in prompt_ids]


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_drafter_over_the_targets_pools(shape: str, tmp_path: Path) -> None:
    """Its layers read both; nothing is written there until the target verifies."""
    kinds = ["sliding_attention", "full_attention"]
    sizes = {**assisted_sizes(64), "num_hidden_layers": 2, "layer_types": kinds}
    model, assistant = build_assisted("dense", sizes, {"num_hidden_layers": 2, "num_kv_shared_layers": 2, "layer_types": kinds}, CLUSTERS)
    target, draft = write_hf(model, tmp_path / "target"), write_hf(assistant, tmp_path / "draft")
    found = Pair(target, draft, model)
    prompt_ids = prompts(1, lengths=(9,), vocab=64)
    llm = LLM(target, variant="assistant", draft=draft, **{**SMALL, **FUSED, **SHAPES[shape]})
    assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=8))) == [
        found.greedy(prompt, 8, ignore_eos=True) for prompt in prompt_ids
    ]
    assert llm.metrics is not None and llm.metrics.acceptance_length > 1.1


SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0.7, "seed": 4, "top_k": 9, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1},
)


@pytest.mark.parametrize("keys", SAMPLED, ids=["plain", "shaped"])
def test_seeded_sampling_equals_plain_decoding_by_references(pair: Pair, keys: dict[str, Any]) -> None:
    prompt_ids, params = prompts(1, lengths=(3,)), SamplingParams(max_tokens=LENGTH, **keys)
    expected = ids(pair.llm(variant="none", max_context=64).generate(prompt_ids, params))
    assert ids(pair.llm(**FUSED, **TREE).generate(prompt_ids, params)) == expected


@pytest.mark.parametrize(
    "keys", [{"variant": "none", "numerics": "batch_invariant"}, {"variant": "ngram", **TREE}], ids=["none-exact", "tree"]
)
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h_moe"])
def test_a_hybrid_target_decodes_as_transformers_does(tmp_path: Path, family: str, keys: dict[str, Any]) -> None:
    """Of each rule, in both forms of verification and of prompts; one with experts without a gate."""
    hybrid = random_pair(tmp_path, build_hybrid(family))
    prompt_ids = prompts(2, lengths=(2, 5))
    outputs = hybrid.llm(**FUSED, **keys).generate(prompt_ids, SamplingParams(max_tokens=4))
    assert ids(outputs) == [hybrid.greedy(prompt, 4) for prompt in prompt_ids]


@pytest.mark.parametrize("variant", ["dflash", pytest.param("p_eagle", marks=pytest.mark.full)])
def test_drafts_of_one_pass_are_those_of_the_references(tmp_path: Path, variant: str) -> None:
    """Two lanes, and a head that reads some rows of a block: the sums of squares that go with them are those of the same rows."""
    favouring = favouring_target(tmp_path)
    if variant == "dflash":
        draft = write_dflash(tmp_path / "draft", dflash_tensors(favouring), causal_head=True)
    else:
        draft = write_p_eagle(tmp_path / "draft", p_eagle_tensors(favouring, reduced=False))
    prompt_ids, params = prompts(2, lengths=(2, 3), vocab=VOCAB_SIZE), SamplingParams(max_tokens=3, ignore_eos=True)
    keys = {**SMALL, **FUSED, "num_steps": 4, "topk": 2, "num_draft_tokens": 8}
    found = {mode: LLM(favouring.target, variant=variant, draft=draft, **{**keys, "mode": mode}) for mode in ("fused", "reference")}
    tokens = {mode: ids(llm.generate(prompt_ids, params)) for mode, llm in found.items()}
    assert tokens["fused"] == tokens["reference"] == [favouring.greedy(prompt, 3, ignore_eos=True) for prompt in prompt_ids]
    left, right = (found[mode].cycle.arena for mode in ("fused", "reference"))
    assert torch.equal(left["candidate_token_BM"], right["candidate_token_BM"])
    torch.testing.assert_close(left["candidate_score_BM"], right["candidate_score_BM"], rtol=1e-4, atol=1e-4)


def test_every_op_that_sums_is_fused(pair: Pair) -> None:
    """Under the law; fast numerics leave sums of squares and products of heads to the compiler and the library. What changes logits one by
    one, or a few candidates, is always the compiler's.
    """
    compiled = {
        "append_masks", "ban_words", "bias_logits", "forced_run", "host_tree", "mask_block", "mask_tokens", "node_contexts", "note_tokens",
        "penalise", "put_first",
    }  # fmt: skip
    references = select_kernels("reference", "reference", "cpu")
    for numerics, sums in (("fast", {"head_product", "sum_squares"}), ("cycle_invariant", set()), ("batch_invariant", set())):
        left = compiled | sums
        kernels = select_kernels("fused", "auto", "cpu", numerics=numerics)
        assert {op.name for op in OPS if getattr(kernels, op.name) is getattr(references, op.name)} == left


def test_engines_share_no_counter(pair: Pair) -> None:
    """A launch of one that is half done leaves a counter above 0; in the other's programs every last program is still the last."""
    running, loading = (pair.llm(**FUSED, variant="none") for _ in range(2))
    prompt_ids, params = prompts(1, lengths=(3,)), SamplingParams(max_tokens=2)
    expected = ids(running.generate(prompt_ids, params))
    scope = running.cycle.kernels.scope
    assert scope is not None
    with scope():
        counters = semaphores(torch.device("cpu"), 1)
        counters.fill_(1)
    assert ids(loading.generate(prompt_ids, params)) == expected
    assert bool((counters == 1).all()), "the other engine's launches arrived here"
    assert not semaphores(torch.device("cpu"), 1).any(), "and nothing of either engine arrives in what belongs to none"


def test_without_the_interpreter_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphspec.kernels.fused.launch.INTERPRETED", False)
    with pytest.raises(ConfigError, match=r"kernels\.mode.*TRITON_INTERPRET"):
        select_kernels("fused", "auto", "cpu")

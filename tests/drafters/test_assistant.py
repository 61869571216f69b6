"""Gemma 4's assistant: it drafts what transformers' drafts, over keys and values of the target, and changes no token of the output."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from graphspec import LLM, SamplingParams
from graphspec.config.catalog import resolve_variant
from graphspec.drafters.assistant.facts import AssistantFacts, Clusters, read_assistant_facts
from graphspec.drafters.assistant.loading import ORDERING, load_assistant
from graphspec.errors import CheckpointError, ConfigError
from graphspec.facts import ModelFacts, read_model_facts
from graphspec.facts.draft import DraftPass
from graphspec.kernels import select_kernels
from graphspec.lab.floor import FloorModel, kv_bytes_per_token
from graphspec.models.attention import TreeAttention
from graphspec.models.target import load_target
from graphspec.shapes import CycleShape
from tests.support.checkpoints import build_hf, edit_json, edit_tensors, write_hf
from tests.support.engines import CHAIN, SMALL, TREE, Pair, ids, prompts, watch_schedulers
from tests.support.features import of_family
from tests.support.gemma4 import (
    CLUSTERS,
    assisted_sizes,
    build_assisted,
    build_gemma4,
    committed_states,
    draft_by_transformers,
    in_float64,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GEMMA = "Gemma4ForCausalLM"
VOCAB = 64
SIZES: dict[str, Any] = assisted_sizes(VOCAB)
LENGTHS = (14, 23, 9)
"""Of prompts, longer than the window of 6 in the layers that have one."""
PAIRS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("dense", {}, CLUSTERS),
    "experts": ("experts", {}, {}),
    "inputs": ("inputs", {}, CLUSTERS),
    "every token scored": ("inputs", {}, {}),
    "one layer": ("dense", {"num_hidden_layers": 1, "num_kv_shared_layers": 1, "layer_types": ["full_attention"]}, {}),
    "the wide pool first": ("experts", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, CLUSTERS),
}
"""Kind of the target, the assistant's text configuration, and its outer one."""
STATIC = {"tree_choices": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]}
SHAPES: dict[str, dict[str, Any]] = {"chain": CHAIN, "tree": TREE, "static tree": STATIC, "one level": {"num_steps": 1, "topk": 3}}


def covers(*features: str) -> pytest.MarkDecorator:
    return pytest.mark.covers("assistant", *features)


def shaped(shape: str) -> Any:
    """A shape, with what a green engine of it shows."""
    kind = "chain" if shape == "chain" else "tree"
    further = [shape] if shape == "static tree" else []
    shown = ("greedy equals transformers", "seeded sampling equals plain decoding", "batch", kind, *further)
    return pytest.param(shape, marks=(covers(*shown), of_family(GEMMA, "assistant", kind)))


class AssistedPair(Pair):
    """A target and its assistant, as folders and as transformers runs them."""

    assistant: Any

    def says(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Of the target, by transformers; no token ends it."""
        return self.greedy(prompt, max_tokens, ignore_eos=True)

    def llm(self, **overrides: Any) -> LLM:
        values = {"variant": "assistant", **SMALL, "prefill_chunks": [4, 8], **overrides}
        return LLM(self.target, draft=self.draft if values["variant"] == "assistant" else None, **values)


def write_pair(path: Path, name: str) -> AssistedPair:
    kind, text, outer = PAIRS[name]
    target, assistant = build_assisted(kind, SIZES, text, outer)
    pair = AssistedPair(write_hf(target, path / "target"), write_hf(assistant, path / "assistant"), target)
    pair.assistant = assistant
    return pair


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], AssistedPair]:
    made: dict[str, AssistedPair] = {}

    def pair(name: str) -> AssistedPair:
        if name not in made:
            made[name] = write_pair(tmp_path_factory.mktemp("pair"), name)
        return made[name]

    return pair


def attention_over(facts: AssistantFacts, target: ModelFacts, shared: dict[str, Any]) -> TreeAttention:
    """Attention as the stages make it, over pools with these keys and values in pages of 4 slots; whatever isn't theirs is NaN."""
    length, size = shared["full_attention"][0].shape[2], 4
    pages = -(-length // size)
    pools: dict[int, torch.Tensor] = {}
    for layer, source in enumerate(facts.target_layers):
        number, (sides, heads, dim) = facts.decoder.pool(layer), target.kv_rows[target.pool(source)]
        empty = torch.full((target.pool_layers(target.pool(source)), sides, 1 + pages, size, heads, dim), float("nan"))
        pool = pools.setdefault(number, empty)
        kind = "full_attention" if target.sliding_window[source] is None else "sliding_attention"
        for side, states in enumerate(shared[kind]):
            rows = torch.full((pages * size, heads, dim), float("nan"))
            rows[:length] = states[0].transpose(0, 1)
            pool[target.place(source), side, 1:] = rows.view(pages, size, heads, dim)
    at, nothing = torch.tensor([[length]]), torch.zeros(1, 1, 1, dtype=torch.int64)
    return TreeAttention(
        select_kernels("reference", "auto", "cpu"), pools[0], 1 + torch.arange(pages, dtype=torch.int32)[None], at,
        torch.ones(1, 1, dtype=torch.bool), at, torch.zeros_like(at), at[0], nothing,
        further_pools=tuple(pools[n] for n in range(1, len(pools))),
    )  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
@torch.inference_mode()
def test_logits_equal_transformers(name: str, pairs: Callable[[str], AssistedPair]) -> None:
    """Step by step, from the same hidden state, keys and values, along tokens that aren't the best; as close to float64 as transformers."""
    pair, path = pairs(name), [7, 1, 40]
    target = read_model_facts(pair.target)
    facts = read_assistant_facts(pair.draft, target)
    ours = load_assistant(facts, load_target(target, (), 64, torch.float32, "cpu"), 64, torch.float32, "cpu")
    exact_pair = (in_float64(pair.assistant), in_float64(pair.hf))
    for tokens in prompts(3, (2, 9, 24), VOCAB):
        theirs = draft_by_transformers(pair.assistant, pair.hf, tokens, 4, path)
        exact = draft_by_transformers(*exact_pair, tokens, 4, path)
        hidden_B1H, shared = committed_states(pair.hf, torch.tensor([tokens[:-1]]))
        attention = attention_over(facts, target, shared)
        for step, token in enumerate([tokens[-1], *path]):
            hidden_B1H = ours(torch.tensor([[token]]), hidden_B1H, attention, step)
            mine = ours.logits(hidden_B1H, step)[0, 0]
            error, bound = (mine - exact[step]).abs().max(), (theirs[step] - exact[step]).abs().max()
            assert error <= 4 * bound + 8 * torch.finfo(torch.float32).eps * exact[step].abs().max(), (len(tokens), step)
            assert mine.argmax() == theirs[step].argmax()


def drafts(pair: AssistedPair, tokens: list[int], steps: int) -> list[int]:
    """The chain that transformers' assistant drafts, over keys and values of committed tokens."""
    best: list[int] = draft_by_transformers(pair.assistant, pair.hf, tokens, steps).argmax(-1).tolist()
    return best


@covers("drafts equal those without a cache")
@pytest.mark.parametrize("name", PAIRS)
def test_every_cycle_drafts_transformers_chain(name: str, pairs: Callable[[str], AssistedPair]) -> None:
    """Cycle by cycle, after runs of several lengths."""
    pair, steps, cycles, runs = pairs(name), 4, 5, set()
    llm = pair.llm(**CHAIN, max_rows=1)
    for prompt in prompts(2, (14, 9), VOCAB):
        output = pair.says(prompt, 40)
        done = 1
        for cycle in range(1, cycles + 1):
            tree = llm.draft_tree(prompt, cycle)
            tokens = [*prompt, *output[:done]]
            assert tree.token_N == [tokens[-1], *drafts(pair, tokens, steps)], (len(prompt), cycle)
            accepted = sum(tree.accepted)
            runs.add(accepted)
            done += accepted
    assert len(runs) > 1, "runs of several lengths, or the test shows less than it says"


@pytest.mark.parametrize("name", ["dense", "the wide pool first"])
def test_a_tree_holds_the_best_of_transformers_at_every_node(name: str, pairs: Callable[[str], AssistedPair]) -> None:
    pair = pairs(name)
    llm = pair.llm(**TREE, max_rows=1)
    prompt = prompts(1, (14,), VOCAB)[0]
    output, depths = pair.says(prompt, 40), set()
    done = 1
    for cycle in (1, 2, 3):
        tree = llm.draft_tree(prompt, cycle)
        for node, parent in enumerate(tree.parent_N):
            path: list[int] = []
            while parent > 0:
                path, parent = [tree.token_N[parent], *path], tree.parent_N[parent]
            if node:
                logits = draft_by_transformers(pair.assistant, pair.hf, [*prompt, *output[:done]], len(path) + 1, path)[-1]
                assert tree.token_N[node] in logits.topk(TREE["topk"]).indices, (cycle, node)
                depths.add(len(path))
        done += sum(tree.accepted)
    assert depths == {0, 1, 2}


@pytest.mark.parametrize("steps", [1, 4])
def test_transformers_assisted_generation_proposes_the_same(steps: int, pairs: Callable[[str], AssistedPair]) -> None:
    """What its candidate generator proposes in every cycle, over keys and values of all committed tokens and no others.

    After a draft that was not accepted as a whole, transformers 5.23 passes those of refused tokens too, one in layers that see everything
    and all in layers with a window, whose cache may lack the first one that the mask lets pass. Before the first refusal both are the same.
    """
    pair, prompt = pairs("every token scored"), prompts(1, (14,), VOCAB)[0]
    propose, proposed = SinglePositionMultiTokenCandidateGenerator.get_candidates, []
    refused: list[int] = []

    def over_committed(self: Any, input_ids: Any, model_kwargs: Any, model_outputs: Any, *rest: Any, **named: Any) -> Any:
        if model_outputs is not None:
            passed, model_outputs.shared_kv_states = model_outputs.shared_kv_states, committed_states(pair.hf, input_ids[:, :-1])[1]
            refused.append(passed["full_attention"][0].shape[2] - (input_ids.shape[1] - 1))
            if not any(refused):
                mine = model_outputs.shared_kv_states
                pairs_of = [sides for kind in mine for sides in zip(passed[kind], mine[kind], strict=True)]
                assert all(torch.allclose(one, other[:, :, -one.shape[2] :], atol=1e-5) for one, other in pairs_of)
        found = propose(self, input_ids, model_kwargs, model_outputs, *rest, **named)
        proposed.append((input_ids[0].tolist(), found[0][0, input_ids.shape[1] :].tolist()))
        return found

    token_BT = torch.tensor([prompt])
    pair.assistant.generation_config.num_assistant_tokens = steps
    with mock.patch.object(SinglePositionMultiTokenCandidateGenerator, "get_candidates", over_committed), torch.no_grad():
        out = pair.hf.generate(
            token_BT, attention_mask=torch.ones_like(token_BT), assistant_model=pair.assistant, max_new_tokens=16, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
    assert out[0, len(prompt) :].tolist() == pair.says(prompt, 16)
    whole = [(tokens, found) for tokens, found in proposed if len(found) == steps]
    assert len(whole) > 3 and any(refused)
    assert all(found == drafts(pair, tokens, steps) for tokens, found in whole)
    llm = pair.llm(num_steps=steps, topk=1, max_rows=1)
    for cycle, (tokens, found) in enumerate(whole, 1):
        assert llm.draft_tree(prompt, cycle).token_N == [tokens[-1], *found]


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("shape", map(shaped, SHAPES))
def test_output_is_the_targets_own(name: str, shape: str, pairs: Callable[[str], AssistedPair]) -> None:
    """Greedy tokens are transformers', seeded ones those of plain decoding; more than one comes out of a cycle now and then."""
    pair, prompt_ids = pairs(name), prompts(3, LENGTHS, VOCAB)
    plain, llm = (pair.llm(**keys, max_rows=2) for keys in ({"variant": "none"}, SHAPES[shape]))
    greedy = SamplingParams(max_tokens=16)
    assert ids(llm.generate(prompt_ids, greedy)) == [pair.says(prompt, 16) for prompt in prompt_ids]
    seeded = [SamplingParams(max_tokens=16, temperature=1.0, seed=number, top_k=9) for number in range(3)]
    assert ids(llm.generate(prompt_ids, seeded)) == ids(plain.generate(prompt_ids, seeded))
    assert llm.metrics is not None and llm.metrics.acceptance_length > 1.1


def test_rows_may_pause_drafting(pairs: Callable[[str], AssistedPair]) -> None:
    """Cycles of depth 0 keep nothing for the drafter to catch up with, and the window stays as wide as a run."""
    pair, prompt_ids = pairs("inputs"), prompts(3, LENGTHS, VOCAB)
    for keys in ({"depth_per_bucket": {2: 0}, "buckets": [1, 2]}, {"depths": [0, 2], "cycles_in_flight": 2}):
        llm = pair.llm(**CHAIN, max_rows=2, **keys)
        assert not llm.plan.catches_up and llm.plan.window_capacity == llm.plan.accept_width
        assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=16))) == [pair.says(prompt, 16) for prompt in prompt_ids]


@covers("preemption and exact resumption", "prefix sharing")
def test_shared_prefixes_and_preempted_rows_change_nothing(pairs: Callable[[str], AssistedPair], monkeypatch: pytest.MonkeyPatch) -> None:
    """No page holds a feature: the last token of a prompt is always computed, and its feature is all that the first draft reads."""
    pair, made = pairs("inputs"), watch_schedulers(monkeypatch)
    begin = prompts(1, (21,), VOCAB)[0]
    prompt_ids = [begin, [*begin[:18], 5, 7, 9], [*begin[:13], 3]]
    expected = [pair.says(prompt, 14) for prompt in prompt_ids]
    lengths = []
    for num_pages in (None, 14):
        llm = pair.llm(**TREE, max_rows=3, page_size=4, num_pages=num_pages, max_context=48)
        assert ids(llm.generate(prompt_ids[:1], SamplingParams(max_tokens=14))) == expected[:1]
        found = llm.generate(prompt_ids, SamplingParams(max_tokens=14))
        assert ids(found) == expected
        assert found[1].cached_tokens >= 16
        assert (made[-1].preempted > 0) == (num_pages is not None)
        lengths.append(llm.generate(prompt_ids[1:2], SamplingParams(max_tokens=14))[0].metrics.acceptance_length)
    alone = pair.llm(**TREE, max_rows=3, page_size=4, max_context=48, prefix_cache=False)
    assert {alone.generate(prompt_ids[1:2], SamplingParams(max_tokens=14))[0].metrics.acceptance_length} == set(lengths)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_pools_of_16_bits(kv_dtype: str, pairs: Callable[[str], AssistedPair]) -> None:
    pair, prompt_ids = pairs("dense"), prompts(2, (14, 9), VOCAB)
    plain, drafting = (pair.llm(**keys, kv_dtype=kv_dtype) for keys in ({"variant": "none"}, TREE))
    expected, found = (ids(llm.generate(prompt_ids, SamplingParams(max_tokens=14))) for llm in (plain, drafting))
    assert found == expected
    pools = {slot.name for slot in drafting.cycle.arena.slots if slot.kind == "kv"}
    assert pools == {"target_kv", "target_kv_2"}, "the drafter keeps nothing"
    assert {drafting.cycle.arena[name].dtype for name in pools} == {getattr(torch, kv_dtype)}


@pytest.mark.full  # compiling takes most of a minute
@pytest.mark.parametrize("shape", ["chain", "tree"])
@covers("compiled")
@of_family(GEMMA, "assistant", "compiled")
def test_a_compiled_engine_gives_the_same(shape: str, pairs: Callable[[str], AssistedPair]) -> None:
    pair, prompt_ids = pairs("inputs"), prompts(2, (14, 9), VOCAB)
    llm = pair.llm(runtime="compiled", **SHAPES[shape])
    assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=12))) == [pair.says(prompt, 12) for prompt in prompt_ids]
    assert llm.decoders["draft"] == "op by op: keys and values of another network"


PUBLISHED = {
    "architectures": ["Gemma4AssistantForCausalLM"], "audio_token_id": 258881, "backbone_hidden_size": 1536, "boa_token_id": 256000,
    "boi_token_id": 255999, "centroid_intermediate_top_k": 32, "dtype": "bfloat16", "eoa_token_id": 258883, "eoi_token_id": 258882,
    "image_token_id": 258880, "model_type": "gemma4_assistant", "num_centroids": 2048, "tie_word_embeddings": True,
    "transformers_version": "5.7.0.dev0", "use_ordered_embeddings": True,
    "text_config": {
        "_name_or_path": "", "architectures": None, "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": False,
        "bos_token_id": 2, "chunk_size_feed_forward": 0, "dtype": "bfloat16", "enable_moe_block": False, "eos_token_id": 1,
        "final_logit_softcapping": None, "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 256, "hidden_size_per_layer_input": 0, "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "initializer_range": 0.02,
        "intermediate_size": 2048, "is_encoder_decoder": False, "label2id": {"LABEL_0": 0, "LABEL_1": 1},
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "max_position_embeddings": 131072, "model_type": "gemma4_text", "moe_intermediate_size": None, "num_attention_heads": 4,
        "num_experts": None, "num_global_key_value_heads": None, "num_hidden_layers": 4, "num_key_value_heads": 1,
        "num_kv_shared_layers": 4, "output_attentions": False, "output_hidden_states": False, "pad_token_id": 0, "problem_type": None,
        "return_dict": True, "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 512, "tie_word_embeddings": True, "top_k_experts": None, "use_bidirectional_attention": None, "use_cache": True,
        "use_double_wide_mlp": False, "vocab_size": 262144, "vocab_size_per_layer_input": 0,
    },
}  # fmt: skip
"""``config.json`` of google/gemma-4-E2B-it-assistant."""
SHRUNK = {"hidden_size": 20, "intermediate_size": 28, "head_dim": 8, "global_head_dim": 16, "sliding_window": 6, "vocab_size": VOCAB}


def test_a_published_config_loads(tmp_path: Path) -> None:
    """Its keys with the sizes of a tiny target, and tensors as transformers writes them."""
    sizes = {**SIZES, "num_key_value_heads": 1, "num_attention_heads": 4, "rope_parameters": PUBLISHED["text_config"]["rope_parameters"]}
    text = {**PUBLISHED["text_config"], **SHRUNK}
    target, assistant = build_assisted("inputs", sizes, text, CLUSTERS)
    pair = AssistedPair(write_hf(target, tmp_path / "target"), write_hf(assistant, tmp_path / "assistant"), target)
    outer = {"backbone_hidden_size": 36, "num_centroids": 8, "centroid_intermediate_top_k": 3}
    (pair.draft / "config.json").write_text(json.dumps({**PUBLISHED, **outer, "text_config": text}))
    names = set(load_file(pair.draft / "model.safetensors"))
    assert {"pre_projection.weight", "post_projection.weight", "masked_embedding.centroids.weight", ORDERING} < names
    facts = read_assistant_facts(pair.draft, read_model_facts(pair.target))
    # Of the E kind, whose last three layers have no keys and values of their own.
    assert facts.target_layers == (3, 3, 3, 2) and facts.clusters == Clusters(8, 3)
    prompt_ids = prompts(2, (14, 9), VOCAB)
    llm = pair.llm(**TREE)
    assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=12))) == [pair.says(prompt, 12) for prompt in prompt_ids]


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_under_either_name(tied: bool, tmp_path: Path) -> None:
    """Tied, it may lie under the embedding's name alone; next to an embedding, the head is what is read."""
    pair = write_pair(tmp_path, "dense")
    file = pair.draft / "model.safetensors"
    tensors = load_file(file)
    head = pair.assistant.lm_head.weight.detach().clone()
    names = {"model.embed_tokens.weight": head} if tied else {"model.embed_tokens.weight": head + 1, "lm_head.weight": head}
    rest = {name: tensor for name, tensor in tensors.items() if name not in ("lm_head.weight", "model.embed_tokens.weight")}
    save_file({**rest, **names, "model.layers.0.self_attn.k_proj.weight": torch.ones(16, 20)}, file)
    target = read_model_facts(pair.target)
    facts = read_assistant_facts(pair.draft, target)
    ours = load_assistant(facts, load_target(target, (), 8, torch.float32, "cpu"), 8, torch.float32, "cpu")
    assert torch.equal(ours.lm_head.weight, head[ours.lm_head.token_V])


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another target's width": ({"backbone_hidden_size": 40}, {}, r"backbone_hidden_size: expected 36, as in .*target, found 40"),
    "vocabulary": ({}, {"vocab_size": 128}, r"text_config: vocab_size: expected 64, as in .*target, found 128"),
    "heads with a window": ({}, {"num_key_value_heads": 4}, r"num_key_value_heads: expected 2, as in layer 3 of .*, found 4"),
    "width of heads with a window": ({}, {"head_dim": 4}, r"text_config: head_dim: expected 8, as in layer 3 of .*layer 0 reads, found 4"),
    "wide heads": ({}, {"global_head_dim": 8}, r"text_config: global_head_dim: expected 16, as in layer 4 of .*, found 8"),
    "number of wide heads": ({}, {"attention_k_eq_v": False}, r"num_global_key_value_heads: expected 1, as in layer 4 of .*, found 2"),
    "window": ({}, {"sliding_window": 8}, r"text_config: sliding_window: expected 6, as in layer 3 of .*, found 8"),
    "rotation": (
        {}, {"rope_parameters": {"full_attention": {"rope_theta": 500.0}, "sliding_attention": {"rope_theta": 50.0}}},
        r"text_config: rope_parameters: expected .*theta=100\.0.*as in layer 3 of .*theta=50\.0",
    ),
    "kinds of layers": ({}, {"layer_types": ["linear_attention"] * 3}, r"layer_types: expected 3 entries of"),
    "keys of its own": ({}, {"num_kv_shared_layers": 1}, r"num_kv_shared_layers: expected 3, all layers of the assistant, found 1"),
    "inputs": ({}, {"hidden_size_per_layer_input": 8}, r"hidden_size_per_layer_input: expected 0"),
    "experts": ({}, {"enable_moe_block": True}, r"enable_moe_block: expected false"),
    "clusters": ({"num_centroids": 7}, {}, r"num_centroids: expected a divisor of vocab_size = 64, found 7"),
    "chosen clusters": ({"centroid_intermediate_top_k": 9}, {}, r"centroid_intermediate_top_k: expected an integer from 1 to 8, found 9"),
    "no text": ({"text_config": None}, {}, r"text_config: expected an object"),
    "architecture": ({"architectures": ["LlamaForCausalLM"]}, {}, r"architectures: expected one of Gemma4Assistant.*variant=standalone"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused_by_one_message(name: str, tmp_path: Path, pairs: Callable[[str], AssistedPair]) -> None:
    outer, text, message = BAD[name]
    pair = pairs("dense")
    config = json.loads((pair.draft / "config.json").read_text())
    if text.keys() & {"head_dim", "global_head_dim", "num_key_value_heads", "attention_k_eq_v"}:
        del config["text_config"]["per_layer_config"]
        config["text_config"] |= {"global_head_dim": 16, "num_global_key_value_heads": 1}
    config = {**config, "text_config": {**config["text_config"], **text}, **outer}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        read_assistant_facts(tmp_path, read_model_facts(pair.target))


def test_targets_it_can_not_draft_for(tmp_path: Path, pairs: Callable[[str], AssistedPair]) -> None:
    llama = read_model_facts(write_hf(build_hf("llama"), tmp_path / "llama"))
    with pytest.raises(CheckpointError, match=r"architectures: expected a draft for LlamaForCausalLM.*it drafts for Gemma 4 alone"):
        read_assistant_facts(pairs("dense").draft, llama)
    windows = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    full = read_model_facts(write_hf(build_gemma4("dense", **SIZES, **windows), tmp_path / "full"))
    with pytest.raises(CheckpointError, match=r"layer_types: expected no sliding_attention, of which .*full has no layer"):
        read_assistant_facts(pairs("dense").draft, full)
    with pytest.raises(CheckpointError, match=r"variant=assistant"):
        LLM(pairs("dense").target, variant="eagle3", draft=pairs("dense").draft, **SMALL)
    with pytest.raises(ConfigError, match=r"variant\.token_map: expected null"):
        pairs("dense").llm(token_map=str(tmp_path / "map.pt"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre_projection__weight": None}, r"pre_projection\.weight: expected a tensor of shape \[20, 72\]"),
        ({"post_projection__weight": torch.ones(36, 19)}, r"post_projection\.weight: expected shape \[36, 20\], found shape \[36, 19\]"),
        ({"masked_embedding__token_ordering": torch.zeros(VOCAB, dtype=torch.int64)}, r"token_ordering: expected every token from 0 to 63"),
        ({"masked_embedding__token_ordering": torch.zeros(VOCAB)}, r"token_ordering: expected dtype I64 or I32, found F32"),
        ({"masked_embedding__token_ordering": None}, r"token_ordering: expected a tensor of shape \[64\]"),
        ({"more__weight": torch.ones(2)}, r"more\.weight: expected no such tensor"),
    ],
)
def test_wrong_tensors_are_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    pair = write_pair(tmp_path, "dense")
    there = {name: tensor for name, tensor in change.items() if tensor is not None}
    edit_tensors(pair.draft / "model.safetensors", *(name.replace("__", ".") for name in change if name not in there), **there)
    target = read_model_facts(pair.target)
    with pytest.raises(CheckpointError, match=message):
        load_assistant(read_assistant_facts(pair.draft, target), load_target(target, (), 8, torch.float32, "cpu"), 8, torch.float32, "cpu")


def test_the_unified_name_is_read_alike(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, "dense")
    expected = read_assistant_facts(pair.draft, read_model_facts(pair.target))
    edit_json(pair.draft / "config.json", architectures=["Gemma4UnifiedAssistantForCausalLM"])
    found = read_assistant_facts(pair.draft, read_model_facts(pair.target))
    assert (found.target_layers, found.clusters) == (expected.target_layers, expected.clusters)


def test_what_it_costs(pairs: Callable[[str], AssistedPair]) -> None:
    """Nothing is kept of a token; every pass reads the target's keys and values, at most a window, and of the head the chosen clusters."""
    pair = pairs("inputs")
    target = read_model_facts(pair.target)
    facts = read_assistant_facts(pair.draft, target)
    assert kv_bytes_per_token(facts.decoder, 4) == 0 and facts.decoder.kv_layers == 0
    assert facts.passes(CycleShape(3, 2, 8)) == (DraftPass("draft_extend", 1, 1), *[DraftPass("draft_steps", 2, 2)] * 2)
    model = FloorModel.of(target, facts, "float32", resolve_variant("assistant"))
    first, later, _ = model.stages(CycleShape(2, 1, 3), 1, 100)
    wide, narrow = 2 * 2 * 16 * 4, 2 * 2 * 8 * 4
    # Two layers with a window of 6, whose mask is two positions wider from the root on, and one that sees all.
    assert first.parts["kv"] == later.parts["kv"] == 2 * 8 * narrow + 100 * wide
    rows = facts.decoder.hidden_size * 4
    scored = (8 + 64 * 3 / 8) * rows
    (weights,) = model.draft_weights
    assert first.parts["weights"] == pytest.approx(weights.sizes["layers"] + scored) and weights.sizes["head"] == (8 + 64) * rows
    drafting, plain = pair.llm(**CHAIN), pair.llm(variant="none")
    assert drafting.memory.page_bytes == plain.memory.page_bytes, "a page is as large as without a draft"

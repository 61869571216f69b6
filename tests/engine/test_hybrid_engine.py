"""Hybrid targets in the engine: greedy tokens are those of transformers, for every drafter and accepted path."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from graphspec.api.llm import LLM, SamplingParams
from graphspec.drafters.ngram_trie.proposer import TrieProposer
from graphspec.errors import ConfigError
from graphspec.graphs.cycle import Cycle
from graphspec.shapes import GraphKey
from tests.support.checkpoints import VOCAB_SIZE, build_hf, edit_json, write_hf
from tests.support.engines import CHAIN, SMALL, TREE, Pair, idle_rows, ids, prompts, random_pair, watch_schedulers
from tests.support.features import marked, of_family, shows
from tests.support.hybrid_checkpoints import build_hybrid, expert_head, hybrid_of, mixer_head
from tests.support.mtp_checkpoints import add_heads, head_tensors
from tests.support.tiny import same_bits

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from graphspec.engine.proposer import Nodes
    from graphspec.engine.request import Request
    from graphspec.graphs.programs import Key
    from graphspec.graphs.stages.mailbox import Message

LENGTH = 15
PROMPTS = prompts(4, (12, 1, 25, 7), VOCAB_SIZE)
WIDE_TREE = {"num_steps": 4, "topk": 3, "num_draft_tokens": 12}
HOST = {"variant": "ngram_trie", "page_size": 4, **WIDE_TREE}


FAMILIES = ("qwen3_5", "qwen3_next", "qwen3_5_moe", "nemotron_h", "granite_moe", "bamba", "falcon_h1")


@pytest.fixture(scope="module", params=marked(FAMILIES, hybrid_of))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return random_pair(tmp_path_factory.mktemp(request.param), build_hybrid(request.param))


@pytest.fixture(scope="module", params=["qwen3_5", "nemotron_h"])
def dense(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """One of each rule, where the others would show the same."""
    return random_pair(tmp_path_factory.mktemp("dense"), build_hybrid(request.param, seed=1))


def expected(pair: Pair, prompt_ids: Sequence[Sequence[int]] = PROMPTS, length: int = LENGTH) -> list[list[int]]:
    return [pair.greedy(prompt, length) for prompt in prompt_ids]


class Oracle:
    """Proposes the true continuation to a drawn depth, between siblings that are wrong, so that every node may be the last accepted one."""

    def __init__(self, known: dict[tuple[int, ...], list[int]]) -> None:
        self.known, self.draw, self.ends = known, random.Random(0), set[int]()

    def propose(self, requests: Sequence[Request]) -> list[Nodes]:
        return [self.tree(request) for request in requests]

    def tree(self, request: Request) -> Nodes:
        true = self.known[tuple(request.prompt)][len(request.output) :]
        tokens, parents, last, end = [], [], -1, 0
        for depth in range(self.draw.randint(0, WIDE_TREE["num_steps"])):
            if depth >= len(true):
                break
            wrong = (true[depth] + 1) % VOCAB_SIZE
            before = self.draw.randint(0, 1)
            for token in [wrong] * before + [true[depth]] + [wrong + 1] * (1 - before):
                tokens.append(token % VOCAB_SIZE)
                parents.append(last)
            last = len(tokens) - 2 + before
            end = last + 1
        self.ends.add(end)
        return tokens, parents


def consult(monkeypatch: pytest.MonkeyPatch, pair: Pair, prompt_ids: Sequence[Sequence[int]] = PROMPTS, length: int = LENGTH) -> Oracle:
    """Every tree of ``ngram_trie`` comes from an oracle from now on."""
    oracle = Oracle({tuple(prompt): pair.greedy(prompt, length) for prompt in prompt_ids})
    monkeypatch.setattr(TrieProposer, "propose", lambda self, requests: oracle.propose(requests))
    return oracle


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"variant": "none"}, id="none", marks=shows("none")),
        pytest.param(CHAIN, id="chain", marks=shows("eagle3", "chain")),
        pytest.param(TREE, id="tree", marks=shows("eagle3", "tree")),
        pytest.param({"variant": "ngram", **TREE}, id="ngram", marks=shows("ngram", "tree")),
    ],
)
def test_greedy_equals_transformers(pair: Pair, shape: dict[str, Any]) -> None:
    llm = pair.llm(**shape, page_size=4, max_rows=3)
    assert ids(llm.generate(PROMPTS, SamplingParams(max_tokens=LENGTH))) == expected(pair)


def test_every_node_may_be_the_last_accepted_one(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = consult(monkeypatch, pair)
    llm = pair.llm(**HOST, max_rows=3)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=LENGTH))
    assert ids(outputs) == expected(pair)
    assert llm.metrics is not None
    assert 1.5 < llm.metrics.acceptance_length < 4.5
    assert len(oracle.ends) > 5, "ends on both sides of their siblings"


def test_seeded_sampling_equals_plain_decoding(dense: Pair) -> None:
    params = [SamplingParams(max_tokens=LENGTH, temperature=0.8, seed=seed) for seed in range(len(PROMPTS))]
    plain, *others = (ids(dense.llm(**shape, page_size=4).generate(PROMPTS, params)) for shape in ({"variant": "none"}, CHAIN, TREE))
    assert others == [plain, plain]


@pytest.mark.parametrize("shape", [{"variant": "none"}, {"variant": "ngram", **TREE}], ids=["none", "ngram"])
def test_cycles_in_flight_change_nothing(dense: Pair, shape: dict[str, Any]) -> None:
    llm = dense.llm(**shape, page_size=4, max_rows=3, cycles_in_flight=3)
    assert ids(llm.generate(PROMPTS, SamplingParams(max_tokens=LENGTH))) == expected(dense)


def test_preempted_rows_start_from_zero_states(dense: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    consult(monkeypatch, dense)
    made = watch_schedulers(monkeypatch)
    llm = dense.llm(**HOST, max_rows=3, num_pages=14, prefill_tokens_per_cycle=4096)
    assert ids(llm.generate(PROMPTS, SamplingParams(max_tokens=LENGTH))) == expected(dense)
    assert made[-1].preempted > 0


@of_family("Qwen3_5ForCausalLM", "mtp", "chain", "tree")
def test_prediction_head_of_the_same_checkpoint(tmp_path: Path) -> None:
    model = build_hybrid("qwen3_5")
    path = add_heads(write_hf(model, tmp_path), head_tensors("qwen"), mtp_num_hidden_layers=1)
    pair = Pair(path, path, model)
    for shape in (CHAIN, TREE):
        llm = LLM(path, variant="mtp", **SMALL, **shape, page_size=4)
        assert ids(llm.generate(PROMPTS, SamplingParams(max_tokens=LENGTH))) == expected(pair)


def assert_drafts(path: Path, model: Any) -> None:
    """Greedy and sampled, with the head that the target's folder holds, the tokens are the target's own."""
    pair = Pair(path, path, model)
    seeded = [SamplingParams(max_tokens=LENGTH, temperature=0.8, seed=seed) for seed in range(len(PROMPTS))]
    sampled = ids(pair.llm(variant="none", page_size=4).generate(PROMPTS, seeded))
    for shape in (CHAIN, TREE):
        llm = LLM(path, variant="mtp", **SMALL, **shape, page_size=4)
        assert ids(llm.generate(PROMPTS, SamplingParams(max_tokens=LENGTH))) == expected(pair)
        assert ids(llm.generate(PROMPTS, seeded)) == sampled


@pytest.mark.parametrize("family", marked(("qwen3_next", "qwen3_5_moe"), hybrid_of, "mtp", "chain", "tree"))
def test_prediction_head_with_experts(family: str, tmp_path: Path) -> None:
    model = build_hybrid(family)
    path = add_heads(write_hf(model, tmp_path), expert_head(family, stacked=family == "qwen3_5_moe")[0], mtp_num_hidden_layers=1)
    assert_drafts(path, model)


@pytest.mark.parametrize("family", marked(("nemotron_h_moe", "nemotron_h_latent"), hybrid_of, "mtp", "chain", "tree"))
def test_prediction_head_of_one_net_per_layer(family: str, tmp_path: Path) -> None:
    """Its experts come before its attention, or after it."""
    model = build_hybrid(family)
    kinds = ("moe", "full_attention") if family == "nemotron_h_moe" else ("full_attention", "moe")
    config = {"num_nextn_predict_layers": 1, "mtp_layers_block_type": list(kinds)}
    path = add_heads(write_hf(model, tmp_path), mixer_head(family, kinds)[0], **config)
    assert_drafts(path, model)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_small_model_drafts_for_a_hybrid(dense: Pair, shape: dict[str, Any], tmp_path: Path) -> None:
    llm = LLM(dense.target, variant="standalone", draft=write_hf(build_hf("llama"), tmp_path), **SMALL, **shape, page_size=4)
    assert ids(llm.generate(PROMPTS, SamplingParams(max_tokens=LENGTH))) == expected(dense)


def test_pages_are_not_shared(dense: Pair) -> None:
    with pytest.raises(ConfigError, match=r"runtime\.prefix_cache: expected null or false: the target has recurrent layers"):
        dense.llm(variant="none", prefix_cache=True)
    llm = dense.llm(variant="none", page_size=4)
    again = llm.generate([PROMPTS[0], PROMPTS[0]], SamplingParams(max_tokens=LENGTH))
    assert [out.cached_tokens for out in again] == [0, 0]


def test_depths_that_change_and_catching_up(dense: Pair) -> None:
    llm = dense.llm(**TREE, page_size=4, max_rows=4, buckets=[2, 4], depth_per_bucket={2: 3, 4: 0})
    assert ids(llm.generate(PROMPTS, SamplingParams(max_tokens=LENGTH))) == expected(dense)


@pytest.mark.parametrize("shape", [{"variant": "none"}, TREE], ids=["none", "tree"])
def test_states_of_other_rows_keep_their_bits(dense: Pair, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that finished, are free or wait for a lane, poisoned before every cycle; what verification records is poisoned as well."""
    made = watch_schedulers(monkeypatch)
    launch, held = Cycle.launch, []

    def poisoned(self: Cycle, key: Key, message: Message) -> int:
        if not isinstance(key, GraphKey):
            return launch(self, key, message)
        self.arena.poison(("lane",))
        idle_R = idle_rows(self, made[-1])[:-1]
        states = [self.arena[name] for name in ("matrix_RUHKV", "column_RUOE")]
        for state in states:
            state[:-1][idle_R] = torch.nan
        before = [state[:-1][idle_R].clone() for state in states]
        done = launch(self, key, message)
        held.extend(same_bits(state[:-1][idle_R], old) for state, old in zip(states, before, strict=True) if idle_R.any())
        return done

    monkeypatch.setattr(Cycle, "launch", poisoned)
    llm = dense.llm(**shape, page_size=4, max_rows=4, buckets=[3, 4])
    budgets = (15, 3, 8, 1)
    outputs = ids(llm.generate(PROMPTS, [SamplingParams(max_tokens=count) for count in budgets]))
    assert outputs == [dense.greedy(prompt, count) for prompt, count in zip(PROMPTS, budgets, strict=True)]
    assert len(held) > 4 and all(held)


def test_a_checkpoint_without_recurrent_layers_has_no_states(tmp_path: Path) -> None:
    path = write_hf(build_hybrid("qwen3_5", layer_types=["full_attention"] * 4), tmp_path)
    edit_json(path / "config.json")
    llm = LLM(path, variant="none", **SMALL)
    assert not {"matrix_RUHKV", "record_input_UBNE"} & {name for name, *_ in llm.slots()}

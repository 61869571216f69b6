"""P-EAGLE: all levels from one pass over masks, against the published equations; and the output, which is the target's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from graphspec.drafters.p_eagle.facts import read_p_eagle_facts
from graphspec.engine.llm import LLM, SamplingParams
from graphspec.errors import CheckpointError, ConfigError
from graphspec.facts import read_model_facts
from tests.support.checkpoints import VOCAB_SIZE, eagle3_tensors, edit_json, edit_tensors, publish_eagle3
from tests.support.eagle_reference import eagle3_fuse, eagle3_step
from tests.support.engines import SMALL, Pair, ids, prompts
from tests.support.marginal_trees import best_prefixes, prefixes
from tests.support.parallel_checkpoints import HIDDEN, MASK, TAPS, THETA, favouring_target, p_eagle_tensors, write_p_eagle

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

LENGTH = 20
CHAIN = {"num_steps": 5, "topk": 1, "num_draft_tokens": 6}
TREE = {"num_steps": 4, "topk": 3, "num_draft_tokens": 12}
DEEP = {"num_steps": 20, "topk": 4, "num_draft_tokens": 64}
WIDE = {"num_steps": 6, "topk": 8, "num_draft_tokens": 128}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return favouring_target(tmp_path_factory.mktemp("favouring"))


@pytest.fixture(scope="module")
def heads(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Tensor]]]:
    """Folder and raw tensors: two layers and a vocabulary of its own; one layer, and the target's output layer."""
    path, made = tmp_path_factory.mktemp("heads"), {}
    for name, options, layout in (
        ("reduced", {"num_layers": 2, "extras": ("fc_norm",)}, "speculators"),
        ("full", {"num_layers": 1, "reduced": False, "extras": ("fc_norm",)}, "sglang"),
    ):
        tensors = p_eagle_tensors(pair, **options)
        made[name] = (write_p_eagle(path / name, tensors, layout), tensors)
    return made


def make(pair: Pair, draft: Path, **overrides: Any) -> LLM:
    return LLM(pair.target, variant="p_eagle", draft=draft, **{**SMALL, **overrides})


def marginals(pair: Pair, raw: dict[str, Tensor], tokens: list[int], steps: int) -> Tensor:
    """Log-probabilities ``[S, V]`` after ``tokens``, the last of which is the root: every row computed anew, in float64."""
    w = {name: tensor.double() for name, tensor in raw.items()}
    states = pair.hf(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    feature = torch.cat([states[layer][0, :-1] for layer in TAPS], -1).double()
    feature = torch.cat((feature, w["mask_hidden"].expand(steps - 1, -1)))
    embedding = pair.hf.model.embed_tokens.weight.detach().double()[[*tokens[1:], *[MASK] * (steps - 1)]]
    _, out = eagle3_step(w, embedding, eagle3_fuse(w, feature, HIDDEN), 0, theta=THETA)
    head = w.get("lm_head.weight", pair.hf.lm_head.weight.detach().double())
    own = (out[-steps:] @ head.T).log_softmax(-1)
    if "d2t" not in raw:
        return own
    return torch.full((steps, VOCAB_SIZE), -torch.inf, dtype=torch.float64).index_copy(1, torch.arange(len(raw["d2t"])) + raw["d2t"], own)


@torch.no_grad()
@pytest.mark.parametrize("name", ["reduced", "full"])
@pytest.mark.parametrize("length", [2, 9, 21])
def test_the_tree_is_that_of_the_equations(pair: Pair, heads: Any, name: str, length: int) -> None:
    """Prompts shorter than a chunk, on its border, over several chunks: the best prefixes of the marginals, the window one entry wide."""
    draft, raw = heads[name]
    llm = make(pair, draft, page_size=4, num_steps=5, topk=19, num_draft_tokens=20)  # no level is wider
    prompt = prompts(1, (length,), VOCAB_SIZE, seed=length)[0]
    tree = llm.draft_tree(prompt)
    assert prefixes(tree) == best_prefixes(marginals(pair, raw, [*prompt, tree.token_N[0]], 5), 19)


@torch.no_grad()
def test_every_cycle_drafts_what_the_equations_draft(pair: Pair, heads: Any) -> None:
    from tests.drafters.test_variants import Watch

    draft, raw = heads["reduced"]
    llm = make(pair, draft, **CHAIN, page_size=4)
    prompt, watch, steps = prompts(1, (9,), VOCAB_SIZE)[0], Watch(llm), CHAIN["num_steps"]
    known = [*prompt, *llm.generate(prompt, SamplingParams(max_tokens=30, ignore_eos=True), launcher=watch)[0].token_ids]
    at, lengths = len(prompt), set()
    for nodes in watch.nodes:
        assert nodes[1:] == marginals(pair, raw, known[: at + 1], steps).argmax(-1).tolist(), f"root at {at}"
        taken = next((d for d in range(steps) if at + 1 + d >= len(known) or nodes[1 + d] != known[at + 1 + d]), steps)
        lengths.add(taken)
        at += taken + 1
    assert len(lengths) > 2, "runs of several lengths, or the windows were not tested"


COVERED = ("greedy equals transformers", "seeded sampling equals plain decoding", "filters, penalties and bias mixed in a batch")


@pytest.mark.parametrize(
    ("name", "shape", "page_size", "rows", "run_ahead"),
    [
        pytest.param(
            "reduced", CHAIN, 16, 2, 2, marks=pytest.mark.covers("p_eagle", *COVERED, "chain", "pages of 16", "batch", "run-ahead")
        ),
        pytest.param("full", TREE, 1, 4, 0, marks=pytest.mark.covers("p_eagle", *COVERED, "tree", "pages of 1", "batch")),
        pytest.param("reduced", WIDE, 16, 4, 1, marks=pytest.mark.covers("p_eagle", *COVERED, "tree", "pages of 16", "batch", "run-ahead")),
        pytest.param("full", DEEP, 16, 3, 0, marks=pytest.mark.covers("p_eagle", *COVERED, "tree", "pages of 16", "batch")),
    ],
    ids=["chain", "tree", "wide", "deep"],
)
def test_output_is_the_targets_own(
    pair: Pair, heads: Any, name: str, shape: dict[str, int], page_size: int, rows: int, run_ahead: int
) -> None:
    from tests.drafters.test_variants import mixed

    llm = make(pair, heads[name][0], **shape, page_size=page_size, max_rows=rows, cycles_in_flight=run_ahead + 1)
    plain = LLM(pair.target, variant="none", **SMALL)
    asked = prompts(4, (3, 9, 17, 5), VOCAB_SIZE)
    assert ids(llm.generate(asked, SamplingParams(max_tokens=LENGTH))) == [pair.greedy(prompt, LENGTH) for prompt in asked]
    assert llm.metrics is not None and 1.2 < llm.metrics.acceptance_length < shape["num_steps"] + 0.95
    for params in ([SamplingParams(max_tokens=LENGTH, temperature=0.8, seed=50 + i) for i in range(4)], mixed(1.0, 4, LENGTH)):
        assert ids(llm.generate(asked, params)) == ids(plain.generate(asked, params))


@pytest.mark.kernels
@pytest.mark.covers("p_eagle", "compiled")
def test_compiled_cycles_give_the_targets_own_tokens(pair: Pair, heads: Any) -> None:
    llm = make(pair, heads["reduced"][0], **TREE, runtime="compiled", buckets=[2], max_rows=2, cycles_in_flight=2)
    asked = prompts(3, vocab=VOCAB_SIZE)
    assert ids(llm.generate(asked, SamplingParams(max_tokens=20))) == [pair.greedy(prompt, 20) for prompt in asked]


@pytest.mark.covers("p_eagle", "preemption and exact resumption")
def test_preemption_resumes_exactly(pair: Pair, heads: Any) -> None:
    llm = make(pair, heads["reduced"][0], **TREE, page_size=4, max_rows=4, num_pages=26)
    asked = prompts(4, (9, 12, 5, 16), VOCAB_SIZE)
    outputs = llm.generate(asked, SamplingParams(max_tokens=20, ignore_eos=True))
    assert ids(outputs) == [pair.greedy(prompt, 20, ignore_eos=True) for prompt in asked]


@pytest.mark.covers("p_eagle", "adaptive depth")
def test_depths_change_and_the_drafter_catches_up(pair: Pair, heads: Any) -> None:
    """Four rows decode plainly; with fewer of them drafting begins, and the head reads what it has missed."""
    llm = make(pair, heads["reduced"][0], **TREE, max_rows=4, buckets=[1, 2, 4], depth_per_bucket={4: 0, 2: 2})
    asked, lengths = prompts(4, (9, 12, 5, 16), VOCAB_SIZE), (4, 9, 16, 30)
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate(asked, params)
    assert ids(outputs) == [pair.greedy(prompt, n, ignore_eos=True) for prompt, n in zip(asked, lengths, strict=True)]
    assert outputs[3].metrics.cycles < 28, "drafts after catching up are accepted now and then"


@pytest.mark.covers("p_eagle", "accept=rejection")
def test_rejection_draws_from_the_marginals(pair: Pair, heads: Any) -> None:
    """Greedy rows do not notice the rule; a drawn token has the probability that is kept for the rule."""
    llm = make(pair, heads["reduced"][0], **CHAIN, rule="rejection")
    asked = prompts(3, (9, 12, 5), VOCAB_SIZE)
    params = [SamplingParams(max_tokens=30, temperature=t, seed=7, ignore_eos=True) for t in (0.0, 1.0, 0.0)]
    outputs = llm.generate(asked, params)
    assert [outputs[i].token_ids for i in (0, 2)] == [pair.greedy(asked[i], 30, ignore_eos=True) for i in (0, 2)]
    kept_SV = llm.cycle.arena["draft_prob_BSV"][1]
    assert torch.allclose(kept_SV.sum(-1), torch.ones(CHAIN["num_steps"]))
    drawn_S = llm.cycle.arena["candidate_token_BM"].flatten()[CHAIN["num_steps"] : 2 * CHAIN["num_steps"]]
    assert bool((kept_SV.gather(1, drawn_S[:, None]) > 0).all())


def test_coupled_noise_raises_acceptance(pair: Pair, heads: Any) -> None:
    """The same output in fewer cycles."""
    asked = prompts(6, vocab=VOCAB_SIZE)
    params = [SamplingParams(max_tokens=40, temperature=1.5, seed=i, ignore_eos=True) for i in range(6)]
    found = {noise: make(pair, heads["full"][0], **CHAIN, draft_noise=noise) for noise in ("coupled", "none")}
    outputs = {noise: llm.generate(asked, params) for noise, llm in found.items()}
    assert ids(outputs["coupled"]) == ids(outputs["none"])
    coupled, none = (found[noise].metrics.acceptance_length for noise in ("coupled", "none"))
    assert coupled > 1.15 * none


@pytest.mark.parametrize(
    ("edit", "key", "expected"),
    [
        ({"mask_token_id": VOCAB_SIZE}, "mask_token_id", f"vocabulary of {VOCAB_SIZE}"),
        ({"mask_token_id": None}, "mask_token_id", "an integer"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "mask_token_id": None}, "architectures", "variant=eagle3"),
        ({"architectures": ["DFlashDraftModel"]}, "architectures", "a P-EAGLE head"),
        ({"block_size": 8}, "block_size", "absent"),
    ],
)
def test_other_heads_are_refused(pair: Pair, tmp_path: Path, edit: dict[str, Any], key: str, expected: str) -> None:
    draft = write_p_eagle(tmp_path / "draft", p_eagle_tensors(pair))
    edit_json(draft / "config.json", **edit)
    with pytest.raises(CheckpointError) as raised:
        read_p_eagle_facts(draft, read_model_facts(pair.target))
    assert key in str(raised.value) and expected in str(raised.value)


def test_a_head_without_the_learned_feature_is_refused(pair: Pair, tmp_path: Path) -> None:
    draft = write_p_eagle(tmp_path / "draft", p_eagle_tensors(pair))
    edit_tensors(draft / "model.safetensors", "mask_hidden")
    with pytest.raises(CheckpointError, match=r"mask_hidden.*EAGLE-3 head"):
        make(pair, draft)
    edit_tensors(draft / "model.safetensors", mask_hidden=torch.zeros(1, HIDDEN))
    with pytest.raises(CheckpointError, match="mask_hidden"):
        make(pair, draft)


def test_the_other_spelling_of_the_mask(pair: Pair, tmp_path: Path) -> None:
    draft = write_p_eagle(
        tmp_path / "draft", p_eagle_tensors(pair), mask_token_id=None, ptd_token_id=7, parallel_drafting=True,
        architectures=["LlamaForCausalLMEagle3"],
    )  # fmt: skip
    assert read_p_eagle_facts(draft, read_model_facts(pair.target)).mask_token_id == 7


def test_an_eagle3_head_names_the_variant(pair: Pair, tmp_path: Path) -> None:
    draft = publish_eagle3(tmp_path / "draft", eagle3_tensors(num_taps=2), "sglang", taps=TAPS)
    with pytest.raises(CheckpointError, match="variant=eagle3"):
        read_p_eagle_facts(draft, read_model_facts(pair.target))


def test_a_static_tree_is_refused(pair: Pair, heads: Any) -> None:
    with pytest.raises(ConfigError, match=r"variant\.tree_choices.*step by step"):
        make(pair, heads["full"][0], tree_choices=[[0], [1], [0, 0]])

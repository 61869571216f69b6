"""P-EAGLE: all levels from one pass over masks, against the published equations; its acceptance, and configs that are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from graphspec.api.llm import LLM, SamplingParams, generate_through
from graphspec.drafters.p_eagle.facts import read_p_eagle_facts
from graphspec.errors import CheckpointError, ConfigError
from graphspec.facts import read_model_facts
from tests.support.checkpoints import VOCAB_SIZE, eagle3_tensors, edit_json, edit_tensors, publish_eagle3
from tests.support.eagle_reference import eagle3_fuse, eagle3_step
from tests.support.engines import SMALL, Pair, ids, prompts
from tests.support.marginal_trees import best_prefixes, prefixes
from tests.support.parallel_checkpoints import (
    HIDDEN,
    MASK,
    TAPS,
    THETA,
    ParallelDraft,
    favouring_target,
    over_targets,
    p_eagle_tensors,
    parallel_drafts,
    write_p_eagle,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

CHAIN = {"num_steps": 5, "topk": 1, "num_draft_tokens": 6}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return favouring_target(tmp_path_factory.mktemp("favouring"))


@pytest.fixture(scope="module")
def heads(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ParallelDraft]:
    return parallel_drafts(pair, tmp_path_factory.mktemp("heads"))


def marginals(pair: Pair, raw: dict[str, Tensor], tokens: list[int], steps: int) -> Tensor:
    """Log-probabilities ``[S, V]`` after ``tokens``, the last of which is the root: every row recomputed, in float64."""
    w = {name: tensor.double() for name, tensor in raw.items()}
    states = pair.hf(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    feature = torch.cat([states[layer][0, :-1] for layer in TAPS], -1).double()
    feature = torch.cat((feature, w["mask_hidden"].expand(steps - 1, -1)))
    embedding = pair.hf.model.embed_tokens.weight.detach().double()[[*tokens[1:], *[MASK] * (steps - 1)]]
    _, out = eagle3_step(w, embedding, eagle3_fuse(w, feature, HIDDEN), 0, theta=THETA)
    head = w.get("lm_head.weight", pair.hf.lm_head.weight.detach().double())
    own = (out[-steps:] @ head.T).log_softmax(-1)
    return over_targets(raw, own)


@torch.no_grad()
@pytest.mark.parametrize("name", ["reduced", "full"])
@pytest.mark.parametrize("length", [2, 9, 21])
def test_the_tree_is_that_of_the_equations(pair: Pair, heads: Any, name: str, length: int) -> None:
    """Prompts shorter than a chunk, on its border, over several chunks: the best prefixes of the marginals, the window one entry wide."""
    raw = heads[name].tensors
    llm = heads[name].llm(pair, page_size=4, num_steps=5, topk=19, num_draft_tokens=20)  # no level is wider
    prompt = prompts(1, (length,), VOCAB_SIZE, seed=length)[0]
    tree = llm.draft_tree(prompt)
    assert prefixes(tree) == best_prefixes(marginals(pair, raw, [*prompt, tree.token_N[0]], 5), 19)


@torch.no_grad()
def test_every_cycle_drafts_what_the_equations_draft(pair: Pair, heads: Any) -> None:
    from tests.drafters.test_variants import Watch

    raw = heads["reduced"].tensors
    llm = heads["reduced"].llm(pair, **CHAIN, page_size=4)
    prompt, watch, steps = prompts(1, (9,), VOCAB_SIZE)[0], Watch(llm), CHAIN["num_steps"]
    known = [*prompt, *generate_through(llm, watch, prompt, SamplingParams(max_tokens=30, ignore_eos=True))[0].token_ids]
    at, lengths = len(prompt), set()
    for nodes in watch.nodes:
        assert nodes[1:] == marginals(pair, raw, known[: at + 1], steps).argmax(-1).tolist(), f"root at {at}"
        taken = next((d for d in range(steps) if at + 1 + d >= len(known) or nodes[1 + d] != known[at + 1 + d]), steps)
        lengths.add(taken)
        at += taken + 1
    assert len(lengths) > 2, "runs of several lengths, or the windows were not tested"


def test_rejection_draws_from_the_marginals(pair: Pair, heads: dict[str, ParallelDraft]) -> None:
    """A drawn token has the probability that is kept for the rule."""
    llm = heads["reduced"].llm(pair, **CHAIN, rule="rejection")
    params = [SamplingParams(max_tokens=30, temperature=t, seed=7, ignore_eos=True) for t in (0.0, 1.0, 0.0)]
    llm.generate(prompts(3, (9, 12, 5), VOCAB_SIZE), params)
    kept_SV = llm.cycle.arena["draft_prob_BSV"][1]
    assert torch.allclose(kept_SV.sum(-1), torch.ones(CHAIN["num_steps"]))
    drawn_S = llm.cycle.arena["candidate_token_BM"].flatten()[CHAIN["num_steps"] : 2 * CHAIN["num_steps"]]
    assert bool((kept_SV.gather(1, drawn_S[:, None]) > 0).all())


def test_coupled_noise_raises_acceptance(pair: Pair, heads: Any) -> None:
    """The same output in fewer cycles."""
    prompt_ids = prompts(6, vocab=VOCAB_SIZE)
    params = [SamplingParams(max_tokens=40, temperature=1.5, seed=i, ignore_eos=True) for i in range(6)]
    found = {noise: heads["full"].llm(pair, **CHAIN, draft_noise=noise) for noise in ("coupled", "none")}
    outputs = {noise: llm.generate(prompt_ids, params) for noise, llm in found.items()}
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
        LLM(pair.target, variant="p_eagle", draft=draft, **SMALL)
    edit_tensors(draft / "model.safetensors", mask_hidden=torch.zeros(1, HIDDEN))
    with pytest.raises(CheckpointError, match="mask_hidden"):
        LLM(pair.target, variant="p_eagle", draft=draft, **SMALL)


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
        heads["full"].llm(pair, tree_choices=[[0], [1], [0, 0]])

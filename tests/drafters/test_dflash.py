"""Block drafters against the published equations, written out from the raw tensors; and configs that are refused."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from graphspec.api.llm import LLM, SamplingParams, generate_through
from graphspec.drafters.dflash.facts import default_layers, read_dflash_facts
from graphspec.errors import CheckpointError, ConfigError
from graphspec.facts import read_model_facts
from graphspec.models.quantise import quantise
from tests.support.checkpoints import VOCAB_SIZE, eagle3_tensors, edit_json, edit_tensors, publish_eagle3
from tests.support.eagle_reference import project, rms, rotate
from tests.support.engines import SMALL, Pair, prompts
from tests.support.marginal_trees import DraftedTree, best_prefixes, prefixes
from tests.support.parallel_checkpoints import (
    BLOCK,
    MASK,
    SLIDING,
    TAPS,
    THETA,
    WINDOW,
    ParallelDraft,
    dflash_tensors,
    favouring_target,
    over_targets,
    parallel_drafts,
    write_dflash,
)

if TYPE_CHECKING:
    from torch import Tensor

DEMO = Path(str(files("graphspec"))) / "demo"

# causal layers, sliding layers, whether rows look one position ahead
KINDS: dict[str, tuple[tuple[bool, ...], tuple[bool, ...], bool]] = {
    "dflash": ((False, False), (False, False), False),
    "sliding": ((True, False, True), (True, False, True), False),
    "looking_ahead": ((False, False, False), (True, False, True), False),
    "jetspec": ((True, True), (False, False), False),
    "speculators": ((False, False), (False, False), True),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return favouring_target(tmp_path_factory.mktemp("favouring"))


@pytest.fixture(scope="module")
def drafts(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ParallelDraft]:
    return parallel_drafts(pair, tmp_path_factory.mktemp("drafts"))


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """``[T, Q * D]`` of heads over groups of keys; ``seen`` is ``[T, U]``."""
    group = query.shape[1] // key.shape[1]
    heads = []
    for head in range(query.shape[1]):
        score = (query[:, head] @ key[:, head // group].T / query.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
        heads.append(score.softmax(-1) @ value[:, head // group])
    return torch.cat(heads, -1)


def marginals(pair: Pair, name: str, raw: dict[str, Tensor], tokens: list[int], steps: int, taps: tuple[int, ...] = TAPS) -> Tensor:
    """Log-probabilities ``[S, V]`` after ``tokens``, the last of which is the anchor, in float64: one block over the whole context."""
    causal, sliding, ahead = KINDS[name]
    w = {key: tensor.double() for key, tensor in raw.items()}
    states = pair.hf(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    context = rms(project(w, "fc", torch.cat([states[layer][0, :-1] for layer in taps], -1).double()), w["hidden_norm.weight"])
    anchor, block = len(tokens) - 1, [tokens[-1], *[MASK] * (BLOCK - 1)]
    hidden = pair.hf.model.embed_tokens.weight.detach().double()[block]
    row_T, at_U = anchor + torch.arange(BLOCK)[:, None], torch.arange(anchor + BLOCK)[None]
    for layer, (alone, short) in enumerate(zip(causal, sliding, strict=True)):
        at = f"layers.{layer}.self_attn."
        x = rms(hidden, w[f"layers.{layer}.input_layernorm.weight"])
        query = rotate(rms(project(w, f"{at}q_proj", x).unflatten(-1, (-1, 16)), w[f"{at}q_norm.weight"]), anchor, THETA)
        keys, values = [], []
        for source, first in ((context, 0), (x, anchor)):
            keys.append(rotate(rms(project(w, f"{at}k_proj", source).unflatten(-1, (-1, 16)), w[f"{at}k_norm.weight"]), first, THETA))
            values.append(project(w, f"{at}v_proj", source).unflatten(-1, (-1, 16)))
        seen = (at_U <= row_T) if alone else torch.ones(BLOCK, anchor + BLOCK, dtype=torch.bool)
        seen = seen & (at_U > row_T - WINDOW) if short else seen
        hidden = hidden + project(w, f"{at}o_proj", attend(query, torch.cat(keys), torch.cat(values), seen))
        y = rms(hidden, w[f"layers.{layer}.post_attention_layernorm.weight"])
        gate = project(w, f"layers.{layer}.mlp.gate_proj", y)
        hidden = hidden + project(w, f"layers.{layer}.mlp.down_proj", gate * gate.sigmoid() * project(w, f"layers.{layer}.mlp.up_proj", y))
    out = rms(hidden, w["norm.weight"])[(0 if ahead else 1) :][:steps]
    own = (out @ w.get("lm_head.weight", pair.hf.lm_head.weight.detach().double()).T).log_softmax(-1)
    return over_targets(raw, own)


@torch.no_grad()
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("length", [2, 9, 21])
@pytest.mark.parametrize("runtime", ["eager", "compiled"])
def test_the_tree_is_that_of_the_equations(pair: Pair, drafts: Any, name: str, length: int, runtime: str) -> None:
    """Prompts shorter than a chunk, on its border, over several chunks. Taps or slots that are off by one would show.

    Compiled, layers and the context's keys and values are one native op each.
    """
    draft, raw = drafts[name], drafts[name].tensors
    llm = draft.llm(pair, page_size=4, num_steps=5, topk=15, num_draft_tokens=16, runtime=runtime)  # no level is wider
    assert (llm.decoders["draft"] == "one native op per pass") == (runtime == "compiled"), llm.decoders
    prompt = prompts(1, (length,), VOCAB_SIZE, seed=length)[0]
    tree = llm.draft_tree(prompt)
    known = [*prompt, tree.token_N[0]]
    own = marginals(pair, name, raw, known, 5)
    assert prefixes(tree) == best_prefixes(own, 15)
    first_K = llm.cycle.arena["candidate_score_BM"][0, :15].double()

    def error(marginal_SV: Tensor) -> float:
        return float((marginal_SV[0].sort(descending=True).values[:15] - first_K).abs().max())

    assert error(own) < 1e-4
    assert error(marginals(pair, name, raw, known, 5, tuple(i + 1 for i in TAPS))) > 1e-3
    assert error(marginals(pair, name, raw, [known[0], *known], 5)) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("name", ["sliding", "jetspec", "speculators"])
def test_every_cycle_drafts_what_the_equations_draft(pair: Pair, drafts: Any, name: str) -> None:
    from tests.drafters.test_variants import Watch

    class Trees(Watch):
        def launch(self, key: Any, message: Any) -> int:
            ticket = super().launch(key, message)
            if len(self.nodes) > len(trees):
                views = self.cycle.arena.views(1)
                trees.append(DraftedTree(views.node_token_BN[0].tolist(), views.node_parent_BN[0].tolist()))
            return ticket

    draft, raw = drafts[name], drafts[name].tensors
    trees: list[DraftedTree] = []
    llm = draft.llm(pair, num_steps=4, topk=15, num_draft_tokens=16, page_size=4, draft_noise="none")
    prompt = prompts(1, (9,), VOCAB_SIZE)[0]
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.7, seed=5)
    known = [*prompt, *generate_through(llm, Trees(llm), prompt, params)[0].token_ids]
    at, lengths = len(prompt), set()
    for tree in trees:
        drafted = prefixes(tree)
        assert drafted == best_prefixes(marginals(pair, name, raw, known[: at + 1], 4), 15), f"root at {at}"
        taken = max((d for d in range(5) if at + d < len(known) and (d == 0 or tuple(known[at + 1 : at + 1 + d]) in drafted)), default=0)
        lengths.add(taken)
        at += taken + 1
    assert len(lengths) > 1, "runs of several lengths, or the windows were not tested"


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"mask_token_id": VOCAB_SIZE}, "mask_token_id", f"vocabulary of {VOCAB_SIZE}"),
    ({"mask_token_id": None}, "mask_token_id", "an integer"),
    ({"block_size": None}, "block_size", "an integer"),
    ({"target_layer_ids": [0, 4]}, "target_layer_ids", "from 0 to 3"),
    ({"target_layer_ids": [2, 0]}, "target_layer_ids", "ascending"),
    ({"conv_kernel_size": 2}, "conv_kernel_size", "DFlash2 is not supported"),
    ({"markov_rank": 256}, "markov_rank", "DSpark is not supported"),
    ({"gru_hidden_dim": 1024}, "gru_hidden_dim", "Domino is not supported"),
    ({"projector_type": "domino"}, "projector_type", "absent or null"),
    ({"xpress_rank": 256}, "xpress_rank", "XPress is not supported"),
    ({"lilicorr_candidate_topk": 8}, "lilicorr_candidate_topk", "LiLiCorr is not supported"),
    ({"attention_value_scale": 0.5}, "attention_value_scale", "absent, null or 1"),
    ({"something_new": 1}, "something_new", "not supported"),
]


@pytest.mark.parametrize(("edit", "key", "expected"), REFUSED)
def test_what_cannot_be_drafted_is_refused(pair: Pair, tmp_path: Path, edit: dict[str, Any], key: str, expected: str) -> None:
    draft = write_dflash(tmp_path / "draft", dflash_tensors(pair), **edit)
    with pytest.raises(CheckpointError) as raised:
        read_dflash_facts(draft, read_model_facts(pair.target))
    assert key in str(raised.value) and expected in str(raised.value)


def test_another_number_of_target_layers_is_a_warning(pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It decides which layers are tapped where the config names none."""
    draft, facts = write_dflash(tmp_path / "draft", dflash_tensors(pair)), read_model_facts(pair.target)
    edit_json(draft / "config.json", num_target_layers=8)
    assert read_dflash_facts(draft, facts).tap_layers == TAPS
    assert [(r.levelname, "num_target_layers is 8" in r.getMessage()) for r in caplog.records] == [("WARNING", True)]
    deep = replace(facts, num_layers=9)
    edit_json(draft / "config.json", dflash_config={"mask_token_id": 0, "block_size": 4})
    assert read_dflash_facts(draft, deep).tap_layers == (2, 6), "the outputs of layers 1 and 5, as in a target of 8"
    edit_json(draft / "config.json", num_target_layers=9)
    assert read_dflash_facts(draft, deep).tap_layers == (2, 7)


def test_a_draft_of_another_target_is_refused(pair: Pair, tmp_path: Path) -> None:
    draft, facts = write_dflash(tmp_path / "draft", dflash_tensors(pair)), read_model_facts(pair.target)
    edit_json(draft / "config.json", num_target_layers=4, architectures=["LlamaForCausalLMEagle3"])
    with pytest.raises(CheckpointError, match="a block drafter"):
        read_dflash_facts(draft, facts)
    edit_json(draft / "config.json", architectures=["DFlashDraftModel"])
    edit_tensors(draft / "model.safetensors", **{"fc.weight": torch.zeros(48, 48)})
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        LLM(pair.target, variant="dflash", draft=draft, **SMALL)


def test_the_block_bounds_the_depth(pair: Pair, drafts: Any) -> None:
    """What is unset is the whole block; a fill-in layout drafts one token less than the block has rows."""
    assert drafts["dflash"].llm(pair).plan.shape.numbers == [5, 1, 6]
    assert drafts["speculators"].llm(pair).plan.shape.numbers == [6, 1, 7]
    with pytest.raises(ConfigError, match=r"num_steps.*at most 5"):
        drafts["dflash"].llm(pair, num_steps=6)


def test_default_layers_are_the_published_ones() -> None:
    assert default_layers(36, 5) == (1, 9, 17, 25, 33)
    assert default_layers(64, 5) == (1, 16, 31, 46, 61)


@pytest.mark.parametrize(
    ("keys", "causal"), [({}, (True, False, True)), ({"causal": False}, (False,) * 3), ({"causal": True}, (True,) * 3)]
)
def test_causality_of_a_config_applies_to_every_layer(pair: Pair, tmp_path: Path, keys: dict[str, bool], causal: tuple[bool, ...]) -> None:
    draft = write_dflash(tmp_path / "draft", dflash_tensors(pair, num_layers=3), layer=SLIDING, **keys)
    assert read_dflash_facts(draft, read_model_facts(pair.target)).causal == causal


def test_a_head_of_another_variant_is_called_a_block_drafter(pair: Pair, drafts: dict[str, ParallelDraft], tmp_path: Path) -> None:
    """By its tensors, where the config could be that of an EAGLE-3 head."""
    draft = publish_eagle3(tmp_path / "draft", eagle3_tensors(num_taps=2), "sglang", taps=TAPS)
    save_file(drafts["dflash"].tensors, draft / "model.safetensors")
    with pytest.raises(CheckpointError, match="this looks like a block drafter: variant=dflash"):
        LLM(pair.target, variant="eagle3", draft=draft, **SMALL)


def test_a_native_block_drafts_as_one_that_runs_op_by_op(tmp_path: Path) -> None:
    """The demo's own draft in codes of 8 bits, which the projection of its context has too."""
    keys = {"num_steps": 4, "topk": 4, "num_draft_tokens": 16, "draft_activations": "full"}
    quantise(DEMO / "dflash", tmp_path / "out", "int8", ["layers", "fc"])
    trees = []
    for runtime in ("eager", "compiled"):
        with LLM("demo", variant="dflash", draft=tmp_path / "out", **{**SMALL, **keys, "runtime": runtime}) as llm:
            trees.append([llm.draft_tree("def fib(n):\n    if", cycles) for cycles in (1, 2, 5)])
    assert trees[0] == trees[1]

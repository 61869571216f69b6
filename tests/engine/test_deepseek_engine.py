"""DeepSeek's and GLM's targets inside the engine: every token is transformers' own, and every tree is the one its prediction head drafts.

The head is transformers' as well: candidates are drafted a second time by it, without cache, pages or windows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from graphspec import LLM, SamplingParams
from graphspec.api.llm import generate_through
from tests.drafters.test_variants import Watch
from tests.support.checkpoints import VOCAB_SIZE, eagle3_tensors, write_eagle3
from tests.support.engines import ids, prompts
from tests.support.features import of_family
from tests.support.moe_checkpoints import HIDDEN, YARN, HeadOfTransformers, add_heads, greedy, head_tensors, mixture_of, write_mixture

if TYPE_CHECKING:
    from pathlib import Path

CHAIN, TREE = {"num_steps": 3, "topk": 1, "num_draft_tokens": 4}, {"num_steps": 3, "topk": 2, "num_draft_tokens": 6}
WIDE = {"num_steps": 4, "topk": 3, "num_draft_tokens": 12}
STATIC = {"tree_choices": [[0], [1], [0, 0], [1, 0], [0, 0, 0]]}
SMALL = {"runtime": "eager", "prefill_chunks": [4, 8]}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "deepseek_v3": {"rope_parameters": YARN},
    "glm4_moe": {},
    "glm4_moe_lite": {"mlp_layer_types": ["sparse", "dense"]},
}
LENGTH, LAYERS = 14, 2


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any, HeadOfTransformers]]:
    """Per family: the folder, head included; the model as transformers runs it; its head likewise."""
    made = {}
    for family, keys in FAMILIES.items():
        keys = {**keys, "max_position_embeddings": 96}
        path, model = write_mixture(tmp_path_factory.mktemp(family), family, easy=True, num_hidden_layers=LAYERS, **keys)
        head = head_tensors(family, LAYERS, **keys)
        made[family] = (add_heads(path, head), model, HeadOfTransformers(model, head))
    return made


CASES: list[tuple[str, str, dict[str, Any], int, int]] = [
    ("deepseek_v2", "none", {}, 16, 3),
    ("deepseek_v3", "none", {}, 1, 1),
    ("deepseek_v3", "none", {}, 16, 3),
    *(("deepseek_v3", "mtp", shape, page_size, rows) for shape in (CHAIN, TREE) for page_size in (1, 16) for rows in (1, 3)),
    ("glm4_moe", "none", {}, 16, 3),
    ("glm4_moe", "mtp", CHAIN, 4, 3),
    ("glm4_moe", "mtp", TREE, 16, 3),
    ("glm4_moe_lite", "none", {}, 4, 3),
    ("glm4_moe_lite", "mtp", CHAIN, 16, 1),
    ("glm4_moe_lite", "mtp", TREE, 4, 3),
    ("deepseek_v2", "mtp", CHAIN, 16, 1),
    ("deepseek_v2", "mtp", TREE, 1, 3),
    ("deepseek_v3", "mtp", WIDE, 4, 3),
    ("deepseek_v3", "mtp", STATIC, 4, 3),
    ("deepseek_v3", "ngram", {}, 4, 3),
]


def cases() -> list[Any]:
    """:data:`CASES` with what each shows."""
    found = []
    for family, variant, shape, *rest in CASES:
        kind = [] if variant != "mtp" else ["chain" if shape.get("topk") == 1 else "tree"]
        found.append(pytest.param(family, variant, shape, *rest, marks=of_family(mixture_of(family), variant, *kind)))
    return found


@pytest.mark.parametrize(("family", "variant", "shape", "page_size", "rows"), cases())
def test_output_is_the_targets_own(targets: Any, family: str, variant: str, shape: dict[str, Any], page_size: int, rows: int) -> None:
    path, model, _ = targets[family]
    llm = LLM(path, variant=variant, **shape, **SMALL, page_size=page_size, max_rows=rows)
    prompt_ids = prompts(4 if rows > 1 else 2, vocab=VOCAB_SIZE)
    assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=LENGTH))) == [greedy(model, prompt, LENGTH) for prompt in prompt_ids]
    assert llm.metrics is not None
    if variant == "mtp" and rows > 1:
        assert 1.3 < llm.metrics.acceptance_length < llm.plan.shape.num_steps + 0.95, "runs of several lengths, or the test shows nothing"


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_seeded_sampling_equals_plain_decoding(targets: Any, shape: dict[str, Any]) -> None:
    path, _, _ = targets["deepseek_v3"]
    prompt_ids = prompts(3, vocab=VOCAB_SIZE)
    params = [SamplingParams(max_tokens=LENGTH, temperature=0.8, seed=i, top_p=0.9 if i else 1.0) for i in range(3)]
    plain, drafted = (
        LLM(path, variant=variant, **keys, **SMALL, page_size=4, max_rows=3) for variant, keys in (("none", {}), ("mtp", shape))
    )
    assert ids(drafted.generate(prompt_ids, params)) == ids(plain.generate(prompt_ids, params))


def test_cycles_in_flight_and_preemption_change_nothing(targets: Any) -> None:
    path, model, _ = targets["deepseek_v3"]
    prompt_ids = prompts(4, (9, 12, 5, 16), VOCAB_SIZE)
    expected = [greedy(model, prompt, LENGTH) for prompt in prompt_ids]
    for keys in ({"cycles_in_flight": 3, "max_rows": 2}, {"num_pages": 24, "max_rows": 4}):
        llm = LLM(path, variant="mtp", **TREE, **SMALL, page_size=4, **keys)
        assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=LENGTH))) == expected


@of_family("DeepseekV3ForCausalLM", "eagle3", "tree")
def test_an_eagle3_head_with_a_latent_target(targets: Any, tmp_path: Path) -> None:
    """The draft's pool has keys and values, the target's latent rows."""
    path, model, _ = targets["deepseek_v3"]
    tensors = eagle3_tensors(hidden_size=HIDDEN, target_hidden_size=HIDDEN, vocab_size=VOCAB_SIZE, num_taps=2)
    taps = {"eagle_aux_hidden_state_layer_ids": [-1, 0], "use_aux_hidden_state": True}
    draft = write_eagle3(tmp_path, tensors, eagle_config=taps, max_position_embeddings=96)
    llm = LLM(path, variant="eagle3", draft=draft, **TREE, **SMALL, page_size=4, max_rows=3)
    shapes = {name: shape for name, shape, _, _ in llm.slots()}
    assert (shapes["target_kv"][1], shapes["draft_kv"][1]) == (1, 2)
    prompt_ids = prompts(3, vocab=VOCAB_SIZE)
    assert ids(llm.generate(prompt_ids, SamplingParams(max_tokens=12))) == [greedy(model, prompt, 12) for prompt in prompt_ids]


def test_a_small_latent_model_as_draft(targets: Any) -> None:
    """The target drafts for itself: every draft is accepted."""
    path, _, _ = targets["deepseek_v2"]
    llm = LLM(path, variant="standalone", draft=path, **CHAIN, **SMALL, page_size=4, max_rows=3)
    prompt_ids = prompts(3, vocab=VOCAB_SIZE)
    params = SamplingParams(max_tokens=13, ignore_eos=True)
    outputs = llm.generate(prompt_ids, params)
    plain = LLM(path, variant="none", **SMALL, page_size=4, max_rows=3)
    assert ids(outputs) == ids(plain.generate(prompt_ids, params))
    assert [output.metrics.acceptance_length for output in outputs] == [4.0] * 3


def tree_of_transformers(
    head: HeadOfTransformers, tokens: list[int], steps: int, topk: int, nodes: int
) -> tuple[set[tuple[int, ...]], float]:
    """The paths of the tree after ``tokens`` (the root is the last): beams of the head, then the best candidates (EAGLE-2).

    Also the margin between the worst node that is in and the best that is out.
    """
    features = head.features(tokens[:-1])

    def next_tokens(path: tuple[int, ...]) -> list[tuple[int, float]]:
        hidden, rows = features, list(tokens[1:])
        for token in path:
            hidden = torch.cat((hidden, head(rows, hidden)[:, -1:]), 1)
            rows.append(token)
        values, index = head.log_probs(head(rows, hidden)[0, -1]).topk(topk)
        return list(zip(index.tolist(), values.tolist(), strict=True))

    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    candidates: list[tuple[tuple[int, ...], float]] = []
    for _ in range(steps):
        level = [((*path, token), score + gain) for path, score in beams for token, gain in next_tokens(path)]
        candidates += level
        beams = sorted(level, key=lambda item: -item[1])[:topk]
    ranked = sorted(candidates, key=lambda item: -item[1])
    margin = ranked[nodes - 2][1] - ranked[nodes - 1][1] if len(ranked) >= nodes else 1.0
    return {path for path, _ in ranked[: nodes - 1]}, margin


class WatchTree(Watch):
    """Notes the parents as well."""

    def launch(self, key: Any, message: Any) -> int:
        before = len(self.nodes)
        ticket = super().launch(key, message)
        if len(self.nodes) > before:
            self.nodes[-1] = (self.nodes[-1], self.cycle.arena.views(1).node_parent_BN[0].tolist())
        return ticket


@pytest.mark.parametrize("shape", [CHAIN, TREE, WIDE], ids=["chain", "tree", "wide"])
@pytest.mark.parametrize("length", [2, 9])
def test_trees_are_those_of_the_head_without_a_cache(targets: Any, shape: dict[str, Any], length: int) -> None:
    path, _, head = targets["deepseek_v3"]
    llm = LLM(path, variant="mtp", **shape, **SMALL, page_size=4, max_rows=1)
    prompt = prompts(1, (length,), VOCAB_SIZE, seed=length)[0]
    watch = WatchTree(llm)
    output = generate_through(llm, watch, prompt, SamplingParams(max_tokens=22, ignore_eos=True))[0]
    known, at, runs = [*prompt, *output.token_ids], len(prompt), set()
    for token_N, parent_N in watch.nodes:
        assert token_N[0] == known[at]

        def walk(node: int, tokens: list[int] = token_N, parents: list[int] = parent_N) -> tuple[int, ...]:
            return () if node == 0 else (*walk(parents[node]), tokens[node])

        found = {walk(node) for node in range(1, len(token_N)) if token_N[node] >= 0}
        expected, margin = tree_of_transformers(head, known[: at + 1], shape["num_steps"], shape["topk"], shape["num_draft_tokens"])
        assert found == expected or margin < 1e-5, f"root at {at}"
        taken = max((d for d in range(1, shape["num_steps"] + 1) if tuple(known[at + 1 : at + 1 + d]) in found), default=0)
        runs.add(taken)
        at += taken + 1
        if at >= len(known):
            break
    assert len(runs) > 1, "runs of several lengths, or the windows were not tested"

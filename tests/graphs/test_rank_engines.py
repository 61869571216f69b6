"""Four ranks and compiled programs: slower than the cases of `tests/engine/test_ranks.py` with two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graphspec import LLM
from graphspec.models.quantise import quantise
from tests.support import mtp_checkpoints
from tests.support.checkpoints import VOCAB_SIZE, build_hf, write_hf
from tests.support.engines import ids, random_pair
from tests.support.hybrid_checkpoints import build_hybrid, expert_head, mixer_head
from tests.support.mtp_checkpoints import LAYERS, add_heads, head_tensors
from tests.support.rank_pair import CHAIN as DEMO_CHAIN
from tests.support.rank_pair import NETWORKS, assert_same_drafts, rank_pair
from tests.support.rank_pair import TREE as DEMO_TREE
from tests.support.rank_runs import BUSY, CHAIN, SIZES, TREE, assert_same_tokens, requests

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("variant", ["eagle3", "ngram_trie", "standalone", "none"])
def test_four_ranks_of_every_kind_of_drafter(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = random_pair(tmp_path, build_hf("qwen2", **SIZES | {"head_dim": None}))
    draft = {"eagle3": pair.draft, "standalone": pair.target}.get(variant)
    assert_same_tokens(monkeypatch, pair.target, draft, 4, variant=variant, num_pages=14, **({} if variant == "none" else CHAIN))


def test_two_ranks_with_parts_of_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_hf(build_hf("llama", **SIZES | {"head_dim": 16, "intermediate_size": 128}), tmp_path / "source")
    quantise(source, tmp_path / "packed", "int4", ["layers", "lm_head"])
    assert_same_tokens(monkeypatch, tmp_path / "packed", None, 2, variant="ngram", num_pages=14, **CHAIN)


RECURRENT: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "qwen3_5": (CHAIN, {}),
    "qwen3_next": (TREE, {"linear_num_key_heads": 3, "linear_num_value_heads": 12}),
    "qwen3_5_moe": (TREE, {}),
    "nemotron_h_moe": (TREE, {}),
    "granite_moe": (CHAIN, {"mamba_n_groups": 1}),
    "bamba": (TREE, {}),
}


@pytest.mark.parametrize("family", RECURRENT)
def test_four_ranks_over_recurrent_layers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Key heads, and groups that are normed together, are on several ranks."""
    shape, keys = RECURRENT[family]
    target = write_hf(build_hybrid(family, num_attention_heads=4, num_key_value_heads=2, **keys), tmp_path / "target")
    draft = write_hf(build_hf("llama", **SIZES), tmp_path / "draft")
    assert_same_tokens(monkeypatch, target, draft, 4, shares=False, variant="standalone", num_pages=14, **shape)


@pytest.mark.parametrize(("size", "spread"), [(VOCAB_SIZE - 5, "sharded"), (VOCAB_SIZE + 9, "replicated")])
def test_two_ranks_with_vocabularies_padded_to_two_sizes(size: int, spread: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both folders say that they tie a head which they have: every rank compares it to the embedding."""
    target = write_hf(build_hf("llama", **SIZES), tmp_path / "target", tie_word_embeddings=True)
    draft = write_hf(build_hf("llama", **SIZES, vocab_size=size), tmp_path / "draft", tie_word_embeddings=True)
    assert_same_tokens(monkeypatch, target, draft, 2, variant="standalone", draft_parallel=spread, num_pages=14, **TREE)


def test_two_ranks_and_a_prediction_head_with_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    raw, _ = expert_head("qwen3_next", stacked=False, **heads)
    target = add_heads(write_hf(build_hybrid("qwen3_next", **heads), tmp_path), raw, mtp_num_hidden_layers=1)
    assert_same_tokens(monkeypatch, target, None, 2, shares=False, variant="mtp", draft_parallel="sharded", num_pages=14, **TREE)


def test_two_ranks_and_a_prediction_head_of_one_net_per_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    raw, _ = mixer_head("nemotron_h_latent", **heads)
    target = add_heads(write_hf(build_hybrid("nemotron_h_latent", **heads), tmp_path), raw, num_nextn_predict_layers=1)
    assert_same_tokens(monkeypatch, target, None, 2, shares=False, variant="mtp", draft_parallel="sharded", num_pages=14, **TREE)


@pytest.mark.parametrize("spread", ["sharded", "replicated"])
def test_two_ranks_and_a_prediction_head_with_its_own_vocabulary(spread: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two heads shares the target's matrices, the second doesn't."""
    sizes = {"num_hidden_layers": LAYERS, "num_attention_heads": 3 * 2, "num_key_value_heads": 2, "head_dim": 16}
    monkeypatch.setattr(mtp_checkpoints, "QUERY_HEADS", 6)
    monkeypatch.setattr(mtp_checkpoints, "KV_HEADS", 2)
    raws = [head_tensors("deepseek", LAYERS + i, copies=i == 1) for i in range(2)]
    target = add_heads(write_hf(build_hf("llama", **sizes), tmp_path), *raws, num_nextn_predict_layers=2)
    assert_same_tokens(monkeypatch, target, None, 2, variant="mtp", draft_parallel=spread, num_pages=14)


@pytest.mark.parametrize(("family", "shape"), [("qwen3_5", CHAIN), ("nemotron_h", TREE), ("bamba", TREE)])
def test_two_ranks_over_recurrent_layers_with_a_part_of_the_draft_each(
    family: str, shape: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_hf(build_hybrid(family, num_attention_heads=4, num_key_value_heads=2), tmp_path / "target")
    draft = write_hf(build_hf("llama", **SIZES), tmp_path / "draft")
    keys = {"variant": "standalone", "draft_parallel": "sharded", "num_pages": 14, **shape}
    assert_same_tokens(monkeypatch, target, draft, 2, shares=False, **keys)


@pytest.mark.parametrize(("family", "shape"), [("qwen3_5", CHAIN), pytest.param("nemotron_h", TREE, marks=pytest.mark.full)])
def test_two_ranks_compiled_over_recurrent_layers(family: str, shape: dict[str, int], tmp_path: Path) -> None:
    target = write_hf(build_hybrid(family, num_attention_heads=4, num_key_value_heads=2), tmp_path / "target")
    draft = write_hf(build_hf("llama", **SIZES), tmp_path / "draft")
    keys = {"variant": "standalone", "draft_parallel": "sharded", "max_rows": 1, "buckets": [1], **shape}
    asked, params = requests()
    found = []
    for size, runtime in ((1, "eager"), (2, "compiled")):
        with LLM(target, draft=draft, tensor_parallel=size, **BUSY | keys | {"runtime": runtime}) as llm:
            found.append(ids(llm.generate(asked[:2], params[:2])))
            if size == 2:
                assert llm.plan.compiles and all("several ranks" in path for path in llm.decoders.values())
    assert found[0] == found[1]


@pytest.mark.parametrize(("size", "heads", "shape"), [(2, 4, TREE), (4, 2, CHAIN)], ids=["two-tree", "four-copies-chain"])
def test_ranks_that_norm_the_queries_of_all(
    size: int, heads: int, shape: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = random_pair(tmp_path, build_hf("olmo2", **SIZES | {"num_key_value_heads": heads}))
    assert_same_tokens(monkeypatch, pair.target, pair.draft, size, variant="eagle3", num_pages=14, **shape)


def test_two_ranks_compiled_with_a_depth_that_changes(tmp_path: Path) -> None:
    pair = random_pair(tmp_path, build_hf("llama", **SIZES))
    keys = {"variant": "eagle3", "depths": [0, 2], "max_rows": 1, "buckets": [1], **CHAIN}
    prompt_ids, params = requests()
    found = []
    for size, runtime in ((1, "eager"), (2, "compiled")):
        with LLM(pair.target, draft=pair.draft, tensor_parallel=size, **BUSY | keys | {"runtime": runtime}) as llm:
            found.append(ids(llm.generate(prompt_ids[:2], params[:2])))
            if size == 2:
                assert all("several ranks" in path for path in llm.decoders.values())
    assert found[0] == found[1]


def test_networks_draft_chains_in_parts_and_trees_as_a_whole(tmp_path: Path) -> None:
    """What `tests/engine/test_rank_drafters.py` leaves out."""
    with rank_pair(tmp_path) as pair:
        for variant in NETWORKS:
            assert_same_drafts(pair, variant, DEMO_CHAIN, draft_parallel="sharded")
            assert_same_drafts(pair, variant, DEMO_TREE, draft_parallel="replicated")
        for draft_parallel in ("sharded", "replicated"):
            assert_same_drafts(pair, "mtp", DEMO_CHAIN, model="demo_hybrid", draft_parallel=draft_parallel)

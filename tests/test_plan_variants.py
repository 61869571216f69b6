"""Numbers and refusals that are specific to a variant."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphspec.config.schema import Config, ModelConfig, NgramSettings, RuntimeConfig, VariantConfig
from graphspec.drafters.heads.config import one_layer
from graphspec.drafters.mtp.facts import MTPFacts
from graphspec.drafters.standalone.facts import StandaloneFacts
from graphspec.errors import ConfigError
from graphspec.facts.multipliers import Multipliers
from graphspec.plan.plan import Plan, make_plan
from graphspec.shapes import CycleShape
from tests.support.plans import draft_facts, model_facts


def heads(count: int) -> MTPFacts:
    decoder = model_facts(path=Path("draft"), num_layers=count, sliding_window=(None,) * count)
    return MTPFacts(
        path=Path("draft"), decoder=decoder, draft_vocab_size=50, target_hidden_size=16, feature_size=16, num_heads=count,
        layout="deepseek", first_index=2,
    )  # fmt: skip


def small_model(**overrides: Any) -> StandaloneFacts:
    return StandaloneFacts(
        path=Path("draft"), decoder=model_facts(path=Path("draft"), **overrides), draft_vocab_size=50, target_hidden_size=16
    )


DRAFTS = {"eagle3": draft_facts, "mtp": lambda: heads(1), "standalone": small_model}


def made(variant: str, draft: Any = None, runtime: dict[str, Any] | None = None, **keys: Any) -> Plan:
    config = Config(variant=VariantConfig(name=variant, **keys), model=ModelConfig(path="target"), runtime=RuntimeConfig(**(runtime or {})))
    return make_plan(config, model_facts(), draft or (DRAFTS[variant]() if variant in DRAFTS else None), device="cpu")


def size(steps: int, topk: int, nodes: int) -> dict[str, int]:
    return {"num_steps": steps, "topk": topk, "num_draft_tokens": nodes}


def test_a_head_per_step_looks_back_and_drafts_a_chain_of_its_heads():
    plan = made("mtp", heads(4))
    assert (plan.shape, plan.lookback, plan.feature_width) == (CycleShape(4, 1, 5), 3, 16)
    assert made("mtp", heads(4), **size(2, 1, 3)).lookback == 3, "all heads run again, however few of them draft"
    assert made("mtp").lookback == 0
    # 60 entries of the window and 7 of the lookback need two ancestor words.
    assert made("mtp", heads(70), **size(60, 1, 61)).num_words == 3


def test_what_each_drafter_offers():
    assert made("standalone").feature_width == 0
    assert made("ngram").shape == CycleShape(6, 4, 12, "paths")
    assert made("ngram").shape.num_candidates == 24
    trie = made("ngram_trie").shape
    assert (trie.pool, trie.num_candidates, trie.window_width) == ("nodes", 11, 12)
    assert made("ngram").keeps_history and not made("ngram_trie").keeps_history
    assert made("eagle3", **size(3, 1, 9)).shape == CycleShape(3, 1, 4)


@pytest.mark.parametrize(
    ("key", "expected", "call"),
    [
        ("variant.num_steps, variant.topk", "at most 2 steps", lambda: made("mtp", heads(2), **size(3, 1, 4))),
        ("variant.num_steps, variant.topk", "topk = 1", lambda: made("mtp", heads(3), **size(2, 2, 5))),
        ("variant.num_draft_tokens", r"at most 13 .*1 \+ num_steps\*topk", lambda: made("ngram", **size(4, 3, 14))),
        ("variant.num_draft_tokens", "more than num_steps = 8", lambda: made("ngram_trie", **size(8, 4, 8))),
        ("runtime.cycles_in_flight", "the host reads every cycle", lambda: made("ngram_trie", runtime={"cycles_in_flight": 2})),
        ("variant.token_map", "brings its own vocabulary", lambda: made("eagle3", token_map="map.pt")),
        ("variant.token_map", "has no draft network", lambda: made("ngram", token_map="map.pt")),
        ("variant.ngram.corpus", "only a drafter on the host", lambda: made("ngram", ngram=NgramSettings(corpus="text"))),
        ("variant.topk", "vocabulary of 30", lambda: made("eagle3", **size(1, 31, 32))),
        ("variant.num_steps", "the draft's sliding window of 3", lambda: made("standalone", small_model(sliding_window=(None, 3)))),
        ("variant.tree_choices", "only a drafter with one network", lambda: made("mtp", heads(2), tree_choices=[[0], [1]])),
        ("variant.ngram.max_window", ">= 5", lambda: NgramSettings(min_window=5, max_window=4)),
        ("variant.ngram.match", "bfs, prob", lambda: NgramSettings(match="dfs")),
    ],
)
def test_refusals(key: str, expected: str, call: Any):
    with pytest.raises(ConfigError, match=expected) as caught:
        call()
    assert caught.value.key == key


def test_a_draft_of_a_shorter_context_is_logged_once(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        plan = made("standalone", small_model(max_position_embeddings=40))
    assert plan.draft_context == 40
    assert "made for 40 positions, the context is 64" in caplog.text
    caplog.clear()
    made("standalone")
    assert not caplog.records


def test_an_assumed_head_is_one_plain_layer_whatever_the_layers_of_its_target_are() -> None:
    target = model_facts()
    unusual = replace(target, mixers=("mlp",) * target.num_layers, multipliers=Multipliers(residual=0.5, attention=1.0))
    assert one_layer(unusual) == one_layer(target)
    assert (one_layer(unusual).kv_layers, one_layer(unusual).blocks) == (1, 2)

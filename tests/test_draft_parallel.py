"""Whether ranks share a draft: estimates computed by hand, and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphspec.config.catalog import resolve_variant
from graphspec.config.schema import Config, HardwareConfig, ModelConfig, RuntimeConfig, VariantConfig
from graphspec.drafters.eagle3.facts import Eagle3Facts
from graphspec.errors import ConfigError
from graphspec.facts import DraftFacts, ModelFacts, read_model_facts
from graphspec.lab.predict.model_pair import SHAPES
from graphspec.plan.draft_parallel import DraftParallel, of_rank, price_parts
from graphspec.plan.plan import Plan, make_plan
from tests.support.tiny import latent_facts, other_draft_facts

H200 = HardwareConfig(bandwidth_gbs=4800, link_gbs=450)
CHAIN = {"num_steps": 4, "topk": 1, "num_draft_tokens": 5}


def llama_70b() -> ModelFacts:
    return read_model_facts(SHAPES / "llama-3.1-70b")


def head(target: ModelFacts) -> Eagle3Facts:
    decoder = replace(target, num_layers=1, sliding_window=(None,))
    return Eagle3Facts(
        path=Path("head"), decoder=decoder, draft_vocab_size=32000, target_hidden_size=8192, feature_size=3 * 8192, tap_layers=(2, 40, 77)
    )


def plan_of(draft: DraftFacts | None, target: ModelFacts, requested: str = "auto", *, size: int = 4, **hardware: Any) -> Plan:
    config = Config(
        variant=VariantConfig(name="eagle3" if draft is not None else "ngram", **CHAIN),
        model=ModelConfig(max_context=96),
        runtime=RuntimeConfig(name="captured", tensor_parallel=size, draft_parallel=requested),
        hardware=replace(H200, device="cuda", **hardware),
    )
    return make_plan(config, target.of_rank(0, size), draft, device="cuda")


def test_a_head_of_llama_70b_is_priced_as_by_hand() -> None:
    target = llama_70b()
    draft = head(target)
    layers, own_head = price_parts(draft, of_rank(draft, 0, 4, layers=True, head=True), plan_of(draft, target).shape, 2, H200)
    # 64 query and 8 key heads of 128 read two vectors of 8192; four passes, three quarters of two bytes each.
    numbers = 2 * 8192 * (64 + 16) * 128 + 64 * 128 * 8192 + 3 * 8192 * 28672
    assert layers.saved_bytes == 4 * 2 * numbers * 3 // 4 and layers.collectives == 8
    assert layers.saved_us == pytest.approx(layers.saved_bytes / 4800e9 * 1e6)
    # The first pass reads five tokens, the others one; three other ranks, at 450 GB/s.
    assert layers.collectives_us == pytest.approx(8 * 8.0 + 2 * (5 + 3) * 3 * 8192 * 2 / 450e9 * 1e6)
    assert own_head.saved_bytes == 4 * 2 * 24000 * 8192 and own_head.collectives == 4
    assert own_head.collectives_us == pytest.approx(4 * 8.0 + 4 * 3 * 16 / 450e9 * 1e6)
    assert layers.pays and own_head.pays


@pytest.mark.parametrize(("sum_us", "chosen"), [(8.0, (True, True)), (150.0, (False, False)), (100.0, (True, False)), (60.0, (True, True))])
def test_auto_spreads_what_takes_longer_to_read(sum_us: float, chosen: tuple[bool, bool]) -> None:
    """A pass saves 294 us of layers for two sums, and 82 us of its head for a gather."""
    target = llama_70b()
    plan = plan_of(head(target), target, sum_us=sum_us)
    assert plan.draft_parallel is not None and plan.draft is not None
    assert (plan.draft_parallel.layers, plan.draft_parallel.head) == chosen
    assert (plan.draft.decoder.sharding.sharded, plan.draft.decoder.vocabulary.sharded) == chosen
    assert plan.draft.decoder.num_heads == (16 if chosen[0] else 64)
    words = str(plan.draft_parallel)
    assert "MB less to read per cycle" in words and "8 collectives" in words and plan.describe()["draft_parallel"] == words


@pytest.mark.parametrize(("keys", "reason"), [
    ({"link_gbs": None}, "hardware.link_gbs is not known"), ({"bandwidth_gbs": None}, "hardware.bandwidth_gbs is not known"),
    ({"requested": "replicated"}, "runtime.draft_parallel=replicated"),
])  # fmt: skip
def test_replicated_gives_the_reason(keys: dict[str, Any], reason: str) -> None:
    target = llama_70b()
    plan = plan_of(head(target), target, **keys)
    assert plan.draft_parallel == DraftParallel(reason=reason) and plan.draft == head(target)


def test_what_cannot_be_spread_is_refused_by_name_or_replicated() -> None:
    target = llama_70b()
    odd = head(target)
    odd = replace(odd, decoder=replace(odd.decoder, num_heads=9, num_kv_heads=9))
    with pytest.raises(ConfigError, match=r"runtime\.draft_parallel: expected auto or replicated: .*num_attention_heads = 9"):
        plan_of(odd, target, "sharded")
    plan = plan_of(odd, target)
    assert plan.draft == odd and "num_attention_heads = 9" in str(plan.draft_parallel)
    with pytest.raises(ConfigError, match=r"runtime\.draft_parallel: .*ngram has no draft network"):
        plan_of(None, target, "sharded")
    assert plan_of(None, target).draft_parallel is None


def test_a_network_of_another_package_is_replicated(monkeypatch: pytest.MonkeyPatch) -> None:
    target = llama_70b()
    variant = replace(resolve_variant("eagle3"), draft_shards=False)
    monkeypatch.setattr("graphspec.plan.plan.resolve_variant", lambda name: variant)
    assert "does not declare draft_shards" in str(plan_of(head(target), target).draft_parallel)
    with pytest.raises(ConfigError, match="does not declare draft_shards"):
        plan_of(head(target), target, "sharded")


def test_one_rank_has_the_draft_as_it_was() -> None:
    target = llama_70b()
    plan = plan_of(head(target), target, "sharded", size=1)
    assert plan.draft == head(target) and plan.draft_parallel is None


@pytest.mark.parametrize("structure", ["head-per-step", "no-feature", "latent-experts"])
def test_every_kind_of_layer_has_a_price(structure: str) -> None:
    """With a head per step a pass reads one layer; a whole language model looks its tokens up too; of experts the chosen count."""
    draft = other_draft_facts(structure)
    assert draft is not None
    decoder = replace(draft.decoder, num_heads=4, num_kv_heads=1)
    draft = replace(draft, decoder=decoder)
    cut = of_rank(draft, 1, 2, layers=True, head=True)
    shape = plan_of(head(llama_70b()), llama_70b()).shape.shortened(3)
    found = {price.part: price for price in price_parts(draft, cut, shape, 4, H200)}
    passes = len(draft.passes(shape))
    per_pass = {"head-per-step": 1, "no-feature": 2, "latent-experts": 1}[structure]
    assert found["layers"].collectives == 2 * per_pass * passes
    if structure == "no-feature":
        assert found["head"].collectives == 2 * passes and found["head"].saved_bytes == passes * 4 * 30 * 48
    else:
        assert "head" not in found
    if structure == "latent-experts":
        latent = latent_facts(1).latent
        assert latent is not None
        # Of each of two heads queries, keys and values, and columns of the output; half of three experts of 12 and of 24 that are shared.
        heads = 20 * 24 + 24 * 18 + 48 * 10
        assert found["layers"].saved_bytes == passes * 4 * (2 * heads + 3 * 48 * (3 * 6 + 12))

"""``graphspec plan`` for several ranks."""

from __future__ import annotations

import pytest

from graphspec.config.catalog import resolve_variant
from graphspec.config.compose import load_config
from graphspec.errors import ConfigError
from graphspec.lab.predict.command import shortfall_lines
from graphspec.lab.predict.model_pair import read_model_pair
from graphspec.lab.predict.plan import Advice, advise
from graphspec.lab.predict.ranks import recommended, sums_ms, sums_of

OPTIONS = ("variant=none", "hardware=h100", "plan.batches=[1]")


def planned(*words: str) -> Advice:
    return advise(load_config(*OPTIONS, *words))


def test_sums_of_llama_70b_are_those_counted_by_hand() -> None:
    facts = read_model_pair("llama-3.1-70b", load_config(*OPTIONS).variant, resolve_variant("none")).target
    assert sums_of(facts, 1) == 0 and sums_of(facts, 4) == 162
    # 161 sums of 8192 numbers of 2 bytes from 3 others, and four words of 4 bytes from each, at 450 GB/s.
    seconds = (3 * 161 * 8192 * 2 + 3 * 16) / 450e9
    assert sums_ms(facts, 4, 1, 2, 8.0, 450e9) == pytest.approx(162 * 8e-3 + 1e3 * seconds)
    assert sums_ms(facts, 1, 1, 2, 8.0, 450e9) == 0


def test_a_model_too_large_for_one_device_gets_a_number_of_them() -> None:
    found = planned("model=llama-3.1-70b")
    one, two, four, *_ = found.ranks
    assert [price.size for price in found.ranks] == [1, 2, 4, 8, 16] and not one.fits
    # All matrices are cut; norms, of 161 vectors of 8192 numbers, are every rank's.
    norms = 161 * 8192 * 2
    assert one.weights == 70_553_706_496 * 2 and two.weights == (one.weights - norms) // 2 + norms
    assert four.weights == (one.weights - norms) // 4 + norms
    fewest = recommended(found.ranks)
    assert fewest is not None and fewest.size in (2, 4) and fewest.needed < one.needed / 1.9
    assert any(f"runtime.tensor_parallel={fewest.size}" in line for line in shortfall_lines(found))


def test_a_plan_with_ranks_is_that_of_one_of_them() -> None:
    whole, half = planned("model=llama-3.1-8b"), planned("model=llama-3.1-8b", "runtime.tensor_parallel=2")
    assert half.capacity.kv_per_token[0] * 2 == whole.capacity.kv_per_token[0]
    assert half.outlook.model.target_weights.size == whole.ranks[1].weights < whole.outlook.model.target_weights.size
    assert half.ranks == whole.ranks and any("one of 2 ranks" in note for note in half.notes)


def test_numbers_that_do_not_divide_are_named() -> None:
    with pytest.raises(ConfigError, match="num_attention_heads = 32"):
        planned("model=llama-3.1-8b", "runtime.tensor_parallel=3")
    with pytest.raises(ConfigError, match=r"plan\.measure.*tensor_parallel=2"):
        planned("model=llama-3.1-8b", "runtime.tensor_parallel=2", "plan.measure=true")


def test_the_draft_is_counted_as_a_rank_holds_it() -> None:
    """Two floors of one engine: with a part of the draft on each rank, a pass of it reads less; the notes give the reason."""
    words = ("model=llama-3.1-70b", "variant=eagle3", "runtime.tensor_parallel=4")
    found = {setting: planned(*words, f"runtime.draft_parallel={setting}") for setting in ("auto", "replicated", "sharded")}
    whole, part = found["replicated"].outlook.model.draft_own, found["sharded"].outlook.model.draft_own
    assert whole is not None and part is not None and found["auto"].outlook.model.draft_own == part
    # The product that joins features to the hidden size is every rank's, as are norms; layer and head are cut in four.
    joined = 3 * 8192 * 8192
    layer = 2 * 8192 * (64 + 16) * 128 + 64 * 128 * 8192 + 3 * 8192 * 28672
    assert whole.number - part.number == (layer + 32000 * 8192) * 3 // 4 and part.number > joined
    assert found["sharded"].capacity.kv_per_token[1] * 4 == found["replicated"].capacity.kv_per_token[1]
    assert any("the draft on 4 ranks: sharded" in note and "MB less to read per cycle" in note for note in found["auto"].notes)
    assert any("the draft on 4 ranks: replicated" in note for note in found["replicated"].notes)


def test_states_of_recurrent_layers_are_those_of_a_ranks_heads() -> None:
    """Six layers: of each head a matrix of 32 by 32 float32 numbers; three inputs of the convolution, bfloat16."""
    whole, *parts = (planned("model=demo_hybrid", f"runtime.tensor_parallel={size}") for size in (1, 2, 4))
    found = [advice.capacity.states for advice in (whole, *parts)]
    # Four value heads over two key heads; each of four ranks has one, and a key head of its own.
    held = [(4, 2), (2, 1), (1, 1)]
    assert [states and states.state for states in found] == [
        6 * (values * 32 * 32 * 4 + 3 * 32 * (2 * keys + values) * 2) for values, keys in held
    ]
    two = whole.ranks[1]
    assert two.sums == 2 * 8 + 2 and two.weights == parts[0].outlook.model.target_weights.size

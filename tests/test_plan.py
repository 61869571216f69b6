"""Config and facts become numbers; contradictions are one message that names key, expected and found."""

from __future__ import annotations

import logging
import math
import re
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphspec.api.overrides import engine_config
from graphspec.config.catalog import resolve_variant
from graphspec.config.schema import Config, KernelsConfig, ModelConfig, VariantConfig
from graphspec.errors import ConfigError
from graphspec.facts import RopeFacts
from graphspec.facts.families import LLAMA, find_family
from graphspec.facts.family import Family
from graphspec.graphs.stages.mailbox import MailLayout
from graphspec.plan.plan import make_plan, resolve_shape
from graphspec.shapes import PLAIN, SAMPLED, CycleShape, GraphKey, pick_bucket
from tests.support.plans import draft_facts, model_facts, plan


def family_of(architecture: str) -> Family:
    """The row of an architecture; Llama's where the drafter reads no target."""
    return find_family(architecture) or LLAMA


def refused(key: str, expected: str, found: object, make: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    error = caught.value
    assert error.key == key
    assert re.search(expected, str(error.expected)), str(error)
    assert str(error.found) == str(found)
    assert str(error).startswith(f"{key}: expected {error.expected}, found {error.found}")


@pytest.mark.parametrize(
    ("shape", "candidates", "accept", "window", "words"),
    [((0, 1, 1), 0, 1, 1, 1), ((1, 1, 2), 1, 2, 2, 1), ((4, 1, 5), 4, 5, 5, 1), ((5, 4, 8), 68, 6, 17, 1), ((3, 8, 60), 136, 4, 60, 1),
     ((5, 4, 69), 68, 6, 69, 2), ((9, 8, 4), 520, 10, 65, 2)],
)  # fmt: skip
def test_numbers_of_a_shape(shape: tuple[int, int, int], candidates: int, accept: int, window: int, words: int) -> None:
    s = CycleShape(*shape)
    assert (s.num_candidates, s.accept_width, s.window_width, s.num_words) == (candidates, accept, window, words)
    assert s.is_chain == (shape[1] == 1)


def test_what_lies_between_fused_kernels_can_be_left_uncompiled() -> None:
    """A captured engine then waits for no compiler at load."""

    def made(mode: str, device: str, *, compile_around: bool) -> Any:
        kernels = KernelsConfig(mode=mode, compile_around=compile_around)
        config = Config(variant=VariantConfig(name="none"), model=ModelConfig(path="target"), kernels=kernels)
        return make_plan(config, model_facts(), None, device=device)

    assert made("fused", "cuda", compile_around=True).compiles
    assert not made("fused", "cuda", compile_around=False).compiles
    assert made("compiled", "cpu", compile_around=True).compiles
    refused("kernels.compile_around", "true with kernels.mode=compiled", False, lambda: made("compiled", "cpu", compile_around=False))


@given(st.integers(1, 9), st.integers(2, 9))
def test_as_many_nodes_as_candidates_and_no_more(steps: int, topk: int) -> None:
    maximum = 1 + topk + (steps - 1) * topk**2
    if maximum <= 128:
        assert CycleShape(steps, topk, maximum).window_width >= maximum
    refused(
        "num_draft_tokens",
        f"at most {maximum} for num_steps={steps} and topk={topk}",
        maximum + 1,
        lambda: CycleShape(steps, topk, maximum + 1),
    )


def test_shapes_out_of_range() -> None:
    refused("num_steps", ">= 0", -1, lambda: CycleShape(-1, 1, 1))
    refused("topk", ">= 1", 0, lambda: CycleShape(1, 0, 1))
    refused("num_draft_tokens", ">= 1", 0, lambda: CycleShape(1, 1, 0))
    refused("num_draft_tokens", "at most 5", 7, lambda: CycleShape(4, 1, 7))
    refused("num_draft_tokens", "num_steps . 1 = 5 when topk is 1", 3, lambda: CycleShape(4, 1, 3))
    with pytest.raises(ConfigError, match="a window of at most 128 slots, found 145 slots"):
        CycleShape(10, 16, 9)


@pytest.mark.parametrize(
    ("architecture", "shape"),
    [("LlamaForCausalLM", (5, 4, 8)), ("Qwen3ForCausalLM", (3, 1, 4)), ("MistralForCausalLM", (3, 1, 4)), ("Qwen2ForCausalLM", (3, 1, 4))],
)
def test_automatic_shape(architecture: str, shape: tuple[int, int, int]) -> None:
    assert resolve_shape(resolve_variant("eagle3"), VariantConfig(), family_of(architecture)) == CycleShape(*shape)
    assert resolve_shape(resolve_variant("none"), VariantConfig(), family_of(architecture)) == PLAIN


STEPS, FAN_OUT, NODES = "num_steps", "topk", "num_draft_tokens"
DERIVED: list[tuple[str, str, int, dict[str, int], tuple[int, int, int]]] = [
    # The automatic shape is the tree (5, 4, 8).
    ("eagle3", "LlamaForCausalLM", 1, {STEPS: 4}, (4, 4, 8)),
    ("eagle3", "LlamaForCausalLM", 1, {STEPS: 1}, (1, 4, 5)),
    ("eagle3", "LlamaForCausalLM", 1, {STEPS: 9}, (9, 4, 10)),
    ("eagle3", "LlamaForCausalLM", 1, {FAN_OUT: 1}, (5, 1, 6)),
    ("eagle3", "LlamaForCausalLM", 1, {FAN_OUT: 2}, (5, 2, 8)),
    ("eagle3", "LlamaForCausalLM", 1, {NODES: 16}, (5, 4, 16)),
    ("eagle3", "LlamaForCausalLM", 1, {NODES: 4}, (3, 4, 4)),
    ("eagle3", "LlamaForCausalLM", 1, {STEPS: 4, FAN_OUT: 2}, (4, 2, 8)),
    ("eagle3", "LlamaForCausalLM", 1, {STEPS: 4, NODES: 5}, (4, 4, 5)),
    ("eagle3", "LlamaForCausalLM", 1, {FAN_OUT: 1, NODES: 4}, (3, 1, 4)),
    ("eagle3", "LlamaForCausalLM", 1, {FAN_OUT: 3, NODES: 12}, (5, 3, 12)),
    # The automatic shape is the chain (3, 1, 4).
    ("eagle3", "Qwen3ForCausalLM", 1, {STEPS: 4}, (4, 1, 5)),
    ("eagle3", "Qwen3ForCausalLM", 1, {NODES: 6}, (5, 1, 6)),
    ("eagle3", "Qwen3ForCausalLM", 1, {STEPS: 5, NODES: 6}, (5, 1, 6)),
    ("eagle3", "Qwen3ForCausalLM", 1, {FAN_OUT: 4}, (3, 4, 8)),
    ("eagle3", "Qwen3ForCausalLM", 1, {STEPS: 10, FAN_OUT: 2}, (10, 2, 11)),
    # Paths (6, 4, 12) and nodes (8, 8, 12).
    ("ngram", "", 1, {STEPS: 4}, (4, 4, 12)),
    ("ngram", "", 1, {STEPS: 2}, (2, 4, 9)),
    ("ngram", "", 1, {FAN_OUT: 1}, (6, 1, 7)),
    ("ngram_trie", "", 1, {STEPS: 4}, (4, 8, 12)),
    ("ngram_trie", "", 1, {STEPS: 2, FAN_OUT: 2}, (2, 2, 7)),
    ("ngram_trie", "", 1, {NODES: 6}, (5, 8, 6)),
    # A head per step.
    ("mtp", "", 3, {STEPS: 2}, (2, 1, 3)),
    ("mtp", "", 3, {NODES: 3}, (2, 1, 3)),
    ("mtp", "", 3, {FAN_OUT: 1}, (3, 1, 4)),
]


@pytest.mark.parametrize(("variant", "architecture", "heads", "given", "shape"), DERIVED)
def test_what_is_unset_comes_from_the_automatic_shape(
    variant: str, architecture: str, heads: int, given: dict[str, int], shape: tuple[int, int, int]
) -> None:
    found = resolve_shape(resolve_variant(variant), VariantConfig(name=variant, **given), family_of(architecture), heads)
    assert found.numbers == list(shape)


@given(
    st.sampled_from([("eagle3", "LlamaForCausalLM"), ("eagle3", "Qwen3ForCausalLM"), ("ngram", ""), ("ngram_trie", "")]),
    st.integers(1, 12) | st.none(),
    st.integers(1, 8) | st.none(),
    st.integers(2, 60) | st.none(),
)
def test_a_derived_shape_keeps_what_is_set(which: tuple[str, str], steps: int | None, topk: int | None, nodes: int | None) -> None:
    variant, architecture = resolve_variant(which[0]), which[1]
    given = {STEPS: steps, FAN_OUT: topk, NODES: nodes}
    try:
        shape = resolve_shape(variant, VariantConfig(name=which[0], **given), family_of(architecture))
    except ConfigError:
        assert nodes is not None or (steps and topk), "a depth alone and a fan-out alone contradict nothing"
        return
    assert steps in (None, shape.num_steps)
    assert topk in (None, shape.topk)
    assert nodes in (None, shape.num_draft_tokens) or topk == 1, "a chain's nodes follow from its steps, and a warning says so"
    assert 2 <= shape.num_draft_tokens <= shape.num_candidates + 1


def test_numbers_that_contradict_each_other() -> None:
    def resolve(architecture: str, **values: int) -> CycleShape:
        return resolve_shape(resolve_variant("eagle3"), VariantConfig(**values), family_of(architecture))

    refused(
        "variant.topk", r"above 1, or num_draft_tokens = num_steps \+ 1 = 4", "num_draft_tokens = 9",
        lambda: resolve("Qwen3ForCausalLM", num_steps=3, num_draft_tokens=9),
    )  # fmt: skip
    refused("variant.num_draft_tokens", "at least 2", 1, lambda: resolve("LlamaForCausalLM", num_draft_tokens=1))
    refused(
        "variant.num_draft_tokens", "at most 5 for num_steps=1", 9, lambda: resolve("LlamaForCausalLM", num_steps=1, num_draft_tokens=9)
    )
    refused("variant.num_steps", "at least 1", 0, lambda: resolve("LlamaForCausalLM", num_steps=0))


@pytest.mark.parametrize("nodes", [None, 5, 9])
def test_a_chain_has_as_many_nodes_as_steps_and_a_root(nodes: int | None, caplog: pytest.LogCaptureFixture) -> None:
    config = VariantConfig(num_steps=4, topk=1, num_draft_tokens=nodes)
    with caplog.at_level(logging.WARNING):
        assert resolve_shape(resolve_variant("eagle3"), config, LLAMA) == CycleShape(4, 1, 5)
    warned = [record.getMessage() for record in caplog.records]
    assert warned == (["topk=1 is a chain: num_draft_tokens=9 becomes num_steps + 1 = 5"] if nodes == 9 else [])


def test_plain_decoding_takes_no_shape() -> None:
    def resolve(**values: int) -> CycleShape:
        return resolve_shape(resolve_variant("none"), VariantConfig(name="none", **values), LLAMA)

    assert resolve(num_steps=0, topk=1, num_draft_tokens=1) == PLAIN
    refused("variant.num_steps", "null with variant=none", 3, lambda: resolve(num_steps=3))
    refused("variant.num_draft_tokens", "null with variant=none", 4, lambda: resolve(num_draft_tokens=4))
    refused("variant.num_steps", "at least 1", 0, lambda: plan(shape=(0, 2, 1)))


def test_too_many_nodes_and_unknown_variant() -> None:
    refused("variant.num_draft_tokens", "at most 22", 23, lambda: plan(shape=(3, 3, 23)))
    refused(
        "variant",
        "one of none, eagle, eagle3, p_eagle, dflash, standalone, mtp, assistant, ngram, ngram_trie",
        "'medusa'",
        lambda: plan("medusa"),
    )
    with pytest.raises(ConfigError, match=r"found 'eagle33' \(did you mean eagle3\?\)"):
        resolve_variant("eagle33")


@pytest.mark.parametrize(
    ("rows", "requested", "buckets"),
    [(8, [1, 2, 4, 8], (1, 2, 4, 8)), (3, [1, 2, 4, 8], (1, 2, 4)), (1, [4, 8], (4,)), (5, [5], (5,)), (4, [1, 2, 4, 8], (1, 2, 4))],
)
def test_buckets_reach_the_rows_and_no_further(rows: int, requested: list[int], buckets: tuple[int, ...]) -> None:
    made = plan(runtime={"max_rows": rows, "buckets": requested})
    assert made.buckets == buckets
    assert [key.bucket for key in made.graph_keys(SAMPLED)] == sorted(buckets, reverse=True)
    assert all(key == GraphKey(key.bucket, made.shape, SAMPLED) for key in made.graph_keys(SAMPLED))
    assert all(pick_bucket(made.buckets, lanes) >= lanes for lanes in range(1, rows + 1))


def test_buckets_below_the_rows_are_refused() -> None:
    refused("runtime.buckets", "at least max_rows = 9 lanes", [1, 2, 4, 8], lambda: plan(runtime={"max_rows": 9}))
    refused("runtime.buckets", "at least 5 lanes", [1, 4], lambda: pick_bucket((1, 4), 5))
    for buckets in ([], [2, 1], [1, 1], [0, 4]):
        refused("runtime.buckets", "non-empty ascending", buckets, lambda buckets=buckets: plan(runtime={"buckets": buckets}))


@given(
    st.sampled_from([(4, 1, 5), (3, 3, 10), (5, 4, 16), None]),
    st.integers(1, 32),
    st.integers(0, 3),
    st.integers(2, 64),
    st.integers(1, 8),
)
def test_sizes_hold_what_launches_touch(shape: Any, page_size: int, run_ahead: int, context: int, rows: int) -> None:
    made = plan(
        "eagle3" if shape else "none",
        shape=shape,
        max_context=context,
        runtime={"page_size": page_size, "cycles_in_flight": run_ahead + 1, "max_rows": rows},
    )
    slots = made.table_width * page_size
    assert slots >= context + run_ahead * made.accept_width + made.window_width
    assert slots - page_size < context + made.tokens_in_flight
    assert made.max_positions == slots
    assert made.num_pages == 1 + rows * made.table_width, "every row to its end, and the dummy page"
    assert made.ring_depth >= run_ahead + 2
    layout = MailLayout.of(made)
    first_prefill = math.ceil((made.prefill_chunks[-1] + made.window_width) / page_size) + 1
    growth = max(made.buckets) * math.ceil(made.accept_width / page_size)
    assert layout.max_pages >= growth and layout.max_pages + layout.max_chunk_pages >= first_prefill
    assert (layout.max_lanes, layout.dummy_row) == (max(made.buckets), rows)


def test_pages_and_context_that_do_not_fit() -> None:
    # window of the (3, 3, 10) tree: 10 slots, and one token
    assert plan(shape=(3, 3, 10), runtime={"page_size": 4, "num_pages": 3}).num_pages == 4
    refused("runtime.num_pages", "at least 3 pages of 4", 2, lambda: plan(shape=(3, 3, 10), runtime={"page_size": 4, "num_pages": 2}))
    refused("model.max_context", "at most the checkpoint's 64", 65, lambda: plan(max_context=65))
    assert plan(max_context=64).max_context == plan().max_context == 64
    yarn = RopeFacts(1e4, "yarn", 4.0, 64)
    longer = Config(model=ModelConfig(path="tiny", max_context=256))
    head = replace(draft_facts(), decoder=model_facts(num_layers=1, rope=yarn))
    made = make_plan(longer, model_facts(rope=yarn), head, device="cpu")
    assert (made.max_context, made.draft_context) == (256, 256)
    assert make_plan(Config(), model_facts(rope=yarn), draft_facts(), device="cpu").max_context == 64
    too_long = replace(longer, model=replace(longer.model, max_context=257))
    refused(
        "model.max_context", "at most the checkpoint's 256", 257, lambda: make_plan(too_long, model_facts(rope=yarn), head, device="cpu")
    )


def test_what_only_some_devices_can_do() -> None:
    refused("runtime", "eager or compiled on this machine", "captured on cpu", lambda: plan(runtime={"name": "captured"}))
    assert plan(runtime={"name": "captured"}, device="cuda").runtime.captured
    assert (plan().dtype, plan(device="cuda").dtype) == ("float32", "bfloat16")
    assert [plan(runtime={"name": name}).kernels for name in ("eager", "compiled")] == ["reference", "compiled"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_stepz", 5), ("name", "eager"), ("variant", "eagle3"), ("page_sizes", 1)],
)
def test_unknown_override(name: str, value: object) -> None:
    refused(name, "a configuration key", f"{name}={value!r}", lambda: engine_config(Config(), {name: value}))


def test_override_reaches_its_group() -> None:
    config = engine_config(Config(), {"num_steps": 2, "page_size": 4, "dtype": "float16", "max_context": 7, "attention": "native"})
    assert (config.variant.num_steps, config.runtime.page_size, config.hardware.dtype) == (2, 4, "float16")
    assert (config.model.max_context, config.kernels.attention) == (7, "native")
    assert engine_config(Config(), {}) == Config()
    refused("runtime.page_size", ">= 1", 0, lambda: engine_config(Config(), {"page_size": 0}))


def test_a_bare_name_is_that_of_one_key() -> None:
    config = Config()
    keys = [field.name for group in fields(config) if group.name != "sampling" for field in fields(getattr(config, group.name))]
    assert len(keys) == len({*keys}) + keys.count("name") - 1


def test_draft_facts_reach_the_plan() -> None:
    made = plan()
    assert (made.feature_width, made.tap_layers, made.draft_context) == (32, (0, 1), 64)
    assert (plan("none").feature_width, plan("none").tap_layers) == (0, ())
    short = make_plan(Config(), model_facts(), draft_facts(max_position_embeddings=20), device="cpu")
    assert (short.draft_context, short.max_context) == (20, 64)
    described = made.describe()
    assert (described["variant"], described["num_steps"], described["topk"], described["num_draft_tokens"]) == ("eagle3", 5, 4, 8)


def test_planning_imports_no_torch() -> None:
    code = "import sys, graphspec.plan.plan, graphspec.facts, graphspec.config.catalog; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

"""How many launches a compiled cycle is, counted in the wrapper Inductor writes for a GPU that is not there.

Every launch costs about a microsecond whatever it does, so the budgets here are speed that can be tested on any machine. A figure above its
budget is a regression; one below it is progress, and the budget follows. The wrapper calls operators; how many kernels each of them is, its
launcher says, called with the shapes of the cycle.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from graphspec.facts import RecurrentFacts
from graphspec.facts.hybrid_families import NEMOTRON_H, QWEN3_5
from graphspec.facts.recurrent import SsmFacts
from graphspec.graphs.programs import compiled_parts
from graphspec.graphs.stages.verify import Verify
from graphspec.shapes import GREEDY, SAMPLED, CycleShape, SamplingClass
from perf.counts import GUARD, differences, launch_figures
from perf.none_cost import plain_step
from tests.support.codegen import Launches, launches_of
from tests.support.launches import OperatorCall, operator_calls
from tests.support.shapes_8b import fake_cycle, run_stages

pytestmark = pytest.mark.kernels

TREE, PLAIN = CycleShape(5, 4, 8), CycleShape(0, 1, 1)
LAYER = Counter({"linear_kv_write": 1, "tree_attention": 1, "linear": 1, "linear_summed": 2})
"""A dense layer: norm, qkv, head norms, RoPE and KV write; attention; o and residual; norm, gate and up; down and residual."""
DRAFT_PASS = LAYER + Counter({"linear": 1, "draft_topk": 1, "draft_level": 1})
"""A layer, the head, selection; and two of Inductor's kernels: the norms of embedding and hidden state."""

KERNELS = {8: (5, 226), 16: (5, 227), 64: (5, 227)}
"""By the number of verified nodes: kernels of a decoder layer, and of a cycle of 32. More than 8 rows have their squares added by a kernel
of its own where no product has left them: once, in front of the first layer."""


def count(shape: CycleShape, num_layers: int, **keys: Any) -> Launches:
    with fake_cycle(shape, num_layers, **keys) as cycle:
        return launches_of(*cycle.parts())


def calls_of(shape: CycleShape, num_layers: int, **keys: Any) -> list[OperatorCall]:
    with fake_cycle(shape, num_layers, **keys) as cycle:
        return operator_calls(cycle.program())


def kernels_of(calls: list[OperatorCall]) -> int:
    return sum(call.kernels for call in calls)


def ops_of(found: Launches) -> Counter[str]:
    return Counter({name.removeprefix("graphspec."): number for name, number in found.ops.items()})


@pytest.fixture(scope="module")
def tree() -> Iterator[Launches]:
    yield count(TREE, 3)


@pytest.fixture(scope="module")
def deeper() -> Iterator[Launches]:
    yield count(TREE, 5)


@pytest.fixture(scope="module")
def plain() -> Iterator[Launches]:
    yield count(PLAIN, 3)


def test_a_speculative_cycle_keeps_its_budget(tree: Launches) -> None:
    """S = 5 passes of an EAGLE-3 head and a target of three layers."""
    passes = Counter({name: 5 * number for name, number in DRAFT_PASS.items()})
    layers = Counter({name: 3 * number for name, number in LAYER.items()})
    once = (
        "mail_apply", "draft_window", "take_last", "tree_build", "verify_rows", "sample_tokens", "tree_walk", "kv_move",
        "page_feature_write", "commit_rows",
    )  # fmt: skip
    # fc in front of the first pass, the target's head
    assert ops_of(tree) == passes + layers + Counter(once) + Counter({"linear": 2})
    assert tree.kinds == {"op": 67, "triton": 14}
    assert tree.host_marks == []


def test_a_layer_is_five_launches(tree: Launches, deeper: Launches) -> None:
    assert len(deeper) - len(tree) == 2 * LAYER.total() == 10
    # What the whole of 32 layers comes to.
    assert len(tree) + 29 * LAYER.total() == 226


def recurrent(rule: str, num_layers: int) -> dict[str, Any]:
    """Facts of a target whose layers, but the last, have the sizes of Qwen3-Next's recurrent layers, or of Nemotron-H's."""
    layers = (True,) * (num_layers - 1) + (False,)
    if rule == "delta":
        return {
            "family": QWEN3_5,
            "recurrent": RecurrentFacts(layers=layers, key_heads=16, value_heads=32, key_dim=128, value_dim=128, taps=4),
        }
    ssm = SsmFacts(conv_bias=True, projection_bias=False)
    own = RecurrentFacts(layers=layers, key_heads=8, value_heads=128, key_dim=128, value_dim=64, taps=4, ssm=ssm)
    return {"family": NEMOTRON_H, "recurrent": own, "mixers": ("recurrent",) * (num_layers - 1) + ("attention",)}


@pytest.mark.parametrize(("rule", "products", "own"), [("delta", 2, 2), ("ssm", 1, 3)])
def test_launches_of_a_recurrent_layer(rule: str, products: int, own: int) -> None:
    """Convolution and rule for the nodes; Inductor's own: gates, and a norm with the output gate. At most five.

    Products are those of the layer, and of the MLP where it has one. Nemotron-H has a third: its norm scales before it
    rounds, which no product of ours does. What nodes leave to the commit is copied for all layers together, and the commit is two
    launches for all layers: matrices, and columns.
    """
    few, many = (Counter(call.name for call in calls_of(PLAIN, layers, **recurrent(rule, layers))) for layers in (3, 5))
    layer = Counter({"linear": products, "linear_summed": products, "tree_conv": 1, "state_walk": 1})
    assert many - few == layer + layer
    assert few["state_commit"] == few["conv_shift"] == 1
    found = count(PLAIN, 5, **recurrent(rule, 5))
    assert ops_of(found) == many and found.host_marks == []
    written = Counter(name for kind, name in found.names if kind == "triton")
    assert sum(times >= 3 for times in written.values()) == own, "kernels that come with every layer"
    assert 2 + own <= 5


@pytest.mark.parametrize("nodes", KERNELS)
def test_kernels_of_a_layer(nodes: int) -> None:
    few, many = (kernels_of(calls_of(CycleShape(5, 4, nodes), layers)) for layers in (3, 5))
    assert many - few == 2 * KERNELS[nodes][0]


@pytest.mark.parametrize("nodes", [8, pytest.param(16, marks=pytest.mark.full), 64])
def test_kernels_of_a_cycle(tree: Launches, nodes: int) -> None:
    """Inductor's own, and those of the operators that its wrapper calls."""
    shape = CycleShape(5, 4, nodes)
    found, calls = tree if shape == TREE else count(shape, 3), calls_of(shape, 3)
    assert ops_of(found) == Counter(call.name for call in calls)
    layer, cycle = KERNELS[nodes]
    assert len(found) - len(calls) + kernels_of(calls) + 29 * layer == cycle


@pytest.mark.parametrize(
    ("depth", "kernels"),
    [pytest.param(s, 211 if s < 8 else 213, marks=() if s in (2, 8, 20) else pytest.mark.full) for s in range(2, 21)],
)
def test_kernels_of_a_cycle_that_drafts_in_one_pass(depth: int, kernels: int) -> None:
    """A block drafter of five layers, 64 nodes. Where no product left them, squares of more than 8 rows are added by a kernel."""
    shape = CycleShape(depth, 8, 64, "marginals")
    found, calls = count(shape, 3, variant="dflash"), calls_of(shape, 3, variant="dflash")
    assert len(found) - len(calls) + kernels_of(calls) + 29 * KERNELS[64][0] == kernels
    assert found.host_marks == []


def test_more_nodes_than_fused_rows_are_left_to_the_library() -> None:
    """128 nodes: the target's products, and the ops otherwise fused into them, are separate; the drafter is unchanged."""
    shape = CycleShape(16, 8, 128, "marginals")
    found, deeper = (count(shape, layers, variant="dflash") for layers in (3, 5))
    layer = Counter({"matmul": 4, "rope_kv_write": 1, "tree_attention": 1})
    assert ops_of(deeper) - ops_of(found) == layer + layer
    # and three of Inductor's: both norms, and the gate
    assert len(deeper) - len(found) == 2 * 9
    assert ops_of(found)["matmul"] + 29 * 4 == 129
    calls = calls_of(shape, 3, variant="dflash")
    assert len(found) - len(calls) + kernels_of(calls) + 29 * 9 == 340
    assert found.host_marks == []


def test_plain_decoding_is_a_kernel_an_operator() -> None:
    calls = calls_of(PLAIN, 3)
    assert kernels_of(calls) == len(calls) == 22


def test_filters_are_five_kernels_wherever_they_are() -> None:
    """Of the drafts, of which each samples, and of the target."""
    calls = calls_of(TREE, 3, sampling=SamplingClass(noise=True, truncate=True))
    several = Counter(call.name for call in calls if call.kernels > 1)
    assert several == Counter(filter_logits=5, sample_tokens=1) and {call.kernels for call in calls} == {1, 5}
    for sampling in (GREEDY, SAMPLED):
        assert kernels_of(calls_of(TREE, 3, sampling=sampling)) == 67


def test_plain_decoding_keeps_its_budget(plain: Launches) -> None:
    assert (plain.kinds["op"], plain.kinds["triton"], len(plain)) == (22, 3, 25)
    assert plain.host_marks == []


def test_plain_decoding_is_five_launches_more_than_the_shortest_loop(plain: Launches) -> None:
    """Message, layout of one node, its rows, its walk, the books and the logits that are kept, less the loop's own counting."""
    with fake_cycle(PLAIN, 3) as cycle:
        verify = next(stage for stage in cycle.stages if isinstance(stage, Verify))
        token_11, length_1 = (torch.zeros(*size, dtype=torch.int64, device="cuda") for size in ((1, 1), (1,)))
        views = cycle.views
        loop = launches_of(plain_step(verify.target, verify.kernels, views.target_kv, views.page_table_RP[:1], token_11, length_1))
    assert (len(plain) - len(loop), len(loop) + 29 * LAYER.total()) == (5, 165)


def test_the_guard_holds_these_counts(tree: Launches, plain: Launches, deeper: Launches) -> None:
    recorded = json.loads(GUARD.read_text(encoding="utf-8"))["launches"]
    found = differences("launches", recorded, launch_figures(len(tree), len(plain), len(deeper)))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("tokens", "layers"), [(16, 10), (256, 19)])
def test_launches_of_a_prompts_chunk(tokens: int, layers: int) -> None:
    """Those of two layers. What all layers read of a token, as its slot, is computed once; no argument is copied whole.

    Above 64 rows norms and gates are launches of their own, and now and then one adds to the residual stream.
    """
    found = []
    for depth in (7, 7, 9):  # the first compilation of a process makes two kernels more
        with fake_cycle(TREE, depth) as cycle:
            parts = [run_stages(part, cycle.views) for part in compiled_parts(cycle.prefill(tokens))]
            found.append(launches_of(*parts))
    _, few, many = found
    assert len(many) - len(few) == layers
    if tokens == 16:
        assert len(few) + 25 * layers // 2 == 188, "of 32 layers"
    assert few.copied_arguments == many.copied_arguments == [] and few.returned == many.returned == 0


def test_sampling_adds_no_copy_of_the_vocabulary(tree: Launches) -> None:
    """Noise is made where it is used: seeded sampling launches what greedy decoding launches, and nothing reads the vocabulary twice."""
    found = count(TREE, 3, sampling=SAMPLED)
    assert len(found) - len(tree) <= 2
    assert ops_of(found)["sample_tokens"] == 1


def test_norms_of_heads_cost_no_launch(tree: Launches) -> None:
    """Qwen3's layers: the norms of queries and keys are part of the launch that projects them."""
    assert len(count(TREE, 3, qk_norm=True)) == len(tree)


def test_windows_cost_no_launch_of_a_layer() -> None:
    """What a window's layers see begins where it does for all of them: computed, and kept, once per size."""
    few, many = (count(TREE, layers, sliding_window=(512, None, 1024) * (layers // 3)) for layers in (6, 9))
    assert len(many) - len(few) == 3 * LAYER.total()
    assert ops_of(few)["stored"] == ops_of(many)["stored"] == 2


def test_library_products_keep_the_old_budget() -> None:
    """With every product left to cuBLAS: nine launches a layer, no bias matrix after a product, no host mark."""
    found, deeper = (count(PLAIN, layers, mode="fused", linear="reference") for layers in (3, 5))
    assert len(deeper) - len(found) == 2 * 9
    assert not any("addmm" in name for _, name in found.names)
    assert found.host_marks == []

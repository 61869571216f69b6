"""The fused commit against its reference: the slots it writes, those it must not write, and the number of launches."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from graphspec.graphs.compile import compile_stages
from graphspec.graphs.programs import cycle_stages
from graphspec.graphs.stages.mailbox import MailLayout
from graphspec.graphs.stages.stage import Build
from graphspec.kernels import OPS, op_of, select_kernels
from graphspec.kernels.fused.launch import recording
from graphspec.kernels.tree.fused.commit_rows import CHUNK, commit_rows
from graphspec.plan.buffers import POISON, Arena
from graphspec.shapes import GREEDY
from tests.kernels.cases.tree import commit_case
from tests.support.tiny import structure_plan, tiny_networks

from ._programs import ORDERS, program_order

OP = op_of("commit_rows")

ROW_STATE = OP.mutates[2:]


def own(case: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in case.items()}


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal, NaN to NaN."""
    return torch.equal(left.nan_to_num(7.25), right.nan_to_num(7.25)) and torch.equal(left.isnan(), right.isnan())


def run(name: str, case: dict[str, Any], times: int = 1) -> dict[str, torch.Tensor]:
    copy = own(case)
    for _ in range(times):
        OP.call(OP.implementation(name), copy)
    return {key: copy[key] for key in OP.mutates if copy[key] is not None}


def assert_equal(case: dict[str, Any], times: int = 1) -> dict[str, torch.Tensor]:
    found, expected = run("fused", case, times), run("reference", case, times)
    for key, e in expected.items():
        assert same(found[key], e), key
    return found


KINDS: dict[str, dict[str, Any]] = {
    "features": {"features": 37},
    "features-of-two-chunks": {"features": CHUNK + 5},
    "lookback": {"features": 19, "lookback": 2},
    "lookback-wider-than-the-window": {"features": 5, "lookback": 7},
    "history": {"history": 60},
    "counts": {"features": 3, "vocab": 9},
    "tokens-only": {},
    "wide": {"features": 11, "capacity": 9},
    "append": {"features": 37, "append": True},
    "append-of-two-chunks": {"features": CHUNK + 5, "append": True},
    "append-tokens": {"vocab": 9, "append": True},
    "append-after-lookback": {"features": 5, "lookback": 2, "append": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_kind_of_drafter(kind: str, dtype: torch.dtype) -> None:
    for seed, (lanes, nodes, width) in enumerate(((5, 8, 4), (1, 1, 1), (3, 33, 6))):
        case = commit_case(torch.Generator().manual_seed(seed), lanes, nodes, width, **KINDS[kind])
        for key, value in case.items():
            if "feature" in key and value is not None:
                case[key] = value.to(dtype)
        assert_equal(case)


def test_more_lanes_than_one_tile_and_windows_as_wide_as_they_get() -> None:
    for lanes, nodes, width in ((11, 128, 128), (70, 9, 9)):
        found = assert_equal(commit_case(torch.Generator().manual_seed(lanes), lanes, nodes, width, history=400))
        assert found["ring_ZBJ"].shape[1] == lanes


@pytest.mark.parametrize("kind", ["features", "lookback", "history", "append"])
@ORDERS
def test_any_order_of_programs_and_inert_lanes_write_nothing(kind: str, order: int | None) -> None:
    case = commit_case(torch.Generator().manual_seed(4), 6, 9, 4, **KINDS[kind])
    case["accept_len_B"][0], case["accept_len_B"][1] = 4, 0
    row = case["lane_row_B"]
    case["outcome_B"][1] = case["status_R"][row[1]]
    idle = [int(row[1]), int(row[-1])]
    assert row[-1] == row[-2]
    for key in ROW_STATE:
        if case[key] is not None and key != "status_R":
            case[key][idle] = POISON if key.endswith(("R", "RAc", "RY", "RL")) and not case[key].is_floating_point() else torch.nan
    case["path_BA"][1], case["path_BA"][-2:] = POISON, POISON
    for key in ("feature_BNF", "sample_BN"):
        if case[key] is not None:
            case[key][[1, -1, -2]] = torch.nan if case[key].is_floating_point() else POISON
    with program_order(order) as launches:
        found = run("fused", case)
    assert launches and launches[-1] >= 1
    reference = own(case)
    # What the reference may not be given: indices of lanes that are not there.
    reference["path_BA"][[1, -1, -2]] = 0
    for key in ("window_len_R", "seq_len_R"):
        reference[key][idle] = 1
    expected = run("reference", reference)
    for key, value in found.items():
        if key in ROW_STATE:
            kept = torch.ones(len(value), dtype=torch.bool).index_fill(0, torch.tensor(idle), False)
            assert same(value[kept], expected[key][kept]), key
            assert same(value[idle], case[key][idle]), key
        else:
            assert same(value, expected[key]), key


def test_a_ring_wider_than_the_bucket() -> None:
    case = commit_case(torch.Generator().manual_seed(2), 3, 6, 4, features=4)
    wide = torch.full((3, 8, 6), -5)
    case["ring_ZBJ"] = wide.narrow(1, 0, 3)
    copy = own({**case, "ring_ZBJ": None})
    OP.call(OP.implementation("fused"), {**copy, "ring_ZBJ": wide.narrow(1, 0, 3)})
    slot = int(case["cycle_1"]) % 3
    assert torch.equal(wide[slot, :3], run("reference", case)["ring_ZBJ"][slot])
    assert wide[:, 3:].eq(-5).all() and wide[[(slot + 1) % 3, (slot + 2) % 3]].eq(-5).all()


def test_cycles_count_on_and_use_the_next_slot() -> None:
    """Three cycles of one run each; the run of two cycles is not that of one."""
    case = commit_case(torch.Generator().manual_seed(6), 2, 5, 3, features=8, lookback=2, vocab=11)
    case["accept_len_B"][:] = torch.tensor([2, 3])
    found = [assert_equal(case, times) for times in (1, 2, 3)]
    begin = int(case["cycle_1"])
    assert [int(f["cycle_1"]) for f in found] == [begin + 1, begin + 2, begin + 3]
    assert not torch.equal(found[0]["lookback_token_RY"], found[1]["lookback_token_RY"])
    assert all(torch.equal(a, b) for a, b in zip(run("fused", case, 2).values(), run("fused", case, 2).values(), strict=True))


def test_runs_are_appended_to_the_window() -> None:
    """Both implementations against lists: three runs appended, then one that replaces them all."""
    for name in ("reference", "fused"):
        case = own(commit_case(torch.Generator().manual_seed(8), 2, 6, 3, features=5, capacity=12, append=True))
        case["window_len_R"][:], case["lane_row_B"][:] = 2, torch.tensor([1, 0])
        expected = {row: (case["window_token_RAc"][row, :2].tolist(), case["window_feature_RAcF"][row, :2].tolist()) for row in (0, 1)}
        for lengths, append in (((1, 3), True), ((0, 2), True), ((2, 2), True), ((1, 3), False)):
            case["accept_len_B"][:], case["append"] = torch.tensor(lengths), append
            case["sample_BN"] += 1
            case["feature_BNF"] += 1
            rest = case["window_token_RAc"][:, 3:].clone()
            OP.call(OP.implementation(name), case)
            for lane, row in enumerate((1, 0)):
                nodes = case["path_BA"][lane, : lengths[lane]].tolist()
                run = [case["sample_BN"][lane, n].item() for n in nodes], [case["feature_BNF"][lane, n].tolist() for n in nodes]
                if nodes:
                    expected[row] = tuple(old + new for old, new in zip(expected[row], run, strict=True)) if append else run
                length = case["window_len_R"][row].item()
                found = case["window_token_RAc"][row, :length].tolist(), case["window_feature_RAcF"][row, :length].tolist()
                assert found == expected[row], name
        assert torch.equal(case["window_token_RAc"][:2, 3:], rest[:2]), "what lies after a replaced window stays"
        assert case["window_token_RAc"][1, :3].tolist() == [*expected[1][0], -1, -1]


@pytest.mark.parametrize("name", ["reference", "fused"])
def test_a_run_that_does_not_fit_writes_nothing_of_others(name: str) -> None:
    case = commit_case(torch.Generator().manual_seed(9), 1, 3, 3, features=4, capacity=4, append=True)
    case["accept_len_B"][:], case["window_len_R"][:], case["lane_row_B"][:] = 3, 3, 1
    found = run(name, case)
    for key in ("window_token_RAc", "window_feature_RAcF"):
        assert same(found[key][[0, 2]], case[key][[0, 2]]) and same(found[key][1, :3], case[key][1, :3])
    assert found["window_token_RAc"][1, 3] == case["sample_BN"][0, 0]


def test_a_failed_row_without_a_run_still_fails() -> None:
    case = commit_case(torch.Generator().manual_seed(3), 2, 4, 3, features=6)
    case["accept_len_B"][:], case["outcome_B"][:], case["status_R"][:] = torch.tensor([0, 2]), torch.tensor([4, 1]), 1
    found = assert_equal(case)
    first, second = case["lane_row_B"].tolist()
    assert found["status_R"][first] == 4 and found["status_R"][second] == 1
    assert torch.equal(found["window_feature_RAcF"][first], case["window_feature_RAcF"][first])


def test_one_launch_and_two_where_features_are_placed_by_the_old_length() -> None:
    twice = ("lookback", "lookback-wider-than-the-window", "append", "append-of-two-chunks", "append-after-lookback")
    for kind, expected in ((name, 2 if name in twice else 1) for name in KINDS):
        with recording() as launches:
            OP.call(commit_rows, commit_case(torch.Generator(), 4, 5, 3, **KINDS[kind]))
        assert len(launches) == expected, kind


@pytest.mark.parametrize("shares", [False, True])
def test_compiled_stages_are_one_operator_each(shares: bool) -> None:
    """Slots are written in place: no copy comes before or after an operator, in any region the stages are compiled in."""
    plan = structure_plan("tree", device="cpu", runtime="eager", buckets=[2, 3], max_rows=3, prefix_cache=shares)
    names = ("tree_build", "kv_move", *(("page_feature_write",) if shares else ()), "commit_rows")
    fused = {op.name: op.implementation("fused") for op in OPS if op.name in names}
    kernels = replace(select_kernels("reference", "reference", "cpu"), **fused)
    networks = tiny_networks(plan)
    build = Build(plan, kernels, networks.target, networks.draft, plan.shape, GREEDY)
    stages = [stage for stage in cycle_stages(build) if stage.name in ("tree_build", "commit_state", "commit")]
    views = Arena(plan, MailLayout.of(plan).size).views(2)
    with torch.no_grad():
        _, sources = run_and_get_code(compile_stages(stages, views))
    calls = re.findall(r"torch\.ops\.\w+\.\w+|cpp_fused\w*\(|extern_kernels\.\w+|empty_strided\w*\(", sources[0].split("def call")[1])
    assert calls == [f"torch.ops.graphspec.{name}" for name in names]

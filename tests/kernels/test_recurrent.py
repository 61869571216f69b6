"""Ops of recurrent layers against a plain float64 recurrence, and against each other."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor

from graphspec.errors import ConfigError
from graphspec.kernels import OPS
from graphspec.kernels.recurrent.conv_shift import conv_shift
from graphspec.kernels.recurrent.state_tokens import ancestor_matrix
from graphspec.kernels.recurrent.tree_conv import tree_conv
from tests.kernels.cases.recurrent import random_ancestors, random_tokens
from tests.support.float_law import widened
from tests.support.tiny import same_bits

BY_NAME = {op.name: op for op in OPS}
RULES = ("delta", "ssm")


@dataclass(frozen=True)
class Op:
    """An implementation of an op, which is imported by the test that calls it."""

    name: str
    which: str = "reference"
    rule: str = "delta"

    def __call__(self, *given: Any, **named: Any) -> Any:
        return BY_NAME[self.name].implementation(self.which)(*given, **named)


def implementations(*names: str, fused: bool = True) -> pytest.MarkDecorator:
    """Every implementation of these ops; without fused ones where interpreting them would take minutes."""
    return pytest.mark.parametrize(
        "op",
        [
            pytest.param(Op(name, which, rule), id=f"{name}-{rule}-{which}", marks=[pytest.mark.kernels] if which == "fused" else [])
            for name in names
            for rule in (RULES if "skip_H" in signature(BY_NAME[name].reference).parameters else ("any",))
            for which in BY_NAME[name].names
            if fused or which != "fused"
        ],
    )


SKIP = torch.tensor([0.5, -1.5, 2.0, 0.25])
LANES, NODES, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 3, 12, 2, 4, 8, 6


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tree(seed: int = 0, nodes: int = NODES) -> dict[str, Any]:
    drawn = generator(seed)
    case = random_tokens(drawn, LANES, nodes, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM)
    return {**case, "ancestors_BTX": random_ancestors(drawn, LANES, nodes)}


def run(seed: int = 0, tokens: int = NODES) -> dict[str, Any]:
    return random_tokens(generator(seed), LANES, tokens, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM)


def path_of(ancestors_BTX: Tensor, lane: int, node: int) -> list[int]:
    """From the root to the node; empty: the node is unused."""
    return ancestor_matrix(ancestors_BTX)[lane, node].nonzero()[:, 0].tolist()


def own(op: Op) -> dict[str, Tensor | None]:
    """The rule, as an op takes it."""
    return {"skip_H": SKIP if op.rule == "ssm" else None}


def recurrence(op: Op, case: dict[str, Any], lane: int, path: list[int]) -> tuple[Tensor, Tensor]:
    """The state after a path and what its last token reads, in float64, one head at a time, as the papers write it."""
    if op.rule == "ssm":
        return selective(case, lane, path)
    state = case["matrix_RUHKV"][case["lane_row_B"][lane], case["layer"]].double().clone()
    out = torch.zeros(HEADS, VALUE_DIM, dtype=torch.float64)
    for node in path:
        mixed, gate = case["mixed_BTE"][lane, node].double(), case["gate_BTG"][lane, node].double()
        for head in range(HEADS):
            served = head // (HEADS // KEY_HEADS) * KEY_DIM
            query, key = (mixed[at + served : at + served + KEY_DIM] for at in (0, KEY_HEADS * KEY_DIM))
            value = mixed[2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM :][:VALUE_DIM]
            query, key = (x / torch.sqrt(x @ x + 1e-6) for x in (query, key))
            matrix = state[head] * torch.exp(gate[head])
            matrix = matrix + torch.outer(key, gate[HEADS + head] * (value - matrix.T @ key))
            state[head], out[head] = matrix, matrix.T @ query * KEY_DIM**-0.5
    return state, out


def selective(case: dict[str, Any], lane: int, path: list[int]) -> tuple[Tensor, Tensor]:
    """The same of Mamba-2."""
    state = case["matrix_RUHKV"][case["lane_row_B"][lane], case["layer"]].double().clone()
    out, values = torch.zeros(HEADS, VALUE_DIM, dtype=torch.float64), HEADS * VALUE_DIM
    for node in path:
        mixed, gate = case["mixed_BTE"][lane, node].double(), case["gate_BTG"][lane, node].double()
        for head in range(HEADS):
            x = mixed[head * VALUE_DIM :][:VALUE_DIM]
            group = values + head // (HEADS // KEY_HEADS) * KEY_DIM
            into, out_of = (mixed[group + at :][:KEY_DIM] for at in (0, KEY_HEADS * KEY_DIM))
            state[head] = state[head] * torch.exp(gate[head]) + torch.outer(into, gate[HEADS + head] * x)
            out[head] = state[head].T @ out_of + float(SKIP[head]) * x
    return state, out


@implementations("state_walk", "state_tree", fused=False)
@pytest.mark.parametrize("nodes", [1, 12, 70])
def test_every_node_follows_its_own_ancestors(op: Op, nodes: int) -> None:
    case = tree(nodes, nodes)
    found = op(**case, **own(op))
    for lane in range(LANES):
        for node in range(max(0, nodes - 12), nodes):
            if path := path_of(case["ancestors_BTX"], lane, node):
                torch.testing.assert_close(found[lane, node].double(), recurrence(op, case, lane, path)[1], rtol=1e-5, atol=1e-5)


@implementations("state_walk", "state_tree")
def test_unused_nodes_are_unseen_and_give_zero(op: Op) -> None:
    case = tree(3)
    used_BT = ancestor_matrix(case["ancestors_BTX"]).diagonal(dim1=1, dim2=2)
    assert not used_BT.all()
    clean = op(**case, **own(op))
    for name in ("mixed_BTE", "gate_BTG"):
        case[name] = torch.where(used_BT[..., None], case[name], torch.nan)
    case["ancestors_BTX"][2] = 0
    used_BT[2] = False
    case["matrix_RUHKV"][case["lane_row_B"][2]] = torch.nan  # the dummy row of a padded lane holds anything
    found = op(**case, **own(op))
    torch.testing.assert_close(found[used_BT], clean[used_BT], rtol=2e-6, atol=2e-6)
    assert clean[used_BT].isfinite().all() and not found[~used_BT].any()


@pytest.mark.parametrize("rule", RULES)
def test_a_walk_is_decoding_of_its_path_token_by_token(rule: str) -> None:
    """As close as torch's own exponentials, whose last bit may depend on the position in a tensor."""
    walk, scan = (Op(name, rule=rule) for name in ("state_walk", "state_scan"))
    case = tree(1)
    found = walk(**case, **own(walk))
    for node in range(NODES):
        path = path_of(case["ancestors_BTX"], 0, node)
        matrix = case["matrix_RUHKV"].clone()
        for at in path:
            one = {name: case[name][:, at : at + 1] for name in ("mixed_BTE", "gate_BTG")}
            length = torch.tensor([1, 0, 0])
            read = scan(**one, **own(scan), matrix_RUHKV=matrix, layer=case["layer"], lane_row_B=case["lane_row_B"], length_B=length)
        torch.testing.assert_close(read[0, 0], found[0, node], rtol=2e-6, atol=2e-6)


@implementations("state_scan", "state_chunk")
def test_commit_at_every_end_node(op: Op) -> None:
    case = tree(2)
    ancestors = case.pop("ancestors_BTX")
    for node in range(NODES):
        path = path_of(ancestors, 0, node)
        width = len(path) + 2
        index = torch.tensor([*path, NODES - 1, 0])
        picked = {name: case[name][:, index] for name in ("mixed_BTE", "gate_BTG")}
        picked["mixed_BTE"][:, len(path) :] = torch.nan  # past the accepted path
        length = torch.tensor([len(path), 0, 0])
        matrix = case["matrix_RUHKV"].clone()
        out = op(**picked, **own(op), matrix_RUHKV=matrix, layer=1, lane_row_B=case["lane_row_B"], length_B=length)
        assert out.shape == (LANES, width, HEADS, VALUE_DIM)
        assert not out[0, len(path) :].any() and not out[1:].any()
        row = int(case["lane_row_B"][0])
        state, _ = recurrence(op, case, 0, path)
        torch.testing.assert_close(matrix[row, 1].double(), state, rtol=1e-5, atol=1e-5)
        matrix[row, 1] = case["matrix_RUHKV"][row, 1]
        assert same_bits(matrix, case["matrix_RUHKV"]), "rows that nothing was accepted in, and the other layer, keep their bits"


@implementations("state_scan", "state_chunk", fused=False)
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 150])
def test_a_prompt_in_pieces_ends_in_the_same_state(op: Op, tokens: int) -> None:
    case = run(4, tokens)
    rows = {"layer": case["layer"], "lane_row_B": case["lane_row_B"]}
    whole = case["matrix_RUHKV"].clone()
    whole[case["lane_row_B"]] = torch.nan  # what a row held before a fresh start
    pieces, fresh = whole.clone(), torch.ones(LANES, dtype=torch.bool)
    length = torch.full((LANES,), tokens)
    out = op(case["mixed_BTE"], case["gate_BTG"], *own(op).values(), whole, **rows, length_B=length, fresh_B=fresh)
    found = []
    for begin in range(0, tokens, 40):
        part = [
            torch.nn.functional.pad(case[name][:, begin : begin + 40], (0, 0, 0, 7), value=torch.nan) for name in ("mixed_BTE", "gate_BTG")
        ]
        length = torch.full((LANES,), part[0].shape[1] - 7)
        found.append(op(*part, *own(op).values(), pieces, **rows, length_B=length, fresh_B=fresh if begin == 0 else None)[:, :-7])
    torch.testing.assert_close(torch.cat(found, 1), out, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(pieces[case["lane_row_B"], 1], whole[case["lane_row_B"], 1], rtol=2e-5, atol=2e-5)
    zeros = {**case, "matrix_RUHKV": torch.zeros_like(whole)}
    state, last = recurrence(op, zeros, 2, list(range(tokens)))
    torch.testing.assert_close(out[2, -1].double(), last, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(whole[case["lane_row_B"][2], 1].double(), state, rtol=2e-5, atol=2e-5)


@implementations("state_scan", "state_chunk")
def test_a_row_without_tokens_keeps_its_bits(op: Op) -> None:
    case = run(5)
    case["matrix_RUHKV"][case["lane_row_B"][1]] = torch.nan
    before = case["matrix_RUHKV"].clone()
    case["mixed_BTE"].fill_(torch.nan)
    op(**case, **own(op), length_B=torch.zeros(LANES, dtype=torch.int64))
    assert same_bits(case["matrix_RUHKV"], before)


@pytest.mark.parametrize("rule", RULES)
def test_all_nodes_at_once_keep_within_twice_the_error_of_the_walk(rule: str) -> None:
    walk, at_once = (Op(name, rule=rule) for name in ("state_walk", "state_tree"))
    case = {**tree(6, 40), **own(walk)}
    wide = widened(case)
    exact = walk(**wide)
    used_BT = ancestor_matrix(case["ancestors_BTX"]).diagonal(dim1=1, dim2=2)
    errors = [(op(**case).double() - exact)[used_BT].abs().max() for op in (walk, at_once)]
    assert errors[1] <= 2 * errors[0] + torch.finfo(torch.float32).eps * exact[used_BT].abs().max()


def commit_case(seed: int, selective: bool, *, key_dim: int = KEY_DIM, value_dim: int = VALUE_DIM) -> dict[str, Any]:
    """Recorded nodes of two layers."""
    drawn, layers = generator(seed), 2
    channels = 2 * KEY_HEADS * key_dim + HEADS * value_dim
    gate = torch.rand(layers, LANES, NODES, 2 * HEADS, generator=drawn)
    gate[..., :HEADS] *= -3
    return {
        "input_UBTE": torch.randn(layers, LANES, NODES, channels, generator=drawn),
        "gate_UBTG": gate,
        "weight_UEO": torch.randn(layers, channels, 4, generator=drawn),
        "bias_UE": torch.randn(layers, channels, generator=drawn) if selective else None,
        "column_RUOE": torch.randn(LANES + 2, layers, 3, channels, generator=drawn),
        "matrix_RUHKV": torch.randn(LANES + 2, layers, HEADS, key_dim, value_dim, generator=drawn),
        "lane_row_B": torch.tensor([3, 0, 4]),
        "selective": selective,
    }


@implementations("state_commit")
@pytest.mark.parametrize("selective", [False, True], ids=["delta", "ssm"])
def test_a_commit_is_the_convolution_and_a_run_of_the_path(op: Op, selective: bool) -> None:
    """As one commit, and token by token with the columns moved in between; with any other nodes, and at every leaf of a tree."""
    conv, scan, shift = (Op(name, op.which, RULES[selective]) for name in ("tree_conv", "state_scan", "conv_shift"))
    ancestors, whole = random_ancestors(generator(7), LANES, NODES), commit_case(7, selective)
    rows = {"lane_row_B": whole["lane_row_B"]}
    for node in range(NODES):
        path = path_of(ancestors, 0, node)
        case, length = dict(whole), torch.tensor([len(path), 0, 0])
        for name in ("input_UBTE", "gate_UBTG"):
            case[name] = torch.full_like(whole[name], torch.nan)
            case[name][:, 0, path] = whole[name][:, 0, path]
        found = whole["matrix_RUHKV"].clone()
        found[whole["lane_row_B"][1]] = torch.nan  # a row in which nothing was accepted holds anything, and keeps it
        expected, single, columns = found.clone(), found.clone(), whole["column_RUOE"].clone()
        op(**{**case, "matrix_RUHKV": found}, path_BA=torch.tensor([[*path, 0, NODES - 1]] * LANES), length_B=length)
        run = torch.arange(-1, len(path) - 1).repeat(LANES, 1)
        for layer in range(2):
            weights = whole["weight_UEO"][layer], None if whole["bias_UE"] is None else whole["bias_UE"][layer]
            mixed = conv(case["input_UBTE"][layer][:, path], whole["column_RUOE"], layer, rows["lane_row_B"], run, *weights)
            scan(mixed, case["gate_UBTG"][layer][:, path], *own(scan).values(), expected, layer, **rows, length_B=length)
        one, first = torch.tensor([1, 0, 0]), torch.zeros(LANES, 1, dtype=torch.int64)
        for at in path:
            token = {name: case[name][:, :, at : at + 1] for name in ("input_UBTE", "gate_UBTG")}
            op(**{**case, **token, "column_RUOE": columns, "matrix_RUHKV": single}, path_BA=first, length_B=one)
            shift(token["input_UBTE"], columns, 0, **rows, path_BA=first, length_B=one)
        for other in (expected, single):
            if op.which == "reference":
                torch.testing.assert_close(found, other, rtol=2e-6, atol=2e-6, equal_nan=True)
            else:
                assert same_bits(found, other)
        untouched = [row for row in range(LANES + 2) if row != 3]
        assert found[3].isfinite().all() and not same_bits(found[3], whole["matrix_RUHKV"][3])
        kept = whole["matrix_RUHKV"].clone()
        kept[whole["lane_row_B"][1]] = torch.nan
        assert same_bits(found[untouched], kept[untouched])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("value_dim", [6, 16, 70, 128])
def test_native_nodes_have_the_bits_of_decoding_their_path(rule: str, value_dim: int) -> None:
    """Token by token, every one committed before the next; in a tree, in a run, in both forms."""
    walk, at_once, scan, chunk = (Op(name, "native", rule) for name in ("state_walk", "state_tree", "state_scan", "state_chunk"))
    drawn, skip = generator(8), own(walk)
    case = {**random_tokens(drawn, LANES, NODES, KEY_HEADS, HEADS, KEY_DIM, value_dim), **skip}
    case["ancestors_BTX"] = random_ancestors(drawn, LANES, NODES)
    found = walk(**case)
    assert same_bits(at_once(**case), found)
    for node in range(NODES):
        path = path_of(case["ancestors_BTX"], 0, node)
        plain, run, block = (case["matrix_RUHKV"].clone() for _ in range(3))
        one_bit = torch.ones(LANES, 1, 1, dtype=torch.int64)
        rest = {"layer": case["layer"], "lane_row_B": case["lane_row_B"], **skip}
        for at in path:
            one = {name: case[name][:, at : at + 1] for name in ("mixed_BTE", "gate_BTG")}
            read = walk(**one, matrix_RUHKV=plain, **rest, ancestors_BTX=one_bit)
            scan(**one, matrix_RUHKV=plain, **rest, length_B=torch.tensor([1, 0, 0]))
        assert same_bits(read[0, 0], found[0, node])
        tokens = {name: case[name][:, path] for name in ("mixed_BTE", "gate_BTG")}
        length = torch.tensor([len(path), 0, 0])
        for op, matrix in ((scan, run), (chunk, block)):
            out = op(**tokens, matrix_RUHKV=matrix, **rest, length_B=length)
            assert same_bits(out[0, -1], found[0, node]) and same_bits(matrix, plain)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["state_walk", "state_scan", "tree_conv", "state_commit"])
def test_a_native_row_has_the_same_bits_in_any_batch_and_on_any_threads(name: str, rule: str) -> None:
    drawn = generator(9)
    op = Op(name, "native", rule)
    case: dict[str, Any] = {**random_tokens(drawn, LANES, NODES, KEY_HEADS, HEADS, 64, 80), **own(op)}
    if name == "state_commit":
        case = commit_case(9, rule == "ssm", key_dim=64, value_dim=80)
        case |= {"path_BA": torch.arange(NODES).repeat(LANES, 1), "length_B": torch.tensor([NODES, 3, 0])}
    elif name.endswith("_walk"):
        case["ancestors_BTX"] = random_ancestors(drawn, LANES, NODES)
    elif name.endswith("_scan"):
        case["length_B"] = torch.tensor([NODES, 3, 0])
    else:
        case = {**conv_case(9, NODES), "input_BTE": torch.randn(LANES, NODES, 700, generator=drawn)}
        case |= {"column_RUOE": torch.randn(LANES + 1, 2, 3, 700, generator=drawn), "weight_EO": torch.randn(700, 4, generator=drawn)}
    states = "column_RUOE" if name == "tree_conv" else "matrix_RUHKV"
    by_lane = ("mixed_BTE", "gate_BTG", "input_BTE", "lane_row_B", "ancestors_BTX", "parent_BT", "path_BA", "length_B")

    def result(lanes: slice) -> tuple[Tensor, ...]:
        part = {key: value[lanes] if key in by_lane else value for key, value in case.items()}
        part |= {key: case[key][:, lanes] for key in ("input_UBTE", "gate_UBTG") if key in case}
        part[states] = case[states].clone()
        returned = op(**part)
        return (*(() if returned is None else (returned,)), part[states][case["lane_row_B"][lanes]])

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = result(slice(None))
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            assert all(map(same_bits, result(slice(None)), whole))
            for lane in range(LANES):
                assert all(same_bits(one[0], of_all[lane]) for one, of_all in zip(result(slice(lane, lane + 1)), whole, strict=True))
    finally:
        torch.set_num_threads(before)


def test_a_native_kernel_refuses_other_dtypes_and_slots_with_gaps() -> None:
    case, walk = tree(), Op("state_walk", "native")
    with pytest.raises(ConfigError, match=r"mixed.*float32"):
        walk(**{**case, "skip_H": None, "mixed_BTE": case["mixed_BTE"].double()})
    with pytest.raises(ConfigError, match="contiguous slots"):
        walk(**{**case, "skip_H": None, "matrix_RUHKV": case["matrix_RUHKV"].transpose(3, 4).contiguous().transpose(3, 4)})
    with pytest.raises(ConfigError, match=r"skip.*float32"):
        walk(**case, skip_H=SKIP.double())


def conv_case(seed: int, nodes: int) -> dict[str, Any]:
    drawn = generator(seed)
    parent = torch.stack(
        [torch.tensor([-1, *(int(torch.randint(0, n, (1,), generator=drawn)) for n in range(1, nodes))]) for _ in range(LANES)]
    )
    return {
        "input_BTE": torch.randn(LANES, nodes, 5, generator=drawn),
        "column_RUOE": torch.randn(LANES + 1, 2, 3, 5, generator=drawn),
        "layer": 1,
        "lane_row_B": torch.tensor([2, 0, 3]),
        "parent_BT": parent,
        "weight_EO": torch.randn(5, 4, generator=drawn),
    }


@implementations("tree_conv")
def test_convolution_goes_on_across_the_root(op: Op) -> None:
    """By torch's own convolution over the committed columns and the node's path."""
    case = conv_case(0, 9)
    found = op(**case)
    for lane in range(LANES):
        for node in range(9):
            path = [node]
            while (parent := int(case["parent_BT"][lane, path[0]])) >= 0:
                path.insert(0, parent)
            line = torch.cat((case["column_RUOE"][case["lane_row_B"][lane], 1], case["input_BTE"][lane, path]))
            plain = torch.nn.functional.conv1d(line.T[None], case["weight_EO"][:, None], groups=5)[0, :, -1]
            torch.testing.assert_close(found[lane, node], torch.nn.functional.silu(plain))


@implementations("tree_conv")
def test_convolution_of_a_part_of_wider_rows(op: Op) -> None:
    """As in a projection's output: rows are strided."""
    case = conv_case(2, 9)
    wide = torch.full((LANES, 9, 12), torch.nan)
    wide[..., 3:8] = case["input_BTE"]
    assert same_bits(op(**{**case, "input_BTE": wide[..., 3:8]}), op(**case))


@pytest.mark.kernels
def test_a_part_of_wider_rows_is_not_copied() -> None:
    from graphspec.kernels.fused.launch import recording
    from graphspec.kernels.recurrent.fused.tree_conv import tree_conv as launcher

    for lanes, nodes in ((LANES, 9), (1, 9), (LANES, 1)):
        case = {**conv_case(2, 9), "input_BTE": torch.zeros(lanes, nodes, 12)[..., 3:8]}
        with recording() as launches:
            launcher(**case)
        (launch,) = launches
        inputs = dict(zip(launch.kernel.arg_names, launch.args, strict=False))["inputs"]
        assert inputs.data_ptr() == case["input_BTE"].data_ptr() and inputs.stride(0) == 12


def test_a_path_one_by_one_gives_what_the_tree_gives() -> None:
    case = conv_case(1, 9)
    found, columns = tree_conv(**case), case["column_RUOE"].clone()
    path = [8]
    while (parent := int(case["parent_BT"][1, path[0]])) >= 0:
        path.insert(0, parent)
    for node in path:
        one = {**case, "input_BTE": case["input_BTE"][:, node : node + 1], "parent_BT": torch.full((LANES, 1), -1), "column_RUOE": columns}
        torch.testing.assert_close(tree_conv(**one)[1, 0], found[1, node], rtol=2e-6, atol=2e-6)
        conv_shift(
            one["input_BTE"][None], columns, 1, case["lane_row_B"], torch.zeros(LANES, 1, dtype=torch.int64), torch.tensor([0, 1, 0])
        )
    whole = case["column_RUOE"].clone()
    padded = torch.tensor([path + [0] * (9 - len(path))] * LANES)
    conv_shift(case["input_BTE"][None], whole, 1, case["lane_row_B"], padded, torch.tensor([0, len(path), 0]))
    assert same_bits(whole, columns)
    kept = torch.cat((case["column_RUOE"][0, 1], case["input_BTE"][1, path]))[-3:]
    assert same_bits(whole[0, 1], kept)
    assert same_bits(whole[1:], case["column_RUOE"][1:]), "other rows keep their bits"

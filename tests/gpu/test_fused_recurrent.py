"""The fused ops of recurrent layers on a GPU: within twice the reference's error, in the op's own sizes and in those of a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphspec.kernels import OPS, KernelOp
from tests.kernels.cases import cases_of
from tests.kernels.cases.recurrent import random_ancestors, random_tokens
from tests.support.float_law import assert_float_law

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

VERIFY, RUNS = ("state_walk", "state_tree"), ("state_scan", "state_chunk")
NAMES = ("tree_conv", "conv_shift", "state_commit", *VERIFY, *RUNS)
MINE = {op.name: op for op in OPS if op.name in NAMES}
BY_OP = [pytest.param(op, id=name) for name, op in MINE.items()]


def drawn(selective: bool, generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """Inputs of an op in the sizes of Nemotron-H or Qwen3-Next."""
    sizes = (8, 128, 128, 64) if selective else (16, 32, 128, 128)
    made = random_tokens(generator, 2, tokens, *sizes)
    return {**made, "skip_H": torch.randn(sizes[1], generator=generator) if selective else None}


def on_gpu(case: dict[str, Any], *, double: bool = False) -> dict[str, Any]:
    """A copy of the case on the device."""

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to("cuda", torch.float64 if double and value.is_floating_point() else value.dtype, copy=True)

    return {key: copy(value) for key, value in case.items()}


def outputs(op: KernelOp, function: Any, case: dict[str, Any]) -> list[Tensor]:
    """What a call returns and writes; it may write into ``case``."""
    result = op.call(function, case)
    return [*(() if result is None else (result,)), *(case[name] for name in op.mutates if case[name] is not None)]


def assert_law(op: KernelOp, case: dict[str, Any]) -> None:
    """Error against the float64 reference at most twice the float32 one, plus one rounding of the largest value; the same every time."""
    reference = outputs(op, op.reference, on_gpu(case))
    oracle = reference if op.exact else outputs(op, op.reference, on_gpu(case, double=True))
    first, second = (outputs(op, op.implementation("fused"), on_gpu(case)) for _ in range(2))
    for found, again, plain, exact in zip(first, second, reference, oracle, strict=True):
        assert found.dtype == plain.dtype and torch.equal(found.nan_to_num(), again.nan_to_num())
        if op.exact:
            finite = exact.isfinite()
            assert torch.equal(found.isfinite(), finite) and torch.equal(found[finite], plain[finite])
        else:
            assert_float_law(found, plain, exact, dtype=torch.float32, partly=True)


@pytest.mark.references(*NAMES)
@pytest.mark.parametrize("op", BY_OP)
def test_equals_the_reference(op: KernelOp) -> None:
    for seed in range(4):
        for case in cases_of(op, torch.Generator().manual_seed(seed)):
            assert_law(op, case)


@pytest.mark.parametrize("name", VERIFY)
@pytest.mark.parametrize("selective", [False, True], ids=["delta", "ssm"])
@pytest.mark.parametrize("nodes", [1, 8, 16, 64])
def test_a_tree_in_the_sizes_of_a_model(name: str, selective: bool, nodes: int) -> None:
    generator = torch.Generator().manual_seed(nodes)
    assert_law(MINE[name], {**drawn(selective, generator, nodes), "ancestors_BTX": random_ancestors(generator, 2, nodes)})


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("selective", [False, True], ids=["delta", "ssm"])
@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_a_run_in_the_sizes_of_a_model(name: str, selective: bool, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    rows = {"length_B": torch.tensor([tokens, tokens // 2]), "fresh_B": torch.tensor([False, True])}
    assert_law(MINE[name], {**drawn(selective, generator, tokens), **rows})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("selective", [False, True], ids=["delta", "ssm"])
def test_a_commit_has_the_bits_of_plain_decoding(selective: bool, dtype: torch.dtype) -> None:
    """A path in one commit, and node by node as in plain decoding; a node's output does not depend on how its past was committed."""
    key_heads, heads, key_dim, value_dim, layers, nodes = (8, 128, 128, 64, 2, 6) if selective else (16, 32, 128, 128, 2, 6)
    drawn, channels = torch.Generator().manual_seed(1), 2 * key_heads * key_dim + heads * value_dim
    gate = torch.rand(layers, 1, nodes, 2 * heads, generator=drawn)
    gate[..., :heads] *= -3
    shapes = {"weight_UEO": (layers, channels, 4), "column_RUOE": (2, layers, 3, channels), "input_UBTE": (layers, 1, nodes, channels)}
    cast = {name: torch.randn(shape, generator=drawn).to("cuda", dtype) for name, shape in shapes.items()}
    case = {**cast, "bias_UE": torch.randn(layers, channels, generator=drawn).to("cuda", dtype) if selective else None}
    rows = {"lane_row_B": torch.tensor([1], device="cuda"), "selective": selective}
    start = torch.randn(2, layers, heads, key_dim, value_dim, generator=drawn).cuda()
    commit, shift = (op.implementation("fused") for op in (MINE["state_commit"], MINE["conv_shift"]))
    walk, conv = MINE["state_walk"].implementation("fused"), MINE["tree_conv"].implementation("fused")
    skip = torch.randn(heads, generator=drawn).cuda() if selective else None
    gate = gate.cuda()

    def reads(tokens: slice, columns: Tensor, matrix: Tensor) -> list[Tensor]:
        """What a chain of tokens reads from a row's states."""
        count = len(range(nodes)[tokens])
        parent = torch.arange(-1, count - 1, device="cuda")[None]
        words = ((1 << torch.arange(1, count + 1, device="cuda")) - 1)[None, :, None]
        read = []
        for layer in range(layers):
            weights = case["weight_UEO"][layer], None if case["bias_UE"] is None else case["bias_UE"][layer]
            mixed = conv(case["input_UBTE"][layer][:, tokens], columns, layer, rows["lane_row_B"], parent, *weights)
            read.append(walk(mixed, gate[layer][:, tokens], skip, matrix, layer, rows["lane_row_B"], words))
        return read

    whole, single, columns = start.clone(), start.clone(), case["column_RUOE"].clone()
    path, one, first = (torch.tensor(x, device="cuda") for x in ([list(range(nodes))], [1], [[0]]))
    chain = reads(slice(None), columns, start)
    commit(**{**case, "gate_UBTG": gate, "matrix_RUHKV": whole}, **rows, path_BA=path, length_B=one * nodes)
    for node in range(nodes):
        alone = reads(slice(node, node + 1), columns, single)
        assert all(torch.equal(mine[:, 0], theirs[:, node]) for mine, theirs in zip(alone, chain, strict=True))
        token = {"input_UBTE": case["input_UBTE"][:, :, node : node + 1], "gate_UBTG": gate[:, :, node : node + 1]}
        commit(**{**case, **token, "column_RUOE": columns, "matrix_RUHKV": single}, **rows, path_BA=first, length_B=one)
        shift(token["input_UBTE"], columns, 0, rows["lane_row_B"], first, one)
    assert torch.equal(whole, single) and not torch.equal(whole, start)

"""The fused linear layer on a GPU: bfloat16 against float64, bits independent of other rows, and a replayed graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphspec.kernels import op_of
from graphspec.kernels.fused.launch import semaphores
from graphspec.kernels.linear.fused.linear import fused_linear, linear, linear_summed
from graphspec.kernels.linear.fused.linear_choice import LinearShape, LinearTable, candidates
from graphspec.kernels.linear.fused.linear_tune import tune
from graphspec.kernels.linear.fused.packed_linear import packed_linear
from graphspec.kernels.linear.fused.sum_squares import sum_squares as fused_squares
from graphspec.kernels.linear.linear import linear as reference
from graphspec.kernels.linear.linear import sum_squares
from graphspec.kernels.linear.packed import dequantise
from tests.kernels.cases import cases_of
from tests.support.float_law import assert_float_law, widened

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DEVICE = torch.device("cuda")
LAYERS = {
    "qkv": (1536, 1024, ("norm",)),
    "o": (1024, 1024, ("residual",)),
    "gate-up": (3584, 1024, ("norm", "gated")),
    "down": (1024, 3584, ("residual", "bias")),
    "head": (32003, 1024, ("norm", "float32")),
    "odd": (1100, 1003, ("offset", "residual")),
}


def call(rows: int, layer: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    outputs, inputs, parts = LAYERS[layer]

    def made(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=DEVICE).to(dtype)

    arguments: dict[str, Any] = {"x": made(rows, inputs), "weight": made(outputs, inputs) * inputs**-0.5}
    if "norm" in parts or "offset" in parts:
        arguments |= {"norm_weight": made(inputs), "norm_eps": 1e-5, "norm_offset": "offset" in parts}
    if "bias" in parts:
        arguments["bias"] = made(outputs)
    if "residual" in parts:
        arguments["residual"] = made(rows, outputs)
    return arguments | {"gated": "gated" in parts, "float32": "float32" in parts}


def assert_law(found: Tensor, arguments: dict[str, Any]) -> None:
    assert_float_law(found, reference(**arguments), reference(**widened(arguments)), dtype=arguments["x"].dtype)


@pytest.mark.references("linear")
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 17, 64])
def test_bfloat16_against_float64(layer: str, rows: int) -> None:
    arguments = call(rows, layer)
    assert_law(linear(**arguments), arguments)
    assert_law(fused_linear("batch_invariant")(**arguments), arguments)


@pytest.mark.references("packed_linear")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_against_float64(dtype: torch.dtype) -> None:
    """The catalog's cases: every kind of code, as the numbers that it stands for."""
    op = op_of("packed_linear")
    for case in cases_of(op, torch.Generator().manual_seed(0)):
        moved = {key: value.to(DEVICE) if isinstance(value, Tensor) else value for key, value in case.items()}
        arguments = op.signature.gather(moved)
        for name in ("x", "bias", "norm_weight", "residual"):
            if isinstance(arguments.get(name), Tensor):
                arguments[name] = arguments[name].to(dtype)
        assert_law(packed_linear(**arguments), arguments | {"weight": dequantise(arguments["weight"], dtype)})


@pytest.mark.parametrize("layer", ["qkv", "gate-up"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(layer: str, dtype: torch.dtype) -> None:
    arguments = call(9, layer, dtype)
    assert_law(linear(**arguments), arguments)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_every_candidate(layer: str, rows: int) -> None:
    arguments = call(rows, layer)
    outputs, inputs, parts = LAYERS[layer]
    shape = LinearShape(
        rows, outputs, inputs, "bfloat16", "norm_weight" in arguments, "gated" in parts, "residual" in parts, "bias" in parts
    )
    for config in candidates(shape):
        found = linear(**arguments, config=config.encoded())
        assert_law(found, arguments)
        assert torch.equal(found, linear(**arguments, config=config.encoded()))
    # The kernels name the device with its index.
    assert not semaphores(torch.device("cuda", torch.cuda.current_device()), 1).any()


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_of_a_row_do_not_depend_on_the_others(layer: str, dtype: torch.dtype) -> None:
    multiply = fused_linear("batch_invariant")
    arguments = call(600, layer, dtype)
    whole = multiply(**arguments)
    for begin, count in ((0, 1), (599, 1), (77, 2), (60, 64), (500, 100)):
        rows = slice(begin, begin + count)
        part = {key: value[rows].clone() if key in ("x", "residual") else value for key, value in arguments.items()}
        assert torch.equal(multiply(**part), whole[rows])


@pytest.mark.parametrize("rows", [1, 8, 16, 64])
def test_squares_from_product_to_product(rows: int) -> None:
    """Those of the stored values, the same every time; and the norm that takes them keeps the law."""
    before, after = call(rows, "down"), call(rows, "gate-up")
    for config in candidates(LinearShape(rows, 1024, 3584, "bfloat16", residual=True, bias=True)):
        out, sums = linear_summed(**before, config=config.encoded())
        stored = torch.stack([part.double().square().sum(-1) for part in out.split(config.tile_outputs, dim=-1)], -1)
        torch.testing.assert_close(sums.double(), stored, rtol=1e-6, atol=0.0)
        assert torch.equal(sums, linear_summed(**before, config=config.encoded())[1])
        arguments = after | {"x": out}
        assert_law(linear(**arguments, squares=sums), arguments)


@pytest.mark.references("sum_squares")
@pytest.mark.parametrize("channels", [128, 3584, 8192])
def test_sums_of_squares_have_the_bits_of_every_row_alone(channels: int) -> None:
    x = torch.randn(1, 512, channels, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE).bfloat16()
    whole = fused_squares(x)
    assert_float_law(whole, sum_squares(x), sum_squares(x.double()), dtype=torch.float32)
    for rows in (1, 2, 8, 64, 100):
        assert torch.equal(fused_squares(x[:, :rows]), whole[:, :rows])


def test_replayed_graph_gives_the_same_bits() -> None:
    arguments = call(8, "gate-up")
    expected = linear(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = linear(**arguments)
    for _ in range(3):
        found.zero_()
        graph.replay()
        assert torch.equal(found, expected)


def test_tuning_measures_everything() -> None:
    shape = LinearShape(8, 1536, 1024, "bfloat16", norm=True)
    table = LinearTable()
    [measured] = tune(table, [shape], DEVICE)
    assert shape in table.entries and None in measured.times and len(measured.times) > 2
    assert all(time > 0 for time in measured.times.values())
    arguments = call(8, "qkv")
    assert_law(fused_linear("fast", table)(**arguments), arguments)

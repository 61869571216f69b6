"""Fused products of weights of low precision: bit for bit the same kernel on the dequantised weight, in every format and every part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from graphspec.errors import CaptureError, ConfigError
from graphspec.kernels.fused.hopper import MULTIPROCESSORS, PROGRAM_SHARED_BYTES, resident
from graphspec.kernels.fused.launch import recording
from graphspec.kernels.linear.fused import linear_tune
from graphspec.kernels.linear.fused.linear import fused_linear, linear, linear_summed, matmul
from graphspec.kernels.linear.fused.linear_choice import LinearConfig, LinearShape, LinearTable, candidates, fast_config, invariant_config
from graphspec.kernels.linear.fused.packed_linear import (
    dequantised,
    fused_packed_linear,
    packed_linear,
    packed_linear_summed,
)
from graphspec.kernels.linear.linear import ResidualStream
from graphspec.kernels.linear.packed import CODES, Packed, code_bits, dequantise
from graphspec.kernels.op import Signature
from graphspec.models.layers import Linear, RMSNorm
from graphspec.models.packed_weight import PackedWeight
from graphspec.models.vocabulary import set_weight
from tests.kernels.fused.test_aot import COMMITTED
from tests.kernels.proof.linear import AOT, FORMATS

# The interpreter computes with numpy, which warns of infinite and undefined results; numbers of 16 bits and scales of all sizes have them.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
FIELDS: dict[str, dict[str, Any]] = {
    "scales": {},
    "half": {"scales": torch.float16},
    "zeros": {"scales": torch.bfloat16, "zeros": torch.uint8},
    "signed zeros": {"scales": torch.float16, "zeros": torch.int8},
    "wide zeros": {"scales": torch.bfloat16, "zeros": torch.int32},
    "e8m0": {"scales": E8M0},
    "global": {"scales": E4M3, "supers": 1},
    "divided": {"scales": E4M3, "supers": 1, "divides": True},
    "minimums": {"scales": torch.float16, "minimums": torch.float16},
    "super": {"scales": torch.uint8, "minimums": torch.uint8, "supers": 2},
    "signed": {"scales": torch.int8, "supers": 4},
    "ordered": {"scales": torch.float16, "zeros": torch.uint8, "ordered": True},
}
"""Fields besides the codes: dtypes, number of super scales, and whether channels are in any order."""
WHOLE, SPLIT = LinearConfig(16, 16, 64, 1, 4, 2), LinearConfig(16, 32, 32, 2, 4, 2, scan=True)


@pytest.fixture(autouse=True)
def _subnormals() -> Iterator[None]:
    """Kept, unless a test says otherwise. An engine in the same process flushes them."""
    flushed = bool(torch.tensor(1e-39) * 1.0 == 0.0)
    torch.set_flush_denormal(False)
    yield
    torch.set_flush_denormal(flushed)


def test_floats_of_4_bits_do_not_depend_on_subnormals() -> None:
    """In the engine's process they are flushed; 0.5 is a subnormal of the 4-bit float, and no other number here is one."""
    made, x = weight("e2m1", 20, 64, 16, torch.bfloat16), torch.randn(3, 64)
    found, half = [], []
    for flush in (False, True):
        torch.set_flush_denormal(flush)
        found.append(packed_linear(x, made, config=WHOLE.encoded()))
        half.append(packed_linear(x.bfloat16(), made, config=WHOLE.encoded()))
    assert torch.equal(*found) and torch.equal(*half)


def factors(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """As a checkpoint may have them; exponents of all sizes, 2 ** -127 among them."""
    if dtype == E8M0:
        return torch.randint(0, 140, (rows, columns), dtype=torch.uint8).view(dtype)
    if dtype == E4M3:
        return torch.randint(1, 127, (rows, columns), dtype=torch.uint8).view(dtype)
    if not dtype.is_floating_point:
        return torch.randint(0, 64, (rows, columns)).to(dtype)
    return (torch.randn(rows, columns) / 8).to(dtype)


def weight(
    code: str, outputs: int, inputs: int, group: int, scales: torch.dtype = torch.float32, zeros: torch.dtype | None = None,
    minimums: torch.dtype | None = None, supers: int = 0, divides: bool = False, ordered: bool = False,
) -> Packed:  # fmt: skip
    """Random codes, each of every value, with these fields."""
    codes = torch.randint(0, 256, (outputs, inputs * code_bits(code) // 8), dtype=torch.uint8)
    if code == "e4m3":
        codes = torch.where(codes & 127 == 127, 0, codes)  # no NaN
    groups = -(-inputs // group)
    return Packed(
        codes.view(CODES[code]), factors(outputs, groups, scales), code, group,
        super_scales=factors(outputs, supers, torch.float16) if supers else None,
        zeros=None if zeros is None else torch.randint(-3 if zeros.is_signed else 0, 17, (outputs, groups)).to(zeros),
        minimums=None if minimums is None else factors(outputs, groups, minimums),
        super_minimums=factors(outputs, supers, torch.float16) if supers and minimums is not None else None,
        group_of=torch.randint(0, groups, (inputs,), dtype=torch.int32) if ordered else None,
        divides=divides,
    )  # fmt: skip


def same(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit, but for the payload of NaN."""
    return found.dtype == expected.dtype and bool(((found == expected) | (found.isnan() & expected.isnan())).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("code", CODES)
def test_numbers_are_those_of_the_specification(code: str, fields: str, dtype: torch.dtype) -> None:
    """Groups in a tile, across tiles, and of a whole row."""
    for inputs, group in ((256, 16), (70, 24), (130, 130)):
        groups = -(-inputs // group)
        kind = {**FIELDS[fields]}
        if kind.get("supers", 0) > 1 and groups % kind["supers"]:
            kind["supers"] = groups
        made = weight(code, 21, inputs, group, **kind)
        assert same(dequantised(made, torch.empty(0, dtype=dtype)), dequantise(made, dtype))


@pytest.mark.parametrize("code", [code for code in CODES if code_bits(code) == 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_16_bits_at_the_ends_of_the_range(code: str, dtype: torch.dtype) -> None:
    """Every code with every scale of the dtype: subnormals and infinite products, too."""
    scales = torch.arange(0, 1 << 16, 97).to(torch.int32).to(torch.int16).view(dtype)
    scales = scales[scales.isfinite()][:, None]
    codes = torch.arange(0, 256, 17, dtype=torch.uint8).repeat(len(scales), 1)
    for zeros in (None, torch.full_like(scales, 5).to(torch.uint8)):
        made = Packed(codes, scales, code, 32, zeros=zeros)
        assert same(dequantised(made, torch.empty(0, dtype=dtype)), dequantise(made, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("code", CODES)
def test_a_product_is_that_of_the_dequantised_weight(code: str, fields: str, dtype: torch.dtype) -> None:
    """Rows, sizes, parts and splits take turns."""
    turn = [*CODES].index(code) + [*FIELDS].index(fields)
    rows, inputs, group = (1, 2, 5, 16, 33)[turn % 5], (96, 70, 128)[turn % 3], (32, 24, 16)[turn % 3]
    kind = {**FIELDS[fields]}
    if kind.get("supers", 0) > 1:
        kind["supers"] = -(-inputs // group)
    made, gated = weight(code, 22, inputs, group, **kind), turn % 2 == 1
    width = 11 if gated else 22
    given: dict[str, Any] = {"x": torch.randn(rows, inputs).to(dtype), "gated": gated, "float32": turn % 4 == 3}
    if turn % 3:
        given |= {"norm_weight": torch.randn(inputs).to(dtype), "norm_eps": 1e-5, "norm_offset": turn % 3 == 2}
    if turn % 4 < 2:
        given |= {"bias": torch.randn(22).to(dtype), "residual": torch.randn(rows, width).to(dtype)}
    config = (WHOLE, SPLIT)[turn // 2 % 2]
    found = packed_linear(weight=made, **given, config=config.encoded())
    assert same(found, linear(weight=dequantise(made, dtype), **given, config=config.encoded()))


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 33])
def test_choices_of_tiles_give_the_bits_of_those_tiles(rows: int) -> None:
    for code, group in (("int4", 32), ("e4m3", 200)):
        made, x, norm = weight(code, 40, 200, group), torch.randn(rows, 200).bfloat16(), torch.randn(200).bfloat16()
        for numerics in ("fast", "batch_invariant"):
            shape = LinearShape(rows, 40, 200, "bfloat16", norm=True, code=code, group=group)
            config = LinearTable().choose(shape, numerics)
            assert config is not None
            found = fused_packed_linear(numerics)(x, made, norm_weight=norm, norm_eps=1e-5)
            assert isinstance(found, Tensor)
            values = dequantise(made, torch.bfloat16)
            assert same(found, linear(x, values, norm_weight=norm, norm_eps=1e-5, config=config.encoded()))


def test_bits_of_a_row_do_not_depend_on_the_others() -> None:
    multiply, made = fused_packed_linear("batch_invariant"), weight("int4", 16, 1024, 64)
    x = torch.randn(66, 1024).half()
    assert invariant_config(LinearShape(66, 16, 1024, "float16", code="int4", group=64)).splits > 1
    whole = multiply(x, made)
    assert isinstance(whole, Tensor)
    for begin, count in ((0, 1), (65, 1), (40, 17)):
        part = multiply(x[begin : begin + count], made)
        assert isinstance(part, Tensor) and torch.equal(part, whole[begin : begin + count])


def test_squares_of_a_stream_are_those_of_the_dequantised_weight() -> None:
    made, x, residual = weight("e2m1", 48, 64, 32, E8M0), torch.randn(3, 64).bfloat16(), torch.randn(3, 48).bfloat16()
    found = packed_linear_summed(x, made, residual=residual, config=SPLIT.encoded())
    expected = linear_summed(x, dequantise(made, torch.bfloat16), residual=residual, config=SPLIT.encoded())
    assert all(same(*pair) for pair in zip(found, expected, strict=True))
    stream = fused_packed_linear()(x, made, residual=ResidualStream(residual))
    assert isinstance(stream, ResidualStream) and stream.squares is not None


@pytest.mark.parametrize("parts", [{}, {"gated": True}, {"float32": True}])
def test_many_rows_multiply_the_dequantised_weight_by_the_library(parts: dict[str, Any]) -> None:
    """Codes become numbers once per call, in one launch, and the product is the one that a weight of numbers has."""
    made, x = weight("int8", 34, 96, 32), torch.randn(65, 96)
    values = dequantise(made, torch.float32)
    with recording() as launches:
        fused_packed_linear()(x, made, **parts)
    assert [each.kernel.fn.__name__ for each in launches] == ["_dequantise"]
    found, expected = fused_packed_linear()(x, made, **parts), fused_linear()(x, values, **parts)
    assert isinstance(found, Tensor) and isinstance(expected, Tensor) and torch.equal(found, expected)
    if not parts:
        assert torch.equal(found, matmul(x, values))


@pytest.mark.parametrize("config", [WHOLE, SPLIT])
def test_memory_around_the_weight_is_never_read(config: LinearConfig) -> None:
    """Codes and fields that tiles cover beyond the real ones would make NaN."""
    made = weight("e4m3", 20, 50, 24, torch.float16)
    around = torch.full((24, 80), 127, dtype=torch.uint8)
    around[:20, :50] = made.codes.view(torch.uint8)
    x = torch.randn(5, 50)
    surrounded = made._replace(codes=around.view(E4M3)[:20, :50])
    assert torch.equal(packed_linear(x, surrounded, config=config.encoded()), packed_linear(x, made, config=config.encoded()))


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"scales": torch.ones(4, 3)}, ConfigError, r"scales.*\[4, 2\].*\[4, 3\]"),
        ({"scales": torch.ones(2, 4).t()}, CaptureError, "scales.*contiguous.*strides"),
        ({"super_scales": torch.ones(4, 1).to(E4M3)}, CaptureError, "super_scales.*numbers.*float8"),
        ({"codes": torch.ones(4, 31, dtype=torch.uint8)}, CaptureError, r"\[out, 64\].*\(4, 62\)"),
        ({"codes": torch.ones(32, 4, dtype=torch.uint8).t()}, CaptureError, "contiguous rows"),
        ({"code": "int3"}, ConfigError, "int3"),
    ],
)
def test_refuses(change: dict[str, Any], error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        packed_linear(torch.randn(2, 64), weight("int4", 4, 64, 32)._replace(**change))


def test_operators_are_known_to_the_compiler() -> None:
    made, x = weight("int4", 24, 64, 32, torch.bfloat16), torch.randn(2, 3, 64)
    flatten, operators = Signature(packed_linear, weight=Packed).flatten, torch.ops.graphspec
    torch.library.opcheck(operators.packed_linear.default, tuple(flatten((x, made), {"config": list(SPLIT.encoded())})))
    torch.library.opcheck(operators.dequantised.default, tuple(Signature(dequantised).flatten((made, x), {})))


class Block(nn.Module):
    """A layer of one format, after a norm and gated, and one of two formats."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(64, 1e-5)
        self.norm.weight.data.normal_()
        self.up, self.down = Linear(64, 48, 48), Linear(48, 40, 24)
        up = [weight("int4", 48, 64, 32, torch.bfloat16) for _ in range(2)]
        set_weight(self.up, PackedWeight(up, torch.float32))
        set_weight(self.down, PackedWeight([weight("uint4", 40, 48, 16), weight("int8", 24, 48, 16)], torch.float32))

    def use(self, of_numbers: Callable[..., Any], of_codes: Callable[..., Any]) -> Block:
        for layer in (self.up, self.down):
            layer.multiply, layer.multiply_codes = of_numbers, of_codes
        return self

    def forward(self, x: Tensor) -> Any:
        return self.down(self.up(x, self.norm, gated=True), residual=x)


UP = LinearShape(6, 96, 64, "float32", norm=True, gated=True, code="int4", group=32)


def test_traced_into_one_graph_and_measured() -> None:
    """Both formats of a layer have a choice of their own."""
    block, x = Block(), torch.randn(2, 3, 64)
    expected = block(x)
    table = LinearTable()
    block.use(fused_linear("fast", table), fused_packed_linear("fast", table))
    torch._dynamo.reset()
    found = torch.compile(block, backend="eager", fullgraph=True, dynamic=False)(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    shapes = linear_tune.shapes_of(block, lambda: block(x))
    assert [(shape.outputs, shape.code, shape.group) for shape in shapes] == [(96, "int4", 32), (40, "uint4", 16), (24, "int8", 16)]
    assert shapes[0] == UP and list(table.requested) == shapes


def test_measured_weights_are_packed() -> None:
    calls = linear_tune.inputs_of(UP, torch.device("cpu"), 3 * 96 * 64 // 2)
    assert len(calls) == 4 and all(call["weight"].code == "int4" for call in calls)
    [measured] = linear_tune.tune(LinearTable(), [UP], torch.device("cpu"), timer=lambda calls: float(calls[0]() is None), compiled=False)
    assert measured.best == candidates(UP)[0] and {*measured.times} >= {*candidates(UP), None}


PACKED_SHAPES = st.builds(
    LinearShape,
    rows=st.integers(1, 64),
    outputs=st.integers(1, 20000).map(lambda half: 2 * half),
    inputs=st.integers(1, 20000).map(lambda half: 2 * half),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    norm=st.booleans(),
    gated=st.booleans(),
    code=st.sampled_from([*CODES]),
    group=st.sampled_from([1, 16, 32, 128, 4096]),
)


@given(PACKED_SHAPES)
def test_tiles_fit_and_their_codes_keep_the_memory_busy(shape: LinearShape) -> None:
    for config in (*candidates(shape), invariant_config(shape)):
        assert config.shared_bytes(shape) <= PROGRAM_SHARED_BYTES and config.tile_inputs >= 16
        assert config == replace(config) and config.tile_outputs >= 32
    assert invariant_config(shape) == invariant_config(replace(shape, rows=1))


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_in_flight(name: str) -> None:
    """At least what the bandwidth of an H200 times the time of a round trip asks of codes, or of their conversion where it takes longer."""
    kind = FORMATS[name]
    for rows in (1, 8, 32):
        [case] = [case for case in AOT["packed_linear"] if case.name == f"{name}-down-m{rows}"]
        with recording() as launches:
            case.launcher(**case.arguments())
        config = fast_config(LinearShape(rows, 4096, 14336, "bfloat16", residual=True, code=kind.code, group=kind.group or 14336))
        assert config is not None
        [launch] = launches
        programs = min(resident(COMMITTED["kernels"][f"packed_linear/{case.name}/linear"]), -(-launch.grid[0] // MULTIPROCESSORS))
        tile = config.tile_outputs * config.tile_inputs * code_bits(kind.code) // 8
        assert programs * (config.stages - 1) * tile >= (24 if kind.group == 16 and code_bits(kind.code) == 4 else 48) * 1024

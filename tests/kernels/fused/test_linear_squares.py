"""Sums of squares passed from product to product, what that saves, and the number of resident programs of a product."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor, nn

from graphspec.errors import CaptureError
from graphspec.kernels.formulas import rms_norm
from graphspec.kernels.fused.hopper import MULTIPROCESSORS, RESERVED_BYTES, SHARED_BYTES, resident
from graphspec.kernels.fused.launch import recording
from graphspec.kernels.linear.fused import linear as module
from graphspec.kernels.linear.fused.linear import fused_linear, linear, linear_summed
from graphspec.kernels.linear.fused.linear_choice import LinearConfig, LinearShape, LinearTable, fast_config, invariant_config
from graphspec.kernels.linear.linear import ResidualStream, hidden_of
from graphspec.kernels.linear.linear import linear as reference
from graphspec.kernels.op import Signature
from graphspec.models.layers import Linear, RMSNorm
from tests.kernels.proof import aot

ROOT = Path(__file__).resolve().parents[3]
EPS = 1e-5
SPLIT = LinearConfig(16, 32, 16, 3, 4, 2)
WHOLE = replace(SPLIT, splits=1)


def whole_numbers(*sizes: int, dtype: torch.dtype) -> Tensor:
    """Few enough and small enough that every sum of their squares is exact in float32."""
    return torch.randint(-3, 4, sizes).to(dtype)


@pytest.mark.parametrize("config", [SPLIT, WHOLE, None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [(1,), (2, 9), (33,)])
def test_squares_are_those_of_what_is_stored(rows: tuple[int, ...], dtype: torch.dtype, config: LinearConfig | None) -> None:
    """Tile by tile, in the order of tiles; the last tile is not full."""
    x, weight, residual = (whole_numbers(*sizes, dtype=dtype) for sizes in ((*rows, 50), (84, 50), (*rows, 84)))
    encoded = None if config is None else config.encoded()
    out, sums = linear_summed(x, weight, residual=residual, config=encoded)
    assert torch.equal(out, linear(x, weight, residual=residual, config=encoded)) and torch.equal(
        out, reference(x, weight, residual=residual)
    )
    tile = 64 if config is None else config.tile_outputs
    tiles = [part.float().square().sum(-1) for part in out.split(tile, dim=-1)]
    assert sums.dtype == torch.float32 and torch.equal(sums, torch.stack(tiles, -1))


@pytest.mark.parametrize("parts", [("bias",), ("gated",), ("gated", "bias")])
def test_squares_are_of_rounded_values(parts: tuple[str, ...]) -> None:
    x, weight, bias = torch.randn(5, 40).half(), torch.randn(64, 40).half(), torch.randn(64).half()
    gated = "gated" in parts
    residual = torch.randn(5, 32 if gated else 64).half()
    for config in (SPLIT, WHOLE):
        arguments: dict[str, Any] = {"bias": bias if "bias" in parts else None, "residual": residual, "gated": gated}
        out, sums = linear_summed(x, weight, **arguments, config=config.encoded())
        rounded = torch.stack([part.double().square().sum(-1) for part in out.split(32, dim=-1)], -1)
        # In float32 to a few bits; what is not rounded to half precision first differs in the eleventh.
        torch.testing.assert_close(sums.double(), rounded, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 5, 33, 70])
def test_the_norm_takes_its_factor_from_the_squares(parts: int, offset: bool) -> None:
    """Given four times what they are, the factor halves, to the bit."""
    x, weight, norm = torch.randn(2, 8, 140), torch.randn(24, 140), torch.randn(140)
    squares = x.square().sum(-1, keepdim=True) / parts
    given = squares.expand(-1, -1, parts).contiguous()
    arguments: dict[str, Any] = {"norm_weight": norm, "norm_offset": offset}
    for config in (SPLIT, WHOLE, replace(WHOLE, scan=True)):
        found = linear(x, weight, **arguments, squares=given, config=config.encoded())
        torch.testing.assert_close(found, reference(x, weight, **arguments), rtol=1e-4, atol=1e-4)
        assert torch.equal(linear(x, weight, **arguments, squares=4 * given, config=config.encoded()), found / 2)


def test_squares_without_a_norm_change_nothing() -> None:
    x, weight = torch.randn(3, 40), torch.randn(24, 40)
    assert torch.equal(linear(x, weight, squares=torch.full((3, 2), torch.nan)), linear(x, weight))


def test_squares_past_the_rows_and_parts_are_never_read() -> None:
    x, weight, norm = torch.randn(3, 40), torch.randn(24, 40), torch.randn(40)
    around = torch.full((8, 3), torch.nan)
    inside = around.flatten()[:9].view(3, 3)
    inside.copy_((x.square().sum(-1, keepdim=True) / 3).expand(-1, 3))
    assert linear(x, weight, norm_weight=norm, norm_eps=EPS, squares=inside).isfinite().all()


@pytest.mark.parametrize(
    "squares", [torch.ones(3), torch.ones(2, 5), torch.ones(3, 5).half(), torch.ones(5, 3).t()], ids=["shape", "rows", "dtype", "strides"]
)
def test_refuses_squares(squares: Tensor) -> None:
    with pytest.raises(CaptureError, match="linear squares"):
        linear(torch.randn(3, 40), torch.randn(24, 40), norm_weight=torch.randn(40), squares=squares)


def test_operators_are_known_to_the_compiler() -> None:
    x, weight, residual = torch.randn(2, 3, 40), torch.randn(70, 40), torch.randn(2, 3, 70)
    flatten, operators = Signature(linear).flatten, torch.ops.graphspec
    options = {"residual": residual, "config": list(SPLIT.encoded())}
    torch.library.opcheck(operators.linear_summed.default, tuple(flatten((x, weight), options)))
    options = {"norm_weight": torch.randn(40), "norm_eps": EPS, "squares": torch.rand(2, 3, 5)}
    torch.library.opcheck(operators.linear.default, tuple(flatten((x, weight), options)))


class Blocks(nn.Module):
    """Two blocks of a decoder, each a normed and gated product and one with the residual."""

    def __init__(self, multiply: Callable[..., Any]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm(32, EPS) for _ in range(2))
        self.ups = nn.ModuleList(Linear(32, 48, 48) for _ in range(2))
        self.downs = nn.ModuleList(Linear(48, 32) for _ in range(2))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator)
        for layer in (*self.ups, *self.downs):
            layer.multiply = multiply

    def forward(self, x: Any) -> Any:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = down(up(x, norm, gated=True), residual=x)
        return x


@torch.no_grad()
def test_a_stream_spares_a_launch_and_changes_little() -> None:
    """At 16 rows the sum over a row is a separate launch, needed only by the first norm of a stream."""
    blocks, x = Blocks(fused_linear()), torch.randn(2, 8, 32)
    for given, launches in ((x, 6), (ResidualStream(x), 5)):
        with recording() as made:
            blocks(given)
        assert len(made) == launches
    found = blocks(ResidualStream(x))
    assert isinstance(found, ResidualStream) and found.squares is not None
    torch.testing.assert_close(found.hidden, blocks(x), rtol=1e-4, atol=1e-3)
    plain = Blocks(reference)(ResidualStream(x))
    assert plain.squares is None
    torch.testing.assert_close(found.hidden, plain.hidden, rtol=1e-4, atol=1e-3)


@torch.no_grad()
def test_a_stream_goes_on_where_cublas_multiplies() -> None:
    blocks, x = Blocks(fused_linear()), torch.randn(70, 32)
    found = blocks(ResidualStream(x))
    assert isinstance(found, ResidualStream) and found.squares is None and torch.equal(found.hidden, blocks(x))


@torch.no_grad()
def test_bits_of_a_row_in_a_stream_do_not_depend_on_the_others() -> None:
    blocks, x = Blocks(fused_linear("batch_invariant")), torch.randn(66, 32)
    whole = hidden_of(blocks(ResidualStream(x)))
    for begin, count in ((0, 1), (65, 1), (40, 17)):
        rows = slice(begin, begin + count)
        assert torch.equal(blocks(ResidualStream(x[rows].clone())).hidden, whole[rows])


@torch.no_grad()
def test_a_stream_is_traced_into_one_graph() -> None:
    x = torch.randn(2, 8, 32)
    table, graphs = LinearTable(), []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(Blocks(fused_linear("fast", table)), backend=backend, fullgraph=True, dynamic=False)
    found = compiled(ResidualStream(x))
    assert torch.equal(found.hidden, Blocks(fused_linear())(ResidualStream(x)).hidden)
    [graph] = graphs
    names = [str(node.target) for node in graph.graph.nodes if "graphspec" in str(node.target)]
    assert names == ["graphspec.linear.default", "graphspec.linear_summed.default"] * 2
    assert [shape.summed for shape in table.requested] == [False, False, True]


def test_a_stream_through_rms_norm_and_the_reference() -> None:
    stream, weight = ResidualStream(torch.randn(3, 8), torch.full((3, 1), torch.nan)), torch.randn(8, 8)
    norm = RMSNorm(8, EPS)
    norm.weight.data.normal_()
    assert torch.equal(norm(stream), rms_norm(stream.hidden, norm.weight, EPS))
    found = reference(stream, weight, norm_weight=norm.weight, norm_eps=EPS, residual=stream)
    assert isinstance(found, ResidualStream) and found.squares is None
    assert torch.equal(found.hidden, reference(stream.hidden, weight, norm_weight=norm.weight, norm_eps=EPS, residual=stream.hidden))


COMMITTED = json.loads(aot.TABLE.read_text())["kernels"]
PRODUCTS = {case.name: case for case in aot.CALLS["linear"] if "fp32" not in case.name}


@pytest.mark.parametrize("name", PRODUCTS)
def test_programs_end_together(name: str) -> None:
    """No product of an 8B model is a wave of programs and a remnant that is too small to keep the memory of an H200 busy."""
    case = PRODUCTS[name]
    with recording() as launches:
        case.launcher(**case.arguments())
    [grid] = [launch.grid[0] for launch in launches if launch.kernel is module._linear]
    waves = grid / (resident(COMMITTED[f"linear/{name}/linear"]) * MULTIPROCESSORS)
    assert not 1.05 < waves < 1.9, f"{grid} programs are {waves:.2f} waves"
    assert grid >= 0.9 * MULTIPROCESSORS


def test_programs_that_a_multiprocessor_holds() -> None:
    """By shared memory, by registers, by threads."""
    assert resident({"registers": 64, "shared": 81920, "warps": 4}) == 2
    assert resident({"registers": 172, "shared": 16384, "warps": 4}) == 2
    assert resident({"registers": 32, "shared": 0, "warps": 32}) == 2


def test_waves_of_other_models() -> None:
    """Shapes of Llama-3.2-1B, Qwen3-8B and Llama-3.1-70B: one wave of the residents that the config is made for, or many."""
    for outputs, inputs, gated in (
        (3072, 2048, False), (16384, 2048, True), (2048, 8192, False), (24576, 4096, True), (4096, 12288, False), (151936, 4096, False),
        (10240, 8192, False), (57344, 8192, True), (8192, 28672, False),
    ):  # fmt: skip
        for rows in (1, 16, 32, 64):
            shape = LinearShape(rows, outputs, inputs, "bfloat16", gated=gated)
            fast = fast_config(shape)
            assert fast is not None
            for config in (fast, invariant_config(shape)):
                programs = -(-shape.width // config.tile_outputs) * config.splits
                fitting = SHARED_BYTES // (config.shared_bytes(shape) + RESERVED_BYTES)
                assert any(not 1.0 < programs / (count * MULTIPROCESSORS) < 1.9 for count in range(min(2, fitting), fitting + 1)), (
                    shape,
                    config,
                )


def test_few_rows_without_a_norm_are_not_split() -> None:
    """Narrow tiles make a wave by themselves, so nothing waits for a merge."""
    few = LinearShape(8, 4096, 4096, "bfloat16", residual=True)
    for shape, split in (
        (few, False), (replace(few, rows=1), False), (replace(few, inputs=14336), False),
        (replace(few, rows=9), True), (replace(few, norm=True), True), (replace(few, outputs=1024), True),
    ):  # fmt: skip
        config = fast_config(shape)
        assert config is not None and (config.splits > 1) == split, shape


@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (4096, 14336), (8192, 8192), (3584, 14336), (2048, 2048), (5120, 17408)])
def test_under_the_law_only_rows_of_narrow_tiles_follow_the_number_of_rows(outputs: int, inputs: int) -> None:
    """And stages, which change no order. Unsplit narrow tiles have the waves that fast numerics want of them."""
    configs = [invariant_config(LinearShape(rows, outputs, inputs, "bfloat16", residual=True)) for rows in (1, 8, 16, 17, 32, 33, 64, 512)]
    assert len({(config.tile_outputs, config.tile_inputs, config.splits, config.warps) for config in configs}) == 1
    narrow = configs[0].tile_outputs == 32
    assert narrow == (outputs in (4096, 8192, 3584)) and all(config.splits == 1 for config in configs) == narrow
    assert [config.tile_rows for config in configs] == ([16, 16, 16, 32, 32, 64, 64, 64] if narrow else [64] * 8)
    for rows, config in zip((1, 64), (configs[0], configs[-2]), strict=True):
        shape = LinearShape(rows, outputs, inputs, "bfloat16", residual=True)
        assert config.shared_bytes(shape) + RESERVED_BYTES <= SHARED_BYTES
    for kept in ({"norm": True}, {"gated": True}, {"code": "int4", "group": 128}, {"dtype": "float32"}):
        assert invariant_config(replace(LinearShape(8, outputs, inputs, "bfloat16"), **kept)).tile_outputs in (64, 128)
    assert invariant_config(LinearShape(8, outputs, inputs, "bfloat16"), narrow=False).tile_rows == 64


@pytest.mark.parametrize("rows", [1, 8, 17, 33, 70])
def test_rows_of_narrow_tiles_have_the_same_bits_among_others(rows: int) -> None:
    """Products and sums of squares, in tiles of 16, 32 and 64 rows."""
    generator = torch.Generator().manual_seed(0)
    x, weight, residual = (torch.randn(*sizes, generator=generator).bfloat16() for sizes in ((70, 96), (80, 96), (70, 80)))
    found = [
        linear_summed(x[:count], weight, residual=residual[:count], config=LinearConfig(tile, 32, 64, 1, 4, 3).encoded())
        for count, tile in ((rows, 16 if rows <= 16 else 32 if rows <= 32 else 64), (70, 64))
    ]
    for alone, among in zip(*found, strict=True):
        assert torch.equal(alone, among[:rows])


PROBE = """
import sys
from pathlib import Path
from tests.kernels.proof.aot import CALLS, compiled_for_gpu
from graphspec.kernels.fused.hopper import MULTIPROCESSORS, resident
from graphspec.kernels.fused.launch import recording
for case in CALLS["linear"]:
    if case.name in sys.argv[2:]:
        with recording() as launches:
            case.launcher(**case.arguments())
        Path(sys.argv[1], case.name).write_bytes(compiled_for_gpu(launches[-1]).asm["cubin"])
"""
NORMED = ("llama-8b-qkv-m16", "llama-8b-gate-up-invariant", "llama-8b-first-qkv-m8")


def test_weights_are_loaded_before_anything_is_waited_for(tmp_path: Path) -> None:
    """In machine code: the copies of two stages, of input and weight, come before what the norm's factor needs, 16 bytes a thread.

    Squares that the product before has left, or, in the first product of a stream, the row itself.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROBE, str(tmp_path), *NORMED]
    subprocess.run(command, check=True, cwd=ROOT, env=environment)
    for name in NORMED:
        tool = triton.knobs.nvidia.cuobjdump.path
        sass = subprocess.run([tool, "--dump-sass", str(tmp_path / name)], check=True, capture_output=True, text=True).stdout
        before = re.split(r"LDG\.E\.128|MUFU\.RSQ", sass, maxsplit=1)[0]
        groups = before.count("LDGDEPBAR")
        assert groups >= 4, f"{groups} groups of copies before the squares in {name}"

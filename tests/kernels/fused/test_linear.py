"""The fused linear layer against the reference and a float64 oracle, bits independent of other rows, and the choice of configs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from triton.runtime.errors import OutOfResources

from graphspec.errors import CaptureError, ConfigError
from graphspec.kernels.fused.hopper import PROGRAM_SHARED_BYTES
from graphspec.kernels.fused.launch import recording, semaphores
from graphspec.kernels.linear.fused import linear as module
from graphspec.kernels.linear.fused import linear_tune
from graphspec.kernels.linear.fused.linear import LinearConfig, LinearShape, LinearTable, fused_linear, linear
from graphspec.kernels.linear.fused.linear_choice import FORMAT, candidates, decoded, device_identity, fast_config, invariant_config
from graphspec.kernels.linear.linear import linear as reference
from graphspec.kernels.op import Signature
from graphspec.models.layers import Linear, RMSNorm
from perf.gpu.linear import LAYERS, record, shapes
from tests.support.float_law import assert_float_law, widened

CPU = torch.device("cpu")
SPLIT = LinearConfig(16, 32, 16, 3, 4, 2, scan=True)
APART = LinearConfig(16, 32, 16, 3, 4, 2)


def call(rows: Sequence[int], inputs: int, outputs: int, *parts: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Arguments; parts name what there is besides input and weight."""
    width = outputs // 2 if "gated" in parts else outputs
    made: dict[str, Any] = {"x": torch.randn(*rows, inputs), "weight": torch.randn(outputs, inputs) / inputs**0.5}
    if "bias" in parts:
        made["bias"] = torch.randn(outputs)
    if "norm" in parts or "offset" in parts:
        made |= {"norm_weight": torch.randn(inputs), "norm_eps": 1e-5, "norm_offset": "offset" in parts}
    if "residual" in parts:
        made["residual"] = torch.randn(*rows, width)
    made = {key: value.to(dtype) if isinstance(value, Tensor) else value for key, value in made.items()}
    return made | {"gated": "gated" in parts, "float32": "float32" in parts}


def check(arguments: dict[str, Any], config: LinearConfig | None = None) -> Tensor:
    """Holds a call to the law of floats."""
    found = linear(**arguments, config=None if config is None else config.encoded())
    assert found.is_contiguous()
    assert_float_law(found, reference(**arguments), reference(**widened(arguments)), dtype=arguments["x"].dtype)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("norm", ["", "norm", "offset"])
def test_every_combination_of_parts(norm: str, dtype: torch.dtype) -> None:
    for count in range(4):
        for parts in itertools.combinations(("bias", "gated", "residual"), count):
            arguments = call((2, 3), 40, 24, norm, *parts, dtype=dtype)
            check(arguments)
            if dtype == torch.float32:
                check(arguments, LinearConfig(16, 32, 32, 2, 4, 2))


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 17, 33, 64, 65])
def test_rows(rows: int) -> None:
    check(call((rows,), 50, 17, "norm", "residual"))
    check(call((rows,), 50, 17, "norm", "residual"), replace(SPLIT, tile_inputs=32, splits=2))


@pytest.mark.parametrize("outputs", [1, 17])
@pytest.mark.parametrize("inputs", [1, 5, 16, 130, 300])
def test_odd_sizes(inputs: int, outputs: int) -> None:
    check(call((3,), inputs, outputs, "norm", "bias"))
    check(call((3,), inputs, outputs, "residual", dtype=torch.float16))
    check(call((2,), inputs, 2 * outputs, "norm", "gated"), replace(SPLIT, tile_outputs=16))


def test_many_outputs() -> None:
    check(call((3,), 33, 1100, "norm", "bias"))
    check(call((3,), 33, 1100, "residual", "gated", dtype=torch.float16), replace(APART, tile_outputs=256, splits=2))


@pytest.mark.parametrize("parts", [("residual",), ("gated", "bias"), ("gated", "residual"), ("norm",), ("offset",)])
@pytest.mark.parametrize("config", [None, LinearConfig(16, 64, 16, 2, 4, 2)])
def test_rounds_where_the_reference_rounds(parts: tuple[str, ...], config: LinearConfig | None) -> None:
    """Every output is one product, exact in float32: in half precision only the places of rounding are left to differ."""
    arguments = call((16,), 32, 64, *parts, dtype=torch.float16)
    arguments["weight"] = torch.randn(64, 1).half() * torch.eye(32).half().repeat(2, 1)
    if "norm_weight" in arguments:
        arguments["weight"] = torch.eye(32).half().repeat(2, 1)
    found = linear(**arguments, config=None if config is None else config.encoded())
    # exp and the norm's factor are right to a bit or two of float32, which rarely decides a bit of half precision.
    assert (found == reference(**arguments)).float().mean() > 0.99


def test_float32_results_come_from_the_accumulator() -> None:
    arguments = call((5,), 64, 40, "norm", "float32", dtype=torch.float16)
    found = check(arguments)
    assert found.dtype == torch.float32 and not torch.equal(found, found.half().float())
    for parts in (("bias", "residual"), ("gated",)):
        check(call((5,), 64, 40, "float32", *parts, dtype=torch.float16), SPLIT)


VIEWS: dict[str, Callable[[], Tensor]] = {
    "channels of wider rows": lambda: torch.randn(2, 3, 90)[..., 50:],
    "tokens of longer lanes": lambda: torch.randn(2, 7, 40)[:, 2:5],
    "every other token": lambda: torch.randn(2, 6, 40)[:, ::2],
    "lanes and tokens swapped": lambda: torch.randn(3, 2, 40).transpose(0, 1),
    "channels outermost": lambda: torch.randn(40, 2, 3).permute(1, 2, 0),
    "one lane for all": lambda: torch.randn(1, 3, 40).expand(2, 3, 40),
}


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("name", VIEWS)
def test_strided_rows(name: str, scan: bool) -> None:
    config = LinearConfig(16, 64, 64, 1, 4, 2, scan)
    names = list(VIEWS)
    x, residual = VIEWS[name](), VIEWS[names[names.index(name) - 1]]()
    arguments = call((2, 3), 40, 40, "norm", "residual")
    found = check(arguments | {"x": x, "residual": residual}, config)
    dense = arguments | {"x": x.contiguous(), "residual": residual.contiguous()}
    assert torch.equal(found, linear(**dense, config=config.encoded()))


def test_other_leading_dimensions() -> None:
    check(call((4,), 40, 24, "norm") | {"x": torch.randn(4, 6, 40)[:, -1]})
    check(call((2, 2, 3), 40, 24, "norm", "residual"))
    check(call((), 40, 24, "norm", "residual"))
    check(call((3,), 40, 24) | {"weight": torch.randn(24, 64)[:, :40]})


def test_nothing_to_multiply() -> None:
    assert linear(**call((0, 3), 8, 4)).shape == (0, 3, 4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of numpy
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("config", [None, SPLIT, APART])
def test_a_bad_row_stays_alone(config: LinearConfig | None, value: float) -> None:
    arguments = call((18,), 40, 20, "norm", "residual")
    encoded = None if config is None else config.encoded()
    clean = linear(**arguments, config=encoded)
    x = arguments["x"].clone()
    x[3] = value
    found = linear(**arguments | {"x": x}, config=encoded)
    others = torch.arange(18) != 3
    assert found[3].isnan().all() and torch.equal(found[others], clean[others])


@pytest.mark.parametrize("config", [None, SPLIT, APART])
def test_memory_around_the_rows_is_never_read(config: LinearConfig | None) -> None:
    """Rows, channels and outputs that tiles cover beyond the real ones hold NaN."""
    arguments = call((5,), 50, 20, "norm", "bias", "residual")
    encoded = None if config is None else config.encoded()
    surrounded = dict(arguments)
    for key, value in arguments.items():
        if isinstance(value, Tensor):
            around = torch.full([size + 80 for size in value.shape], torch.nan)
            inside = around[tuple(slice(3, 3 + size) for size in value.shape)]
            surrounded[key] = inside.copy_(value)
    assert torch.equal(linear(**surrounded, config=encoded), linear(**arguments, config=encoded))


@pytest.mark.parametrize(("config", "parts"), [(None, ("residual",)), (SPLIT, ("gated", "bias")), (APART, ("norm", "gated"))])
def test_every_element_is_written(parts: tuple[str, ...], config: LinearConfig | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and workspaces start as NaN."""
    arguments = call((17,), 50, 34, *parts)
    expected = reference(**arguments)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: empty(*sizes, **options).fill_(torch.nan))
    found = linear(**arguments, config=None if config is None else config.encoded())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_same_input_same_bits_and_counters_left_at_zero() -> None:
    arguments = call((17,), 130, 40, "norm", "gated")
    first, second = (linear(**arguments, config=SPLIT.encoded()) for _ in range(2))
    assert torch.equal(first, second)
    assert not semaphores(CPU, 1).any()


@pytest.mark.parametrize(
    ("parts", "dtype"),
    [(("norm", "gated", "bias"), torch.float32), (("residual",), torch.float16)],
)
def test_bits_of_a_row_do_not_depend_on_the_others(parts: tuple[str, ...], dtype: torch.dtype) -> None:
    multiply = fused_linear("batch_invariant")
    arguments = call((66,), 520, 16, *parts, dtype=dtype)
    shape = module.shape_of(arguments["x"], arguments["weight"], None, None, None, "gated" in parts, False)
    assert invariant_config(shape).splits > 1
    whole = multiply(**arguments)
    for begin, count in ((0, 1), (65, 1), (40, 17)):
        rows = slice(begin, begin + count)
        part = {key: value[rows] if key in ("x", "residual") else value for key, value in arguments.items()}
        assert torch.equal(multiply(**part), whole[rows])
    if "norm" not in parts:
        deep = {key: value.unflatten(0, (2, 33)) if key in ("x", "residual") else value for key, value in arguments.items()}
        assert torch.equal(multiply(**deep).flatten(0, 1), whole)


def test_many_rows_are_several_launches_of_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = call((3, 15), 60, 20, "norm", "residual")
    whole = linear(**arguments, config=APART.encoded())
    monkeypatch.setattr(module, "LAUNCH_ROWS", 32)
    with recording() as launches:
        linear(**arguments, config=APART.encoded())
    assert len(launches) == 3
    assert torch.equal(linear(**arguments, config=APART.encoded()), whole)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"weight": torch.randn(4, 8).half()}, "float16"),
        ({"x": torch.randn(2, 8).double(), "weight": torch.randn(4, 8).double()}, "float64"),
        ({"weight": torch.randn(4, 9)}, r"\[out, 8\]"),
        ({"weight": torch.randn(5, 8), "gated": True}, "even"),
        ({"weight": torch.randn(8, 4).t()}, "contiguous rows"),
        ({"bias": torch.randn(5)}, r"bias.*\(4,\).*\(5,\)"),
        ({"norm_weight": torch.randn(8).half()}, "norm_weight.*float32.*float16"),
        ({"residual": torch.randn(1, 2, 4)}, r"residual.*\(2, 4\).*\(1, 2, 4\)"),
    ],
)
def test_refuses(change: dict[str, Any], word: str) -> None:
    with pytest.raises(CaptureError, match=word):
        linear(**call((2,), 8, 4) | change)


def test_one_launch_for_few_rows() -> None:
    for rows, launches in ((1, 1), (8, 1), (16, 2)):
        with recording() as made:
            linear(**call((rows,), 64, 32, "norm", "gated"))
        assert len(made) == launches
    with recording() as made:
        linear(**call((64,), 64, 32, "residual", "bias"))
    assert len(made) == 1


SHAPES = st.builds(
    LinearShape,
    rows=st.integers(1, 300),
    outputs=st.integers(1, 20000).map(lambda half: 2 * half),
    inputs=st.integers(1, 20000),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    norm=st.booleans(),
    gated=st.booleans(),
)


@given(SHAPES)
def test_configs_fit_and_cover(shape: LinearShape) -> None:
    fused = candidates(shape)
    assert (fast_config(shape) is None) == (shape.rows > 64) == (not fused)
    for config in (*fused, invariant_config(shape)):
        assert config.shared_bytes(shape) <= PROGRAM_SHARED_BYTES and config.stages >= 2
        steps = -(-shape.inputs // config.tile_inputs)
        each = -(-steps // config.splits)
        assert (config.splits - 1) * each < steps <= config.splits * each
        for size in (config.tile_rows, config.tile_outputs, config.tile_inputs, config.warps):
            assert size & (size - 1) == 0
        assert config.tile_inputs >= 16 and config.tile_rows >= 16
        assert decoded(config.encoded()) == config
    assert len(set(fused)) == len(fused)


@given(SHAPES, st.integers(1, 1000), st.booleans(), st.booleans())
def test_invariant_config_knows_the_weight_alone(shape: LinearShape, rows: int, norm: bool, residual: bool) -> None:
    assert invariant_config(shape) == invariant_config(replace(shape, rows=rows, norm=norm, residual=residual))
    table = LinearTable({shape: None})
    assert table.choose(shape, "batch_invariant") == invariant_config(shape)


class Block(nn.Module):
    """Two layers as a decoder has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(32, 1e-5)
        self.up, self.down = Linear(32, 48, 48), Linear(48, 32, bias=True)
        for parameter in self.parameters():
            parameter.data.normal_()

    def use(self, multiply: Callable[..., Tensor]) -> Block:
        self.up.multiply = self.down.multiply = multiply
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x, self.norm, gated=True), residual=x)


UP = LinearShape(6, 96, 32, "float32", norm=True, gated=True)
DOWN = LinearShape(6, 32, 48, "float32", residual=True, bias=True)


def test_traced_into_one_graph_with_the_choice_in_it() -> None:
    block, x = Block(), torch.randn(2, 3, 32)
    expected = block(x)
    config = LinearConfig(16, 16, 16, 2, 4, 2, scan=True)
    table = LinearTable({UP: config, DOWN: None})
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    found = torch.compile(block.use(fused_linear("fast", table)), backend=backend, fullgraph=True, dynamic=False)(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    assert list(table.requested) == [UP, DOWN]
    [graph] = graphs
    ops = [node for node in graph.graph.nodes if "graphspec" in str(node.target)]
    assert [str(node.target) for node in ops] == ["graphspec.linear.default", "graphspec.matmul.default"]
    assert config.encoded() in (tuple(arg) for arg in ops[0].args if isinstance(arg, (tuple, list)))


def test_many_rows_go_to_cublas_unless_bits_matter() -> None:
    x = torch.randn(70, 32)
    block = Block()
    expected = block(x)
    for numerics, fused in (("fast", False), ("batch_invariant", True)):
        with recording() as launches:
            block.use(fused_linear(numerics))(x)
        assert bool(launches) == fused
        torch.testing.assert_close(block(x), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("parts", [(), ("norm", "float32"), ("gated", "float32"), ("bias", "residual"), ("norm", "gated", "bias")])
def test_cublas_path_equals_the_reference(parts: tuple[str, ...]) -> None:
    arguments = call((3, 30), 32, 24, *parts, dtype=torch.float16)
    found = fused_linear()(**arguments)
    assert found.dtype == reference(**arguments).dtype and torch.equal(found, reference(**arguments))


def test_operators_are_known_to_the_compiler() -> None:
    arguments = call((3,), 20, 12, "norm", "gated")
    torch.library.opcheck(torch.ops.graphspec.linear.default, tuple(Signature(module.linear).flatten((), arguments)))
    torch.library.opcheck(torch.ops.graphspec.matmul.default, (arguments["x"], arguments["weight"], None, True))


def test_shapes_of_a_network() -> None:
    block, x = Block(), torch.randn(2, 3, 32)
    before = block.up.multiply
    shapes = linear_tune.shapes_of(block, lambda: (block(x), block(x)))
    assert shapes == [UP, DOWN] and block.up.multiply is before
    assert linear_tune.shapes_of(block, lambda: block(x), rows=(1, 9)) == [replace(s, rows=n) for n in (1, 9) for s in (UP, DOWN)]


def times(fused: Callable[[LinearConfig], float], plain: float) -> tuple[linear_tune.Timer, list[LinearConfig | None]]:
    """A timer that runs the first call once and looks times up in a table, and the list of configs it was called with."""
    timed: list[LinearConfig | None] = []

    def timer(calls: Sequence[Callable[[], object]]) -> float:
        first = calls[0]
        assert isinstance(first, partial) and isinstance(first(), Tensor)
        given = first.keywords.get("config")
        timed.append(None if given is None else decoded(given))
        return plain if given is None else fused(decoded(given))

    return timer, timed


def test_tuning_enters_the_fastest() -> None:
    wanted = candidates(UP)[-1]
    timer, timed = times(lambda config: 5.0 if replace(config, scan=wanted.scan) == wanted else 7.0, 6.0)
    table, seen = LinearTable(), []
    made = linear_tune.tune(table, [UP, UP], CPU, timer=timer, compiled=False, done=seen.append)
    assert table.entries == {UP: wanted} and made == seen and len(made) == 1
    assert set(timed) == {*candidates(UP), replace(wanted, scan=not wanted.scan), None}
    assert made[0].times[None] == 6.0 and made[0].best == wanted
    assert linear_tune.tune(table, [UP], CPU, timer=timer, compiled=False) == []


def test_tuning_leaves_to_cublas_what_is_faster_there() -> None:
    timer, _ = times(lambda _: 7.0, 6.0)
    many = replace(DOWN, rows=65)
    table = LinearTable()
    linear_tune.tune(table, [DOWN, many], CPU, timer=timer, compiled=False)
    assert table.entries == {DOWN: None, many: None} and table.choose(DOWN) is None
    equal, _ = times(lambda _: 6.0, 6.0)
    table = LinearTable()
    linear_tune.tune(table, [DOWN], CPU, timer=equal, compiled=False)
    assert table.entries == {DOWN: candidates(DOWN)[0]}


def test_what_does_not_fit_the_device_is_never_chosen() -> None:
    def fused(config: LinearConfig) -> float:
        if config.tile_outputs == 128:
            raise OutOfResources(300000, 232448, "shared memory")
        return 7.0

    timer, _ = times(fused, 9.0)
    table = LinearTable()
    [measured] = linear_tune.tune(table, [DOWN], CPU, timer=timer, compiled=False)
    assert table.entries[DOWN].tile_outputs < 128  # type: ignore[union-attr]
    assert float("inf") in measured.times.values()
    line = json.loads(json.dumps(record("down", measured), allow_nan=False))
    assert (line["layer"], line["chosen"], line["fused_us"], line["torch_us"]) == ("down", "fused", 7.0, 9.0)
    assert line["torch_gb_s"] == pytest.approx(DOWN.outputs * DOWN.inputs * 4 / 9000)
    assert len(line["all"]) == len(measured.times) and None in [time for _, time in line["all"]]


def test_the_benchmark_measures_real_shapes() -> None:
    made = shapes((1, 64), tuple(LAYERS), "bfloat16")
    assert len(made) == 2 * len(LAYERS) and all(candidates(shape) for shape in made)


def test_tuning_needs_a_gpu_or_a_timer() -> None:
    with pytest.raises(ConfigError, match=r"linear tuning.*cpu"):
        linear_tune.tune(LinearTable(), [UP], CPU)


def test_measured_weights_are_cold() -> None:
    calls = linear_tune.inputs_of(replace(UP, bias=True, residual=True), CPU, 5 * UP.outputs * UP.inputs * 4)
    weights = [arguments["weight"] for arguments in calls]
    assert len(weights) == 6 and len({weight.data_ptr() for weight in weights}) == 6
    assert all(arguments["x"] is calls[0]["x"] for arguments in calls)
    assert linear(**calls[0]).shape == calls[0]["residual"].shape == (6, 48)


def test_table_survives_a_restart(tmp_path: Path) -> None:
    identity = device_identity(CPU)
    table = LinearTable({UP: SPLIT, DOWN: None})
    path = tmp_path / "new" / "linear.json"
    table.save(path, identity)
    assert LinearTable.load(path, identity).entries == table.entries
    assert [file.name for file in path.parent.iterdir()] == ["linear.json"]


def written(entries: object = (), **changes: object) -> str:
    return json.dumps({"format": FORMAT, "identity": device_identity(CPU), "entries": entries, **changes})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ("a table", "No such file")),
        ("{", ("JSON",)),
        ("[]", (f"format {FORMAT}", "list")),
        (written(format=1), (f"format {FORMAT}", "found 1")),
        (written(identity={"gpu": "another", "triton": "1", "torch": "2"}), ("measurements of", "'cpu'", "another", "delete it")),
        (written([{"shape": asdict(UP)}]), ("entries", "config")),
        (written([{"shape": asdict(UP) | {"rows": "6"}, "config": None}]), ("rows '6'", "int")),
        (written([{"shape": asdict(UP) | {"more": 6}, "config": None}]), ("entries", "more")),
        (written([{"shape": asdict(UP), "config": {"tile_rows": 16}}]), ("entries", "tile_outputs")),
        (written(5), ("entries", "int")),
    ],
)
def test_foreign_tables_are_refused(text: str | None, words: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "linear.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        LinearTable.load(path, device_identity(CPU), "kernels.linear_table")
    assert all(word in str(error.value) for word in ("kernels.linear_table", str(path), *words))

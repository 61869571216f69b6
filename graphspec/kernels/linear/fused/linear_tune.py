"""Measures linear layers, fused and by cuBLAS, and fills the table of choices, before anything is captured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from triton.runtime.errors import OutOfResources

from ....errors import ConfigError
from ..linear import Hidden
from ..packed import CODES, Packed, code_bits
from . import packed_linear
from .linear import OPERATORS, fused_linear, shape_of
from .linear_choice import SCANNED_ROWS, LinearConfig, LinearShape, LinearTable, candidates

Call = Callable[[], object]
Timer = Callable[[Sequence[Call]], float]
"""Microseconds per call of several calls that run one after the other."""

CALLS = 12
"""Fewest calls in a measured graph, over which the cost of launching it is spread."""
REPLAYS = 15
EPS = 1e-5
SUMMED_CHANNELS = 64
"""Columns that one part of the previous product's squares covers: about one tile."""


def graph_timer(calls: Sequence[Call]) -> float:
    """Microseconds per call: median over replays of a CUDA graph that makes all calls in turn."""
    rounds = -(-CALLS // len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in (*calls, calls[0]):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in [*calls] * rounds:
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 1000.0 * statistics.median(times) / (rounds * len(calls))


def inputs_of(shape: LinearShape, device: torch.device, cold: int) -> list[dict[str, Any]]:
    """Arguments of calls of ``shape`` that only differ in the weight; together the weights exceed ``cold`` bytes.

    Called in turn, every call reads its weight from memory and its few rows from the cache, as in a decode cycle. A packed weight has
    scales of the dtype, and no other fields: they are few bytes next to the codes.
    """
    dtype = getattr(torch, shape.dtype)

    def made(*sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=dtype, device=device)

    def weight() -> Tensor | Packed:
        if not shape.code:
            return made(shape.outputs, shape.inputs)
        codes = torch.randint(0, 120, (shape.outputs, shape.inputs * code_bits(shape.code) // 8), dtype=torch.uint8, device=device)
        groups = -(-shape.inputs // shape.group)
        return Packed(codes.view(CODES[shape.code]), made(shape.outputs, groups), shape.code, shape.group)

    weights = 1 + cold // (shape.outputs * shape.inputs * shape.weight_bits // 8)
    common: dict[str, Any] = {"x": made(shape.rows, shape.inputs), "gated": shape.gated, "float32": shape.float32}
    if shape.bias:
        common["bias"] = made(shape.outputs)
    if shape.norm:
        common |= {"norm_weight": made(shape.inputs), "norm_eps": EPS}
    if shape.summed:
        parts = -(-shape.inputs // SUMMED_CHANNELS)
        common["squares"] = torch.full((shape.rows, parts), shape.inputs / parts, device=device)
    if shape.residual:
        common["residual"] = made(shape.rows, shape.width)
    return [common | {"weight": weight()} for _ in range(min(weights, 64))]


@dataclass(frozen=True, slots=True)
class Measured:
    """Microseconds by config for one shape. Config None: cuBLAS. Infinite: the config does not fit the device."""

    shape: LinearShape
    times: dict[LinearConfig | None, float]

    @property
    def best(self) -> LinearConfig | None:
        """The fastest config; in a tie the first, and fused ones come first."""
        return min(self.times, key=lambda config: self.times[config])


def measure(shape: LinearShape, device: torch.device, timer: Timer, compiled: bool = True) -> Measured:
    """Time the candidates of one shape, and cuBLAS with norm, gate and residual compiled around it."""
    cold = 2 * torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    arguments = inputs_of(shape, device, cold)
    times: dict[LinearConfig | None, float] = {}
    products = packed_linear.OPERATORS if shape.code else OPERATORS

    def fused(config: LinearConfig) -> float:
        try:
            return timer([partial(products.linear, **given, config=config.encoded()) for given in arguments])
        except OutOfResources:
            return float("inf")

    for config in candidates(shape):
        times[config] = fused(config)
    if times and shape.norm and not shape.summed and shape.rows <= 2 * SCANNED_ROWS:
        found = min(times, key=lambda config: times[config])
        if found is not None:
            other = replace(found, scan=not found.scan)
            times[other] = fused(other)
    plain = fused_linear("fast", LinearTable({shape: None}), products)
    if compiled:
        # Every shape is compiled separately, so the limit on recompilations does not apply.
        torch.compiler.reset()
        plain = torch.compile(plain, fullgraph=True, dynamic=False)
    times[None] = timer([partial(plain, **{key: given[key] for key in given if key != "squares"}) for given in arguments])
    return Measured(shape, times)


def tune(
    table: LinearTable,
    shapes: Iterable[LinearShape],
    device: torch.device,
    *,
    timer: Timer | None = None,
    compiled: bool = True,
    done: Callable[[Measured], None] | None = None,
) -> list[Measured]:
    """Measure the shapes that ``table`` lacks, and enter the fastest choice of each.

    Call it before anything is traced or captured: it resets torch.compile.

    Args:
        table: filled in place.
        shapes: what to measure, see :func:`shapes_of`.
        device: where.
        timer: :func:`graph_timer` unless given.
        compiled: time cuBLAS with norm, gate and residual compiled around it, as it would run.
        done: called with every measurement.

    Raises:
        ConfigError: the device has no CUDA events and no timer is given.
    """
    if timer is None:
        if device.type != "cuda":
            raise ConfigError("linear tuning", "a CUDA device, or a timer", device.type)
        timer = graph_timer
    made = []
    with torch.no_grad():
        for shape in dict.fromkeys(shapes):
            if shape in table.entries:
                continue
            measured = measure(shape, device, timer, compiled)
            table.entries[shape] = measured.best
            made.append(measured)
            if done is not None:
                done(measured)
    return made


@contextmanager
def recorded(network: nn.Module) -> Iterator[dict[LinearShape, None]]:
    """A context in which every linear layer of ``network`` records the shape of each call; in order, without repeats."""
    shapes: dict[LinearShape, None] = {}
    modules: list[Any] = list(network.modules())
    layers: list[tuple[Any, str, Callable[..., Hidden]]] = [
        (module, name, getattr(module, name)) for module in modules for name in ("multiply", "multiply_codes") if hasattr(module, name)
    ]

    def noting(multiply: Callable[..., Hidden]) -> Callable[..., Hidden]:
        def note(
            x: Hidden,
            weight: Tensor | Packed,
            bias: Tensor | None = None,
            norm_weight: Tensor | None = None,
            norm_eps: float = 0.0,
            norm_offset: bool = False,
            residual: Hidden | None = None,
            gated: bool = False,
            float32: bool = False,
        ) -> Hidden:
            shapes[shape_of(x, weight, bias, norm_weight, residual, gated, float32)] = None
            return multiply(x, weight, bias, norm_weight, norm_eps, norm_offset, residual, gated, float32)

        return note

    try:
        for layer, name, multiply in layers:
            setattr(layer, name, noting(multiply))
        yield shapes
    finally:
        for layer, name, multiply in layers:
            setattr(layer, name, multiply)


def shapes_of(network: nn.Module, run: Call, rows: Sequence[int] = ()) -> list[LinearShape]:
    """Shapes of the products in the linear layers of ``network``.

    Args:
        network: any module; its linear layers are those with an attribute ``multiply``, or ``multiply_codes``.
        run: calls it once, uncompiled; fake or ``meta`` tensors will do.
        rows: numbers of rows to use instead of those of the calls; empty: as called.
    """
    with recorded(network) as shapes:
        run()
    return list(shapes) if not rows else list(dict.fromkeys(replace(shape, rows=count) for count in rows for shape in shapes))

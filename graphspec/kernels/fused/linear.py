"""Triton kernels of :mod:`graphspec.kernels.linear`: weights streamed once through matrix instructions, everything else around them.

The weight is the tall side of the instruction and the few rows are the narrow one. Programs that share the inputs of a tile leave their
partial sums in memory; the last one to arrive adds them in order and finishes the tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...errors import CaptureError
from ..formulas import rms_norm
from ..linear import finish
from ._vocabulary import arrive, exp_exact
from .launch import INTERPRETED, AotCase, launch, register, semaphores
from .linear_choice import LinearConfig, LinearShape, LinearTable, decoded, fast_config, invariant_config

_INTERPRETED = tl.constexpr(INTERPRETED)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PREFETCHED_BYTES = 32 * 1024
"""Of a program's weights, asked for while the kernel before still writes what this one reads."""
LINE_BYTES = 128
FACTOR_BLOCK = 4096
SCAN_BLOCK = 4096
LAUNCH_ROWS = 512
"""Rows of one launch; bounds the memory of partial sums and the number of semaphores."""


@triton.jit
def _prefetch(at):
    """Bring the lines at these addresses into L2; they are not read."""
    if not _INTERPRETED:
        tl.inline_asm_elementwise(
            "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _factor(total, inputs, eps):
    return tl.rsqrt(total / inputs + eps)


@triton.jit
def _normed(x, factor, weight, OFFSET: tl.constexpr, dtype: tl.constexpr):
    """``x`` times the norm's factor and weight; rounded between the two where the reference rounds."""
    x = x.to(tl.float32) * factor[:, None]
    weight = weight.to(tl.float32)[None, :]
    y = x * (1.0 + weight) if OFFSET else weight * x.to(dtype).to(tl.float32)
    return y.to(dtype)


@triton.jit
def _finish(
    acc, up, output, row, keep, bias, residual_at, out, outputs,
    GATED: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Bias, gate and residual of a whole tile ``[TILE_O, TILE_M]``; rounded where the reference rounds, unless the result is wider."""
    result: tl.constexpr = out.dtype.element_ty
    rounded: tl.constexpr = dtype if result == dtype else tl.float32
    if bias is not None:
        acc += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + outputs + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
    y = acc.to(rounded).to(tl.float32)
    if GATED:
        y = (y / (1.0 + exp_exact(-y))).to(rounded).to(tl.float32) * up.to(rounded).to(tl.float32)
        y = y.to(rounded).to(tl.float32)
    if residual_at is not None:
        y = tl.load(residual_at, mask=keep, other=0.0).to(tl.float32) + y
    tl.store(out + row.to(tl.int64)[None, :] * outputs + output[:, None], y.to(result), mask=keep)


@triton.jit
def _row_factor(x, factor, eps, inputs, inner, x_outer, x_inner, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program: the norm's factor of one row, in an order that depends on the length of the row alone."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    at = x + (row // inner).to(tl.int64) * x_outer + (row % inner).to(tl.int64) * x_inner
    channel = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, inputs, BLOCK):
        part = tl.load(at + start + channel, mask=start + channel < inputs, other=0.0).to(tl.float32)
        total += part * part
    tl.store(factor + row, _factor(tl.sum(total, 0), inputs, eps))


@triton.jit
def _linear(
    x, weight, bias, norm_weight, factor, residual, out, partial, semaphore,
    eps, begin, rows, inner, outputs, inputs, x_outer, x_inner, weight_o, to_up, residual_outer, residual_inner,
    TILE_M: tl.constexpr, TILE_O: tl.constexpr, TILE_K: tl.constexpr, SPLITS: tl.constexpr, EVEN: tl.constexpr,
    SCAN_M: tl.constexpr, SCAN_K: tl.constexpr, OFFSET: tl.constexpr, GATED: tl.constexpr, PREFETCH: tl.constexpr, LINE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: ``TILE_O`` outputs (of gate and of up) of ``TILE_M`` rows, over one of ``SPLITS`` ranges of the inputs.

    Rows are ``begin .. begin + rows`` of ``x``, two leading dimensions of which the last is ``inner``. ``SCAN_M`` is 0 unless the program
    computes the norm's factors itself.
    """
    dtype: tl.constexpr = weight.dtype.element_ty
    tiles_m = tl.cdiv(rows, TILE_M)
    program = tl.program_id(0)
    tile_m = program % tiles_m
    split = program // tiles_m % SPLITS
    tile = program // (tiles_m * SPLITS)
    steps = tl.cdiv(tl.cdiv(inputs, TILE_K), SPLITS)
    first = split * steps * TILE_K
    end = tl.minimum(first + steps * TILE_K, inputs)

    output = tile * TILE_O + tl.arange(0, TILE_O)
    # Outputs past the end repeat the last one; they are not stored.
    weight_at = weight + tl.minimum(output, outputs - 1).to(tl.int64)[:, None] * weight_o
    channel = tl.arange(0, TILE_K)
    if PREFETCH > 0:
        line = first + tl.arange(0, PREFETCH) * LINE
        # A line past the end is one that is in the tile anyway.
        line = tl.minimum(line, inputs - 1)
        _prefetch(weight_at + line[None, :])
        if GATED:
            _prefetch(weight_at + to_up + line[None, :])
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    lane = tile_m * TILE_M + tl.arange(0, TILE_M)
    in_rows = lane < rows
    row = begin + lane
    x_at = x + ((row // inner).to(tl.int64) * x_outer + (row % inner).to(tl.int64) * x_inner)[:, None]
    if norm_weight is not None:
        if SCAN_M > 0:
            scanned = tile_m * TILE_M + tl.arange(0, SCAN_M)
            scanned_row = begin + scanned
            scanned_at = x + ((scanned_row // inner).to(tl.int64) * x_outer + (scanned_row % inner).to(tl.int64) * x_inner)[:, None]
            position = tl.arange(0, SCAN_K)
            total = tl.zeros([SCAN_M, SCAN_K], tl.float32)
            for start in range(0, inputs, SCAN_K):
                inside = (scanned < rows)[:, None] & (start + position < inputs)[None, :]
                part = tl.load(scanned_at + (start + position)[None, :], mask=inside, other=0.0).to(tl.float32)
                total += part * part
            found = _factor(tl.sum(total, 1), inputs, eps)
            # One entry of each row is its own: the sum is exact.
            own = tl.arange(0, TILE_M)[:, None] == tl.arange(0, SCAN_M)[None, :]
            scale = tl.sum(tl.where(own, found[None, :], 0.0), 1)
        else:
            scale = tl.load(factor + row, mask=in_rows, other=0.0)

        # Loaded a step ahead: the matrix instruction waits for what is scaled, but not for the weights of the steps after it.
        scales = tl.load(norm_weight + first + channel, mask=first + channel < end, other=0.0)

    acc = tl.zeros([TILE_O, TILE_M], tl.float32)
    up = acc
    for start in range(first, end, TILE_K):
        at = weight_at + (start + channel)[None, :]
        if EVEN:
            rows_of_x = tl.load(x_at + (start + channel)[None, :], mask=in_rows[:, None], other=0.0)
            rows_of_weight = tl.load(at)
        else:
            inside = start + channel < inputs
            rows_of_x = tl.load(x_at + (start + channel)[None, :], mask=in_rows[:, None] & inside[None, :], other=0.0)
            rows_of_weight = tl.load(at, mask=inside[None, :], other=0.0)
        if norm_weight is not None:
            rows_of_x = _normed(rows_of_x, scale, scales, OFFSET, dtype)
            following = start + TILE_K + channel
            scales = tl.load(norm_weight + following, mask=following < end, other=0.0)
        narrow = tl.trans(rows_of_x)
        acc = tl.dot(rows_of_weight, narrow, acc, input_precision="ieee")
        if GATED:
            at += to_up
            rows_of_weight = tl.load(at) if EVEN else tl.load(at, mask=(start + channel < inputs)[None, :], other=0.0)
            up = tl.dot(rows_of_weight, narrow, up, input_precision="ieee")

    keep = (output < outputs)[:, None] & in_rows[None, :]
    residual_at = None
    if residual is not None:
        residual_row = (row // inner).to(tl.int64) * residual_outer + (row % inner).to(tl.int64) * residual_inner
        residual_at = residual + residual_row[None, :] + output[:, None]
    if SPLITS == 1:
        _finish(acc, up, output, row, keep, bias, residual_at, out, outputs, GATED, dtype)
    else:
        halves: tl.constexpr = 2 if GATED else 1
        part_at = partial + lane.to(tl.int64)[None, :] * (halves * outputs) + output[:, None]
        stride = rows * halves * outputs
        own_part_at = part_at + split.to(tl.int64) * stride
        tl.store(own_part_at, acc, mask=keep)
        if GATED:
            tl.store(own_part_at + outputs, up, mask=keep)
        if arrive(semaphore + tile * tiles_m + tile_m, SPLITS):
            acc = tl.load(part_at, mask=keep, other=0.0, cache_modifier=".cg")
            for other in tl.static_range(1, SPLITS):
                acc += tl.load(part_at + other * stride, mask=keep, other=0.0, cache_modifier=".cg")
            if GATED:
                up = tl.load(part_at + outputs, mask=keep, other=0.0, cache_modifier=".cg")
                for other in tl.static_range(1, SPLITS):
                    up += tl.load(part_at + other * stride + outputs, mask=keep, other=0.0, cache_modifier=".cg")
            _finish(acc, up, output, row, keep, bias, residual_at, out, outputs, GATED, dtype)


def shape_of(x: Tensor, weight: Tensor, bias: object, norm_weight: object, residual: object, gated: bool, float32: bool) -> LinearShape:
    """The shape of a call."""
    rows = x.numel() // max(x.shape[-1], 1)
    name = str(x.dtype).removeprefix("torch.")
    return LinearShape(
        rows, weight.shape[0], weight.shape[1], name, norm_weight is not None, gated, residual is not None, bias is not None, float32
    )


def _check(x: Tensor, weight: Tensor, gated: bool) -> None:
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        raise CaptureError("linear", "input and weight of one of float32, float16, bfloat16", f"{x.dtype} and {weight.dtype}")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or (gated and weight.shape[0] % 2):
        raise CaptureError("linear", f"a weight [out, {x.shape[-1]}]" + (", out even" if gated else ""), tuple(weight.shape))
    if weight.stride(1) != 1:
        raise CaptureError("linear", "a weight with contiguous rows", f"strides {weight.stride()}", "a copy for every call would cost more")


def _check_parts(shape: LinearShape, out: Tensor, dtype: torch.dtype, **parts: Tensor | None) -> None:
    sizes = {"bias": (shape.outputs,), "norm_weight": (shape.inputs,), "residual": tuple(out.shape)}
    for name, part in parts.items():
        if part is not None and (tuple(part.shape) != sizes[name] or part.dtype != dtype):
            raise CaptureError(f"linear {name}", f"{sizes[name]} of {dtype}", f"{tuple(part.shape)} of {part.dtype}")


def _two_leading(x: Tensor) -> Tensor:
    """``x`` as ``[A, T, channels]`` with contiguous channels; a view unless its strides forbid that."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() == 3:
        return x
    return x.reshape(1, -1, x.shape[-1])


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    norm_offset: bool = False,
    residual: Tensor | None = None,
    gated: bool = False,
    float32: bool = False,
    config: Sequence[int] | None = None,
) -> Tensor:
    """See :func:`graphspec.kernels.linear.linear`; ``config`` is :meth:`LinearConfig.encoded`, None: as for unmeasured shapes."""
    _check(x, weight, gated)
    shape = shape_of(x, weight, bias, norm_weight, residual, gated, float32)
    use = (fast_config(shape) or invariant_config(shape)) if config is None else decoded(config)
    out = torch.empty((*x.shape[:-1], shape.width), dtype=torch.float32 if float32 else x.dtype, device=x.device)
    _check_parts(shape, out, x.dtype, bias=bias, norm_weight=norm_weight, residual=residual)
    if out.numel() == 0:
        return out
    source, added = _two_leading(x), None if residual is None else _two_leading(residual)
    inner = source.shape[1]
    factor = None
    if norm_weight is not None and not use.scan:
        factor = torch.empty(shape.rows, dtype=torch.float32, device=x.device)
        block = min(triton.next_power_of_2(shape.inputs), FACTOR_BLOCK)
        launch(_row_factor, (shape.rows,), source, factor, norm_eps, shape.inputs, inner, *source.stride()[:2], BLOCK=block, num_warps=4)
    scanned = min(triton.next_power_of_2(shape.rows), use.tile_rows) if norm_weight is not None and use.scan else 0
    line = LINE_BYTES // shape.item_size
    prefetch = min(PREFETCHED_BYTES // LINE_BYTES // (use.tile_outputs * (2 if gated else 1)), shape.inputs // use.splits // line)
    tiles = triton.cdiv(shape.width, use.tile_outputs)
    limit = LAUNCH_ROWS if use.splits > 1 else shape.rows
    partial = semaphore = None
    if use.splits > 1:
        partial = torch.empty((use.splits, min(shape.rows, limit), shape.outputs), dtype=torch.float32, device=x.device)
        semaphore = semaphores(x.device, tiles * triton.cdiv(min(shape.rows, limit), use.tile_rows))
    for begin in range(0, shape.rows, limit):
        rows = min(limit, shape.rows - begin)
        launch(
            _linear, (triton.cdiv(rows, use.tile_rows) * tiles * use.splits,),
            source, weight, bias, norm_weight, factor, added, out, partial, semaphore,
            norm_eps, begin, rows, inner, shape.width, shape.inputs, *source.stride()[:2], weight.stride(0), weight.stride(0) * shape.width,
            *((0, 0) if added is None else added.stride()[:2]),
            TILE_M=use.tile_rows, TILE_O=use.tile_outputs, TILE_K=use.tile_inputs, SPLITS=use.splits,
            EVEN=shape.inputs % use.tile_inputs == 0, SCAN_M=scanned,
            SCAN_K=min(SCAN_BLOCK // max(scanned, 1), triton.next_power_of_2(shape.inputs)),
            OFFSET=norm_offset, GATED=gated, PREFETCH=1 << max(prefetch, 1).bit_length() - 1, LINE=line,
            num_warps=use.warps, num_stages=use.stages,
        )  # fmt: skip
    return out


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    norm_offset: bool = False,
    residual: Tensor | None = None,
    gated: bool = False,
    float32: bool = False,
    config: Sequence[int] | None = None,
) -> Tensor:
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    return x.new_empty((*x.shape[:-1], outputs), dtype=torch.float32 if float32 else x.dtype)


OP = register("linear", linear, _fake)


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None, float32: bool = False) -> Tensor:
    """``x @ weight.T + bias`` by cuBLAS; float32 results of half-precision inputs come from its accumulator.

    An operator of its own because the compiler would turn an addition behind a product into ``addmm`` with a full matrix, which copies that
    matrix first and rounds once where the reference rounds twice.
    """
    if float32 and bias is None and x.is_cuda and x.dtype != torch.float32:
        flat = x.reshape(-1, x.shape[-1])
        return torch.mm(flat, weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], -1)
    out = functional.linear(x, weight, bias)
    return out.float() if float32 else out


def _fake_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None, float32: bool = False) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32 if float32 else x.dtype)


MATMUL = register("matmul", matmul, _fake_matmul)


def fused_linear(numerics: str = "fast", table: LinearTable | None = None) -> Callable[..., Tensor]:
    """The linear layer of a fused cycle: a plain function with the op's signature that decides for every static shape while it is traced.

    Args:
        numerics: ``fast``: what ``table`` says, which may depend on the number of rows. ``batch_invariant``: always the fused kernel, cut
            by the shape of the weight alone; the bits of a row do not depend on the rows around it.
        table: measured choices; it may be filled later, but before the trace. None: an empty one.
    """
    chosen = LinearTable() if table is None else table

    @torch.compiler.assume_constant_result
    def choose(rows: int, outputs: int, inputs: int, dtype: str, *parts: bool) -> tuple[int, ...]:
        config = chosen.choose(LinearShape(rows, outputs, inputs, dtype, *parts), numerics)
        return () if config is None else config.encoded()

    def multiply(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_eps: float = 0.0,
        norm_offset: bool = False,
        residual: Tensor | None = None,
        gated: bool = False,
        float32: bool = False,
    ) -> Tensor:
        rows = x.numel() // x.shape[-1]
        parts = (norm_weight is not None, gated, residual is not None, bias is not None, float32)
        config = choose(rows, weight.shape[0], weight.shape[1], str(x.dtype).removeprefix("torch."), *parts)
        if config:
            out: Tensor = OP(x, weight, bias, norm_weight, norm_eps, norm_offset, residual, gated, float32, config)
            return out
        if norm_weight is not None:
            x = rms_norm(x, norm_weight, norm_eps, norm_offset)
        plain = not gated and residual is None
        return finish(MATMUL(x, weight, bias, float32 and plain), residual, gated, float32)

    return multiply


def _call(rows: int, outputs: int, inputs: int, *parts: str, config: LinearConfig | None = None) -> dict[str, Any]:
    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32 if "fp32" in parts else torch.bfloat16, device="meta")

    call: dict[str, Any] = {"x": meta(rows, inputs), "weight": meta(outputs, inputs)}
    if "norm" in parts:
        call |= {"norm_weight": meta(inputs), "norm_eps": 1e-5}
    if "residual" in parts:
        call["residual"] = meta(rows, outputs)
    call |= {"gated": "gated" in parts, "float32": "float32" in parts}
    if "invariant" in parts:
        config = invariant_config(shape_of(call["x"], call["weight"], None, call.get("norm_weight"), None, call["gated"], False))
    return call | {"config": None if config is None else config.encoded()}


_SHAPES: tuple[tuple[str, int, int, tuple[str, ...]], ...] = (
    ("qkv", 6144, 4096, ("norm",)),
    ("o", 4096, 4096, ("residual",)),
    ("gate-up", 28672, 4096, ("norm", "gated")),
    ("down", 4096, 14336, ("residual",)),
    ("head", 128256, 4096, ("float32",)),
    ("eagle3-qkv", 6144, 8192, ()),
    ("eagle3-head", 32000, 4096, ("norm", "float32")),
)
AOT = (
    *(
        AotCase(f"llama-8b-{name}-m{rows}", linear, lambda n=rows, o=out, i=inp, p=parts: _call(n, o, i, *p))  # type: ignore[misc]
        for name, out, inp, parts in _SHAPES
        for rows in (1, 16, 64)
    ),
    AotCase("llama-8b-qkv-invariant", linear, lambda: _call(8, 6144, 4096, "norm", "invariant")),
    AotCase("llama-8b-gate-up-invariant", linear, lambda: _call(8, 28672, 4096, "norm", "gated", "invariant")),
    AotCase("llama-8b-qkv-fp32", linear, lambda: _call(64, 6144, 4096, "norm", "fp32")),
    AotCase("llama-8b-gate-up-fp32", linear, lambda: _call(8, 28672, 4096, "norm", "gated", "fp32")),
    AotCase("llama-8b-gate-up-fp32-invariant", linear, lambda: _call(8, 28672, 4096, "norm", "gated", "fp32", "invariant")),
)

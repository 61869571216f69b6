"""Triton implementation of :mod:`graphspec.kernels.linear.linear`: a matrix product with RMSNorm, bias, gate and residual fused around it.

The norm's factor of a row comes from its sum of squares. The previous product stores a part of that sum per output tile, so the next one
can issue its weight loads first and add a few numbers while they arrive. The kernels are in ``_linear.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional

from ....errors import CaptureError
from ...formulas import rms_norm
from ...fused.launch import launch, operator, semaphores
from ...groups import Heads
from ..linear import Hidden, ResidualStream, finish, hidden_of
from ..packed import Packed, check_packed
from ._linear import _linear
from .linear_choice import LinearConfig, LinearShape, LinearTable, decoded, fast_config, invariant_config
from .sum_squares import launch_row_squares

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PREFETCHED_BYTES = 32 * 1024
"""Weights that a program prefetches while the previous kernel still writes its inputs."""
LINE_BYTES = 128
SCAN_BLOCK = 2048
LAUNCH_ROWS = 512
"""Most rows of one launch; bounds the memory of partial sums and the number of semaphores."""


def shape_of(
    x: Hidden, weight: Tensor | Packed, bias: object, norm_weight: object, residual: object, gated: bool, float32: bool,
    squares: object = None,
) -> LinearShape:  # fmt: skip
    """The :class:`LinearShape` of a call."""
    hidden = hidden_of(x)
    squares = x.squares if isinstance(x, ResidualStream) else squares
    rows = hidden.numel() // max(hidden.shape[-1], 1)
    parts = (norm_weight is not None, gated, residual is not None, bias is not None, float32)
    summed = norm_weight is not None and squares is not None
    name = str(hidden.dtype).removeprefix("torch.")
    return LinearShape(rows, weight.shape[0], weight.shape[1], name, *parts, summed, *format_of(weight))


def format_of(weight: Tensor | Packed) -> tuple[str, int]:
    """``code`` and ``group`` of a :class:`LinearShape`; channels whose groups are no runs have one each."""
    if not isinstance(weight, Packed):
        return "", 0
    return weight.code, weight.group if weight.group_of is None else 1


def _check(x: Tensor, weight: Tensor | Packed, gated: bool) -> None:
    if isinstance(weight, Packed):
        check_packed(weight, "linear weight")
    dtype = x.dtype if isinstance(weight, Packed) else weight.dtype
    if x.dtype not in DTYPES or dtype != x.dtype:
        raise CaptureError("linear", "input and weight of one of float32, float16, bfloat16", f"{x.dtype} and {dtype}")
    if len(weight.shape) != 2 or weight.shape[1] != x.shape[-1] or (gated and weight.shape[0] % 2):
        raise CaptureError("linear", f"a weight [out, {x.shape[-1]}]" + (", out even" if gated else ""), tuple(weight.shape))
    rows = weight.codes if isinstance(weight, Packed) else weight
    if rows.stride(1) != 1:
        raise CaptureError("linear", "a weight with contiguous rows", f"strides {rows.stride()}", "a copy for every call would cost more")


def _check_parts(shape: LinearShape, out: Tensor, dtype: torch.dtype, squares: Tensor | None, **parts: Tensor | None) -> None:
    sizes = {"bias": (shape.outputs,), "norm_weight": (shape.inputs,), "residual": tuple(out.shape)}
    for name, part in parts.items():
        if part is not None and (tuple(part.shape) != sizes[name] or part.dtype != dtype):
            raise CaptureError(f"linear {name}", f"{sizes[name]} of {dtype}", f"{tuple(part.shape)} of {part.dtype}")
    if squares is not None and (squares.shape[:-1] != out.shape[:-1] or squares.dtype != torch.float32 or not squares.is_contiguous()):
        expected = f"contiguous {(*out.shape[:-1], 'parts')} of {torch.float32}"
        raise CaptureError("linear squares", expected, f"{tuple(squares.shape)} of {squares.dtype}, strides {squares.stride()}")


FLOAT8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e8m0fnu: "e8m0"}
"""Scales that a kernel takes as bytes."""


class Stored(NamedTuple):
    """A weight as the kernels take it, see :func:`~._packed.fields_from`.

    Attributes:
        rows: numbers or codes.
        fields: scales, super scales, zeros, minimums, super minimums and group_of.
        columns: of scales, super scales and super minimums; None where there are none.
        options: constants of the compiled kernel.
    """

    rows: Tensor
    fields: tuple[Tensor | None, ...] = (None,) * 6
    columns: tuple[int | None, ...] = (None,) * 3
    options: Mapping[str, Any] = MappingProxyType({"CODE": "", "FLOAT8": "", "GROUP": 0, "SUPER": 0, "SUPER_MINIMUM": 0, "DIVIDES": False})


def stored(weight: Tensor | Packed) -> Stored:
    """A weight's tensors, columns and constants.

    Raises:
        CaptureError: a field that is not contiguous, or an 8-bit float other than a scale.
    """
    if not isinstance(weight, Packed):
        return Stored(weight)
    for name, field in weight.tensors.items():
        if name != "codes" and (not field.is_contiguous() or (field.dtype in FLOAT8 and name != "scales")):
            raise CaptureError(f"linear {name}", "contiguous numbers", f"{field.dtype}, strides {field.stride()}")
    codes, scales = (part.view(torch.uint8) if part.element_size() == 1 and part.is_floating_point() else part for part in weight[:2])
    groups = weight.scales.shape[1]
    supers = (weight.super_scales, weight.super_minimums)
    counts = [None if field is None else field.shape[1] for field in supers]
    per = [0 if count in (None, 1) else groups // count for count in counts]
    optional = (weight.super_scales, weight.zeros, weight.minimums, weight.super_minimums, weight.group_of if groups > 1 else None)
    options = {"CODE": weight.code, "FLOAT8": FLOAT8.get(weight.scales.dtype, ""), "GROUP": weight.group if groups > 1 else 0}
    options |= {"SUPER": per[0], "SUPER_MINIMUM": per[1], "DIVIDES": weight.divides}
    return Stored(codes, (scales, *optional), (groups, *counts), options)


def _two_leading(x: Tensor) -> Tensor:
    """``x`` as ``[A, T, channels]`` with contiguous channels; a view where the strides allow it."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() == 3:
        return x
    return x.reshape(1, -1, x.shape[-1])


NO_HEADS: tuple[tuple[Tensor | None, ...], tuple[int, ...]] = ((None,) * 8, (0,) * 13)
"""What :func:`_of_heads` is for a product without them."""


def _of_heads(heads: Heads, queries: int) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
    """Tensors and numbers of a launch. The pool is that of the layer, whose number would otherwise be compiled into the kernel."""
    _, _, pages, page_size, groups, _ = heads.kv_pool.shape
    pool, norms = heads.kv_pool[heads.layer], (heads.query_norm, heads.key_norm)
    numbers = (queries, groups, heads.table_BP.shape[1], page_size, pages, heads.rope_LD.shape[0])
    strides = (*heads.rope_row_BT.stride(), heads.table_BP.stride(0), *heads.slot_BT.stride(), *heads.valid_BT.stride())
    return (heads.rope_LD, heads.rope_row_BT, pool, heads.table_BP, heads.slot_BT, heads.valid_BT, *norms), (*numbers, *strides)


def _used(shape: LinearShape, config: Sequence[int] | None) -> LinearConfig:
    return (fast_config(shape) or invariant_config(shape)) if config is None else decoded(config)


def multiplied(
    x: Tensor, weight: Tensor | Packed, bias: Tensor | None, norm_weight: Tensor | None, norm_eps: float, norm_offset: bool,
    residual: Tensor | None, gated: bool, float32: bool, squares: Tensor | None, config: Sequence[int] | None, summed: bool,
    heads: Heads | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Run one call: the result and, if ``summed``, the sums of squares of each row's tiles. With ``heads`` the result is the queries."""
    _check(x, weight, gated)
    shape = shape_of(x, weight, bias, norm_weight, residual, gated, float32, squares)
    use, held = _used(shape, config), stored(weight)
    width, dim, head_norm, head_eps, head_offset = shape.width, 0, False, 0.0, False
    places, numbers = NO_HEADS
    if heads is not None:
        (groups, dim), head_norm, head_eps, head_offset = heads.sizes, heads.query_norm is not None, heads.head_eps, heads.head_offset
        width -= 2 * groups * dim
        places, numbers = _of_heads(heads, width // dim)
    out = torch.empty((*x.shape[:-1], width), dtype=torch.float32 if float32 else x.dtype, device=x.device)
    _check_parts(shape, out, x.dtype, squares, bias=bias, norm_weight=norm_weight, residual=residual)
    tiles = triton.cdiv(shape.width, use.tile_outputs)
    sums = torch.empty((*x.shape[:-1], tiles), dtype=torch.float32, device=x.device) if summed else None
    if out.numel() == 0:
        return out, sums
    source, added = _two_leading(x), None if residual is None else _two_leading(residual)
    inner = source.shape[1]
    scanned = 0
    if norm_weight is None:
        squares = None
    elif squares is None and use.scan:
        scanned = min(triton.next_power_of_2(shape.rows), use.tile_rows)
    elif squares is None:
        squares = torch.empty((shape.rows, 1), dtype=torch.float32, device=x.device)
        launch_row_squares(source, squares)
    parts = 0 if squares is None else squares.shape[-1]
    line = LINE_BYTES // held.rows.element_size()
    prefetch = min(PREFETCHED_BYTES // LINE_BYTES // (use.tile_outputs * (2 if gated else 1)), held.rows.shape[1] // use.splits // line)
    scan = min(SCAN_BLOCK // max(scanned, 1), triton.next_power_of_2(shape.inputs))
    # A norm of a head needs its tiles, which are parts too.
    cut = use.splits * (max(dim // use.tile_outputs, 1) if head_norm else 1) > 1
    limit = LAUNCH_ROWS if cut else shape.rows
    partial = semaphore = None
    if cut:
        partial = torch.empty((use.splits, min(shape.rows, limit), shape.outputs), dtype=torch.float32, device=x.device)
        semaphore = semaphores(x.device, tiles * triton.cdiv(min(shape.rows, limit), use.tile_rows))
    for begin in range(0, shape.rows, limit):
        rows = min(limit, shape.rows - begin)
        launch(
            _linear, (triton.cdiv(rows, use.tile_rows) * tiles * use.splits,),
            source, held.rows, *held.fields, bias, norm_weight, squares, added, out, sums, partial, semaphore, *places,
            norm_eps, head_eps, begin, rows, inner, shape.width, shape.inputs, *held.columns, parts, *source.stride()[:2],
            held.rows.stride(0), held.rows.stride(0) * shape.width, *((0, 0) if added is None else added.stride()[:2]), *numbers,
            **held.options, TILE_M=use.tile_rows, TILE_O=use.tile_outputs, TILE_K=use.tile_inputs, SPLITS=use.splits,
            EVEN=shape.inputs % use.tile_inputs == 0, SCAN_M=scanned,
            SCAN_K=scan, SCANS=triton.cdiv(shape.inputs, scan) if scanned else 0, PARTS=triton.next_power_of_2(max(parts, 1)),
            OFFSET=norm_offset, GATED=gated, PREFETCH=1 << max(prefetch, 1).bit_length() - 1, LINE=line, DIM=dim,
            HEAD_NORM=head_norm, HEAD_OFFSET=head_offset,
            num_warps=use.warps, num_stages=use.stages,
        )  # fmt: skip
    return out, sums


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
    squares: Tensor | None = None,
    config: Sequence[int] | None = None,
) -> Tensor:
    """See :func:`graphspec.kernels.linear.linear.linear`; a residual stream is passed as two tensors.

    Args:
        x, weight, bias, norm_weight, norm_eps, norm_offset, residual, gated, float32: as there.
        squares: float32 ``[..., P]``, sums of squares of parts of each row of ``x``. None: computed by this call.
        config: :meth:`LinearConfig.encoded`; None: the choice for unmeasured shapes.
    """
    return multiplied(x, weight, bias, norm_weight, norm_eps, norm_offset, residual, gated, float32, squares, config, summed=False)[0]


def linear_summed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    norm_offset: bool = False,
    residual: Tensor | None = None,
    gated: bool = False,
    float32: bool = False,
    squares: Tensor | None = None,
    config: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`linear`, and float32 ``[..., tiles]``: sums of squares of each row's tiles, taken of the rounded values."""
    out, sums = multiplied(x, weight, bias, norm_weight, norm_eps, norm_offset, residual, gated, float32, squares, config, summed=True)
    assert sums is not None
    return out, sums


OP = operator("linear", linear)
SUMMED = operator("linear_summed", linear_summed)


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None, float32: bool = False) -> Tensor:
    """``x @ weight.T + bias`` by cuBLAS; with ``float32``, unrounded results of half-precision inputs.

    An operator of its own, because the compiler would turn a product plus a residual into ``addmm``, which copies the residual first and
    rounds once where the reference rounds twice.
    """
    if float32 and bias is None and x.is_cuda and x.dtype != torch.float32:
        flat = x.reshape(-1, x.shape[-1])
        return torch.mm(flat, weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], -1)
    out = functional.linear(x, weight, bias)
    return out.float() if float32 else out


MATMUL = operator("matmul", matmul)


class Products(NamedTuple):
    """Products that a linear layer can call: the fused kernel, the fused kernel that also returns sums of squares, and cuBLAS."""

    linear: Callable[..., Tensor]
    summed: Callable[..., tuple[Tensor, Tensor]]
    matmul: Callable[..., Tensor]


OPERATORS = Products(OP, SUMMED, MATMUL)


def fused_linear(numerics: str = "fast", table: LinearTable | None = None, products: Products = OPERATORS) -> Callable[..., Hidden]:
    """The linear layer of a fused cycle: a function with the op's signature that chooses a kernel per static shape at trace time.

    With products of packed weights, it is that of :mod:`graphspec.kernels.linear.packed_linear`.

    Args:
        numerics: ``fast``: by ``table``, and so possibly by the number of rows. ``batch_invariant``: always the fused kernel, tiled by
            the shape of the weight only, so that the bits of a row do not depend on other rows. ``cycle_invariant``: the latter for as
            many rows as a cycle may have, the former for others.
        table: measured choices; may be filled later, but before the trace. None: an empty one.
        products: what it calls; replaceable, to find out what would be launched.
    """
    chosen = LinearTable() if table is None else table

    @torch.compiler.assume_constant_result
    def choose(*shape: Any) -> tuple[int, ...]:
        config = chosen.choose(LinearShape(*shape), numerics)
        return () if config is None else config.encoded()

    def multiply(
        x: Hidden,
        weight: Any,
        bias: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_eps: float = 0.0,
        norm_offset: bool = False,
        residual: Hidden | None = None,
        gated: bool = False,
        float32: bool = False,
    ) -> Hidden:
        x, squares = x if isinstance(x, ResidualStream) else (x, None)
        rows = x.numel() // x.shape[-1]
        parts = (norm_weight is not None, gated, residual is not None, bias is not None, float32)
        summed = norm_weight is not None and squares is not None
        config = choose(rows, *weight.shape, str(x.dtype).removeprefix("torch."), *parts, summed, *format_of(weight))
        if config:
            added = None if residual is None else hidden_of(residual)
            arguments = (x, weight, bias, norm_weight, norm_eps, norm_offset, added, gated, float32, squares if summed else None, config)
            return ResidualStream(*products.summed(*arguments)) if isinstance(residual, ResidualStream) else products.linear(*arguments)
        if norm_weight is not None:
            x = rms_norm(x, norm_weight, norm_eps, norm_offset)
        plain = not gated and residual is None
        return finish(products.matmul(x, weight, bias, float32 and plain), residual, gated, float32)

    return multiply

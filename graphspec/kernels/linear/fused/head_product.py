"""Triton kernel of :mod:`graphspec.kernels.linear.head_product`, tiled by the shape of the weight alone."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ....errors import CaptureError
from ...fused.hopper import MULTIPROCESSORS
from ...fused.launch import Launch, launch, register
from ...fused.work import Situation, Work, works

TILE_ROWS = 64
"""Rows of a tile, whatever their number: one instruction serves all."""
OUTPUTS, NARROW_OUTPUTS = 64, 32
"""Outputs of a tile: few where there would be fewer programs than multiprocessors."""
INPUTS, FLOAT32_INPUTS = 64, 32


def _work(launch: Launch, at: Situation) -> Work:
    values = launch.values
    weight, item = values["weight"], values["weight"].element_size()
    stage = values["TILE_K"] * (values["TILE_O"] + values["TILE_M"]) * item
    rows = values["rows"]
    # Few rows come from L2, written by the kernel before; all of the weight streams from memory.
    return Work(
        bytes=weight.numel() * item,
        programs=launch.programs,
        in_flight=(launch.num_stages - 1) * stage,
        memory=1,
        cache=1,
        flops=2 * rows * weight.numel(),
    )


@works(_work)
@triton.jit
def _head_product(
    x, weight, out,
    rows, inner, heads, outputs, inputs, x_outer, x_inner, x_head, weight_head, weight_stride,
    DENSE_OUTPUTS: tl.constexpr, TILE_M: tl.constexpr, TILE_O: tl.constexpr, TILE_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows and of outputs, head). The weight is the M operand of the matrix instruction.

    Rows are the two leading dimensions of ``x``, flattened; the inner one has size ``inner``. ``weight`` is ``[heads, inputs, outputs]``
    with dense outputs, or else with dense inputs; ``weight_stride`` is that of the other dimension.
    """
    tiles_m = tl.cdiv(rows, TILE_M)
    head = tl.program_id(1)
    row = tl.program_id(0) % tiles_m * TILE_M + tl.arange(0, TILE_M)
    output = tl.program_id(0) // tiles_m * TILE_O + tl.arange(0, TILE_O)
    in_rows, in_outputs = row < rows, output < outputs
    own = weight + head.to(tl.int64) * weight_head
    x_at = x + (row // inner).to(tl.int64) * x_outer + (row % inner).to(tl.int64) * x_inner + head.to(tl.int64) * x_head
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([TILE_O, TILE_M], tl.float32)
    for start in range(0, inputs, TILE_K):
        channel = start + tl.arange(0, TILE_K)
        inside = channel < inputs
        rows_of_x = tl.load(x_at[:, None] + channel[None, :], mask=in_rows[:, None] & inside[None, :], other=0.0)
        if DENSE_OUTPUTS:
            at = own + channel.to(tl.int64)[:, None] * weight_stride + output[None, :]
            of_weight = tl.trans(tl.load(at, mask=inside[:, None] & in_outputs[None, :], other=0.0))
        else:
            at = own + output.to(tl.int64)[:, None] * weight_stride + channel[None, :]
            of_weight = tl.load(at, mask=in_outputs[:, None] & inside[None, :], other=0.0)
        acc = tl.dot(of_weight, tl.trans(rows_of_x), acc, input_precision="ieee")
    target = out + (row.to(tl.int64) * heads + head)[None, :] * outputs + output[:, None]
    tl.store(target, acc.to(out.dtype.element_ty), mask=in_outputs[:, None] & in_rows[None, :])


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def head_product(x_BTQK: Tensor, weight_QKO: Tensor) -> Tensor:
    lanes, tokens, heads, inputs = x_BTQK.shape
    outputs = weight_QKO.shape[2]
    if weight_QKO.shape[:2] != (heads, inputs) or weight_QKO.dtype != x_BTQK.dtype:
        expected = f"a weight [{heads}, {inputs}, outputs] of {x_BTQK.dtype}"
        raise CaptureError("head_product", expected, f"{tuple(weight_QKO.shape)} of {weight_QKO.dtype}")
    _, stride_k, stride_o = weight_QKO.stride()
    if 1 not in (stride_k, stride_o):
        expected = "dense inputs or outputs"
        raise CaptureError("head_product weight", expected, f"strides {weight_QKO.stride()}", "a copy for every call would cost more")
    out = torch.empty((lanes, tokens, heads, outputs), dtype=x_BTQK.dtype, device=x_BTQK.device)
    rows, source = lanes * tokens, _dense(x_BTQK)
    if not out.numel():
        return out
    wide = heads * triton.cdiv(outputs, OUTPUTS) >= MULTIPROCESSORS
    tile: dict[str, Any] = {"TILE_O": OUTPUTS if wide else NARROW_OUTPUTS, "TILE_M": TILE_ROWS}
    tile["TILE_K"] = INPUTS if x_BTQK.element_size() < 4 else FLOAT32_INPUTS
    launch(
        _head_product, (triton.cdiv(rows, TILE_ROWS) * triton.cdiv(outputs, tile["TILE_O"]), heads),
        source, weight_QKO, out, rows, tokens, heads, outputs, inputs, *source.stride()[:3],
        weight_QKO.stride(0), stride_k if stride_o == 1 else stride_o, DENSE_OUTPUTS=stride_o == 1, **tile, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


OP = register(head_product)

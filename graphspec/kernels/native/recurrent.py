"""Ops of recurrent layers in C++, float32.

Contracts stand next to the references, in the files of the same names one folder up. There is one form of the gated delta rule here. A core
keeps the states on the path to a node, so a tree costs one update per node and a prompt one per token. That is about as many operations as
the block forms need, so these are the same functions. Whatever computes a token, its bits are those of plain decoding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import conv_shift as shifts
from .. import delta_chunk as chunks
from .. import delta_scan as scans
from .. import delta_solve as solves
from .. import delta_walk as walks
from .. import tree_conv as convs
from . import define_op
from .call import call, dense, require, require_slots

_float32 = torch.float32


def _tree_conv(
    input_BTE: Tensor, column_RUOE: Tensor, layer: int, lane_row_B: Tensor, parent_BT: Tensor, weight_EO: Tensor,
    bias_E: Tensor | None, fresh_B: Tensor | None,
) -> Tensor:  # fmt: skip
    require("convolution input", input_BTE, _float32)
    require_slots(column_RUOE)
    out = torch.empty(input_BTE.shape, dtype=_float32)
    read = (dense(input_BTE), column_RUOE, dense(lane_row_B), dense(parent_BT), dense(weight_EO))
    may = (None if x is None else dense(x) for x in (bias_E, fresh_B))
    call("tree_conv", (out, *read, *may), *input_BTE.shape, column_RUOE.shape[2], column_RUOE.shape[1], layer)
    return out


def _like_first(first: Tensor, *_: object) -> Tensor:
    return first.new_empty(first.shape)


def _conv_shift(
    input_UBTE: Tensor, column_RUOE: Tensor, layer: int, lane_row_B: Tensor, path_BA: Tensor, length_B: Tensor, fresh_B: Tensor | None
) -> None:
    require_slots(column_RUOE)
    fresh = None if fresh_B is None else dense(fresh_B)
    layers, lanes, tokens, channels = input_UBTE.shape
    sizes = (layers, lanes, tokens, path_BA.shape[1], column_RUOE.shape[2], column_RUOE.shape[1], layer)
    read = (dense(input_UBTE), column_RUOE, dense(lane_row_B), dense(path_BA), dense(length_B), fresh)
    call("conv_shift", read, *sizes, channels * column_RUOE.element_size())


def _rule(
    mixed: Tensor, gate: Tensor, matrix: Tensor, layer: int, lane_row: Tensor, *,
    ancestors: Tensor | None = None, length: Tensor | None = None, path: Tensor | None = None, fresh: Tensor | None = None,
) -> Tensor:  # fmt: skip
    for name, tensor in (("mixed", mixed), ("gate", gate), ("matrix", matrix)):
        require(name, tensor, _float32)
    require_slots(matrix)
    lanes, tokens, channels = mixed.shape
    _, layers, heads, key_dim, value_dim = matrix.shape
    steps = tokens if path is None else path.shape[1]
    out = torch.empty((lanes, steps, heads, value_dim), dtype=_float32)
    may = (None if x is None else dense(x) for x in (ancestors, length, path, fresh))
    words = 0 if ancestors is None else ancestors.shape[2]
    sizes = (lanes, tokens, steps, channels, heads, key_dim, value_dim, layers, layer, words)
    call("delta_rule", (out, dense(mixed), dense(gate), matrix, dense(lane_row), *may), *sizes)
    return out


def _delta_walk(mixed_BTE: Tensor, gate_BTG: Tensor, matrix_RUHKV: Tensor, layer: int, lane_row_B: Tensor, ancestors_BTX: Tensor) -> Tensor:
    return _rule(mixed_BTE, gate_BTG, matrix_RUHKV, layer, lane_row_B, ancestors=ancestors_BTX)


def _delta_scan(
    mixed_BTE: Tensor, gate_BTG: Tensor, matrix_RUHKV: Tensor, layer: int, lane_row_B: Tensor, length_B: Tensor,
    fresh_B: Tensor | None, path_BA: Tensor | None,
) -> Tensor:  # fmt: skip
    return _rule(mixed_BTE, gate_BTG, matrix_RUHKV, layer, lane_row_B, length=length_B, path=path_BA, fresh=fresh_B)


def _delta_chunk(
    mixed_BTE: Tensor, gate_BTG: Tensor, matrix_RUHKV: Tensor, layer: int, lane_row_B: Tensor, length_B: Tensor, fresh_B: Tensor | None
) -> Tensor:
    return _rule(mixed_BTE, gate_BTG, matrix_RUHKV, layer, lane_row_B, length=length_B, fresh=fresh_B)


def _tree_shape(mixed: Tensor, gate: Tensor, matrix: Tensor, *_: object) -> Tensor:
    return mixed.new_empty((*mixed.shape[:2], matrix.shape[2], matrix.shape[4]))


def _run_shape(mixed: Tensor, gate: Tensor, matrix: Tensor, *rest: Tensor | None) -> Tensor:
    path = rest[4] if len(rest) > 4 else None
    steps = mixed.shape[1] if path is None else path.shape[1]
    return mixed.new_empty((mixed.shape[0], steps, matrix.shape[2], matrix.shape[4]))


tree_conv = define_op("tree_conv", _tree_conv, _like_first, convs.OP.signature)
"""The op of this name in C++, as those below."""
conv_shift = define_op("conv_shift", _conv_shift, signature=shifts.OP.signature)
delta_walk = define_op("delta_walk", _delta_walk, _tree_shape, walks.OP.signature)
delta_solve = define_op("delta_solve", _delta_walk, _tree_shape, solves.OP.signature)
delta_scan = define_op("delta_scan", _delta_scan, _run_shape, scans.OP.signature)
delta_chunk = define_op("delta_chunk", _delta_chunk, _run_shape, chunks.OP.signature)

"""Ops of recurrent layers in C++, float32.

Contracts are next to the references, in the files of the same names one folder up. Each rule, the gated delta rule and Mamba-2's, has one
form here. A core keeps the states on the path to a node, so a tree costs one update per node and a prompt one per token. That takes about
as many operations as the block forms, so both are the same functions, and a token always has the bits of plain decoding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import implement
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
    mixed: Tensor, gate: Tensor, skip: Tensor | None, matrix: Tensor, layer: int, lane_row: Tensor, *,
    ancestors: Tensor | None = None, length: Tensor | None = None, fresh: Tensor | None = None,
) -> Tensor:  # fmt: skip
    for key, tensor in (("mixed", mixed), ("gate", gate), ("skip", skip), ("matrix", matrix)):
        if tensor is not None:
            require(key, tensor, _float32)
    require_slots(matrix)
    lanes, tokens, channels = mixed.shape
    _, layers, heads, key_dim, value_dim = matrix.shape
    out = torch.empty((lanes, tokens, heads, value_dim), dtype=_float32)
    own = None if skip is None else dense(skip)
    may = (None if x is None else dense(x) for x in (ancestors, length, fresh))
    words = 0 if ancestors is None else ancestors.shape[2]
    sizes = (lanes, tokens, channels, heads, key_dim, value_dim, layers, layer, words)
    name = "delta_rule" if skip is None else "ssm_rule"
    call(name, (out, dense(mixed), dense(gate), own, matrix, dense(lane_row), *may), *sizes)
    return out


def _walk(
    mixed_BTE: Tensor, gate_BTG: Tensor, skip_H: Tensor | None, matrix_RUHKV: Tensor, layer: int, lane_row_B: Tensor, ancestors_BTX: Tensor
) -> Tensor:
    return _rule(mixed_BTE, gate_BTG, skip_H, matrix_RUHKV, layer, lane_row_B, ancestors=ancestors_BTX)


def _scan(
    mixed_BTE: Tensor, gate_BTG: Tensor, skip_H: Tensor | None, matrix_RUHKV: Tensor, layer: int, lane_row_B: Tensor, length_B: Tensor,
    fresh_B: Tensor | None,
) -> Tensor:  # fmt: skip
    return _rule(mixed_BTE, gate_BTG, skip_H, matrix_RUHKV, layer, lane_row_B, length=length_B, fresh=fresh_B)


def _state_commit(
    input_UBTE: Tensor, gate_UBTG: Tensor, weight_UEO: Tensor, bias_UE: Tensor | None, column_RUOE: Tensor, matrix_RUHKV: Tensor,
    lane_row_B: Tensor, path_BA: Tensor, length_B: Tensor, selective: bool,
) -> None:  # fmt: skip
    for key, tensor in (("convolution input", input_UBTE), ("gate", gate_UBTG), ("matrix", matrix_RUHKV)):
        require(key, tensor, _float32)
    require_slots(column_RUOE, matrix_RUHKV)
    bias = None if bias_UE is None else dense(bias_UE)
    read = (dense(input_UBTE), dense(gate_UBTG), dense(weight_UEO), bias, column_RUOE)
    rows = (dense(lane_row_B), dense(path_BA), dense(length_B))
    layers, lanes, tokens, channels = input_UBTE.shape
    sizes = (layers, lanes, tokens, path_BA.shape[1], channels, column_RUOE.shape[2], *matrix_RUHKV.shape[2:], selective)
    call("state_commit", (*read, matrix_RUHKV, *rows), *sizes)


def _read_shape(mixed: Tensor, gate: Tensor, skip: Tensor | None, matrix: Tensor, *_: object) -> Tensor:
    return mixed.new_empty((*mixed.shape[:2], matrix.shape[2], matrix.shape[4]))


tree_conv = implement("tree_conv", _tree_conv, _like_first)
"""The op of this name in C++, as those below."""
conv_shift = implement("conv_shift", _conv_shift)
state_walk = implement("state_walk", _walk, _read_shape)
state_tree = implement("state_tree", _walk, _read_shape)
state_scan = implement("state_scan", _scan, _read_shape)
state_chunk = implement("state_chunk", _scan, _read_shape)
state_commit = implement("state_commit", _state_commit)

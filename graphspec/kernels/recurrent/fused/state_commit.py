"""Triton kernel of :mod:`graphspec.kernels.recurrent.state_commit`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...fused.launch import launch, register
from ...fused.work import works
from ._convolution import activated, add_tap
from ._states import head_sizes, head_state, own_columns, state_tile, states_work, token_places
from .delta_rule import delta_change
from .ssm_rule import ssm_change


@triton.jit
def _convolved(
    nodes, columns_end, path, step, channels, weight, bias, channel, inside, BIAS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The convolution's output for one step of a path, for a block of channels."""
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        place = step + tap - (TAPS - 1)
        node = tl.load(path + tl.maximum(place, 0))
        factors = weight + channel * TAPS + tap
        total = add_tap(total, place, node, nodes + channel, channels, columns_end + channel, channels, factors, inside, inside)
    if BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    return activated(total, nodes.dtype.element_ty).to(tl.float32)


@works(states_work)
@triton.jit
def _commit_states(
    matrix, inputs, gate, weight, bias, column, lane_row, path, length, lanes, tokens, steps, layers,
    BIAS: tl.constexpr, TAPS: tl.constexpr, SELECTIVE: tl.constexpr, HEADS: tl.constexpr, REPEAT: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, KEY_PAD: tl.constexpr, COLUMNS: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per (layer, lane, head) and tile of columns: the whole path. It convolves the key and its columns of the value."""
    lane, head, value_column = own_columns(HEADS, COLUMNS, PDL)
    layer = tl.program_id(2).to(tl.int64)
    channels: tl.constexpr = 2 * (HEADS // REPEAT * KEY) + HEADS * VALUE
    count = tl.load(length + lane)
    row = tl.load(lane_row + lane)
    at, inside = state_tile(head_state(matrix, row, layers, layer, head, HEADS, KEY, VALUE), value_column, KEY, VALUE, KEY_PAD)
    state = tl.load(at, mask=inside & (count > 0), other=0.0)
    key_column = tl.arange(0, KEY_PAD)
    _, key_place, value_place = token_places(0, 0, head, SELECTIVE, HEADS, REPEAT, KEY, VALUE)
    record = (layer * lanes + lane) * tokens
    nodes = inputs + record * channels
    columns_end = column + (row * layers + layer + 1) * (TAPS - 1) * channels
    factors = weight + layer * channels * TAPS
    offsets = bias
    if BIAS:
        offsets = bias + layer * channels
    own_path = path + lane * steps
    for step in range(count):
        key = _convolved(
            nodes, columns_end, own_path, step, channels, factors, offsets, key_place + key_column, key_column < KEY, BIAS, TAPS, KEY_PAD
        )
        value = _convolved(
            nodes, columns_end, own_path, step, channels, factors, offsets, value_place + value_column, value_column < VALUE, BIAS, TAPS,
            COLUMNS,
        )  # fmt: skip
        gates = gate + (record + tl.load(own_path + step)) * 2 * HEADS + head
        decay = tl.load(gates)
        rate = tl.load(gates + HEADS)
        state = ssm_change(state, key, value, decay, rate) if SELECTIVE else delta_change(state, key, value, decay, rate, EPS)
    # Other threads of this program have loaded what is overwritten here.
    tl.debug_barrier()
    tl.store(at, state, mask=inside & (count > 0))


def state_commit(
    input_UBTE: Tensor,
    gate_UBTG: Tensor,
    weight_UEO: Tensor,
    bias_UE: Tensor | None,
    column_RUOE: Tensor,
    matrix_RUHKV: Tensor,
    lane_row_B: Tensor,
    path_BA: Tensor,
    length_B: Tensor,
    selective: bool,
) -> None:
    layers, lanes, tokens, _ = input_UBTE.shape
    sizes = head_sizes(input_UBTE, matrix_RUHKV, selective=selective)
    heads, _, width = matrix_RUHKV.shape[2:]
    launch(
        _commit_states, (lanes * heads, triton.cdiv(width, sizes["COLUMNS"]), layers), matrix_RUHKV, input_UBTE.contiguous(),
        gate_UBTG.contiguous(), weight_UEO.contiguous(), None if bias_UE is None else bias_UE.contiguous(), column_RUOE, lane_row_B,
        path_BA.contiguous(), length_B, lanes, tokens, path_BA.shape[1], layers,
        BIAS=bias_UE is not None, TAPS=weight_UEO.shape[2], **sizes,
    )  # fmt: skip


OP = register(state_commit)

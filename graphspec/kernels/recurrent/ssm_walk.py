"""Selective state space over a tree, node by node: the bits of plain decoding."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ..op import Int64, kernel_op
from .ssm_rule import ssm_tokens, ssm_update
from .state_runs import walk_tree
from .state_tokens import rows_of


@kernel_op(native="native.recurrent", exact=False)
def ssm_walk(
    mixed_BTE: Tensor, gate_BTG: Tensor, skip_H: Tensor, matrix_RUHKV: Tensor, layer: int, lane_row_B: Int64, ancestors_BTX: Int64
) -> Tensor:
    """What every node reads after its own ancestors and itself have updated its row's state, one after the other.

    The update is that of ``ssm_rule``; what ``delta_walk`` says of order, bits and
    implementations holds here too. No state is written.

    Args:
        mixed_BTE: after the convolution, E = H * V + 2 * groups * K: x, B, C.
        gate_BTG: float32, G = 2 * H: log-decays, at most 0, then steps.
        skip_H: float32, D.
        matrix_RUHKV: float32, the committed states of each row and recurrent layer.
        layer: static; of the recurrent ones.
        lane_row_B: int64.
        ancestors_BTX: int64 words, 64 bits each: bit j of node i: j is an ancestor of i, or i itself. A node without its own bit is unused:
            its inputs may be NaN. Ancestors come before their descendants.

    Returns:
        ``[B, T, H, V]`` in the dtype of ``mixed``; 0 where a node is unused.
    """
    tokens = ssm_tokens(mixed_BTE, gate_BTG, *matrix_RUHKV.shape[2:])
    start_BHKV = rows_of(matrix_RUHKV, layer, lane_row_B, None)
    return walk_tree(partial(ssm_update, skip_H), start_BHKV, tokens, ancestors_BTX).to(mixed_BTE.dtype)

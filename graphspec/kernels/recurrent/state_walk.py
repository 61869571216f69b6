"""Recurrent layers over a tree, node by node: the bits of plain decoding."""

from __future__ import annotations

from torch import Tensor

from ..op import Int64, kernel_op
from .state_runs import tokens_of, update_of, walk_tree
from .state_tokens import rows_of


@kernel_op(native="native.recurrent", exact=False)
def state_walk(
    mixed_BTE: Tensor, gate_BTG: Tensor, skip_H: Tensor | None, matrix_RUHKV: Tensor, layer: int, lane_row_B: Int64, ancestors_BTX: Int64
) -> Tensor:
    """What every node reads after its own ancestors and itself have updated its row's state, one after the other.

    The update is that of the rule, with the same operations in the same order whatever the tree: a node's result
    has the bits that plain decoding of its path has. No state is written. An implementation gives each node to programs of its own, which
    walk from the row's state along its ancestor bits; the reference keeps the states of all nodes and goes on from the parent's. On a CPU
    torch's exponential may round by where in a tensor a number lies, so there the reference promises the order alone.

    Args:
        mixed_BTE: after the convolution. Gated delta rule: E = 2 * Hk * K + H * V, queries, keys, values. Selective state space:
            E = H * V + 2 * groups * K, x, B, C.
        gate_BTG: float32, G = 2 * H: log-decays, at most 0, then rates or steps.
        skip_H: the rule. None: the gated delta rule (``delta_rule``); else the selective state space (``ssm_rule``) with this D, float32.
        matrix_RUHKV: float32, the committed states of each row and recurrent layer.
        layer: static; of the recurrent ones.
        lane_row_B: int64.
        ancestors_BTX: int64 words, 64 bits each: bit j of node i: j is an ancestor of i, or i itself. A node without its own bit is unused:
            its inputs may be NaN. Ancestors come before their descendants.

    Returns:
        ``[B, T, H, V]`` in the dtype of ``mixed``; 0 at unused nodes.
    """
    tokens = tokens_of(skip_H, mixed_BTE, gate_BTG, matrix_RUHKV)
    start_BHKV = rows_of(matrix_RUHKV, layer, lane_row_B, None)
    return walk_tree(update_of(skip_H), start_BHKV, tokens, ancestors_BTX).to(mixed_BTE.dtype)

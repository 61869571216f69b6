"""The target's inputs for every verify node: token, slot, position and visibility."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import Case, KernelOp
from .draft_window import LIVE


def verify_rows(
    lane_row_B: Tensor, status_R: Tensor, seq_len_R: Tensor, node_token_BN: Tensor, node_depth_BN: Tensor, node_ancestors_BNX: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The nodes of a tree as rows of one forward pass. A node is valid if its lane is live and it has a token.

    Its KV goes to slot ``seq_len + n`` at RoPE position ``seq_len + depth``; it sees the prefix up to ``seq_len`` and its ancestors.

    Args:
        lane_row_B: int64, the row of each lane.
        status_R, seq_len_R: int64.
        node_token_BN, node_depth_BN, node_ancestors_BNX: int64, as :func:`~graphspec.kernels.tree.tree_build.tree_build` leaves them.

    Returns:
        token ``[B, N]`` int64, -1 where not valid; valid ``[B, N]`` bool; slot and position ``[B, N]`` int64; begin ``[B, N]`` int64, 0:
        the first slot a node may see; end ``[B]`` int64, that of the prefix; ancestors ``[B, N, X]`` int64, 0 where not valid.
    """
    node_N = torch.arange(node_token_BN.shape[1], device=lane_row_B.device)
    seq_B = seq_len_R[lane_row_B]
    valid_BN = (status_R[lane_row_B] == LIVE)[:, None] & (node_token_BN >= 0)
    token_BN = torch.where(valid_BN, node_token_BN, -1)
    slot_BN, position_BN = seq_B[:, None] + node_N, seq_B[:, None] + node_depth_BN
    begin_BN, ancestors_BNX = torch.zeros_like(node_token_BN), node_ancestors_BNX.masked_fill(~valid_BN[..., None], 0)
    return token_BN, valid_BN, slot_BN, position_BN, begin_BN, seq_B, ancestors_BNX


def _cases(generator: torch.Generator) -> list[Case]:
    def case(lanes: int, nodes: int, words: int) -> Case:
        status = torch.randint(0, 3, (lanes + 1,), generator=generator)
        status[0] = LIVE
        return {
            "lane_row_B": torch.randperm(lanes + 1, generator=generator)[:lanes],
            "status_R": status,
            "seq_len_R": torch.randint(0, 2**40, (lanes + 1,), generator=generator),
            "node_token_BN": torch.randint(-2, 9, (lanes, nodes), generator=generator),
            "node_depth_BN": torch.randint(0, 7, (lanes, nodes), generator=generator),
            "node_ancestors_BNX": torch.randint(-(2**62), 2**62, (lanes, nodes, words), generator=generator),
        }

    return [case(1, 1, 1), case(3, 8, 1), case(2, 65, 2), case(5, 33, 1)]


OP = KernelOp(verify_rows, _cases, native="native.state")

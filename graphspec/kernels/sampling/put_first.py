"""The token that a grammar forces, in front of what a draft proposes."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import Int64, kernel_op


@kernel_op(native="native.shaping", fused=None)
def put_first(score_BTK: Tensor, token_BTK: Int64, forced_BS: Int64, path_BTs: Int64 | None) -> tuple[Tensor, Tensor]:
    """Continuations with a forced token in front of the others, of which the last makes room unless that token was among them.

    Args:
        score_BTK: float32 log-probabilities, sorted; so they stay.
        token_BTK: int64, all different where they are tokens.
        forced_BS: int64, the forced token of each depth from 1 on, -1 if there is none.
        path_BTs: int64, tokens drafted on the way to each row; a row off the forced path keeps its continuations. None: T is S, and row
            t has depth t + 1.

    Returns:
        Scores and tokens of these shapes.
    """
    forced_BT = forced_BS
    if path_BTs is not None:
        drafted = path_BTs.shape[-1]
        on_way_BT = (path_BTs == forced_BS[:, None, :drafted]).all(-1)
        forced_BT = torch.where(on_way_BT, forced_BS[:, drafted, None], -1)
    place_K = torch.arange(token_BTK.shape[-1], device=token_BTK.device)
    room_BT1 = torch.where(token_BTK == forced_BT[..., None], place_K, token_BTK.shape[-1] - 1).amin(-1, keepdim=True)
    source_BTK = torch.where(place_K <= room_BT1, (place_K - 1).clamp(min=0), place_K)
    forced_BTK = (forced_BT >= 0)[..., None].expand_as(token_BTK)
    score, token = score_BTK.gather(-1, source_BTK), token_BTK.gather(-1, source_BTK)
    score, token = torch.where(place_K == 0, 0.0, score), torch.where(place_K == 0, forced_BT[..., None], token)
    return torch.where(forced_BTK, score, score_BTK), torch.where(forced_BTK, token, token_BTK)

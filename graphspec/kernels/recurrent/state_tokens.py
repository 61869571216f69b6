"""What tokens bring to the states of recurrent layers, who comes before whom, and where a row's states lie, whatever the rule."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class StateTokens(NamedTuple):
    """What tokens bring to an update, in float32 (float64 for float64 channels). Queries and keys are repeated for the heads they serve."""

    query_BTHK: Tensor
    key_BTHK: Tensor
    value_BTHV: Tensor
    decay_BTH: Tensor
    rate_BTH: Tensor

    def masked(self, valid_BT: Tensor) -> StateTokens:
        """The same where a token that is not valid changes no state and reads 0, whatever it holds."""
        return StateTokens(*(torch.where(valid_BT.view(*valid_BT.shape, *[1] * (part.dim() - 2)), part, 0.0) for part in self))

    def at(self, token: int) -> StateTokens:
        """One token, ``[B, H, ...]``."""
        return StateTokens(*(part[:, token] for part in self))


def ancestor_matrix(ancestors_BTX: Tensor) -> Tensor:
    """Words of T nodes as bool ``[B, T, T]``: node j is an ancestor of node i, or i itself."""
    node_T = torch.arange(ancestors_BTX.shape[1], device=ancestors_BTX.device)
    return ((ancestors_BTX[:, :, node_T >> 6] >> (node_T & 63)) & 1) == 1


def rows_of(state_RUHKV: Tensor, layer: int, lane_row_B: Tensor, fresh_B: Tensor | None) -> Tensor:
    """The states of the lanes' rows in one layer; zero in a lane that starts afresh, whatever the row held."""
    state_B = state_RUHKV[lane_row_B, layer]
    if fresh_B is None:
        return state_B
    return torch.where(fresh_B.view(-1, *[1] * (state_B.dim() - 1)), 0.0, state_B)

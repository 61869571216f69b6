"""The selective state space of Mamba-2 (arXiv 2405.21060): its one-token update, and the same over many tokens at once.

A head's state is a matrix S of ``[K, V]``, zero at the start; K is the size of the state, V the width of the head. A token with input x of
width V, B and C of width K, log-decay g <= 0 and step dt makes of it::

    S <- exp(g) S + B (dt x)^T

and reads ``S^T C + D x``. Heads of a group share B and C. Nothing of the state enters the change, so tokens of a tree need no system of
equations: a product with masked decays serves (the paper's dual form, section 3, with paths in place of a sequence).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .state_tokens import StateTokens


def ssm_tokens(mixed_BTE: Tensor, gate_BTG: Tensor, heads: int, state_dim: int, head_dim: int) -> StateTokens:
    """Taken apart: C as queries, B as keys, x as values, log-decays, and steps as rates.

    Args:
        mixed_BTE: after the convolution: x, B, C.
        gate_BTG: float32: log-decays of all heads, then their steps.
        heads: of x.
        state_dim, head_dim: of a head.
    """
    wide = torch.float64 if mixed_BTE.dtype == torch.float64 else torch.float32
    values = heads * head_dim
    keys = (mixed_BTE.shape[-1] - values) // 2
    value_BTE, *shared = mixed_BTE.to(wide).split((values, keys, keys), dim=-1)
    repeat = heads * state_dim // keys
    key_BTHK, query_BTHK = (part.unflatten(-1, (-1, state_dim)).repeat_interleave(repeat, dim=2) for part in shared)
    decay_BTH, step_BTH = gate_BTG.to(wide).chunk(2, dim=-1)
    return StateTokens(query_BTHK, key_BTHK, value_BTE.unflatten(-1, (heads, head_dim)), decay_BTH, step_BTH)


def ssm_update(skip_H: Tensor, state_BHKV: Tensor, token: StateTokens) -> tuple[Tensor, Tensor]:
    """State after one token, and what the token reads, ``[B, H, V]``."""
    query_BHK, key_BHK, value_BHV, decay_BH, step_BH = token
    change_BHV = step_BH[..., None] * value_BHV
    state_BHKV = state_BHKV * decay_BH.exp()[..., None, None] + key_BHK[..., None] * change_BHV[..., None, :]
    return state_BHKV, (state_BHKV * query_BHK[..., None]).sum(-2) + skip_H.to(value_BHV.dtype)[:, None] * value_BHV


def ssm_block(skip_H: Tensor, state_BHKV: Tensor, tokens: StateTokens, before_BTT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens at once: each follows those before it on its own path, from the same state.

    Args:
        skip_H: D.
        state_BHKV: S.
        tokens: masked, so that none of them is NaN.
        before_BTT: bool: token j lies on the path of token i, i itself included.

    Returns:
        What each token reads ``[B, T, H, V]``, its change ``[B, H, T, V]``, and the sum of log-decays on its path ``[B, H, T]``.
    """
    query_BHTK, key_BHTK, value_BHTV = (part.transpose(1, 2) for part in tokens[:3])
    path_BHT = (before_BTT.to(value_BHTV.dtype) @ tokens.decay_BTH).transpose(1, 2)
    # An exponent of a pair that is no pair may be positive, and overflow.
    decay_BHTT = torch.where(before_BTT[:, None], path_BHT[..., None] - path_BHT[..., None, :], -torch.inf).exp()
    change_BHTV = tokens.rate_BTH.transpose(1, 2)[..., None] * value_BHTV
    read_BHTV = path_BHT.exp()[..., None] * (query_BHTK @ state_BHKV) + (query_BHTK @ key_BHTK.transpose(-1, -2) * decay_BHTT) @ change_BHTV
    read_BHTV = read_BHTV + skip_H.to(value_BHTV.dtype)[:, None, None] * value_BHTV
    return read_BHTV.transpose(1, 2), change_BHTV, path_BHT

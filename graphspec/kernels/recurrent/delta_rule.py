"""The gated delta rule (arXiv 2412.06464): its one-token update, and the same over many tokens at once.

A head's state is a matrix S of ``[Dk, Dv]``, zero at the start. A token with key k, value v, log-decay g <= 0 and rate beta makes of it::

    S <- exp(g) S;    u = beta (v - S^T k);    S <- S + k u^T

and reads ``S^T q`` with its query q. Queries and keys have length 1, queries are scaled by ``Dk ** -0.5``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .state_tokens import StateTokens

NORM_EPS = 1e-6
"""Added to the squared length of queries and keys."""


def delta_tokens(mixed_BTE: Tensor, gate_BTG: Tensor, heads: int, key_dim: int, value_dim: int) -> StateTokens:
    """Taken apart and normed.

    Args:
        mixed_BTE: after the convolution: queries, keys, values.
        gate_BTG: float32: log-decays of all value heads, then their rates.
        heads: of values.
        key_dim, value_dim: of a head.
    """
    wide = torch.float64 if mixed_BTE.dtype == torch.float64 else torch.float32
    values = heads * value_dim
    keys = (mixed_BTE.shape[-1] - values) // 2
    query_BTE, key_BTE, value_BTE = mixed_BTE.to(wide).split((keys, keys, values), dim=-1)
    repeat = heads * key_dim // keys

    def normed(x_BTE: Tensor) -> Tensor:
        x_BTHK = x_BTE.unflatten(-1, (-1, key_dim))
        x_BTHK = x_BTHK * torch.rsqrt(x_BTHK.pow(2).sum(-1, keepdim=True) + NORM_EPS)
        return x_BTHK.repeat_interleave(repeat, dim=2) if repeat > 1 else x_BTHK

    decay_BTH, rate_BTH = gate_BTG.to(wide).chunk(2, dim=-1)
    return StateTokens(normed(query_BTE) * key_dim**-0.5, normed(key_BTE), value_BTE.unflatten(-1, (heads, value_dim)), decay_BTH, rate_BTH)


def delta_update(state_BHKV: Tensor, token: StateTokens) -> tuple[Tensor, Tensor]:
    """State after one token, and what the token reads, ``[B, H, V]``."""
    query_BHK, key_BHK, value_BHV, decay_BH, rate_BH = token
    state_BHKV = state_BHKV * decay_BH.exp()[..., None, None]
    change_BHV = rate_BH[..., None] * (value_BHV - (state_BHKV * key_BHK[..., None]).sum(-2))
    state_BHKV = state_BHKV + key_BHK[..., None] * change_BHV[..., None, :]
    return state_BHKV, (state_BHKV * query_BHK[..., None]).sum(-2)


def delta_solve_block(state_BHKV: Tensor, tokens: StateTokens, before_BTT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens at once: each follows those before it on its own path, from the same state.

    With D the sum of log-decays on a path, the changes u solve a unit triangular system, ``u_i + beta_i sum_j (k_i.k_j) exp(D_i - D_j) u_j
    = beta_i (v_i - exp(D_i) S^T k_i)``, j over the tokens before i (arXiv 2412.06464, section 3, with paths in place of a sequence).

    Args:
        state_BHKV: S.
        tokens: masked, so that none of them is NaN.
        before_BTT: bool, lower triangular: token j lies on the path of token i, i itself included.

    Returns:
        What each token reads ``[B, T, H, V]``, its change ``[B, H, T, V]``, and the sum of log-decays on its path ``[B, H, T]``.
    """
    query_BHTK, key_BHTK, value_BHTV = (part.transpose(1, 2) for part in tokens[:3])
    rate_BHT1 = tokens.rate_BTH.transpose(1, 2)[..., None]
    before_B1TT = before_BTT[:, None]
    path_BHT = (before_BTT.to(value_BHTV.dtype) @ tokens.decay_BTH).transpose(1, 2)
    # An exponent of a pair that is no pair may be positive, and overflow.
    decay_BHTT = torch.where(before_B1TT, path_BHT[..., None] - path_BHT[..., None, :], -torch.inf).exp()
    from_state_BHT1 = path_BHT.exp()[..., None]
    # Its diagonal is taken as 1, and above it there is nothing.
    system_BHTT = rate_BHT1 * (key_BHTK @ key_BHTK.transpose(-1, -2)) * decay_BHTT
    right_BHTV = rate_BHT1 * (value_BHTV - from_state_BHT1 * (key_BHTK @ state_BHKV))
    change_BHTV = torch.linalg.solve_triangular(system_BHTT, right_BHTV, upper=False, unitriangular=True)
    read_BHTV = from_state_BHT1 * (query_BHTK @ state_BHKV) + (query_BHTK @ key_BHTK.transpose(-1, -2) * decay_BHTT) @ change_BHTV
    return read_BHTV.transpose(1, 2), change_BHTV, path_BHT

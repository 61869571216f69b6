"""Noise and sampling in C++. Contracts are next to the references, in the files of the same names one folder up."""

from __future__ import annotations

import torch
from torch import Tensor

from . import define_op, implement
from .call import call, dense, require


def _gumbel_noise(seed_B: Tensor, position_BT: Tensor, token_V: Tensor) -> Tensor:
    out = _noise_shape(seed_B, position_BT, token_V)
    call("gumbel_noise", (out, *map(dense, (seed_B, position_BT, token_V))), *out.shape)
    return out


def _noise_shape(seed_B: Tensor, position_BT: Tensor, token_V: Tensor) -> Tensor:
    return seed_B.new_empty((*position_BT.shape, token_V.shape[0]), dtype=torch.float32)


gumbel_noise = implement("gumbel_noise", _gumbel_noise, _noise_shape)
"""The op of this name in C++."""


def _filter_logits(logits_BTV: Tensor, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor) -> Tensor:
    require("logits", logits_BTV, torch.float32)
    out = torch.empty(logits_BTV.shape, dtype=torch.float32)
    call("filter_logits", (out, *map(dense, (logits_BTV, temperature_B, top_k_B, top_p_B, min_p_B))), *out.shape)
    return out


filter_logits = implement("filter_logits", _filter_logits, lambda logits, *_: logits.new_empty(logits.shape))
"""The op of this name in C++."""


def _sample(
    logits: Tensor, temperature: Tensor | None, seed: Tensor | None, position: Tensor | None, strict: bool
) -> tuple[Tensor, Tensor]:
    require("logits", logits, torch.float32)
    token, sound = _sample_shape(logits)
    read = (None if x is None else dense(x) for x in (logits, temperature, seed, position))
    call("sample_tokens", (token, sound, *read), *logits.shape, strict)
    return token, sound


def _sample_shape(logits: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return logits.new_empty(logits.shape[:2], dtype=torch.int64), logits.new_empty(logits.shape[:2], dtype=torch.bool)


_sample_rows = define_op("sample_tokens", _sample, _sample_shape)


def sample_tokens(
    logits_BTV: Tensor, temperature_B: Tensor | None, seed_B: Tensor | None, position_BT: Tensor | None, top_k_B: Tensor | None,
    top_p_B: Tensor | None, min_p_B: Tensor | None, strict: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`graphspec.kernels.sampling.sample_tokens.sample_tokens` in C++."""
    drawn: tuple[Tensor, Tensor]
    if top_k_B is None:
        drawn = _sample_rows(logits_BTV, temperature_B, seed_B, position_BT, strict)
        return drawn
    assert temperature_B is not None and top_p_B is not None and min_p_B is not None
    kept_BTV = filter_logits(logits_BTV, temperature_B, top_k_B, top_p_B, min_p_B)
    drawn = _sample_rows(kept_BTV, temperature_B, seed_B, position_BT, False)
    # Whether a row is valid is decided on its logits before any filter.
    return drawn[0], _sample_rows(logits_BTV, None, None, None, strict)[1]

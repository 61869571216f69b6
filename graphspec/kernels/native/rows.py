"""Native ops between the passes of a network: embeddings, a drafter's input, and gathers of rows.

They are not in the catalog: networks whose layers are one native op (:mod:`graphspec.models.stack`) call them in place of torch, and
:class:`NativeKernels` has those that stages call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import ConfigError
from ..registry import KernelSet
from . import define_op
from .call import bits, call, dense, require
from .pack import CODE, channels_of, code_of, outputs_of

__all__ = ["NativeKernels", "embed", "enter"]


def _table(weight: Tensor, hidden: int) -> tuple[int, int, int]:
    """The fields of the C++ struct ``Table`` after its pointers, of float32 ``[V, H]`` or a weight of :func:`.pack.pack_segments`.

    Raises:
        ConfigError: another dtype or width.
    """
    if weight.dtype is torch.uint8:
        code, outputs, channels = code_of(weight), outputs_of(weight), channels_of(weight)
    else:
        require("embedding", weight, torch.float32)
        code, (outputs, channels) = CODE[weight.dtype], weight.shape
    if channels != hidden:
        raise ConfigError("native kernels: embedding", f"{hidden} channels", channels)
    return code, outputs, channels


def _embed(token: Tensor, valid: Tensor, weight: Tensor, hidden: int) -> Tensor:
    """Rows of a weight, float32 ``[..., hidden]``; zero where a token is not valid or out of range. Only these are dequantised."""
    table = _table(weight, hidden)
    out = _embed_shape(token, valid, weight, hidden)
    call("embed", (out, dense(token), dense(valid), dense(weight)), *table, token.numel())
    return out


def _embed_shape(token: Tensor, valid: Tensor, weight: Tensor, hidden: int) -> Tensor:
    return weight.new_empty((*token.shape, hidden), dtype=torch.float32)


def _enter(
    token: Tensor, valid: Tensor, weight: Tensor, hidden: Tensor, embedding_norm: Tensor | None, hidden_norm: Tensor | None, eps: float,
    hidden_first: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Concatenated embeddings and hidden states, each normed if it has norm weights; and the hidden states before the norm.

    Args:
        token: int64 ``[B, T]``. valid: bool; rows that are not valid are zero before any norm, whatever they hold.
        weight: of the embedding, float32 ``[V, H]`` or of :func:`.pack.pack_segments`.
        hidden: float32 ``[B, T, H]``.
        embedding_norm, hidden_norm: weights of RMSNorms, float32 ``[H]``; None: no norm.
        eps: of both norms.
        hidden_first: whether hidden states come before embeddings.

    Returns:
        ``[B, T, 2 * H]`` and ``[B, T, H]``.

    Raises:
        ConfigError: embedding or hidden states are not float32.
    """
    require("hidden", hidden, torch.float32)
    table = _table(weight, hidden.shape[-1])
    out = _enter_shape(token, valid, weight, hidden)
    norms = (None if x is None else dense(x) for x in (embedding_norm, hidden_norm))
    tensors = (*out, dense(hidden), *norms, dense(token), dense(valid), dense(weight))
    call("enter", tensors, *table, token.numel(), hidden_first, bits(eps))
    return out


def _enter_shape(token: Tensor, valid: Tensor, weight: Tensor, hidden: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    size = hidden.shape[-1]
    return hidden.new_empty((*token.shape, 2 * size)), hidden.new_empty((*token.shape, size))


def _carry(hidden: Tensor, source: Tensor, valid: Tensor) -> Tensor:
    require("hidden", hidden, torch.float32)
    out = _carry_shape(hidden, source, valid)
    lanes, after, size = out.shape
    call("carry", (out, *map(dense, (hidden, source, valid))), lanes, hidden.shape[1], after, size)
    return out


def _carry_shape(hidden: Tensor, source: Tensor, valid: Tensor) -> Tensor:
    return hidden.new_empty((*source.shape, hidden.shape[2]))


def _positions(lane_row: Tensor, seq_len: Tensor, depth: Tensor) -> Tensor:
    out = depth.new_empty(depth.shape)
    call("positions", (out, *map(dense, (lane_row, seq_len, depth))), *depth.shape)
    return out


def _positions_shape(lane_row: Tensor, seq_len: Tensor, depth: Tensor) -> Tensor:
    return depth.new_empty(depth.shape)


embed = define_op("embed", _embed, _embed_shape)
enter = define_op("enter", _enter, _enter_shape)
_carried = define_op("carry", _carry, _carry_shape)
_sampled = define_op("positions", _positions, _positions_shape)


@dataclass(frozen=True, slots=True)
class NativeKernels(KernelSet):
    """The kernel set of ``kernels.mode=native``."""

    records: ClassVar[bool] = True

    def carry(self, hidden_BEH: Tensor, source_BK: Tensor, valid_BK: Tensor) -> Tensor:
        carried: Tensor = _carried(hidden_BEH, source_BK, valid_BK)
        return carried

    def sampled_positions(self, lane_row_B: Tensor, seq_len_R: Tensor, depth_BN: Tensor) -> Tensor:
        positions: Tensor = _sampled(lane_row_B, seq_len_R, depth_BN)
        return positions

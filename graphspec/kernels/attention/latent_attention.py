"""Decode-phase attention over a latent pool (multi-head latent attention), for chains and trees alike."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import Int32, Int64, kernel_op
from .tree_attention import tree_attention


def both_sides(latent_pool: Tensor) -> Tensor:
    """A view of the pool in which the row of a slot is its key and its value: ``[layers, 2, pages, page_size, 1, E]``."""
    return latent_pool.expand(-1, 2, -1, -1, -1, -1)


@kernel_op(invariant="latent_position_attention:OP", exact=False)
def latent_attention(
    query_latent_BTQL: Tensor,
    query_rope_BTQR: Tensor,
    latent_pool: Tensor,
    layer: int,
    table_BP: Int32,
    prefix_begin_BT: Int64,
    prefix_end_B: Int64,
    ancestors_BTX: Int64,
    scale: float,
) -> Tensor:
    """Multi-head latent attention in absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1): all heads share one row per slot.

    A slot holds ``E = L + R`` channels: the normalised compressed KV of a token, then the rotated key part that the heads share. The
    query of a head is its no-position part multiplied by its slice of ``W_UK`` (L channels), and its rotated part (R channels). Scores are
    ``scale * (query_latent . row[:L] + query_rope . row[L:])``, values are ``row[:L]``; multiplying the result by ``W_UV`` is left to the
    caller. So this is :func:`~graphspec.kernels.attention.tree_attention.tree_attention` with one KV head whose key and value are one row.

    A query sees the same slots as in that op: ``prefix_begin[b, t] <= s < prefix_end[b]``, and slot ``prefix_end[b] + j`` when bit
    ``j % 64`` of word ``j // 64`` of its ancestors is set; its own bit included. Unseen slots may hold NaN.

    Args:
        query_latent_BTQL: floating point; any strides with the last dimension dense, so that a view of a batched product will do.
        query_rope_BTQR: dtype and strides likewise.
        latent_pool: ``[layers, 1, pages, page_size, 1, L + R]``, contiguous, read only.
        layer: static.
        table_BP: int32.
        prefix_begin_BT, prefix_end_B: int64.
        ancestors_BTX: int64 words, 64 bits each, bit 63 is the sign.
        scale: static; multiplies the scores. Not ``(L + R)**-0.5``: that of the heads before absorption.

    Returns:
        ``[B, T, Q, L]`` in the dtype of the query; 0 for a query that sees nothing. Softmax in float32.
    """
    query = torch.cat((query_latent_BTQL, query_rope_BTQR), dim=-1)
    pool = both_sides(latent_pool)
    out = tree_attention(query, pool, layer, table_BP, prefix_begin_BT, prefix_end_B, ancestors_BTX, scale)
    return out[..., : query_latent_BTQL.shape[-1]]

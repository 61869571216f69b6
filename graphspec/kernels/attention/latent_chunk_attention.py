"""Prefill attention over a latent pool: a chunk of prompt tokens, causal by logical slot."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import Bool, Int32, Int64, kernel_op
from .latent_attention import both_sides
from .tree_attention import chunk_attention


@kernel_op(fused="latent_attention:CHUNK_OP", invariant="latent_position_attention:CHUNK_OP", exact=False, prompts=True)
def latent_chunk_attention(
    query_latent_BTQL: Tensor,
    query_rope_BTQR: Tensor,
    latent_pool: Tensor,
    layer: int,
    table_BP: Int32,
    prefix_begin_BT: Int64,
    slot_BT: Int64,
    valid_BT: Bool,
    scale: float,
) -> Tensor:
    """Causal attention, in the absorbed form of ``latent_attention``, of tokens already written.

    Query (b, t) sees slots ``prefix_begin[b, t] <= s <= slot[b, t]``. Slots that no valid query of the lane sees may hold NaN.

    Args:
        query_latent_BTQL, query_rope_BTQR: floating point; any strides with the last dimension dense.
        latent_pool: ``[layers, 1, pages, page_size, 1, L + R]``, contiguous, read only.
        layer: static.
        table_BP: int32.
        prefix_begin_BT, slot_BT: int64. valid_BT: bool.
        scale: static; multiplies the scores.

    Returns:
        ``[B, T, Q, L]`` in the dtype of the query; 0 for an invalid query. Softmax in float32.
    """
    query = torch.cat((query_latent_BTQL, query_rope_BTQR), dim=-1)
    out = chunk_attention(query, both_sides(latent_pool), layer, table_BP, prefix_begin_BT, slot_BT, valid_BT, scale)
    return out[..., : query_latent_BTQL.shape[-1]]

"""Prefill attention: a chunk of prompt tokens, causal by logical slot, over the paged prefix and the chunk itself."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import Bool, Int32, Int64, kernel_op
from .tree_attention import masked_attention


@kernel_op(native="native", by_position="position_attention:CHUNK_OP", exact=False)
def chunk_attention(
    query_BTQD: Tensor,
    kv_pool: Tensor,
    layer: int,
    table_BP: Int32,
    prefix_begin_BT: Int64,
    slot_BT: Int64,
    valid_BT: Bool,
    scale: float,
    sink_Q: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Causal attention of prompt tokens whose KV is already written.

    Query (b, t) sees slots ``prefix_begin[b, t] <= s <= slot[b, t]``. Slots that no valid query of the lane sees may hold NaN.

    Args:
        query_BTQD: floating point; Q is a multiple of G.
        kv_pool: ``[layers, 2, pages, page_size, G, D]``, read only.
        layer: static.
        table_BP: int32.
        prefix_begin_BT, slot_BT: int64. valid_BT: bool.
        scale: static; multiplies the scores.
        sink_Q, softcap: of :func:`~graphspec.kernels.attention.tree_attention.tree_attention`.

    Returns:
        ``[B, T, Q, D]`` in the dtype of the query; 0 for an invalid query. Softmax in float32.
    """
    slot_L = torch.arange(table_BP.shape[1] * kv_pool.shape[3], device=query_BTQD.device)
    visible_BTL = (slot_L >= prefix_begin_BT[..., None]) & (slot_L <= slot_BT[..., None]) & valid_BT[..., None]
    return masked_attention(query_BTQD, kv_pool, layer, table_BP, visible_BTL, scale, sink_Q, softcap)

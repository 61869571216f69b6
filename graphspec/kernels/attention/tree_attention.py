"""Attention over the paged pool: of nodes, to a prefix and a window after it under ancestor words; of a prompt's chunk, causal by slot."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import Bool, Int32, Int64, kernel_op


def gather_slots(pool_layer: Tensor, table_BP: Tensor) -> Tensor:
    """``[pages, page_size, G, D]`` through the page table: ``[B, P * page_size, G, D]`` in logical order."""
    lanes, columns = table_BP.shape
    rows = pool_layer.index_select(0, table_BP.reshape(-1).clamp(min=0).to(torch.int64))
    return rows.view(lanes, columns * pool_layer.shape[1], *pool_layer.shape[2:])


def masked_attention(
    query_BTQD: Tensor,
    kv_pool: Tensor,
    layer: int,
    table_BP: Tensor,
    visible_BTL: Tensor,
    scale: float,
    sink_Q: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Softmax attention over logical slots under a mask; a query that sees nothing returns 0.

    Sinks and cap are those of :func:`tree_attention`.

    Scores, softmax and the weighted sum run in float32 (float64 for float64 queries).
    """
    lanes, tokens, heads, dim = query_BTQD.shape
    groups = kv_pool.shape[-2]
    compute = torch.float64 if query_BTQD.dtype == torch.float64 else torch.float32
    # If only scores were masked, a NaN in an unseen value would reach the result as 0 * NaN.
    seen_BL11 = visible_BTL.any(1)[:, :, None, None]
    key_BLGD = torch.where(seen_BL11, gather_slots(kv_pool[layer, 0], table_BP), 0.0).to(compute)
    value_BLGD = torch.where(seen_BL11, gather_slots(kv_pool[layer, 1], table_BP), 0.0).to(compute)
    query = query_BTQD.to(compute).view(lanes, tokens, groups, heads // groups, dim)
    score = torch.einsum("btgrd,blgd->bgrtl", query, key_BLGD) * scale
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    visible = visible_BTL[:, None, None]
    score = torch.where(visible, score, -torch.inf)
    peak = score.amax(-1, keepdim=True)
    weight = torch.where(visible, torch.exp(score - torch.where(peak == -torch.inf, 0.0, peak)), 0.0)
    total = weight.sum(-1, keepdim=True)
    if sink_Q is not None:
        total = total + torch.exp(sink_Q.to(compute).view(groups, heads // groups, 1, 1) - peak)
    weight = weight / torch.where(total == 0, 1.0, total)
    out = torch.einsum("bgrtl,blgd->btgrd", weight, value_BLGD)
    return out.reshape(lanes, tokens, heads, dim).to(query_BTQD.dtype)


@kernel_op(native="native", invariant="position_attention:OP", exact=False)
def tree_attention(
    query_BTQD: Tensor,
    kv_pool: Tensor,
    layer: int,
    table_BP: Int32,
    prefix_begin_BT: Int64,
    prefix_end_B: Int64,
    ancestors_BTX: Int64,
    scale: float,
    sink_Q: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Attention of tree nodes, draft beams or window entries over their prefix and their own ancestors.

    Query (b, t) sees slot s when ``prefix_begin[b, t] <= s < prefix_end[b]``, and slot ``prefix_end[b] + j`` when bit ``j % 64`` of word
    ``j // 64`` of its ancestors is set; its own bit included. Slots that it doesn't see may hold NaN.

    Args:
        query_BTQD: floating point; Q is a multiple of G.
        kv_pool: ``[layers, 2, pages, page_size, G, D]``, read only.
        layer: static.
        table_BP: int32.
        prefix_begin_BT, prefix_end_B: int64.
        ancestors_BTX: int64 words, 64 bits each, bit 63 is the sign.
        scale: static; multiplies the scores.
        sink_Q: one more score of each head, of a key that has no value: it only adds to the sum of weights (gpt-oss; arXiv 2309.17453).
        softcap: static; scores become ``softcap * tanh(score / softcap)`` (Gemma 2, arXiv 2408.00118). 0: they don't.

    Returns:
        ``[B, T, Q, D]`` in the dtype of the query; 0 for a query that sees nothing. Softmax in float32.
    """
    slot_L = torch.arange(table_BP.shape[1] * kv_pool.shape[3], device=query_BTQD.device)
    prefix_BTL = (slot_L >= prefix_begin_BT[..., None]) & (slot_L < prefix_end_B[:, None, None])
    offset_BL = slot_L - prefix_end_B[:, None]
    words = ancestors_BTX.shape[-1]
    inside_BL = (offset_BL >= 0) & (offset_BL < 64 * words)
    offset_BL = offset_BL.clamp(0, 64 * words - 1)
    word_BTL = ancestors_BTX.gather(2, (offset_BL >> 6)[:, None].expand(-1, ancestors_BTX.shape[1], -1))
    window_BTL = (((word_BTL >> (offset_BL & 63)[:, None]) & 1) == 1) & inside_BL[:, None]
    return masked_attention(query_BTQD, kv_pool, layer, table_BP, prefix_BTL | window_BTL, scale, sink_Q, softcap)


@kernel_op(native="native", invariant="position_attention:CHUNK_OP", exact=False, prompts=True)
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

"""Prefill attention: a chunk of prompt tokens, causal by logical slot, over the paged prefix and the chunk itself."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import Case, KernelOp
from .tree_attention import masked_attention, poison_unseen, random_pool


def chunk_attention(
    query_BTQD: Tensor,
    kv_pool: Tensor,
    layer: int,
    table_BP: Tensor,
    prefix_begin_BT: Tensor,
    slot_BT: Tensor,
    valid_BT: Tensor,
    scale: float,
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

    Returns:
        ``[B, T, Q, D]`` in the dtype of the query; 0 for an invalid query. Softmax in float32.
    """
    slot_L = torch.arange(table_BP.shape[1] * kv_pool.shape[3], device=query_BTQD.device)
    visible_BTL = (slot_L >= prefix_begin_BT[..., None]) & (slot_L <= slot_BT[..., None]) & valid_BT[..., None]
    return masked_attention(query_BTQD, kv_pool, layer, table_BP, visible_BTL, scale)


def _cases(generator: torch.Generator) -> list[Case]:
    def case(lanes: int, tokens: int, page_size: int, columns: int, queries: int, groups: int, dim: int, begin: int) -> Case:
        pool, table = random_pool(generator, lanes=lanes, columns=columns, page_size=page_size, heads=groups, dim=dim, layers=2)
        length = columns * page_size
        first = torch.randint(0, length - tokens + 1, (lanes, 1), generator=generator)
        slot = first + torch.arange(tokens)
        valid = torch.arange(tokens) < torch.randint(1, tokens + 1, (lanes, 1), generator=generator)
        begin_BT = torch.full((lanes, tokens), begin)
        visible = torch.zeros(lanes, tokens, length, dtype=torch.bool)
        for lane in range(lanes):
            for token in range(tokens):
                if valid[lane, token]:
                    visible[lane, token, begin : int(slot[lane, token]) + 1] = True
        poison_unseen(pool, table, visible)
        return {
            "query_BTQD": torch.randn(lanes, tokens, queries, dim, generator=generator),
            "kv_pool": pool,
            "layer": 1,
            "table_BP": table,
            "prefix_begin_BT": begin_BT,
            "slot_BT": torch.where(valid, slot, 10**9),
            "valid_BT": valid,
            "scale": dim**-0.5,
        }

    return [case(1, 1, 1, 3, 1, 1, 8, 0), case(3, 7, 4, 5, 6, 2, 5, 1), case(2, 33, 16, 5, 4, 4, 16, 3)]


OP = KernelOp(chunk_attention, _cases, native="native", exact=False)

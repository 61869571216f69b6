"""Prefill attention over a latent pool: a chunk of prompt tokens, causal by logical slot."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import Case, KernelOp
from .chunk_attention import chunk_attention
from .latent_attention import both_sides, random_latent_pool
from .tree_attention import poison_unseen


def latent_chunk_attention(
    query_latent_BTQL: Tensor,
    query_rope_BTQR: Tensor,
    latent_pool: Tensor,
    layer: int,
    table_BP: Tensor,
    prefix_begin_BT: Tensor,
    slot_BT: Tensor,
    valid_BT: Tensor,
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


def _cases(generator: torch.Generator) -> list[Case]:
    def case(lanes: int, tokens: int, page_size: int, columns: int, heads: int, latent: int, rope: int, begin: int) -> Case:
        pool, table = random_latent_pool(generator, lanes=lanes, columns=columns, page_size=page_size, dim=latent + rope, layers=2)
        length = columns * page_size
        first = torch.randint(0, length - tokens + 1, (lanes, 1), generator=generator)
        slot = first + torch.arange(tokens)
        valid = torch.arange(tokens) < torch.randint(1, tokens + 1, (lanes, 1), generator=generator)
        slot_L = torch.arange(length)
        poison_unseen(pool, table, (slot_L >= begin) & (slot_L <= slot[..., None]) & valid[..., None])
        return {
            "query_latent_BTQL": torch.randn(lanes, tokens, heads, latent, generator=generator),
            "query_rope_BTQR": torch.randn(lanes, tokens, heads, rope, generator=generator),
            "latent_pool": pool,
            "layer": 1,
            "table_BP": table,
            "prefix_begin_BT": torch.full((lanes, tokens), begin),
            "slot_BT": torch.where(valid, slot, 10**9),
            "valid_BT": valid,
            "scale": 0.15,
        }

    return [case(1, 1, 1, 3, 1, 8, 2, 0), case(3, 7, 4, 5, 6, 20, 4, 1), case(2, 33, 16, 5, 4, 32, 16, 3)]


OP = KernelOp(latent_chunk_attention, _cases, fused="latent_attention:CHUNK_OP", exact=False)

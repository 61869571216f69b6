"""Decode-phase attention over a latent pool (multi-head latent attention), for chains and trees alike."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import Case, KernelOp
from .tree_attention import poison_unseen, tree_attention, visible_slots


def both_sides(latent_pool: Tensor) -> Tensor:
    """A view of the pool in which the row of a slot is its key and its value: ``[layers, 2, pages, page_size, 1, E]``."""
    return latent_pool.expand(-1, 2, -1, -1, -1, -1)


def latent_attention(
    query_latent_BTQL: Tensor,
    query_rope_BTQR: Tensor,
    latent_pool: Tensor,
    layer: int,
    table_BP: Tensor,
    prefix_begin_BT: Tensor,
    prefix_end_B: Tensor,
    ancestors_BTX: Tensor,
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


def random_latent_pool(
    generator: torch.Generator, *, lanes: int, columns: int, page_size: int, dim: int, layers: int
) -> tuple[Tensor, Tensor]:
    """A random latent pool of row width ``dim`` and a shuffled page table over it."""
    pages = lanes * columns + 1
    table = (torch.randperm(pages - 1, generator=generator) + 1).view(lanes, columns).to(torch.int32)
    return torch.randn(layers, 1, pages, page_size, 1, dim, generator=generator), table


def _cases(generator: torch.Generator) -> list[Case]:
    def case(lanes: int, tokens: int, page_size: int, columns: int, heads: int, latent: int, rope: int, words: int) -> Case:
        pool, table = random_latent_pool(generator, lanes=lanes, columns=columns, page_size=page_size, dim=latent + rope, layers=2)
        length = columns * page_size
        end = torch.randint(0, length, (lanes,), generator=generator)
        begin = torch.randint(0, 3, (lanes, tokens), generator=generator)
        reach = (torch.arange(64 * words) < length - end[:, None]) & (torch.arange(64 * words) < 2 * tokens)
        bits = (torch.rand(lanes, tokens, 64 * words, generator=generator) < 0.4) & reach[:, None]
        if tokens > 2:
            bits[0, 1], begin[0, 1] = False, length
        ancestors = (bits.view(lanes, tokens, words, 64).to(torch.int64) << torch.arange(64)).sum(-1)
        poison_unseen(pool, table, visible_slots(begin, end, ancestors, length))
        return {
            "query_latent_BTQL": torch.randn(lanes, tokens, heads, latent, generator=generator),
            "query_rope_BTQR": torch.randn(lanes, tokens, heads, rope, generator=generator),
            "latent_pool": pool,
            "layer": 1,
            "table_BP": table,
            "prefix_begin_BT": begin,
            "prefix_end_B": end,
            "ancestors_BTX": ancestors,
            "scale": 0.15,
        }

    return [
        case(1, 1, 1, 5, 1, 8, 2, 1),
        case(3, 5, 16, 4, 6, 40, 8, 1),
        case(2, 7, 1, 41, 3, 24, 6, 1),
        case(2, 40, 16, 9, 2, 32, 16, 2),
        case(1, 3, 4, 60, 16, 64, 16, 2),
    ]


OP = KernelOp(latent_attention, _cases, exact=False)

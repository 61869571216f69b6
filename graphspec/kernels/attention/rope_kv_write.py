"""Queries and keys normed and rotated, keys and values scattered into the paged pool."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formulas import Rotation, apply_rope, rms_norm
from ..op import Case, KernelOp, Written
from .paged_kv_write import paged_kv_write


def rope_kv_write(
    query_BTQD: Tensor,
    key_BTGD: Tensor,
    value_BTGD: Tensor,
    rope_LD: Tensor,
    rope_row_BT: Tensor,
    kv_pool: Written,
    layer: int,
    table_BP: Tensor,
    slot_BT: Tensor,
    valid_BT: Tensor,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    norm_eps: float = 0.0,
    norm_offset: bool = False,
) -> Tensor:
    """Everything between the projections and attention: norms of query and key heads, RoPE, and the write of one layer's keys and values.

    Logical slot s of lane b is on page ``table[b, s // page_size]`` at offset ``s % page_size``. Invalid tokens are written to page 0, the
    dummy page, which is never read; their slot may be out of range.

    Args:
        query_BTQD, key_BTGD, value_BTGD: floating point; the last dimension is contiguous, others may be views of one projection.
        rope_LD: float32 ``[L, 2d]``, d cosines and d sines a row, cast to the dtype of the query; pairs ``(i, i + d)`` rotate (RoFormer,
            arXiv 2104.09864), channels from 2d on pass unchanged.
        rope_row_BT: int64, each token's row, clamped into the table.
        kv_pool: ``[layers, 2, pages, page_size, G, D]``, contiguous, written in place in its own dtype; index 0 of dim 1 is the key.
        layer: static.
        table_BP: int32. slot_BT: int64, distinct per lane where valid. valid_BT: bool.
        query_norm, key_norm: ``[D]``, weights of an RMSNorm over each head, before the rotation; both or none.
        norm_eps, norm_offset: of these norms.

    Returns:
        The rotated queries, ``[B, T, Q, D]`` contiguous, dtype of the query.
    """
    cos_BTD, sin_BTD = Rotation(rope_LD, rope_row_BT).cos_sin(query_BTQD.dtype)
    if query_norm is not None and key_norm is not None:
        query_BTQD = rms_norm(query_BTQD, query_norm, norm_eps, norm_offset)
        key_BTGD = rms_norm(key_BTGD, key_norm, norm_eps, norm_offset)
    paged_kv_write(kv_pool, layer, apply_rope(key_BTGD, cos_BTD, sin_BTD), value_BTGD, table_BP, slot_BT, valid_BT)
    return apply_rope(query_BTQD, cos_BTD, sin_BTD)


def _cases(generator: torch.Generator) -> list[Case]:
    def case(lanes: int, tokens: int, page_size: int, columns: int, queries: int, heads: int, dim: int, rotary: int, norm: bool) -> Case:
        pages = lanes * columns + 1
        slots = torch.stack([torch.randperm(columns * page_size, generator=generator)[:tokens] for _ in range(lanes)])
        valid = torch.rand(lanes, tokens, generator=generator) < 0.7
        fused = torch.randn(lanes, tokens, (queries + 2 * heads) * dim, generator=generator)
        query, key, value = fused.split((queries * dim, heads * dim, heads * dim), -1)
        angle = torch.rand(7, rotary // 2, generator=generator) * 6
        made: Case = {
            "query_BTQD": query.unflatten(-1, (queries, dim)),
            "key_BTGD": key.unflatten(-1, (heads, dim)),
            "value_BTGD": value.unflatten(-1, (heads, dim)),
            "rope_LD": torch.cat((angle.cos(), angle.sin()), -1),
            "rope_row_BT": torch.randint(-2, 9, (lanes, tokens), generator=generator),
            "kv_pool": torch.randn(3, 2, pages, page_size, heads, dim, generator=generator),
            "layer": 1,
            "table_BP": (torch.randperm(pages - 1, generator=generator) + 1).view(lanes, columns).to(torch.int32),
            "slot_BT": torch.where(valid, slots, torch.tensor(-7)),
            "valid_BT": valid,
        }
        if norm:
            made |= {name: torch.randn(dim, generator=generator) for name in ("query_norm", "key_norm")}
            made |= {"norm_eps": 1e-6, "norm_offset": tokens % 2 == 0}
        return made

    return [
        case(1, 1, 1, 1, 1, 1, 2, 2, False),
        case(3, 5, 1, 9, 6, 2, 8, 8, True),
        case(2, 6, 16, 3, 3, 3, 12, 6, True),
        case(2, 3, 4, 3, 20, 4, 24, 24, False),
    ]


OP = KernelOp(rope_kv_write, _cases, exact=False)

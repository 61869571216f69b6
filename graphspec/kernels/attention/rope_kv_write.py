"""Queries and keys normed and rotated, keys and values scattered into the paged pool; where a logical slot is in it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formulas import Rotation, apply_rope, rms_norm
from ..op import Bool, Int32, Int64, Written, kernel_op


@kernel_op(exact=False)
def rope_kv_write(
    query_BTQD: Tensor,
    key_BTGD: Tensor,
    value_BTGD: Tensor,
    rope_LD: Tensor,
    rope_row_BT: Int64,
    kv_pool: Written[Tensor],
    layer: int,
    table_BP: Int32,
    slot_BT: Int64,
    valid_BT: Bool,
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


def locate(table_BP: Tensor, slot_BT: Tensor, valid_BT: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Page and offset of logical slots, int64, shape of ``slot_BT``; page 0, the dummy page, for invalid ones.

    Out-of-range slots of invalid entries are clamped before the table is read.
    """
    slot_BT = slot_BT.clamp(0, table_BP.shape[1] * page_size - 1)
    column_BT = torch.div(slot_BT, page_size, rounding_mode="floor")
    page_BT = table_BP.gather(1, column_BT).to(torch.int64)
    return torch.where(valid_BT, page_BT, 0), slot_BT % page_size


def paged_kv_write(
    kv_pool: Tensor, layer: int, key_BTGD: Tensor, value_BTGD: Tensor, table_BP: Tensor, slot_BT: Tensor, valid_BT: Tensor
) -> None:
    """Write the keys and values of one layer into their pages, in place.

    Logical slot s of lane b is on page ``table[b, s // page_size]`` at offset ``s % page_size``. Invalid tokens are written to page 0, the
    dummy page, which is never read; their slot may be out of range.

    Args:
        kv_pool: ``[layers, 2, pages, page_size, G, D]``, contiguous, written in place; index 0 of dim 1 is the key.
        layer: static.
        key_BTGD, value_BTGD: cast to the dtype of the pool.
        table_BP: int32. slot_BT: int64, distinct per lane where valid. valid_BT: bool.
    """
    page_BT, offset_BT = locate(table_BP, slot_BT, valid_BT, kv_pool.shape[3])
    side_211 = torch.arange(2, device=kv_pool.device)[:, None, None]
    rows_2BTGD = torch.stack((key_BTGD, value_BTGD)).to(kv_pool.dtype)
    # Scatter into the pool itself: through a view, the compiler would copy the whole pool, twice per graph.
    kv_pool.index_put_((torch.full_like(side_211, layer), side_211, page_BT, offset_BT), rows_2BTGD)

"""Queries and keys normed and rotated, keys and values scattered into the paged pool."""

from __future__ import annotations

from torch import Tensor

from ..formulas import Rotation, apply_rope, rms_norm
from ..op import Bool, Int32, Int64, Written, kernel_op
from .paged_kv_write import paged_kv_write


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

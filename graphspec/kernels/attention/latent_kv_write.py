"""The step between the projections of latent attention and its scores: norm, RoPE, and the paged write."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formulas import Rotation, apply_rope, rms_norm
from ..op import Bool, Int32, Int64, Written, kernel_op
from .rope_kv_write import locate


def _rotate(x_BTQR: Tensor, cos_BTD: Tensor, sin_BTD: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        x_BTQR = torch.cat((x_BTQR[..., 0::2], x_BTQR[..., 1::2]), dim=-1)
    return apply_rope(x_BTQR, cos_BTD, sin_BTD)


@kernel_op(exact=False)
def latent_kv_write(
    latent_pool: Written[Tensor],
    layer: int,
    latent_BTE: Tensor,
    query_rope_BTQR: Tensor,
    norm_weight_L: Tensor,
    rope_LD: Tensor,
    rope_row_BT: Int64,
    table_BP: Int32,
    slot_BT: Int64,
    valid_BT: Bool,
    eps: float,
    interleaved: bool,
) -> Tensor:
    """Norm and RoPE of the compressed KV, its write into the pages of one layer, and RoPE of the queries (arXiv 2405.04434, section 2.1).

    A row of ``latent`` is the output of ``kv_a_proj_with_mqa``: L channels that get an RMSNorm (statistics in float32, scaled after the
    cast back, as transformers does), then R channels that get RoPE. Both are written to logical slot s of lane b: page
    ``table[b, s // page_size]``, offset ``s % page_size``. An invalid token writes nothing that is read; its slot may be out of range, and
    its rotated query is meaningless.

    RoPE pair i is channels ``(2i, 2i + 1)`` if ``interleaved``, else ``(i, i + R/2)``; it is always written to ``(i, i + R/2)``. Scores do
    not change, because queries and keys have the same order.

    Args:
        latent_pool: ``[layers, 1, pages, page_size, 1, L + R]``, contiguous, written in place; rows are cast to its dtype.
        layer: static.
        latent_BTE: ``E = L + R``; any strides with the last dimension dense.
        query_rope_BTQR: dtype and strides likewise.
        norm_weight_L: ``kv_a_layernorm``.
        rope_LD: float32, R / 2 cosines and as many sines a row, cast to the dtype of the query.
        rope_row_BT: int64, each token's row, clamped into the table.
        table_BP: int32. slot_BT: int64, distinct per lane where valid. valid_BT: bool.
        eps: static; of the norm.
        interleaved: static.

    Returns:
        The rotated queries ``[B, T, Q, R]``, in the dtype of ``query_rope``.
    """
    width = norm_weight_L.shape[0]
    cos_BTD, sin_BTD = Rotation(rope_LD, rope_row_BT).cos_sin(query_rope_BTQR.dtype)
    compressed_BTL = rms_norm(latent_BTE[..., :width], norm_weight_L, eps)
    rope_BT1R = _rotate(latent_BTE[..., None, width:], cos_BTD, sin_BTD, interleaved)
    row_BT1E = torch.cat((compressed_BTL[:, :, None], rope_BT1R), dim=-1)
    page_BT, offset_BT = locate(table_BP, slot_BT, valid_BT, latent_pool.shape[3])
    layer_BT = torch.full_like(page_BT, layer)
    latent_pool.index_put_((layer_BT, torch.zeros_like(page_BT), page_BT, offset_BT), row_BT1E.to(latent_pool.dtype))
    return _rotate(query_rope_BTQR, cos_BTD, sin_BTD, interleaved)

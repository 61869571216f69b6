"""Features at the ends of pages, which a drafter needs to continue after pages that another request has filled."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..op import Int32, Int64, Written, kernel_op


@kernel_op(native="native.cycle")
def page_feature_write(
    page_feature: Written[Tensor],
    page_size: int,
    table_BP: Int32,
    begin_R: Int64,
    length_B: Int64,
    feature_BTF: Tensor,
    path_BA: Int64 | None = None,
    lane_row_B: Int64 | None = None,
) -> None:
    """Store the feature of every token that fills a page. Pages that tokens ``[begin, begin + length)`` don't fill keep theirs.

    In place. Suppressed writes go to the dummy page 0 or nowhere.

    Args:
        page_feature: ``[1, 1, pages, 1, 1, F]``, contiguous, written in place.
        page_size: tokens of a page.
        table_BP: int32, the lanes' pages; no page in two lanes that fill it.
        begin_R: int64, position of the first token.
        length_B: int64, at most A, or T without a path; of an inert lane 0, and nothing else of that lane is used.
        feature_BTF: dtype of ``page_feature``.
        path_BA: int64, index in T of each token's feature; None: in order.
        lane_row_B: int64, the entry of ``begin`` that belongs to each lane; None: one per lane, in this order.
    """
    begin_B = begin_R if lane_row_B is None else begin_R[lane_row_B]
    width = feature_BTF.shape[1] if path_BA is None else path_BA.shape[1]
    nth_E = torch.arange(math.ceil(width / page_size), device=table_BP.device)
    token_BE = page_size - 1 - begin_B[:, None] % page_size + nth_E * page_size
    fills_BE = token_BE < length_B[:, None]
    column_BE = torch.where(fills_BE, (begin_B[:, None] + token_BE) // page_size, 0)
    page_BE = torch.where(fills_BE, table_BP.gather(1, column_BE).long(), 0)
    source_BE = token_BE.clamp(max=width - 1)
    source_BE = source_BE if path_BA is None else path_BA.gather(1, source_BE)
    feature_BEF = feature_BTF.gather(1, source_BE[..., None].expand(-1, -1, feature_BTF.shape[2]))
    # Indexed like a pool: if it were written through a view, the compiler would copy all pages.
    first_BE = torch.zeros_like(page_BE)
    page_feature.index_put_((first_BE, first_BE, page_BE, first_BE), feature_BEF[:, :, None])

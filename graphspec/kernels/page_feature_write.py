"""Features at the ends of pages: what a drafter needs to go on after pages that another request has filled."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...buffers import Views


def save_page_features(
    v: Views, table_BP: Tensor, begin_B: Tensor, length_B: Tensor, feature_BTF: Tensor, index_BT: Tensor | None = None
) -> None:
    """Keep the feature of every token that fills a page, with the page. Pages that tokens ``[begin, begin + length)`` do not fill stay.

    Args:
        v: ``page_feature`` is written.
        table_BP: int32, the rows' pages.
        begin_B: int64, position of the first token.
        length_B: int64, at most T; of an inert lane 0, and its begin then has no effect.
        feature_BTF: the target's features.
        index_BT: int64, where each token's feature lies among them; None: in order.
    """
    size, width = v.target_kv.shape[3], feature_BTF.shape[1] if index_BT is None else index_BT.shape[1]
    nth_E = torch.arange(math.ceil(width / size), device=table_BP.device)
    entry_BE = size - 1 - begin_B[:, None] % size + nth_E * size
    ends_BE = entry_BE < length_B[:, None]
    column_BE = torch.where(ends_BE, (begin_B[:, None] + entry_BE) // size, 0)
    # What fills no page goes to the dummy page.
    page_BE = torch.where(ends_BE, table_BP.gather(1, column_BE).long(), 0)
    source_BE = entry_BE.clamp(max=width - 1)
    source_BE = source_BE if index_BT is None else index_BT.gather(1, source_BE)
    feature_BEF = feature_BTF.gather(1, source_BE[..., None].expand(-1, -1, feature_BTF.shape[2]))
    # Indexed as a pool is: writing through a view would have the compiler copy all pages.
    first_BE = torch.zeros_like(page_BE)
    v.page_feature.index_put_((first_BE, first_BE, page_BE, first_BE), feature_BEF[:, :, None])


def page_feature(v: Views, table_BP: Tensor, end_B: Tensor) -> Tensor:
    """Features ``[B, 1, F]`` of the tokens before the positions ``end_B``, each of which begins a page; the dummy page's where it is 0."""
    column_B1 = (end_B[:, None] // v.target_kv.shape[3] - 1).clamp(min=0)
    page_B1 = torch.where(end_B[:, None] > 0, table_BP.gather(1, column_B1).long(), 0)
    return v.page_feature[0, 0, :, 0, 0][page_B1]

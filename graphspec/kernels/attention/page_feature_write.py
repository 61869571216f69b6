"""Features at the ends of pages, which a drafter needs to continue after pages that another request has filled."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..op import Case, KernelOp, Written


def page_feature_write(
    page_feature: Written,
    page_size: int,
    table_BP: Tensor,
    begin_R: Tensor,
    length_B: Tensor,
    feature_BTF: Tensor,
    path_BA: Tensor | None = None,
    lane_row_B: Tensor | None = None,
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


def page_feature_case(
    generator: torch.Generator, lanes: int, page_size: int, columns: int, features: int, width: int, nodes: int = 0
) -> Case:
    """Lanes of any length at any offset in their pages. With ``nodes`` the tokens are on a path over rows, and the last lane is padded."""

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    pages = lanes * columns + 1
    case: Case = {
        "page_feature": torch.randn(1, 1, pages, 1, 1, features, generator=generator),
        "page_size": page_size,
        "table_BP": (torch.randperm(pages - 1, generator=generator) + 1).view(lanes, columns).to(torch.int32),
        "begin_R": draw(0, columns * page_size - width + 1, lanes),
        "length_B": draw(0, width + 1, lanes),
        "feature_BTF": torch.randn(lanes, nodes or width, features, generator=generator),
    }
    if not nodes:
        # For chunks of prompts they are columns of the message.
        case["begin_R"], case["length_B"] = torch.stack((case["begin_R"], case["length_B"]), 1).unbind(1)
        return case
    row = torch.cat((torch.randperm(lanes, generator=generator)[:-1], torch.tensor([lanes])))
    case["length_B"][-1] = 0
    case["table_BP"][-1] = 0
    begin = torch.cat((case["begin_R"], torch.tensor([-(2**40)])))
    return {**case, "begin_R": begin, "path_BA": draw(0, nodes, lanes, width), "lane_row_B": row}


def _cases(generator: torch.Generator) -> list[Case]:
    return [
        page_feature_case(generator, 1, 4, 3, 5, 4),
        page_feature_case(generator, 3, 1, 9, 7, 6),
        page_feature_case(generator, 2, 3, 8, 2049, 17),
        page_feature_case(generator, 4, 4, 3, 6, 5, nodes=9),
        page_feature_case(generator, 2, 16, 2, 3, 1, nodes=1),
    ]


OP = KernelOp(page_feature_write, _cases, native="native.state")

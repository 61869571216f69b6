"""The host's message for one launch, applied to the rows' state."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from ..groups import Lanes, Penalties, RowRequest, Truncation
from ..op import WRITTEN, Case, KernelOp

FREE = 0
"""``status_R`` of a free row (:class:`graphspec.plan.buffers.Status`)."""
JOIN_WORDS = 11
"""Words of a join before its stop ids."""


def _floats(words: Tensor) -> Tensor:
    """The float32 in the low half of each word."""
    return words.to(torch.int32).view(torch.float32)


def mail_apply(
    mail: Tensor,
    lanes_at: int,
    aborts_at: int,
    pages_at: int,
    pages_end: int,
    joins_at: int,
    joins: int,
    join_words: int,
    lanes: Annotated[Lanes, WRITTEN],
    rows: Annotated[RowRequest, WRITTEN],
    truncation: Annotated[Truncation, WRITTEN] | None = None,
    penalties: Annotated[Penalties, WRITTEN] | None = None,
) -> None:
    """Copy lanes, aborts, page-table entries and joins from a vector of int64 words into the slots, in place.

    Lane b takes row ``mail[lanes_at + b]``. Every row in ``mail[aborts_at:pages_at]`` becomes free. Words from ``pages_at`` to
    ``pages_end`` are triples (row, column, page). The words of a join are row, budget, seed, temperature, draft length, top-k, top-p,
    min-p, repetition, presence and frequency; E stop ids follow. Floats are the float32 in a word's low half. A join sets all of these
    in its row, and the row's counts to zero. No part of the message is ever absent: unused entries name the dummy row. Joins and aborts
    write different slots, so their order does not matter.

    Then each lane's slots get its row's page table, seed and temperature, which the stages of this launch read.

    Rows and columns are in range. Triples of one row and column, rows aborted twice and joins of one row agree on the value.

    Args:
        mail: int64 words.
        lanes_at, aborts_at, pages_at, pages_end: static offsets, in this order; the lanes hold at least B words.
        joins_at, joins, join_words: static: offset of the joins, their number, words of each.
        lanes: row and seed int64, table int32, temperature float32; written.
        rows: page table int32, temperature float32, the others int64; written.
        truncation: top-k int64, the others float32; written. None, as the following: no join writes such slots.
        penalties: counts, and marks of the prompt's tokens, are integers, the others float32; written.
    """
    lane_row_B, lane_table_BP, lane_seed_B, lane_temperature_B = lanes
    status_R, budget_R, seed_R, temperature_R, draft_len_R, stop_id_RE, page_table_RP = rows
    lane_row_B.copy_(mail[lanes_at : lanes_at + lane_row_B.shape[0]])
    status_R.index_fill_(0, mail[aborts_at:pages_at], FREE)
    row, column, page = mail[pages_at:pages_end].view(-1, 3).unbind(1)
    page_table_RP.index_put_((row, column), page.to(torch.int32))
    join_JW = mail[joins_at : joins_at + joins * join_words].view(joins, join_words)
    to = join_JW[:, 0]
    if joins:
        budget_R.index_copy_(0, to, join_JW[:, 1])
        seed_R.index_copy_(0, to, join_JW[:, 2])
        temperature_R.index_copy_(0, to, _floats(join_JW[:, 3]))
        draft_len_R.index_copy_(0, to, join_JW[:, 4])
        stop_id_RE.index_copy_(0, to, join_JW[:, JOIN_WORDS : JOIN_WORDS + stop_id_RE.shape[1]])
    lane_table_BP.copy_(page_table_RP[lane_row_B])
    lane_seed_B.copy_(seed_R[lane_row_B])
    lane_temperature_B.copy_(temperature_R[lane_row_B])
    if truncation is not None:
        top_k_R, top_p_R, min_p_R = truncation
        top_k_R.index_copy_(0, to, join_JW[:, 5])
        top_p_R.index_copy_(0, to, _floats(join_JW[:, 6]))
        min_p_R.index_copy_(0, to, _floats(join_JW[:, 7]))
    if penalties is not None:
        repetition_R, presence_R, frequency_R, output_count_RV, prompt_seen_RV = penalties
        repetition_R.index_copy_(0, to, _floats(join_JW[:, 8]))
        presence_R.index_copy_(0, to, _floats(join_JW[:, 9]))
        frequency_R.index_copy_(0, to, _floats(join_JW[:, 10]))
        output_count_RV.index_fill_(0, to, 0)
        prompt_seen_RV.index_fill_(0, to, 0)


def _cases(generator: torch.Generator) -> list[Case]:
    def integers(least: int, most: int, *shape: int) -> Tensor:
        return torch.randint(least, most, shape, generator=generator)

    def case(lanes: int, rows: int, columns: int, updates: int, stops: int, groups: str = "", joins: int = 1, vocab: int = 70) -> Case:
        places = torch.randperm(rows * columns, generator=generator)[:updates]
        pages = torch.stack((places // columns, places % columns, integers(1, 1000, updates)), 1)
        bits = torch.randn(joins, JOIN_WORDS, generator=generator).view(torch.int32).long()
        join = integers(-(2**62), 2**62, joins, JOIN_WORDS)
        join[:, 0] = torch.randperm(rows, generator=generator)[:joins]
        for word in (3, 6, 7, 8, 9, 10):
            join[:, word] = bits[:, word]
        whole = torch.cat((join, integers(-1, 99, joins, stops)), 1)
        parts = (integers(0, rows, lanes + 1), integers(0, rows, rows), pages.flatten(), integers(0, 99, 4))
        at = [0, lanes + 1, lanes + 1 + rows, lanes + 1 + rows + 3 * updates]
        truncate, penalties = (group in groups for group in "tp")
        return {
            "mail": torch.cat((*parts, whole.flatten(), integers(0, 99, 5))),
            "lanes_at": at[0], "aborts_at": at[1], "pages_at": at[2], "pages_end": at[3],
            "joins_at": at[3] + 4, "joins": joins, "join_words": whole.shape[1],
            "lane_row_B": torch.full((lanes,), -(2**40)),
            "lane_table_BP": torch.full((lanes, columns), -(2**31), dtype=torch.int32),
            "lane_seed_B": torch.full((lanes,), -(2**40)), "lane_temperature_B": torch.full((lanes,), torch.nan),
            "status_R": integers(0, 5, rows), "budget_R": integers(0, 99, rows), "seed_R": integers(-99, 99, rows),
            "temperature_R": torch.rand(rows, generator=generator), "draft_len_R": integers(0, 9, rows),
            "stop_id_RE": integers(-1, 99, rows, stops), "page_table_RP": integers(0, 999, rows, columns).to(torch.int32),
            "top_k_R": integers(0, 9, rows) if truncate else None,
            **{name: torch.rand(rows, generator=generator) if truncate else None for name in ("top_p_R", "min_p_R")},
            **{n: torch.rand(rows, generator=generator) if penalties else None for n in ("repetition_R", "presence_R", "frequency_R")},
            "output_count_RV": integers(0, 9, rows, vocab).to(torch.int32) if penalties else None,
            "prompt_seen_RV": integers(0, 2, rows, vocab).to(torch.int8) if penalties else None,
        }  # fmt: skip

    return [
        case(1, 2, 1, 0, 1, joins=0),
        case(3, 5, 7, 9, 2, "tp"),
        case(2, 3, 130, 300, 4, "p", vocab=4099),
        case(4, 9, 17, 1, 8, "t"),
        case(4, 9, 3, 5, 2, "tp", joins=4, vocab=4099),
    ]


OP = KernelOp(mail_apply, _cases, native="native.state")

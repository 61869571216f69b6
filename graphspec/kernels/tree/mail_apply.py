"""The host's message for one launch, applied to the rows' state."""

from __future__ import annotations

import torch
from torch import Tensor

from ..groups import Lanes, Penalties, RowRequest, Truncation
from ..op import Int64, Written, kernel_op

FREE = 0
"""``status_R`` of a free row (:class:`graphspec.plan.buffers.Status`)."""
JOIN_WORDS = 11
"""Words of a join before its stop ids."""


def _floats(words: Tensor) -> Tensor:
    """The float32 in the low half of each word."""
    return words.to(torch.int32).view(torch.float32)


@kernel_op(native="native.cycle")
def mail_apply(
    mail: Int64,
    lanes_at: int,
    aborts_at: int,
    pages_at: int,
    pages_end: int,
    joins_at: int,
    joins: int,
    join_words: int,
    lanes: Written[Lanes],
    rows: Written[RowRequest],
    truncation: Written[Truncation] | None = None,
    penalties: Written[Penalties] | None = None,
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

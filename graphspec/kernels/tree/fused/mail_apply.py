"""Triton kernel of :mod:`graphspec.kernels.tree.mail_apply`: one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused.launch import launch, register
from ...groups import Lanes, Penalties, RowRequest, Truncation
from ..mail_apply import FREE, JOIN_WORDS

BLOCK = 256
COUNTS = 4096
"""Counts that one program clears."""


@triton.jit
def _float(word):
    """The float32 whose bits are the low half of a word."""
    return word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _message(
    mail, lane_row, status, page_table, lanes_at, aborts_at, pages_at,
    LANES: tl.constexpr, ABORTS: tl.constexpr, UPDATES: tl.constexpr, COLUMNS: tl.constexpr, FREE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply lanes, aborts and page-table entries."""
    offset = tl.arange(0, BLOCK)
    for start in range(0, LANES, BLOCK):
        mask = start + offset < LANES
        tl.store(lane_row + start + offset, tl.load(mail + lanes_at + start + offset, mask=mask), mask=mask)
    for start in range(0, ABORTS, BLOCK):
        mask = start + offset < ABORTS
        ended = tl.load(mail + aborts_at + start + offset, mask=mask, other=0)
        tl.store(status + ended, tl.full([BLOCK], FREE, tl.int64), mask=mask)
    for start in range(0, UPDATES, BLOCK):
        mask = start + offset < UPDATES
        triple = mail + pages_at + 3 * (start + offset)
        owner = tl.load(triple, mask=mask, other=0)
        column = tl.load(triple + 1, mask=mask, other=0)
        page = tl.load(triple + 2, mask=mask, other=0)
        tl.store(page_table + owner * COLUMNS + column, page.to(tl.int32), mask=mask)


@triton.jit
def _join(
    join, budget, seed, temperature, draft_len, stop_id,
    top_k, top_p, min_p, repetition, presence, frequency,
    STOPS: tl.constexpr, TRUNCATE: tl.constexpr, PENALTIES: tl.constexpr,
    JOIN_WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply one join, except for its counts."""
    offset = tl.arange(0, BLOCK)
    row = tl.load(join)
    tl.store(budget + row, tl.load(join + 1))
    tl.store(seed + row, tl.load(join + 2))
    tl.store(temperature + row, _float(tl.load(join + 3)))
    tl.store(draft_len + row, tl.load(join + 4))
    for start in range(0, STOPS, BLOCK):
        mask = start + offset < STOPS
        stop = tl.load(join + JOIN_WORDS + start + offset, mask=mask)
        tl.store(stop_id + row * STOPS + start + offset, stop, mask=mask)
    if TRUNCATE:
        tl.store(top_k + row, tl.load(join + 5))
        tl.store(top_p + row, _float(tl.load(join + 6)))
        tl.store(min_p + row, _float(tl.load(join + 7)))
    if PENALTIES:
        tl.store(repetition + row, _float(tl.load(join + 8)))
        tl.store(presence + row, _float(tl.load(join + 9)))
        tl.store(frequency + row, _float(tl.load(join + 10)))


@triton.jit
def _lane_table(
    mail, page_table, lane_table, lane, row, pages_at, UPDATES: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Gather the page table of one lane's row. Program 0 may be writing new entries concurrently, so they are taken from the message."""
    offset = tl.arange(0, BLOCK)
    out = lane_table + lane.to(tl.int64) * COLUMNS
    for start in range(0, COLUMNS, BLOCK):
        mask = start + offset < COLUMNS
        tl.store(out + start + offset, tl.load(page_table + row * COLUMNS + start + offset, mask=mask), mask=mask)
    tl.debug_barrier()
    for start in range(0, UPDATES, BLOCK):
        mask = start + offset < UPDATES
        triple = mail + pages_at + 3 * (start + offset)
        mine = mask & (tl.load(triple, mask=mask, other=-1) == row)
        column = tl.load(triple + 1, mask=mine, other=0)
        page = tl.load(triple + 2, mask=mine, other=0)
        tl.store(out + column, page.to(tl.int32), mask=mine)


@triton.jit
def _mail_apply(
    mail, lane_row, lane_table, lane_seed, lane_temperature, status, budget, seed, temperature, draft_len, stop_id, page_table,
    top_k, top_p, min_p, repetition, presence, frequency, output_count, prompt_seen,
    lanes_at, aborts_at, pages_at, joins_at, vocab, JOINS: tl.constexpr, JOIN_SIZE: tl.constexpr,
    LANES: tl.constexpr, ABORTS: tl.constexpr, UPDATES: tl.constexpr, COLUMNS: tl.constexpr, STOPS: tl.constexpr,
    TRUNCATE: tl.constexpr, PENALTIES: tl.constexpr, FREE: tl.constexpr, JOIN_WORDS: tl.constexpr,
    BLOCK: tl.constexpr, COUNTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program 0 scatters the message, one program per join scatters that join, one program per lane gathers its row, the rest clear counts.

    They run concurrently, so values that another program may be writing are taken from the message.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program == 0:
        _message(
            mail, lane_row, status, page_table, lanes_at, aborts_at, pages_at, LANES, ABORTS, UPDATES, COLUMNS, FREE, BLOCK
        )  # fmt: skip
    elif program <= JOINS:
        _join(
            mail + joins_at + (program - 1) * JOIN_SIZE, budget, seed, temperature, draft_len, stop_id,
            top_k, top_p, min_p, repetition, presence, frequency,
            STOPS, TRUNCATE, PENALTIES, JOIN_WORDS, BLOCK,
        )  # fmt: skip
    elif program <= JOINS + LANES:
        lane = program - 1 - JOINS
        row = tl.load(mail + lanes_at + lane)
        its_seed = tl.load(seed + row)
        its_temperature = tl.load(temperature + row)
        for number in range(JOINS):
            join = mail + joins_at + number * JOIN_SIZE
            joins = row == tl.load(join)
            its_seed = tl.where(joins, tl.load(join + 2), its_seed)
            its_temperature = tl.where(joins, _float(tl.load(join + 3)), its_temperature)
        tl.store(lane_seed + lane, its_seed)
        tl.store(lane_temperature + lane, its_temperature)
        _lane_table(mail, page_table, lane_table, lane, row, pages_at, UPDATES, COLUMNS, BLOCK)
    else:
        if PENALTIES:
            cleared = program - 1 - JOINS - LANES
            row = tl.load(mail + joins_at + cleared % JOINS * JOIN_SIZE)
            token = cleared // JOINS * COUNTS + tl.arange(0, COUNTS)
            inside = token < vocab
            tl.store(output_count + row * vocab + token, tl.zeros([COUNTS], output_count.dtype.element_ty), mask=inside)
            tl.store(prompt_seen + row * vocab + token, tl.zeros([COUNTS], prompt_seen.dtype.element_ty), mask=inside)


def mail_apply(
    mail: Tensor,
    lanes_at: int,
    aborts_at: int,
    pages_at: int,
    pages_end: int,
    joins_at: int,
    joins: int,
    join_words: int,
    lanes: Lanes,
    rows: RowRequest,
    truncation: Truncation | None = None,
    penalties: Penalties | None = None,
) -> None:
    programs, vocab = len(lanes.lane_row_B), 0 if penalties is None else penalties.output_count_RV.shape[1]
    launch(
        _mail_apply, (1 + joins + programs + joins * triton.cdiv(vocab, COUNTS),),
        mail, *lanes, *rows, *(truncation or (None,) * 3), *(penalties or (None,) * 5),
        lanes_at, aborts_at, pages_at, joins_at, vocab, JOINS=joins, JOIN_SIZE=join_words,
        LANES=programs, ABORTS=pages_at - aborts_at, UPDATES=(pages_end - pages_at) // 3, COLUMNS=rows.page_table_RP.shape[1],
        STOPS=rows.stop_id_RE.shape[1],
        TRUNCATE=truncation is not None, PENALTIES=penalties is not None, FREE=FREE, JOIN_WORDS=JOIN_WORDS,
        BLOCK=BLOCK, COUNTS=COUNTS,
    )  # fmt: skip


OP = register(mail_apply)

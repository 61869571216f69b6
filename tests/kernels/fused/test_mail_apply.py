"""The message, fused: entries near block sizes, an absent join, and lane tables that don't wait for the page table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from graphspec.graphs.stages.mailbox import Join, Mailbox, MailLayout, Message
from graphspec.kernels import op_of, select_kernels
from graphspec.kernels.fused.launch import INTERPRETED
from graphspec.kernels.tree.fused import mail_apply as module
from graphspec.kernels.tree.fused.mail_apply import _lane_table
from graphspec.kernels.tree.fused.mail_apply import mail_apply as fused
from graphspec.kernels.tree.mail_apply import mail_apply
from graphspec.plan.buffers import POISON, Arena
from graphspec.shapes import GREEDY, SamplingClass
from tests.support.plans import plan as make

OP = op_of("mail_apply")

DEVICE = "cpu" if INTERPRETED else "cuda"
PLAN = make(shape=(3, 3, 10), max_context=64, runtime={"prefill_chunks": [8, 32], "max_stop_ids": 2, "page_size": 1})
EVERYTHING = SamplingClass(True, True, True, True, 0)
JOIN = Join(2, 7, 2**64 - 3, 0.5, 3, (4,), 5, 0.25, 0.125, 1.5, -0.5, 0.75)


class Kernels:
    """The kernels of a cycle, with one function for the message."""

    def __init__(self, function: Any) -> None:
        self.mail_apply = function


def after(function: Any, message: Message, sampling: SamplingClass, joins: int) -> dict[str, Tensor]:
    """Every slot after one message over an arena full of poison."""
    arena = Arena(PLAN, MailLayout.of(PLAN).size, device=DEVICE)
    arena.allocate(sampling)
    arena.poison(("lane", "state"))
    mail = torch.zeros(MailLayout.of(PLAN).size, dtype=torch.int64)
    MailLayout.of(PLAN).encode(message, mail)
    arena["mail"].copy_(mail)
    build = type("Build", (), {"plan": PLAN, "kernels": Kernels(function), "shape": PLAN.shape, "sampling": sampling})()
    Mailbox(build, joins)(arena.views(2))
    return arena.snapshot(("lane", "state"))


@pytest.mark.parametrize("sampling", [GREEDY, EVERYTHING, SamplingClass(penalties=True)], ids=["greedy", "everything", "penalties"])
@pytest.mark.parametrize(("join", "joins"), [(None, 0), (None, 1), (JOIN, 1), (JOIN, 4)], ids=["cycle", "nobody", "join", "one of four"])
@pytest.mark.parametrize("updates", [0, 1, PLAN.page_updates])
def test_slots_are_those_of_the_reference(sampling: SamplingClass, join: Join | None, joins: int, updates: int) -> None:
    pages = [(n // PLAN.table_width, n % PLAN.table_width, n + 1) for n in range(updates)]
    message = Message(lanes=(0, 2), aborts=[1, 3] if join else [], pages=pages, joins=[join] if join else ())
    found, expected = (after(function, message, sampling, joins) for function in (fused, mail_apply))
    for name, value in expected.items():
        assert torch.equal(found[name].nan_to_num(nan=-7.0), value.nan_to_num(nan=-7.0)), name
    assert torch.equal(found["lane_table_BP"][:2], found["page_table_RP"][[0, 2]])
    assert sum(int((found["page_table_RP"] == page).sum()) for _, _, page in pages) == updates


def test_the_stage_chooses_the_op_of_its_kernels() -> None:
    kernels = select_kernels("reference", "auto", "cpu")
    assert kernels.mail_apply is mail_apply and OP.implementation("fused") is module.OP


@triton.jit
def _tables(mail, page_table, lane_table, row, UPDATES: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    _lane_table(mail, page_table, lane_table, tl.program_id(0), row, 0, UPDATES, COLUMNS, BLOCK)


@pytest.mark.parametrize("updates", [1, 15, 16, 17, 40])
def test_a_lane_table_has_the_new_entries_before_the_page_table_does(updates: int) -> None:
    columns, row = 50, 1
    generator = torch.Generator().manual_seed(updates)
    place = torch.randperm(columns, generator=generator)[:updates]
    mail = torch.stack((torch.arange(updates) % 2, place, 1000 + place), 1).to(DEVICE)
    table = torch.arange(2 * columns, dtype=torch.int32).view(2, columns).to(DEVICE)
    out = torch.full((1, columns), POISON % 1000, dtype=torch.int32, device=DEVICE)
    _tables[(1,)](mail, table, out, torch.tensor(row).item(), UPDATES=updates, COLUMNS=columns, BLOCK=16)
    expected = table[row].clone()
    for owner, column, page in mail.tolist():
        if owner == row:
            expected[column] = page
    assert torch.equal(out[0], expected) and torch.equal(table.flatten(), torch.arange(2 * columns, dtype=torch.int32, device=DEVICE))

"""The message: its data arrives in the row's slots, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphspec.errors import ResourceError
from graphspec.graphs.stages.counts import PromptCounts
from graphspec.graphs.stages.mailbox import Chunk, Join, Mailbox, MailLayout, Message
from graphspec.kernels import select_kernels
from graphspec.plan.buffers import Arena
from graphspec.plan.plan import Plan
from graphspec.shapes import GREEDY, SamplingClass
from tests.support.plans import plan as make

EVERYTHING = SamplingClass(True, True, True, True, 0)
PLAN = make(shape=(3, 3, 10), runtime={"prefill_chunks": [8, 32], "max_logit_bias": 3, "max_stop_ids": 2})
DUMMY, LANES = PLAN.max_rows, 4


def build(plan: Plan, sampling: SamplingClass) -> Any:
    return SimpleNamespace(plan=plan, kernels=select_kernels("reference", "auto", "cpu"), shape=plan.shape, sampling=sampling)


def send(arena: Arena, message: Message, sampling: SamplingClass = EVERYTHING) -> None:
    MailLayout.of(PLAN).encode(message, arena["mail"])
    Mailbox(build(PLAN, sampling), LANES)(arena.views(1))


def fresh(sampling: SamplingClass = EVERYTHING) -> Arena:
    arena = Arena(PLAN, MailLayout.of(PLAN).size)
    arena.allocate(sampling)
    return arena


def floats(minimum: float, maximum: float) -> st.SearchStrategy[float]:
    return st.integers(int(minimum * 64), int(maximum * 64)).map(lambda n: n / 64)


JOINS = st.builds(
    Join,
    row=st.integers(0, DUMMY - 1),
    budget=st.integers(1, 1000),
    seed=st.integers(-(2**63), 2**64 - 1),
    temperature=floats(0, 2),
    draft_len=st.integers(0, 3),
    stop_ids=st.lists(st.integers(0, 49), max_size=2),
    top_k=st.integers(-1, 50),
    top_p=floats(0.1, 1),
    min_p=floats(0, 1),
    repetition=floats(0.5, 2),
    presence=floats(-2, 2),
    frequency=floats(-2, 2),
)


@given(JOINS)
@settings(max_examples=40, deadline=None)
def test_a_join_arrives_as_it_was_sent(join: Join) -> None:
    arena, row = fresh(), join.row
    arena["output_count_RV"].fill_(3)
    arena["prompt_seen_RV"].fill_(1)
    before = arena.snapshot(("state",))
    send(arena, Message(lanes=(row,), joins=[join]))
    for name, value in (
        ("budget_R", join.budget), ("temperature_R", join.temperature), ("draft_len_R", join.draft_len), ("top_k_R", join.top_k),
        ("top_p_R", join.top_p), ("min_p_R", join.min_p), ("repetition_R", join.repetition), ("presence_R", join.presence),
        ("frequency_R", join.frequency),
    ):  # fmt: skip
        assert arena[name][row].item() == value, name
    assert arena["seed_R"][row].item() % 2**64 == join.seed % 2**64
    assert arena["stop_id_RE"][row].tolist() == [*join.stop_ids, -1, -1][:2]
    assert not arena["output_count_RV"][row].any() and not arena["prompt_seen_RV"][row].any()
    for name, old in before.items():
        others = [r for r in range(DUMMY) if r != row]
        if old.shape[0] == DUMMY + 1:
            assert torch.equal(arena[name][others], old[others]), name


def test_an_empty_message_changes_no_row() -> None:
    arena = fresh()
    for name in ("top_k_R", "output_count_RV", "prompt_seen_RV", "bias_id_RI", "stop_from_R", "repetition_R"):
        arena[name].fill_(7)
    before = arena.snapshot(("state",))
    send(arena, Message(lanes=()))
    changed = {name for name, old in before.items() if not torch.equal(arena[name][:DUMMY], old[:DUMMY])}
    assert changed == set()


def test_lanes_take_what_their_rows_have_after_the_message() -> None:
    """A row that joins in the same message, one that only gets a page, and the dummy row after the last lane."""
    arena = fresh()
    arena["page_table_RP"].copy_(torch.arange(arena["page_table_RP"].numel()).view(DUMMY + 1, -1))
    arena["seed_R"].copy_(torch.arange(DUMMY + 1) + 70)
    before = arena["page_table_RP"].clone()
    join = Join(1, 5, 1234, 0.5, 3, ())
    MailLayout.of(PLAN).encode(Message(lanes=(3, 1), pages=[(1, 2, 9), (3, 0, 8), (0, 1, 7)], joins=[join]), arena["mail"])
    Mailbox(build(PLAN, GREEDY), LANES)(arena.views(4))
    before[1, 2], before[3, 0] = 9, 8
    assert torch.equal(arena["lane_table_BP"][:2], before[[3, 1]])
    assert torch.equal(arena["lane_table_BP"][2:4], arena["page_table_RP"][[DUMMY, DUMMY]])
    assert arena["lane_seed_B"][:2].tolist() == [73, 1234] and arena["lane_temperature_B"][:2].tolist() == [0.0, 0.5]


def test_a_class_without_room_does_not_write_there() -> None:
    arena = fresh()
    join = Join(0, 5, 1, 1.0, 3, (), top_k=4, repetition=1.5)
    before = arena.snapshot(("state",))
    send(arena, Message(lanes=(0,), joins=[join]), GREEDY)
    changed = {name for name, old in before.items() if not torch.equal(arena[name], old)}
    assert changed <= set(Mailbox(build(PLAN, GREEDY), LANES).writes) and "top_k_R" not in changed


def test_more_than_a_message_holds_is_refused() -> None:
    with pytest.raises(ResourceError, match="stop ids"):
        MailLayout.of(PLAN).encode(Message(lanes=(), joins=[Join(0, 5, 1, 0.0, 3, (1, 2, 3))]), fresh()["mail"])


def test_a_message_does_not_grow_with_the_tokens_a_request_may_bias() -> None:
    """They are written to the row once, when it is taken."""
    few, many = (MailLayout.of(make(runtime={"max_logit_bias": maximum})).size for maximum in (1, 300))
    assert few == many


def test_chunks_fill_prompt_bits_and_output_counts() -> None:
    """Two chunks of a row that resumes: nine tokens of prompt, then four it had put out."""
    arena, stage = fresh(), PromptCounts(build(PLAN, EVERYTHING), 1, 8)
    prompt, output = [4, 5, 4, 6, 7, 8, 9, 4, 11], [5, 5, 12, 0]
    tokens = [*prompt, *output]
    views = arena.views(1)
    for start in (0, 8):
        part = tokens[start : start + 8]
        message = Message(lanes=(2,), chunks=[Chunk(part, start, len(tokens), known_root=13, prompt=len(prompt))])
        message.joins = [Join(2, 5, 1, 0.0, 3, ())] if start == 0 else ()
        send(arena, message)
        stage(views)
    assert arena["prompt_seen_RV"][2].nonzero().flatten().tolist() == sorted(set(prompt))
    assert {token: int(n) for token, n in enumerate(arena["output_count_RV"][2]) if n} == {5: 2, 12: 1, 0: 1}
    assert not arena["output_count_RV"][:DUMMY][[0, 1, 3]].any() and not arena["prompt_seen_RV"][[0, 1, 3]].any()


def test_groups_are_allocated_when_first_needed() -> None:
    arena = Arena(PLAN, MailLayout.of(PLAN).size)
    views, names = arena.views(2), {slot.name for slot in arena.slots}
    places = {name: arena[name].data_ptr() for name in names}
    assert "top_k_R" not in names
    with pytest.raises(AttributeError, match="top_k_R"):
        views.top_k_R  # noqa: B018
    arena.allocate(SamplingClass(truncate=True, logprobs=3))
    grown = {slot.name for slot in arena.slots} - names
    assert grown == {"top_k_R", "top_p_R", "min_p_R", "ring_logprob_ZBA", "ring_top_logprob_ZBAO", "ring_top_token_ZBAO"}
    assert views.top_p_R is arena["top_p_R"] and views.ring_logprob_ZBA.shape[1] == 2
    arena.allocate(SamplingClass(truncate=True))
    assert {name: arena[name].data_ptr() for name in places} == places
    arena.allocate(EVERYTHING)
    arena.poison(("state", "ring"))
    arena.check_addresses()
    arena.restore(arena.snapshot())
    assert {name for name, *_ in arena.describe()} == {slot.name for slot in arena.slots} == set(views.names)

"""The message buffer only rewrites what changed, and always equals a fresh encoding of the message."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphspec.errors import ResourceError
from graphspec.graphs.stages.mailbox import Chunk, Join, MailLayout, Message, MessageBuffer
from tests.support.plans import plan

PLAN = plan("eagle3", shape=(3, 2, 6), runtime={"max_rows": 4, "buckets": [1, 2, 4], "prefill_chunks": [4, 8]})
LAYOUT = MailLayout.of(PLAN)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    lanes = draw(st.lists(st.integers(0, 3), max_size=4, unique=True))
    if draw(st.integers(0, 2)):
        return Message(lanes=lanes)
    message = Message(lanes=lanes, aborts=draw(st.lists(st.integers(0, 3), max_size=3)))
    message.pages = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 9)), max_size=3))
    if draw(st.booleans()):
        message.joins = [Join(row=1, budget=5, seed=draw(st.integers(0, 2**64 - 1)), temperature=0.5, draft_len=3, stop_ids=(4,))]
        message.chunks = [Chunk(draw(st.lists(st.integers(0, 49), min_size=1, max_size=8)), 0, 8)]
    return message


@given(st.lists(messages(), min_size=1, max_size=8))
def test_the_buffer_holds_only_the_last_message(sent: list[Message]) -> None:
    buffer, fresh = MessageBuffer(LAYOUT, pinned=False), torch.zeros(LAYOUT.size, dtype=torch.int64)
    for message in sent:
        LAYOUT.encode(message, fresh)
        assert torch.equal(buffer.write(message), fresh)


def test_lanes_that_stay_are_not_written_again() -> None:
    buffer = MessageBuffer(LAYOUT, pinned=False)
    lanes = [0, 2]
    words = buffer.write(Message(lanes=lanes))
    words.fill_(-5)
    assert set(buffer.write(Message(lanes=[0, 2])).tolist()) == {-5}
    assert buffer.write(Message(lanes=[2])).tolist()[LAYOUT.lanes : LAYOUT.lanes + 4] == [2, 4, 4, 4]
    lanes.append(3)
    assert buffer.write(Message(lanes=lanes)).tolist()[LAYOUT.lanes : LAYOUT.lanes + 4] == [0, 2, 3, 4]


def test_a_list_changed_in_place_is_noticed() -> None:
    buffer, lanes = MessageBuffer(LAYOUT, pinned=False), [0]
    buffer.write(Message(lanes=lanes))
    lanes[0] = 3
    assert buffer.write(Message(lanes=lanes))[LAYOUT.lanes] == 3


def test_too_many_lanes_are_refused() -> None:
    buffer = MessageBuffer(LAYOUT, pinned=False)
    buffer.write(Message(lanes=[0]))
    maximum = LAYOUT.max_lanes
    with pytest.raises(ResourceError, match=f"mailbox lanes: expected at most {maximum} in one launch"):
        buffer.write(Message(lanes=[0] * (maximum + 1)))
    fresh = torch.zeros(LAYOUT.size, dtype=torch.int64)
    LAYOUT.encode(Message(lanes=[1]), fresh)
    assert torch.equal(buffer.write(Message(lanes=[1])), fresh), "a refused message leaves nothing"

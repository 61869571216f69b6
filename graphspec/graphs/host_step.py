"""The host step before a launch, for attention kernels whose work list the host makes from the row lengths that it mirrors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from ..errors import ResourceError
from ..kernels.host_step import HostStep, PreparedCall, RowSpan
from ..plan.plan import Plan
from ..shapes import GraphKey
from .programs import Key, PrefillKey
from .stages.mailbox import Message
from .stages.stage import Stage


class RowMirror:
    """Length, window and page table of every row, updated from each message sent and each result read.

    Equal to the device's when nothing is in flight. ``len_R`` and ``window_R`` are ``seq_len_R`` and ``window_len_R``.
    """

    def __init__(self, plan: Plan) -> None:
        self._appends = plan.catches_up
        self.len_R = [0] * plan.max_rows
        self.window_R = [1] * plan.max_rows
        self.table_RP = np.zeros((plan.max_rows, plan.table_width), np.int32)
        self._chunks: dict[int, tuple[int, int]] = {}
        """``(begin, end)`` of each row's chunk in the last message sent."""

    def send(self, message: Message) -> None:
        """Apply a message."""
        for row, column, page in message.pages:
            self.table_RP[row, column] = page
        for shared in message.shared:
            self.table_RP[shared.row, : len(shared.pages)] = shared.pages
        self._chunks = {}
        for row, chunk in zip(message.lanes, message.chunks, strict=False):
            self._chunks[row] = chunk.start, chunk.start + len(chunk.tokens)
            # Not read before the last chunk.
            self.len_R[row], self.window_R[row] = chunk.total, 1

    def receive(self, key: Key, rows: Sequence[int], committed: Sequence[Sequence[int]]) -> None:
        """Apply the tokens that a launch committed, per row."""
        if isinstance(key, PrefillKey):
            return
        appends = self._appends and key.shape.num_steps == 0 and not key.catch_up
        for row, tokens in zip(rows, committed, strict=True):
            if tokens:
                self.len_R[row] += len(tokens)
                self.window_R[row] = len(tokens) + (self.window_R[row] if appends else 0)

    def span(self, call: PreparedCall, row: int) -> RowSpan:
        """Slots of the queries of ``call`` in the next launch that has ``row``."""
        root = self.len_R[row]
        if call.anchor == "chunk":
            start, known = self._chunks[row]
        elif call.anchor == "window":
            start, known = root - self.window_R[row] + 1, root + 1
        else:
            start, known = root, root + call.extent
        return RowSpan(self.table_RP[row], start + call.extent, known)


class LaunchPreparation:
    """The host step before every launch of one engine.

    A cycle may be prepared only while nothing is in flight, since only then is every row's length known; a prompt chunk carries its own
    length, so chunks may follow each other.

    Args:
        plan: every static number.
        step: makes the work lists.
    """

    def __init__(self, plan: Plan, step: HostStep) -> None:
        self.plan, self.step, self.rows = plan, step, RowMirror(plan)
        self._calls: dict[Key, tuple[PreparedCall, ...]] = {}
        self._unread: deque[tuple[Key, Sequence[int]]] = deque()

    def bind(self, key: Key, stages: Iterable[Stage]) -> None:
        """Note the calls of a program, and prepare it without rows: building a program runs it."""
        self._calls[key] = tuple(dict.fromkeys(call for stage in stages for call in stage.prepared_calls))
        self.prepare(key)

    def launch(self, key: Key, message: Message, in_flight: int) -> None:
        """Prepare a launch that follows at once; :meth:`received` gets its result.

        Raises:
            ResourceError: ``key`` is a cycle with prepared calls, and the length of a row is not known yet.
        """
        if isinstance(key, GraphKey) and self._calls.get(key) and in_flight:
            raise ResourceError("cycle", "nothing in flight when the host prepares a cycle's attention", f"{in_flight} in flight")
        self.send(key, message)
        self._unread.append((key, message.lanes))

    def send(self, key: Key, message: Message) -> None:
        """Prepare a launch. Idempotent."""
        self.rows.send(message)
        self.prepare(key, message.lanes)

    def prepare(self, key: Key, rows: Sequence[int] = ()) -> None:
        """Make the work lists of a program's next launch, with these rows in its first lanes."""
        calls = self._calls.get(key)
        if calls:
            spans = {call: [self.rows.span(call, row) for row in rows] for call in calls}
            plan = self.plan
            lanes = key.lanes if isinstance(key, PrefillKey) else key.bucket
            self.step.prepare(spans, lanes, plan.page_size, plan.table_width, plan.dtype)

    def received(self, committed: Sequence[Sequence[int]]) -> None:
        """The tokens that the oldest unread launch committed, per row."""
        self.rows.receive(*self._unread.popleft(), committed)

    def reset(self) -> None:
        """Forget every unread launch."""
        self._unread.clear()

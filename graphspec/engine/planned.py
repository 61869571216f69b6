"""A cycle whose attention is planned on the host: what the host knows of every row, and the plans of a launch before the launch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from ..errors import ResourceError
from ..graphs.cycle import TIMED_RUNS, Cycle, RingEntry
from ..graphs.programs import Key, PrefillKey
from ..graphs.stages.mailbox import Message
from ..graphs.stages.stage import Stage
from ..kernels.planned import PlannedCall, RowSpan
from ..plan import Plan
from ..shapes import GraphKey, SamplingClass


class RowMirror:
    """Length, window and page table of every row as the device has them, kept from what is sent and what comes back.

    Exact while nothing is in flight. ``len_R`` and ``window_R`` are ``seq_len_R`` and ``window_len_R``.
    """

    def __init__(self, plan: Plan) -> None:
        self._appends = plan.catches_up
        self.len_R = [0] * plan.max_rows
        self.window_R = [1] * plan.max_rows
        self.table_RP = np.zeros((plan.max_rows, plan.table_width), np.int32)
        self._chunk = (0, 0)

    def send(self, message: Message) -> None:
        """What a launch tells the device before it computes."""
        for row, column, page in message.pages:
            self.table_RP[row, column] = page
        chunk = message.chunk
        if chunk is not None:
            (row,) = message.lanes
            self._chunk = chunk.start, chunk.start + len(chunk.tokens)
            # Before the last chunk nobody asks.
            self.len_R[row], self.window_R[row] = chunk.total, 1

    def receive(self, key: Key, rows: Sequence[int], entry: RingEntry) -> None:
        """What a cycle committed."""
        if isinstance(key, PrefillKey):
            return
        appends = self._appends and key.shape.num_steps == 0 and not key.catch_up
        for row, tokens in zip(rows, entry.tokens, strict=True):
            if tokens:
                self.len_R[row] += len(tokens)
                self.window_R[row] = len(tokens) + (self.window_R[row] if appends else 0)

    def span(self, call: PlannedCall, row: int) -> RowSpan:
        """Where the queries of ``call`` stand in the next launch that has ``row``."""
        root = self.len_R[row]
        if call.anchor == "chunk":
            start, known = self._chunk
        elif call.anchor == "window":
            start, known = root - self.window_R[row] + 1, root + 1
        else:
            start, known = root, root + call.extent
        return RowSpan(self.table_RP[row], start + call.extent, known)


class PlannedCycle(Cycle):
    """:class:`~graphspec.graphs.cycle.Cycle` for kernels with a host planner.

    Every launch is preceded by the plans of its program: host arithmetic, and copies of what it gives into memory that captured programs
    know. A cycle may be planned only when the host knows every row's length, that is, while nothing is in flight; a prompt chunk says its
    own, so chunks may follow each other.
    """

    plans: ClassVar[bool] = True

    def __init__(self, *arguments: Any, **keys: Any) -> None:
        super().__init__(*arguments, **keys)
        self.rows = RowMirror(self.plan)
        self._calls: dict[Key, tuple[PlannedCall, ...]] = {}
        self._unread: deque[tuple[Key, Sequence[int]]] = deque()

    def stages(self, key: Key) -> list[Stage]:
        stages = super().stages(key)
        self._calls[key] = tuple(dict.fromkeys(call for stage in stages for call in stage.planned))
        # Building a program runs it.
        self._plan(key, ())
        return stages

    def ready(self, key: Key, message: Message) -> None:
        """Plan a launch. Doing it again changes nothing."""
        self.rows.send(message)
        self._plan(key, message.lanes)

    def launch(self, key: Key, message: Message) -> int:
        """See :meth:`graphspec.graphs.cycle.Cycle.launch`.

        Raises:
            ResourceError: also where a cycle would be planned while the length of a row is not known.
        """
        if isinstance(key, GraphKey) and self._calls.get(key) and self.in_flight:
            raise ResourceError("cycle", "nothing in flight when the host plans a cycle's attention", f"{self.in_flight} in flight")
        self.ready(key, message)
        ticket = super().launch(key, message)
        self._unread.append((key, message.lanes))
        return ticket

    def read(self, ticket: int) -> RingEntry:
        entry = super().read(ticket)
        self.rows.receive(*self._unread.popleft(), entry)
        return entry

    def reset(self) -> None:
        super().reset()
        self._unread.clear()

    def time_depths(self, buckets: Iterable[int], sampling: SamplingClass, runs: int = TIMED_RUNS) -> dict[int, dict[int, float]]:
        wanted = tuple(buckets)
        for bucket in wanted:
            for depth in self.plan.depths_of(bucket):
                self._plan(self.plan.key(bucket, sampling, depth), ())
        return super().time_depths(wanted, sampling, runs)

    def _plan(self, key: Key, rows: Sequence[int]) -> None:
        calls = self._calls.get(key)
        if not calls:
            return
        planner, plan = self.kernels.host_planner(), self.plan
        assert planner is not None, "calls are bound by kernels with a planner"
        spans = {call: [self.rows.span(call, row) for row in rows] for call in calls}
        planner.plan(spans, 1 if isinstance(key, PrefillKey) else key.bucket, plan.page_size, plan.table_width, plan.dtype)

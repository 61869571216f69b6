"""Per-row parameters that no message has room for: written before the row's first chunk, after clearing those of its last request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet

import numpy as np

from ..graphs.stages.mailbox import Mailbox
from ..plan.buffers import slot_groups
from ..plan.plan import Plan
from ..shapes import SamplingClass
from . import bans
from .request import Request

JOIN_GROUPS = frozenset(Mailbox.GROUPS)
"""Groups of slots that joins of some sampling classes have room for, and others not."""
ROW_GROUPS = JOIN_GROUPS | bans.GROUPS
"""Groups of slots in which a row may hold parameters that are not neutral."""


class RowParameters:
    """Tracks which rows may hold parameters of earlier requests, and writes those of the next one.

    Args:
        plan: every static number.
        clear: makes a row's parameters neutral in some groups of slots (:meth:`graphspec.graphs.cycle.Cycle.clear_row`).
        write: writes slots of a row (:meth:`graphspec.graphs.cycle.Cycle.write_row`).
    """

    def __init__(
        self,
        plan: Plan,
        clear: Callable[[int, AbstractSet[str]], None] | None = None,
        write: Callable[[int, Mapping[str, bans.Table]], None] | None = None,
    ) -> None:
        self._plan, self._clear, self._write = plan, clear, write
        self._held: list[frozenset[str]] = [frozenset()] * plan.max_rows
        """Groups in which a row may hold parameters that are not neutral."""

    def forget(self) -> None:
        """Assume that every row may hold anything."""
        self._held = [ROW_GROUPS] * self._plan.max_rows

    def prepare(self, request: Request, length: int, sampling: SamplingClass) -> None:
        """Clear and write the row parameters that the next chunk, of ``length`` tokens and in a program of this class, reads."""
        assert request.row is not None
        if request.begins:
            self._clear_leftovers(request, request.row, sampling)
        tables = bans.row_tables(request, request.known(0, request.committed), self._plan) if request.begins else {}
        if request.scoring:
            end = request.prefilled + length
            tables["following_token_R"] = np.asarray([*request.known(end, end + 1), -1][0])
        if tables and self._write is not None:
            self._write(request.row, tables)

    def _clear_leftovers(self, request: Request, row: int, sampling: SamplingClass) -> None:
        """Clear the parameters of the row's last request that neither a join of this class nor the request's tables overwrite."""
        written = (JOIN_GROUPS & slot_groups(sampling)) | (bans.GROUPS & slot_groups(request.sampling))
        leftovers = self._held[row] - written
        if leftovers and self._clear is not None:
            self._clear(row, leftovers)
        # A join writes every group its class has room for. Even a value that is neutral for this request may not be for the next.
        self._held[row] = written

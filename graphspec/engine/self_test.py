"""A self-test on the first traffic after load: a drafter that is hardly ever right is more often a wrong checkpoint than a bad draft."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ..plan.plan import Plan
from .request import Request

logger = logging.getLogger(__name__)

CYCLES = 64
"""Whole cycles that are counted."""
MIN_ACCEPTANCE_LENGTH = 1.05
"""New tokens per cycle below which a draft network is suspected; a drafter that is never right has 1."""


class AcceptanceTest:
    """Counts the first :data:`CYCLES` cycles in which a draft network proposed something; does nothing afterwards."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._tokens = self._cycles = 0
        self.done = not plan.variant.has_network

    def observe(self, requests: Iterable[Request]) -> None:
        """Count finished requests; warns once when :data:`CYCLES` were seen and hardly anything was accepted."""
        if self.done:
            return
        for request in requests:
            runs = [tokens for tokens, _ in request.metrics.drafted_cycles()]
            self._tokens, self._cycles = self._tokens + sum(runs), self._cycles + len(runs)
        if self._cycles < CYCLES:
            return
        self.done = True
        length = self._tokens / self._cycles
        if length < MIN_ACCEPTANCE_LENGTH:
            assert self._plan.draft is not None
            logger.warning(
                "the draft is almost never accepted: %.2f tokens per cycle over %d cycles. Is %s a draft for %s, of variant %s, with the "
                "right norm flags and tapped layers?",
                length,
                self._cycles,
                self._plan.draft.path,
                self._plan.target.path,
                self._plan.variant.name,
            )

"""Open-loop load with misbehaving clients, and shutdown in the middle of streams: accepted requests finish, and nothing leaks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from perf.serve_load import MIX, Target, open_loop, until_the_end
from tests.support.engines import CHAIN, MIRROR_VOCAB
from tests.support.serving import Served, serving

if TYPE_CHECKING:
    from tests.support.engines import Pair

ARRIVALS = 120


def target_of(server: Served) -> Target:
    host, port = server.address
    return Target(host, port, vocab=MIRROR_VOCAB, new_tokens=16, prompt_tokens=8)


def test_more_than_it_can_bear(pair: Pair) -> None:
    """Arrivals come faster than any machine serves them: some are refused, and the others get all of their tokens."""
    with pair.llm(**CHAIN, max_rows=2, buckets=[1, 2]) as llm, serving(llm, max_waiting=4) as server:
        target = target_of(server)
        tally = asyncio.run(open_loop(target, rate=20 * ARRIVALS, seconds=0.05, seed=1))
        assert tally.broken == []
        assert tally.answers["done"] and tally.answers["refused"]
        assert asyncio.run(target.idle())
        assert server.api.slots.taken == 0
        assert server.complete(prompt="w7", max_tokens=2)


def test_every_kind_of_client_comes(pair: Pair) -> None:
    with pair.llm(**CHAIN, max_rows=4) as llm, serving(llm, max_waiting=ARRIVALS) as server:
        tally = asyncio.run(open_loop(target_of(server), rate=ARRIVALS, seconds=1.0, seed=2))
        assert tally.broken == [] and tally.answers["refused"] == 0
        names = " ".join(tally.answers)
        assert all(name in names for name in ("done", "left", "malformed: 400", "oversized: 413", "silent")), MIX
        server.idle()


def test_the_end_in_the_middle_of_streams(pair: Pair) -> None:
    with pair.llm(**CHAIN, max_rows=3) as llm:
        server = Served(llm)
        tally = asyncio.run(until_the_end(target_of(server), 3, server.server.drain))
        server.stop()
        assert tally.broken == [] and tally.answers["done"] == 3

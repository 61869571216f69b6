"""Many requests over one engine: no page, row or request leaks, memory is flat, and outputs are those of a fresh engine.

The suite runs a few; ``make soak`` runs 100,000.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from graphspec.api.events import Stream
from graphspec.api.llm import SamplingParams
from graphspec.engine.request import Request
from graphspec.shapes import GREEDY
from tests.support.engines import CHAIN, MIRROR_VOCAB, Pair
from tests.support.interrupts import Fault, interrupted

from .test_interrupts import FILES
from .test_shared_engine import assert_idle

OPEN = 8
"""Calls at a time; each asks for one to three requests."""
CHECKED = 200
"""One request in this many is run again on an engine of its own."""
FAULTS = 2000
"""Reads of results, about, to one that fails."""
GROWTH = 48 * 2**20
"""Bytes that resident memory may grow by after the first quarter of a long run."""
LONG = 10_000


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


KINDS: list[dict[str, Any]] = [
    {}, {}, {"temperature": 0.9}, {"temperature": 1.2, "top_k": 5}, {"repetition_penalty": 1.5}, {"logit_bias": {3: 2.0}, "logprobs": 1},
]  # fmt: skip
ENDED = ("stop", "length")


def draw(rng: random.Random, openings: list[list[int]]) -> tuple[list[int], SamplingParams]:
    """Half of the prompts begin as others do."""
    opening = rng.choice(openings)[: rng.choice((8, 20, 36))] if rng.random() < 0.5 else []
    prompt = [*opening, *(rng.randrange(MIRROR_VOCAB - 1) for _ in range(rng.choice((1, 3, 9, 17, 30))))]
    return prompt, SamplingParams(
        max_tokens=rng.randint(1, 24), ignore_eos=rng.random() < 0.7, seed=rng.getrandbits(32), **rng.choice(KINDS)
    )


@pytest.mark.parametrize("variant", ["none", "eagle3"])
def test_many_requests(pair: Pair, variant: str, request: pytest.FixtureRequest) -> None:
    count, rng = request.config.getoption("--soak-requests"), random.Random(7)
    keys = CHAIN if variant == "eagle3" else {}
    llm = pair.llm(variant=variant, **keys, max_rows=4, buckets=[1, 2, 4], page_size=4, num_pages=40, cycles_in_flight=2)
    fresh = pair.llm(variant="none", max_rows=1, buckets=[1], prefix_cache=False)
    everything = SamplingParams(temperature=1.0, top_k=5, repetition_penalty=1.5, logit_bias={3: 2.0}, logprobs=1).resolve().sampling_class
    for sampling in (GREEDY, SamplingParams(temperature=1.0).resolve().sampling_class, everything):
        llm.warm_up(4, sampling=sampling)
    read, settled = llm.cycle.read, 0
    seen: Counter[str] = Counter()
    """How requests ended, and what else came up."""

    def failing(ticket: int) -> Any:
        if rng_faults.random() < 1 / FAULTS:
            seen["faults"] += 1
            raise Fault
        return read(ticket)

    rng_faults = random.Random(8)
    openings = [[rng.randrange(MIRROR_VOCAB - 1) for _ in range(36)] for _ in range(6)]
    llm.cycle.read = failing  # type: ignore[method-assign]
    sent = checked = 0
    open_calls: list[Stream] = []
    while sent < count or open_calls:
        if sent < count and len(open_calls) < OPEN:
            some = [draw(rng, openings) for _ in range(rng.randint(1, 3))]
            deadline = rng.choice((0.0, 0.01, 0.1)) if rng.random() < 0.1 else None
            prompts, params = [prompt for prompt, _ in some], [params for _, params in some]
            open_calls.append(llm.submit(prompts, params, priority=rng.choice((0, 0, 0, -1, 2)), deadline=deadline))
            sent += len(some)
            settled = settled or (resident() if sent > count // 4 else 0)
            continue
        stream = rng.choice(open_calls)
        how = rng.random()
        if how < 0.05:
            stream.abort()
        elif how < 0.1:
            # Dropped, as by its caller's end.
            open_calls.remove(stream)
            continue
        try:
            if how < 0.12:
                with interrupted(FILES, rng.randrange(30)):
                    stream.wait()
            else:
                stream.wait()
        except KeyboardInterrupt:
            # What was received in that moment is lost with the call.
            seen["interrupts"] += 1
            open_calls.remove(stream)
            continue
        except Fault:
            pass
        if not stream.ended and stream._handle is not None and not stream._handle.ended:
            continue
        open_calls.remove(stream)
        for one in stream.requests:
            seen[str(one.finish_reason)] += 1
            seen["cached tokens"] += one.metrics.cached_tokens
            seen["preempted"] += one.preempted
            if one.finish_reason in ENDED and (sent // CHECKED > checked or (count < LONG and checked < 3)):
                checked += 1
                again = fresh.generate([one.prompt], one.params)[0]
                assert (again.token_ids, again.finish_reason) == (one.output, one.finish_reason)
    del stream, one
    assert_idle(llm)
    assert checked >= min(3, count // CHECKED)
    gc.collect()
    assert sum(type(thing) is Request for thing in gc.get_objects()) < 3 * OPEN, "what has ended is let go"
    assert not seen["error"]
    if count >= LONG:
        for what in (*ENDED, "abort", "deadline", "cached tokens", "preempted", "interrupts", "faults"):
            assert seen[what], what
        growth = resident() - settled
        print(f"{variant}: {sent} requests, {checked} outputs compared, resident memory grew by {growth / 2**20:.1f} MiB; {dict(seen)}")
        assert growth < GROWTH

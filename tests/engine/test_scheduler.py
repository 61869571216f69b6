"""The scheduler against a simulated device that follows a script and checks the content of every page."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphspec.api.prompts import check_prompt
from graphspec.engine.request import NO_ROW, Request, SamplingParams
from graphspec.engine.scheduler import Scheduler
from graphspec.errors import RequestError
from graphspec.graphs.cycle import RingEntry
from graphspec.graphs.programs import Key, PrefillKey
from graphspec.graphs.stages.mailbox import Chunk, Join, MailLayout, Message
from graphspec.plan.buffers import Status
from graphspec.plan.plan import Plan
from graphspec.shapes import GREEDY, GraphKey
from tests.support.chunking import chunked
from tests.support.plans import plan as make

STOP, BROKEN = 1, -7
"""A stop id, and a place where the target's logits break."""
MAX_STEPS = 3000


class Pool:
    """The token whose KV each slot holds; -1: none."""

    def __init__(self, plan: Plan) -> None:
        self.size = plan.page_size
        self.tokens = [[-1] * plan.page_size for _ in range(plan.num_pages)]
        self.final: Collection[int] = ()
        """Pages that others may find."""

    def write(self, table: dict[int, int], begin: int, tokens: Sequence[int]) -> None:
        for slot, token in enumerate(tokens, begin):
            page = table[slot // self.size]
            assert page not in self.final, "a page that others may find is written"
            self.tokens[page][slot % self.size] = token

    def read(self, table: dict[int, int], end: int) -> list[int]:
        return [self.tokens[table[slot // self.size]][slot % self.size] for slot in range(end)]


@dataclass
class Row:
    """What the device knows of one row."""

    owner: int = -1
    status: int = Status.FREE
    seq_len: int = 0
    emitted: int = 0
    budget: int = 0
    read: int = 0
    window: int = 1
    table: dict[int, int] = field(default_factory=dict)


class Device:
    """Follows the scripts at random run lengths; ``Join.seed`` selects the script of a row."""

    def __init__(self, plan: Plan, prompts: list[list[int]], scripts: list[list[int]], rng: random.Random) -> None:
        self.plan, self.prompts, self.scripts, self.rng = plan, prompts, scripts, rng
        self.layout = MailLayout.of(plan)
        self.mail = torch.zeros(self.layout.size, dtype=torch.int64)
        self.rows = [Row() for _ in range(plan.max_rows + 1)]
        self.unread: deque[tuple[int, RingEntry, dict[int, int]]] = deque()
        self.launched = 0
        self.cycles = 0
        self.inert_lanes = 0
        self.target = Pool(plan)
        self.draft = Pool(plan) if plan.draft is not None else None

    @property
    def in_flight(self) -> int:
        return len(self.unread)

    def launch(self, key: Key, message: Message) -> int:
        assert self.in_flight < self.plan.ring_depth - 1, "the ring is full"
        self.layout.encode(message, self.mail)  # raises when a message is too large
        assert len(set(message.lanes)) == len(message.lanes)
        for row in message.aborts:
            self.rows[row].status = Status.FREE
        in_use = {page: owner for _, _, used in self.unread for page, owner in used.items()}
        for join in message.joins:
            self.rows[join.row].owner = join.seed
        for shared in message.shared:
            self.rows[shared.row].table.update(enumerate(shared.pages))
        for row, column, page in message.pages:
            assert 0 < page < self.plan.num_pages
            assert in_use.get(page, self.rows[row].owner) == self.rows[row].owner, "a page changes hands while an unread launch uses it"
            self.rows[row].table[column] = page
        if isinstance(key, PrefillKey):
            entry, touched = self._prefill(key, message)
        else:
            assert key.bucket >= len(message.lanes) >= 1
            entry, touched = self._cycle(key, message)
        self.unread.append((self.launched, entry, touched))
        self.launched += 1
        return self.launched - 1

    def read(self, ticket: int) -> RingEntry:
        number, entry, _ = self.unread.popleft()
        assert number == ticket
        return entry

    def _touch(self, row: Row, slots: int) -> dict[int, int]:
        """Pages of the first ``slots`` slots; all of them must be there."""
        return {row.table[column]: row.owner for column in range(self.plan.pages_for(slots))}

    def _whole(self, row: Row) -> list[int]:
        return [*self.prompts[row.owner], *self.scripts[row.owner]]

    def _prefill(self, key: PrefillKey, message: Message) -> tuple[RingEntry, dict[int, int]]:
        assert len(message.lanes) == len(message.chunks) <= key.lanes
        joins = {join.row: join for join in message.joins}
        found = [self._chunk(key, index, chunk, joins.pop(index, None)) for index, chunk in zip(message.lanes, message.chunks, strict=True)]
        assert not joins, "who joins is a lane"
        tokens, status = [run for run, _, _ in found], [state for _, state, _ in found]
        touched = {page: owner for _, _, pages in found for page, owner in pages.items()}
        return RingEntry(tokens, status), touched

    def _chunk(self, key: PrefillKey, index: int, chunk: Chunk, join: Join | None) -> tuple[list[int], int, dict[int, int]]:
        row = self.rows[index]
        assert (join is not None) == (chunk.start == chunk.shared)
        if join is not None:
            row.budget, row.status, row.read = join.budget, Status.FREE, chunk.start
        assert chunk.start == row.read, "chunks follow each other"
        row.read += len(chunk.tokens)
        prompt, script = self.prompts[row.owner], self.scripts[row.owner]
        row.emitted, row.window = chunk.total - len(prompt) + (chunk.known_root >= 0), 1
        whole = self._whole(row)
        assert list(chunk.tokens) == whole[chunk.start : chunk.start + len(chunk.tokens)]
        assert 0 < len(chunk.tokens) <= key.chunk
        touched = self._touch(row, chunk.start + len(chunk.tokens))
        for pool in filter(None, (self.target, self.draft)):
            assert pool.read(row.table, chunk.start) == whole[: chunk.start], "KV of the tokens before the chunk"
            pool.write(row.table, chunk.start, chunk.tokens)
        if chunk.start + len(chunk.tokens) < chunk.total:
            return [], Status.FREE, touched
        row.seq_len = chunk.total
        if chunk.known_root >= 0:
            assert chunk.known_root == script[row.emitted - 1], "the known root is the last token that was emitted"
            row.status = Status.LIVE
            return [], Status.LIVE, touched
        return self._emit(row, 1), row.status, touched

    def _emit(self, row: Row, length: int) -> list[int]:
        script = self.scripts[row.owner]
        run = script[row.emitted : row.emitted + min(length, row.budget)]
        if STOP in run:
            run = run[: run.index(STOP) + 1]
        if BROKEN in run:
            run = run[: run.index(BROKEN)]
            row.emitted, row.status = row.emitted + len(run), Status.FAILED
            return run
        row.emitted, row.budget = row.emitted + len(run), row.budget - len(run)
        row.status = Status.STOPPED if STOP in run else Status.LENGTH if row.budget == 0 else Status.LIVE
        return run

    def _cycle(self, key: GraphKey, message: Message) -> tuple[RingEntry, dict[int, int]]:
        self.cycles += 1
        tokens: list[list[int]] = []
        touched: dict[int, int] = {}
        for index in message.lanes:
            row = self.rows[index]
            if row.status != Status.LIVE:
                self.inert_lanes += 1
                tokens.append([])
                continue
            touched |= self._touch(row, row.seq_len + self.plan.window_width)
            whole, nobodys = self._whole(row), [-1] * self.plan.window_width
            assert self.target.read(row.table, row.seq_len) == whole[: row.seq_len]
            if self.draft is not None:
                self.draft.write(row.table, row.seq_len, nobodys)
                self.draft.write(row.table, row.seq_len - row.window + 1, whole[row.seq_len - row.window + 1 : row.seq_len + 1])
            self.target.write(row.table, row.seq_len, nobodys)
            run = self._emit(row, self.rng.randint(1, key.shape.accept_width))
            self.target.write(row.table, row.seq_len, whole[row.seq_len : row.seq_len + len(run)])
            row.seq_len, row.window = row.seq_len + len(run), len(run)
            tokens.append(run)
        return RingEntry(tokens, [self.rows[i].status for i in message.lanes]), touched


def expected(script: list[int], budget: int) -> tuple[list[int], str]:
    for length, token in enumerate(script[:budget], 1):
        if token == BROKEN:
            return script[: length - 1], "error"
        if token == STOP:
            return script[:length], "stop"
    return script[:budget], "length"


class Case:
    """One run: requests, a pool, and a device."""

    def __init__(self, plan: Plan, seed: int, count: int, longest: int, budget: int, ends: bool) -> None:
        rng = random.Random(seed)
        self.rng, self.plan = rng, plan
        self.requests: list[Request] = []
        prompts, scripts = [], []
        while len(prompts) < count:
            prompt = [rng.randrange(2, 50) for _ in range(rng.randint(1, longest))]
            if prompts and rng.random() < 0.7:
                # It begins as another one does, or goes on where that one's output ends.
                other = rng.randrange(len(prompts))
                known = [*prompts[other], *(token for token in scripts[other] if token > STOP)]
                prompt = [*known[: rng.randint(1, longest)], *prompt[: rng.randint(0, 3)]][:longest]
            try:
                check_prompt(prompt, plan)
            except RequestError:
                longest -= 1
                continue
            script = [rng.randrange(2, 50) for _ in range(plan.max_context)]
            if ends and rng.random() < 0.6:
                script[rng.randrange(budget)] = rng.choice([STOP, STOP, BROKEN])
            params = SamplingParams(max_tokens=rng.randint(1, budget), seed=len(prompts))
            maximum = min(params.max_tokens, plan.max_context - len(prompt))
            self.requests.append(Request(index=len(prompts), prompt=prompt, params=params, stop_ids=(STOP,), budget=maximum))
            prompts.append(prompt)
            scripts.append(script)
        self.device = Device(plan, prompts, scripts, rng)
        self.scheduler = Scheduler(plan, self.device, sampling=GREEDY)
        for pool in filter(None, (self.device.target, self.device.draft)):
            pool.final = self.scheduler.allocator._key_of

    def run(self, abort_chance: float = 0.0) -> None:
        waiting = list(self.requests)
        seen = dict.fromkeys(self.requests, 0)
        ended: list[Request] = []
        for _ in range(MAX_STEPS):
            while waiting and self.rng.random() < 0.7:
                self.scheduler.add(waiting.pop(0))
            added = self.requests[: len(self.requests) - len(waiting)]
            if added and self.rng.random() < abort_chance:
                self.scheduler.abort(self.rng.choice(added))
            updated = self.scheduler.step()
            assert len(set(updated)) == len(updated), "a request is reported once a step"
            for request in updated:
                assert len(request.output) > seen[request] or request.finish_reason is not None
                seen[request] = len(request.output)
                ended += [request] * (request.finish_reason is not None)
            if not waiting and not self.scheduler.busy:
                break
        else:
            pytest.fail(f"no end after {MAX_STEPS} steps")
        self.check(ended)

    def check(self, ended: list[Request]) -> None:
        allocator = self.scheduler.allocator
        assert allocator.num_used == 0
        assert allocator.num_free == self.plan.num_pages - 1
        assert len(allocator._idle) == len(allocator._key_of)
        assert self.device.in_flight == 0
        assert sorted(self.scheduler._free_rows) == list(range(self.plan.max_rows))
        assert len(ended) == len(set(ended)), "a request ends once"
        for request in self.requests:
            tokens, reason = expected(self.device.scripts[request.index], request.budget)
            assert request.row is NO_ROW
            if request.finish_reason in ("memory", "abort"):
                assert request.output == tokens[: len(request.output)]
            else:
                assert (request.output, request.finish_reason) == (tokens, reason)
                assert (request.error is not None) == (reason == "error")
            if request.finish_reason == "memory":
                assert self.plan.pages_for(request.committed + self.plan.window_width) > self.plan.num_pages - 1
            assert sum(request.metrics.cycle_tokens) == max(0, len(request.output) - 1)


SHAPES = [(4, 1, 5), (3, 3, 10), (5, 4, 16)]


@st.composite
def cases(draw: st.DrawFn, tight: bool = False) -> Case:
    shape = draw(st.sampled_from([*SHAPES, None]))
    rows = draw(st.integers(1, 4))
    page_size = draw(st.sampled_from([1, 3, 16]))
    run_ahead = draw(st.integers(0, 3))
    runtime = {"name": "eager", "max_rows": rows, "page_size": page_size, "cycles_in_flight": run_ahead + 1, "prefill_chunks": [4, 8]}
    roomy = make("eagle3" if shape else "none", shape=shape, runtime=runtime)
    if tight:
        minimum = roomy.pages_for(4 + roomy.tokens_in_flight)
        runtime["num_pages"] = minimum + draw(st.integers(0, roomy.pages_for(40)))
    plan = make("eagle3" if shape else "none", shape=shape, runtime=runtime)
    count, longest, budget = draw(st.integers(1, 7)), draw(st.integers(1, 24)), draw(st.integers(1, 40))
    return Case(plan, draw(st.integers(0, 2**16)), count, longest, budget, draw(st.booleans()))


@given(cases())
def test_outputs_follow_the_script(case: Case) -> None:
    case.run()
    assert all(r.preempted == 0 and r.finish_reason != "memory" for r in case.requests)


@settings(max_examples=80)
@given(cases(tight=True))
def test_outputs_follow_the_script_when_pages_are_short(case: Case) -> None:
    case.run()


@given(cases(tight=True), st.sampled_from([0.05, 0.4]))
def test_aborts_at_any_time(case: Case, chance: float) -> None:
    case.run(chance)


def two_rows(**runtime: object) -> Plan:
    return make("none", runtime={"name": "eager", "max_rows": 2, "page_size": 16, "prefill_chunks": [8, 16], **runtime})


def test_two_rows_that_do_not_fit_together_both_finish() -> None:
    """A preempted row finds its full pages again when it returns; the older row must still get its page."""
    case = Case(two_rows(num_pages=3), seed=0, count=2, longest=15, budget=30, ends=False)
    for request in case.requests:
        request.budget = 30
    case.run()
    assert [r.finish_reason for r in case.requests] == ["length", "length"]
    assert sum(r.preempted for r in case.requests) > 0


def test_a_row_alone_and_too_big_ends_with_a_reason() -> None:
    case = Case(two_rows(num_pages=1), seed=1, count=1, longest=4, budget=30, ends=False)
    case.requests[0].budget = 30
    case.run()
    assert case.requests[0].finish_reason == "memory"
    assert case.requests[0].committed + 1 > 16


def test_no_cycle_for_requests_that_end_in_prefill() -> None:
    case = Case(two_rows(), seed=2, count=2, longest=4, budget=1, ends=False)
    case.run()
    assert case.device.cycles <= 1, "only the first row may be in a cycle, launched before its end was known"
    assert [len(r.output) for r in case.requests] == [1, 1]


@pytest.mark.parametrize("run_ahead", [0, 1, 3])
def test_launches_run_ahead_of_what_was_read(run_ahead: int) -> None:
    case = Case(two_rows(cycles_in_flight=run_ahead + 1), seed=3, count=1, longest=4, budget=12, ends=False)
    case.requests[0].budget = 12
    maximum = 0
    case.scheduler.add(case.requests[0])
    while case.scheduler.busy:
        case.scheduler.step()
        maximum = max(maximum, case.device.in_flight)
    assert maximum == run_ahead
    assert case.device.inert_lanes == run_ahead, "as many cycles as were queued when the row ended"


def test_chunks_are_the_largest_size_and_a_rest() -> None:
    assert chunked(0, 1, (8, 16)) == [(0, 1)]
    assert chunked(0, 16, (8, 16)) == [(0, 16)]
    assert chunked(0, 17, (8, 16)) == [(0, 16), (16, 1)]
    assert chunked(0, 40, (8, 16)) == [(0, 16), (16, 16), (32, 8)]


def test_a_request_without_a_row_has_no_state_of_a_row() -> None:
    request = Request(index=0, prompt=[1], params=SamplingParams(), stop_ids=(), budget=1)
    with pytest.raises(AttributeError):
        _ = request.row.pages
    with pytest.raises(AttributeError, match="prefilled"):
        request.row.prefilled = 1
    request.begin(2, [5, 6])
    row = request.row
    row.prefilled = row.queued_cycles = 3
    request.row = NO_ROW
    request.begin(1, [7])
    assert (request.row.index, request.row.pages, request.row.prefilled, request.row.queued_cycles) == (1, [7], 0, 0)
    assert row.pages == [5, 6]

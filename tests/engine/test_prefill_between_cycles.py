"""Prompts that are read between cycles: waiting times of rows, prompts that share a launch, and tokens under any interleaving."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphspec.api.llm import LLM, SamplingParams
from graphspec.engine.admission import choose_prefill, next_chunk
from graphspec.engine.request import Request
from graphspec.engine.scheduler import Scheduler
from graphspec.errors import ConfigError
from graphspec.graphs.programs import PrefillKey, tokens_of
from graphspec.shapes import GREEDY, MAX_PADDING, SAMPLED, GraphKey
from tests.drafters.test_mtp_engine import counting_head, counting_target
from tests.support.chunking import chunked
from tests.support.engines import CHAIN, TREE, mirror_pair
from tests.support.mtp_checkpoints import add_heads
from tests.support.plans import model_facts
from tests.support.plans import plan as make

from .test_run_ahead import TimedDevice, Times
from .test_scheduler import MAX_STEPS, Case

if TYPE_CHECKING:
    from pathlib import Path

    from graphspec.graphs.programs import Key
    from graphspec.graphs.stages.mailbox import Message

CHUNKS = (16, 64, 256)
PER_TOKEN = 0.01
CYCLE = 1.0
LENGTHS, MAX_TOKENS = (1, 3, 4, 5, 8, 15, 16, 17, 33), 18


class PacedDevice(TimedDevice):
    """A cycle takes one second, a prompt's chunk longer the more tokens its program reads; notes when each row's cycles end."""

    def __init__(self, device: Any, host: float) -> None:
        super().__init__(device, Times((host, host), (0.0, 0.0)))
        self.ends: dict[int, list[float]] = {}
        self.prompt_tokens: list[int] = []
        """Padded tokens of prompts that were launched before each cycle."""
        self.prompt_launches: list[int] = []
        """The launches that read them."""
        self._unread_tokens = self._unread_launches = 0

    def launch(self, key: Key, message: Message) -> int:
        is_cycle = isinstance(key, GraphKey)
        takes = CYCLE if is_cycle else tokens_of(key) * PER_TOKEN
        self.times = replace(self.times, device=(takes, takes))
        number = super().launch(key, message)
        if is_cycle:
            self.prompt_tokens.append(self._unread_tokens)
            self.prompt_launches.append(self._unread_launches)
            self._unread_tokens = self._unread_launches = 0
            for owner in self.lanes[number].values():
                self.ends.setdefault(owner, []).append(self.free_at)
        else:
            self._unread_tokens += tokens_of(key)
            self._unread_launches += 1
        return number


@pytest.mark.parametrize("cycles_in_flight", [1, 2, 3])
@pytest.mark.parametrize("budget", [64, 256, None])
def test_a_running_row_waits_for_one_chunk_at_most(cycles_in_flight: int, budget: int | None) -> None:
    """Eight prompts of 1,000 tokens arrive while one row decodes: no gap between its cycles exceeds two cycles and a chunk."""
    runtime = {
        "name": "eager", "max_rows": 9, "buckets": [1, 4, 16], "cycles_in_flight": cycles_in_flight, "prefill_chunks": list(CHUNKS),
        "prefill_tokens_per_cycle": budget,
    }  # fmt: skip
    plan = make("none", runtime=runtime, target=model_facts(max_position_embeddings=2048))
    case = Case(plan, seed=1, count=9, longest=4, budget=300, ends=False)
    for request in case.requests[1:]:
        case.device.prompts[request.index] = request.prompt = [request.index, *[5] * 999]  # none shares another's pages
    for request, tokens in zip(case.requests, [300, *[9] * 8], strict=True):
        request.budget = tokens
    device = PacedDevice(case.device, host=0.1)
    case.device = case.scheduler.launcher = device
    waiting, steps = list(case.requests), 0
    while waiting or case.scheduler.busy:
        if steps % 5 == 0 and waiting:
            case.scheduler.add(waiting.pop(0))
        case.scheduler.step()
        steps += 1
    assert all(len(request.output) == request.budget for request in case.requests)
    maximum = plan.prefill_tokens_per_cycle
    assert maximum == (budget or 256) and max(device.prompt_tokens) <= maximum
    ends = device.ends[0]
    gaps = [later - earlier for earlier, later in pairwise(ends)]
    assert max(gaps) <= 2 * CYCLE + maximum * PER_TOKEN
    assert sum(gap > CYCLE + 0.3 for gap in gaps) >= 8 * 1000 // maximum, "prompts were read between this row's cycles"
    if cycles_in_flight > 1:
        assert max(device.idle[cycles_in_flight:]) == 0.0, "prompts keep the device as busy as cycles do"


@pytest.mark.parametrize(("budget", "maximum"), [(None, 1), (256, 1), (1024, 4)])
def test_chunks_before_a_cycle_take_no_longer_than_one_of_their_budget(budget: int | None, maximum: int) -> None:
    """Prompts that leave room in the budget arrive together while a row decodes: a launch costs the weights, however little it reads."""
    runtime = {
        "name": "eager", "max_rows": 9, "buckets": [16], "prefill_chunks": list(CHUNKS), "prefill_lanes": 1,
        "prefill_tokens_per_cycle": budget,
    }  # fmt: skip
    case = Case(make("none", runtime=runtime), seed=1, count=9, longest=4, budget=300, ends=False)
    for request in case.requests[1:]:
        case.device.prompts[request.index] = request.prompt = [request.index, *[5] * 39]
    device = PacedDevice(case.device, host=0.1)
    case.device = case.scheduler.launcher = device
    for request in case.requests:
        case.scheduler.add(request)
        for _ in range(3 if request is case.requests[0] else 0):
            case.scheduler.step()
    for request, tokens in zip(case.requests, [60, *[3] * 8], strict=True):
        request.budget = tokens
    while case.scheduler.busy:
        case.scheduler.step()
    while_decoding = device.prompt_launches[1:]
    assert max(while_decoding) == maximum and sum(while_decoding) >= 8
    for launches, tokens in zip(while_decoding, device.prompt_tokens[1:], strict=True):
        assert not launches or tokens + (launches - 1) * MAX_PADDING <= (budget or 256)


def test_the_budget_holds_at_least_one_chunk() -> None:
    with pytest.raises(ConfigError, match=r"runtime\.prefill_tokens_per_cycle: expected at least 16, the smallest prefill chunk, found 8"):
        make("none", runtime={"prefill_chunks": [16, 32], "prefill_tokens_per_cycle": 8})
    assert make("none", runtime={"prefill_chunks": [512]}).prefill_tokens_per_cycle == 512


@given(st.integers(0, 400), st.integers(1, 2000), st.sampled_from([(16, 64, 256), (16, 64, 256, 1024), (8, 16)]))
def test_chunks_end_where_they_end_in_a_prompt_that_is_read_whole(pages: int, left: int, sizes: tuple[int, ...]) -> None:
    """From any page on, the ends are multiples of the sizes; where no padding speaks against it, the very ends of a prompt read from 0."""
    start = pages * 16
    total = start + left
    ends = [begin + length for begin, length in chunked(start, total, sizes)]
    assert ends[-1] == total
    assert all(end % sizes[0] == 0 for end in ends[:-1])
    if sizes[-1] <= MAX_PADDING:
        whole = [begin + length for begin, length in chunked(0, total, sizes)]
        assert ends == [end for end in whole if end > start]


def keys(lanes: int, sampling: Any = GREEDY) -> list[PrefillKey]:
    return [
        *(PrefillKey(size, sampling) for size in CHUNKS),
        *(PrefillKey(size, sampling, lanes) for size in CHUNKS if lanes * size <= 256),
    ]


@pytest.mark.parametrize(
    ("left", "maximum", "expected"),
    [
        ([9], 256, ((1, 16), [9])),
        ([9, 12, 3], 256, ((4, 16), [9, 12, 3])),
        ([40, 60, 9, 64, 64], 256, ((4, 64), [40, 60, 9, 64])),
        ([40, 60, 9, 64, 64], 255, ((4, 16), [16, 16, 9, 16])),
        ([1000, 12], 256, ((1, 256), [256])),
        ([1000, 1000], 100, ((1, 64), [64])),
        ([9, 9], 16, ((1, 16), [9])),
        ([9], 15, None),
    ],
)
def test_short_prompts_share_a_launch_and_long_ones_fill_theirs(left: list[int], maximum: int, expected: Any) -> None:
    chosen = choose_prefill([(0, tokens) for tokens in left], keys(4), maximum)
    found = None if chosen is None else ((chosen[0].lanes, chosen[0].chunk), chosen[1])
    assert found == expected


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LLM]:
    """Engines of four rows and small pages whose drafts are always right, so that wrong draft KV shows as a miss."""
    path: Path = tmp_path_factory.mktemp("engines")
    pair = mirror_pair(path / "pair")
    heads = counting_target(path / "heads", "mimo")
    add_heads(heads, *[counting_head("mimo", index, "hidden") for index in range(3)], num_nextn_predict_layers=3)
    runtime: dict[str, Any] = {
        "runtime": "eager", "max_rows": 4, "buckets": [1, 2, 4], "page_size": 4, "prefill_chunks": [4, 8, 16], "cycles_in_flight": 2,
    }  # fmt: skip
    made = {
        "none": pair.llm(variant="none", **runtime),
        "chain": pair.llm(**CHAIN, **runtime),
        "tree": pair.llm(**TREE, **runtime),
        "heads": LLM(model=str(heads), variant="mtp", **runtime),
    }
    for llm in made.values():
        assert {(4, 4)} == {shape for shape in llm.plan.prefill_shapes if shape[0] > 1}
        llm.warm_up(4)
        llm.warm_up(4, sampling=SAMPLED)
    return made


def run(llm: LLM, requests: list[Request], rng: random.Random, *, budget: int, pages: int, aborts: float = 0.0) -> None:
    """Serve the requests, which arrive at random; pages beyond ``pages`` are taken away."""
    plan = replace(llm.plan, prefill_tokens_per_cycle=budget)
    scheduler = Scheduler(plan, llm.cycle, None)
    for sampling in (GREEDY, SAMPLED):
        scheduler.add_programs(sampling, plan.buckets, llm.cycle.prefills(sampling))
    scheduler.allocator.allocate(max(0, scheduler.allocator.num_free - pages))
    waiting = list(requests)
    for _ in range(MAX_STEPS):
        while waiting and rng.random() < 0.6:
            scheduler.add(waiting.pop(0))
        if scheduler.live and rng.random() < aborts:
            scheduler.abort(rng.choice(scheduler.live))
        scheduler.step()
        if not waiting and not scheduler.busy:
            break
    else:
        pytest.fail(f"no end after {MAX_STEPS} steps")
    assert llm.cycle.in_flight == 0 and scheduler.allocator.num_free == min(pages, plan.num_pages - 1)


def requests_of(llm: LLM, rng: random.Random, count: int, *, growing: bool) -> list[Request]:
    made = []
    for index in range(count):
        length = rng.choice(LENGTHS[:4] if growing else LENGTHS)
        temperature = rng.choice([0.0, 0.0, 0.8])
        params = SamplingParams(max_tokens=MAX_TOKENS if growing else rng.randint(1, MAX_TOKENS), temperature=temperature, seed=index)
        prompt = [rng.randrange(llm.plan.target.vocab_size - 1) for _ in range(length)]
        made.append(Request(index, prompt, params, (), params.max_tokens, priority=rng.choice([0, 0, 1])))
    return made


def again(request: Request) -> Request:
    return Request(request.index, request.prompt, request.params, request.stop_ids, request.budget)


@pytest.mark.parametrize("name", ["none", "chain", "tree", "heads"])
def test_no_interleaving_changes_a_token(engines: dict[str, LLM], name: str) -> None:
    """Each request has the tokens it has alone, and, where it never left its row, the same number of them from every cycle."""
    llm, shared = engines[name], 0
    minimum = llm.plan.pages_for(max(LENGTHS) + MAX_TOKENS + llm.plan.window_width)
    launch = llm.cycle.launch

    def counting(key: Key, message: Message) -> int:
        nonlocal shared
        shared += len(message.chunks) > 1
        return launch(key, message)

    def check(seed: int) -> int:
        rng = random.Random(seed)
        requests = requests_of(llm, rng, 6, growing=seed == 1)
        budget, pages = (4, 17, 32)[seed], (1000, minimum, minimum)[seed]
        run(llm, requests, rng, budget=budget, pages=pages, aborts=(0.0, 0.0, 0.1)[seed])
        for request in requests:
            alone = again(request)
            run(llm, [alone], rng, budget=256, pages=1000)
            if request.finish_reason == "abort":
                assert request.output == alone.output[: len(request.output)]
                continue
            assert (request.output, request.finish_reason) == (alone.output, "length")
            if not request.preempted:
                assert request.metrics.cycle_tokens == alone.metrics.cycle_tokens
        return sum(request.preempted for request in requests)

    llm.cycle.launch = counting  # type: ignore[method-assign]
    try:
        sent_back = sum(check(seed) for seed in range(3))
    finally:
        del llm.cycle.launch  # type: ignore[method-assign]
    assert sent_back and shared, "pages were short, and prompts shared launches"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), min_size=1, max_size=6), st.integers(1, 300))
def test_a_launch_is_within_its_limit_and_reads_something_of_every_lane(prompts: list[tuple[int, int]], maximum: int) -> None:
    ranges = [(start, start + left) for start, left in prompts]
    chosen = choose_prefill(ranges, keys(4), maximum)
    assert (chosen is None) == (maximum < CHUNKS[0])
    if chosen is not None:
        key, lengths = chosen
        assert tokens_of(key) <= maximum and 1 <= len(lengths) <= min(key.lanes, len(ranges))
        for (start, total), length in zip(ranges, lengths, strict=False):
            assert 1 <= length <= min(key.chunk, total - start)
            assert length == next_chunk(start, total, (key.chunk,)) or key.lanes == 1

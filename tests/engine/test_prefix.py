"""Prefix sharing: no token and no draft changes, no shared page is written, no page is lost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from graphspec.api.llm import LLM, SamplingParams
from graphspec.config.catalog import PLAIN_DECODING
from graphspec.config.schema import AdaptiveConfig, Config, RuntimeConfig
from graphspec.drafters.ngram_trie.proposer import TrieProposer
from graphspec.engine.pages import PageAllocator, PrefixCache
from graphspec.engine.request import NO_ROW, Request
from graphspec.engine.scheduler import Scheduler
from graphspec.errors import ConfigError
from graphspec.facts import RopeFacts
from graphspec.graphs.cycle import Cycle, RingEntry
from graphspec.graphs.host_step import RowMirror
from graphspec.graphs.programs import Key
from graphspec.graphs.stages.mailbox import Message, SharedPages
from graphspec.graphs.stages.prefill import page_feature
from graphspec.kernels import op_of
from graphspec.shapes import GREEDY, SAMPLED, SamplingClass
from tests.graphs.test_capture import keys_of, make_cycle, make_plan
from tests.support.depths import RandomDepth
from tests.support.engines import CHAIN, TREE, ids, mirror_pair, prompts
from tests.support.plans import model_facts
from tests.support.plans import plan as small_plan
from tests.support.tiny import STRUCTURES, same_bits

PAGE_FEATURE_WRITE = op_of("page_feature_write")

PAGE = 8
POOLS = ("target_kv", "draft_kv", "page_feature")
COVERED = {
    "none": "none", "chain": "eagle3", "tree": "eagle3", "two-words": "eagle3", "hidden-feature": "eagle", "static-tree": "eagle",
    "no-feature": "standalone", "one-head": "mtp", "head-per-step": "mtp", "latent-experts": "mtp", "own-history": "ngram",
    "host-tree": "ngram_trie", "target-kv": "assistant",
}  # fmt: skip
"""The variant of each structure."""


def pools(cycle: Cycle) -> list[torch.Tensor]:
    there = {slot.name for slot in cycle.arena.slots}
    return [cycle.arena[name] for name in POOLS if name in there]


class Bench:
    """A scheduler over a tiny cycle; where noise is sampled, every other request is greedy.

    It is the launcher as well, and sees that no launch writes a page that others may find.
    """

    def __init__(self, structure: str, sampling: SamplingClass, *, shares: bool, **keys: Any) -> None:
        plan = make_plan(structure, **{"page_size": PAGE, "prefill_chunks": [PAGE], "buckets": [4], "prefix_cache": shares, **keys})
        self.plan, self.cycle, self.sampling = plan, make_cycle(plan, None), sampling
        self.cycle.prepare(keys_of(plan, sampling))
        proposer = TrieProposer(plan) if plan.variant.drafter == "host" else None
        policy = RandomDepth(plan) if plan.depths else None
        self.scheduler = Scheduler(plan, self, sampling, proposer, None, policy)
        self.requests: list[Request] = []
        self.fails = False

    @property
    def in_flight(self) -> int:
        return self.cycle.in_flight

    def launch(self, key: Key, message: Message) -> int:
        final = sorted(self.scheduler.allocator._key_of)
        before = [pool[:, :, final] for pool in pools(self.cycle)]
        ticket = self.cycle.launch(key, message)
        if self.fails:
            raise RuntimeError("after the launch")
        assert all(same_bits(was, pool[:, :, final]) for was, pool in zip(before, pools(self.cycle), strict=True)), (
            "a shared page is written"
        )
        return ticket

    def read(self, ticket: int) -> RingEntry:
        return self.cycle.read(ticket)

    def add(self, prompt: Sequence[int], length: int = 12, **options: Any) -> Request:
        number = len(self.requests)
        params = SamplingParams(max_tokens=length, temperature=0.8 * (self.sampling.noise and number % 2), seed=number, **options)
        self.requests.append(Request(index=number, prompt=list(prompt), params=params, stop_ids=(), budget=length))
        self.scheduler.add(self.requests[-1])
        return self.requests[-1]

    def run(self, *prompt_ids: Sequence[int]) -> list[Request]:
        added = [self.add(prompt) for prompt in prompt_ids]
        while self.scheduler.busy:
            self.scheduler.step()
        return added

    def kv(self, tokens: int) -> list[torch.Tensor]:
        """What the pools hold of the first ``tokens`` of the row that was used last, while it was alone; of the drafter, what is final."""
        table, shift = self.cycle.arena["page_table_RP"][0].long(), self.plan.variant.shift
        return [pool[:, :, table].flatten(2, 3)[:, :, shift : tokens - self.plan.lookback] for pool in pools(self.cycle)[:2]]


def numbers(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 61), k=count)


@pytest.mark.parametrize("structure", [pytest.param(s, marks=pytest.mark.covers(COVERED[s], "prefix sharing")) for s in COVERED])
def test_tokens_drafts_and_kv_are_those_without(structure: str) -> None:
    """Of greedy and seeded requests in turn, in float32; bit for bit where the chunks are the same."""
    shared, alone = (Bench(structure, SAMPLED, shares=shares) for shares in (True, False))
    first = numbers(37, 1)
    begin = [bench.run(first)[0] for bench in (shared, alone)]
    fork = [*first[:30], *numbers(5, 2)]
    forks = [bench.run(fork)[0] for bench in (shared, alone)]
    assert forks[0].metrics.cached_tokens == 24 and forks[1].metrics.cached_tokens == 0
    assert all(same_bits(left, right) for left, right in zip(shared.kv(len(fork)), alone.kv(len(fork)), strict=True))
    # Pages that were filled while decoding, the same prompt again, and one prompt several times at once.
    prompt_ids = [[*first, *begin[0].output[:9], *numbers(3, 3)], first, *[numbers(21, 4)] * 3]
    for bench in (shared, alone):
        bench.run(prompt_ids[0])
        bench.run(*prompt_ids[1:])
    assert [r.output for r in shared.requests] == [r.output for r in alone.requests]
    if structure != "host-tree":
        assert [r.metrics.cycle_tokens for r in shared.requests] == [r.metrics.cycle_tokens for r in alone.requests]
    cached = [r.metrics.cached_tokens for r in shared.requests]
    assert cached[2] >= 40, "pages of the output too"
    assert cached[3:] == [32, 0, 16, 16]
    assert all(r.metrics.cached_tokens == 0 for r in alone.requests) and len(alone.scheduler.allocator._key_of) == 0


@pytest.mark.parametrize("chunk", [1, 16])
def test_heads_after_a_shared_prefix_in_any_chunks(chunk: int) -> None:
    """Chunks shorter than the lookback, whose rows are in shared pages, and chunks longer than a page."""
    shared, alone = (Bench("head-per-step", GREEDY, shares=shares, prefill_chunks=[chunk]) for shares in (True, False))
    first = numbers(27, 5)
    for bench in (shared, alone):
        for length in (27, 26, 25, 16):
            bench.run(first[:length])
    assert [r.metrics.cached_tokens for r in shared.requests] == [0, 24, 16, 8], "the last two tokens of a prompt are read"
    assert [r.output for r in shared.requests] == [r.output for r in alone.requests]
    assert [r.metrics.cycle_tokens for r in shared.requests] == [r.metrics.cycle_tokens for r in alone.requests]


PRESSED: dict[str, dict[str, Any]] = {
    "none": {"cycles_in_flight": 3},
    "tree": {"cycles_in_flight": 2},
    "chain": {"cycles_in_flight": 2, "adaptive": AdaptiveConfig(depths=[0, 2], backlog=9)},
    "head-per-step": {"cycles_in_flight": 2},
}


@pytest.mark.parametrize("structure", PRESSED)
def test_pages_short_aborts_and_preemption(structure: str) -> None:
    rng = random.Random(11)
    keys = {"max_rows": 4, "page_size": 4, "prefill_tokens_per_cycle": 4096, **PRESSED[structure]}
    prompt_ids: list[list[int]] = []
    for number in range(14):
        other = rng.choice(prompt_ids) if prompt_ids else []
        prompt_ids.append([*other[: rng.randrange(20)], *numbers(rng.randrange(1, 16), number)])
    lengths = [rng.randrange(6, 26) for _ in prompt_ids]
    alone = Bench(structure, GREEDY, shares=False, **keys)
    for prompt, length in zip(prompt_ids, lengths, strict=True):
        alone.add(prompt, length)
    while alone.scheduler.busy:
        alone.scheduler.step()
    pressed = Bench(structure, GREEDY, shares=True, num_pages=26, **keys)
    allocator = pressed.scheduler.allocator
    for prompt, length in zip(prompt_ids, lengths, strict=True):
        pressed.add(prompt, length)
    while pressed.scheduler.busy:
        pressed.scheduler.step()
        if rng.random() < 0.03:
            pressed.scheduler.abort(rng.choice(pressed.requests))
    for request, expected in zip(pressed.requests, alone.requests, strict=True):
        if request.finish_reason == "abort":
            assert request.output == expected.output[: len(request.output)]
        else:
            assert (request.output, request.finish_reason) == (expected.output, "length")
    assert sum(r.preempted for r in pressed.requests) > 0 and sum(r.metrics.cached_tokens for r in pressed.requests) > 0
    assert (allocator.num_used, allocator.num_free) == (0, 26)
    assert 0 < len(allocator._key_of) == len(allocator._idle) <= 26


def test_an_interrupted_step_forgets_the_pages() -> None:
    bench = Bench("chain", GREEDY, shares=True)
    prompt = numbers(29, 7)
    wanted = bench.run(prompt)[0].output
    bench.fails = True
    request = bench.add(prompt)
    with pytest.raises(RuntimeError):
        bench.scheduler.step()
    assert request.row.published > 0
    # What the interrupted launch left in the pages is not known.
    for pool in pools(bench.cycle):
        pool.fill_(float("nan"))
    bench.fails = False
    bench.cycle.reset()
    bench.scheduler.recover()
    assert len(bench.scheduler.allocator._key_of) == 0 and request.row is NO_ROW
    while bench.scheduler.busy:
        bench.scheduler.step()
    assert (request.output, request.metrics.cached_tokens) == (wanted, 0)
    assert bench.run(prompt)[0].metrics.cached_tokens == 24


def test_a_prompt_counted_for_penalties_is_read_whole() -> None:
    sampling = SamplingClass(penalties=True)
    shared, alone = (Bench("chain", sampling, shares=shares) for shares in (True, False))
    for bench in (shared, alone):
        for _ in range(2):
            bench.add(numbers(20, 8), repetition_penalty=1.7)
            while bench.scheduler.busy:
                bench.scheduler.step()
        bench.run(numbers(20, 8))
    assert [r.output for r in shared.requests] == [r.output for r in alone.requests]
    assert [r.metrics.cached_tokens for r in shared.requests] == [0, 0, 16], "others find what it read"


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_perfect_draft_stays_perfect(tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any]) -> None:
    """This draft computes what the target does; a feature or slot that is off by one after a shared prefix shows as a miss."""
    pair = mirror_pair(tmp_path_factory.mktemp("twin"))
    llm: LLM = pair.llm(**shape, page_size=4, max_rows=4, cycles_in_flight=2)
    begin = prompts(1, (18,))[0]
    prompt_ids = [[*begin, *tail] for tail in ([], *prompts(5, (1, 2, 3, 4, 7), seed=2))]
    params = SamplingParams(max_tokens=21, ignore_eos=True)
    whole = llm.plan.shape.accept_width
    for round_number in range(2):
        outputs = llm.generate(prompt_ids, params)
        assert ids(outputs) == [pair.greedy(prompt, 21, ignore_eos=True) for prompt in prompt_ids]
        assert [output.metrics.acceptance_length for output in outputs] == [whole] * len(prompt_ids)
        cached = [output.cached_tokens for output in outputs]
        assert cached[1:] == [16, *[16] * 4] if round_number == 0 else cached == [16, 16, 16, 20, 20, 24]
        assert llm.metrics is not None and llm.metrics.cached_tokens == sum(cached)


def test_pages_are_shared_only_with_the_same_salt(tmp_path_factory: pytest.TempPathFactory) -> None:
    pair = mirror_pair(tmp_path_factory.mktemp("pair"))
    prompt, params = [5 + 7 * place % 30 for place in range(40)], SamplingParams(max_tokens=4, ignore_eos=True)
    with pair.llm(**CHAIN, page_size=PAGE, max_rows=4) as llm:

        def cached(*salts: str | None) -> list[int]:
            outputs = llm.generate([prompt] * len(salts), params, cache_salt=salts)
            assert len({tuple(output.token_ids) for output in outputs}) == 1
            return [output.cached_tokens for output in outputs]

        first, again = cached(None)[0], cached(None)[0]
        assert first == 0 < again
        assert cached("a") == [0] and cached("a") == [again] and cached("b") == [0] and cached(None) == [again]
        assert cached("c", "d", "c", None) == [0, 0, again, again], "in one call too"
        [output] = llm.generate([prompt], SamplingParams(max_tokens=4, temperature=1, n=1, seed=3), cache_salt="b")
        assert output.cached_tokens == again
        streams = [llm.submit(prompt, params, cache_salt=salt) for salt in ("b", "e")]
        for stream in streams:
            while not stream.ended:
                stream.wait()
        assert [stream.requests[0].metrics.cached_tokens for stream in streams] == [again, 0]


def test_who_may_share() -> None:
    assert {name for name in STRUCTURES if make_plan(name).prefix_cache} == COVERED.keys(), "null: on where the drafter allows it"
    assert not make_plan("chain", prefix_cache=False).prefix_cache
    unfinished = replace(PLAIN_DECODING, name="unfinished", shares_prefix=False)
    assert not unfinished.resolve_prefix_cache(None, recurrent=False)
    with pytest.raises(ConfigError, match=r"runtime\.prefix_cache: expected null or false: variant unfinished does not declare"):
        unfinished.resolve_prefix_cache(True, recurrent=False)
    assert not PLAIN_DECODING.resolve_prefix_cache(None, recurrent=True)
    with pytest.raises(ConfigError, match=r"runtime\.prefix_cache: expected null or false: the target has recurrent layers"):
        PLAIN_DECODING.resolve_prefix_cache(True, recurrent=True)
    assert Config().runtime.prefix_cache is None and RuntimeConfig(prefix_cache=False).prefix_cache is False


def test_pages_of_one_chain_have_names_of_their_own() -> None:
    """By what comes before, by the salt and, where RoPE depends on it, by the length of the prompt."""

    def names(prompt: list[int], salt: str | None = None, **facts: Any) -> list[bytes]:
        plan = small_plan("none", target=model_facts(**facts), runtime={"page_size": 4})
        request = Request(index=0, prompt=prompt, params=SamplingParams(), stop_ids=(), budget=1, cache_salt=salt)
        cache = PrefixCache(plan, PageAllocator(plan.num_pages))
        return [cache._key(request, index) for index in range(len(prompt) // 4)]

    assert len(set(names([5] * 24))) == 6
    assert names([5] * 24)[:4] == names([5] * 16)
    assert names([6, *[5] * 23])[1] != names([5] * 24)[1]
    salted = [*names([5] * 24), *names([5] * 24, "a"), *names([5] * 24, "b"), *names([5] * 24, "a\0")]
    assert len(set(salted)) == 24 and names([5] * 24, "a") == names([5] * 24, "a")
    dynamic = {"rope": RopeFacts(theta=10000.0, kind="dynamic", factor=2.0)}
    assert names([5] * 24, **dynamic) == names([5] * 24, **dynamic) and names([5] * 24, **dynamic)[0] != names([5] * 16, **dynamic)[0]


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("implementation", ["reference", "native"])
def test_features_at_the_ends_of_pages(size: int, implementation: str) -> None:
    """Against a loop over tokens; what fills no page leaves all pages but the dummy page as they are."""
    plan = make_plan("chain", page_size=size)
    views = make_cycle(plan, None).arena.views(2)
    write = PAGE_FEATURE_WRITE.implementation(implementation)
    generator = torch.Generator().manual_seed(size)
    table = (torch.randperm(plan.num_pages - 1, generator=generator)[: 2 * 8].view(2, 8) + 1).to(torch.int32)
    wanted = views.page_feature.clone()
    for begin, length in ((0, 5), (2, 1), (7, 0), (3, 4), (5, 3), (-(2**40), 0)):
        feature = torch.randn(2, 9, plan.feature_width, generator=generator)
        index = torch.randint(0, 9, (2, 5), generator=generator)
        begins, lengths = torch.tensor([begin, max(begin, 0) + 1]), torch.tensor([length, 0])
        write(views.page_feature, size, table, begins, lengths, feature, index)
        for token in range(length):
            if (begin + token + 1) % size == 0 and (begin + token) // size < 8:
                wanted[0, 0, table[0, (begin + token) // size], 0, 0] = feature[0, index[0, token]]
        assert torch.equal(views.page_feature[:, :, 1:], wanted[:, :, 1:])
    ends = torch.tensor([size, 2 * size])
    assert torch.equal(page_feature(views, table, ends)[:, 0], torch.stack([wanted[0, 0, table[i, i], 0, 0] for i in range(2)]))


def test_kernels_with_a_host_step_know_the_pages() -> None:
    plan = make_plan("none")
    mirror = RowMirror(plan)
    mirror.send(Message(lanes=(1,), shared=[SharedPages(1, [7, 9], [0] * 16)], pages=[(1, 2, 4)]))
    assert mirror.table_RP[1, :4].tolist() == [7, 9, 4, 0]

"""Prefill in chunks: the sizes, how a prompt is split, that no split changes a token, and sizes that are left out when memory is short."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphspec.api.llm import SamplingParams
from graphspec.config.schema import Config, HardwareConfig, ModelConfig, RuntimeConfig
from graphspec.engine.request import Request
from graphspec.engine.scheduler import Scheduler
from graphspec.graphs import memory as memory_module
from graphspec.graphs.memory import GIB, fit_memory, plan_memory
from graphspec.graphs.programs import PrefillKey, prefill_keys
from graphspec.graphs.stages.mailbox import Chunk, MailLayout, Message
from graphspec.plan.plan import make_plan
from graphspec.shapes import CHUNKS, GREEDY, MAX_PADDING, pick_bucket, prefill_chunks
from tests.graphs.test_capture import make_cycle
from tests.graphs.test_capture import make_plan as captured_plan
from tests.support.chunking import chunked
from tests.support.engines import Pair, ids, mirror_pair, prompts
from tests.support.plans import draft_facts, model_facts
from tests.support.plans import plan as small_plan
from tests.support.tape import TapeCapturer

GPU = CHUNKS["cuda"]
LONG = (2047, 2048, 2049)


@pytest.mark.parametrize(
    ("length", "sizes"),
    [
        (9, [16]), (200, [256]), (300, [256, 64]), (600, [256, 256, 256]), (768, [256] * 3), (769, [1024]), (1100, [1024, 256]),
        (1792, [1024, 256, 256, 256]), (1793, [2048]), (2048, [2048]), (2049, [2048, 16]), (5000, [2048, 2048, 1024]),
    ],
)  # fmt: skip
def test_a_long_prompt_fills_large_chunks(length: int, sizes: list[int]) -> None:
    assert [pick_bucket(GPU, part) for _, part in chunked(0, length, GPU)] == sizes


@given(st.integers(1, 9000), st.sets(st.integers(1, 3000), min_size=1, max_size=6).map(lambda sizes: tuple(sorted(sizes))))
def test_chunks_cover_a_prompt_once_with_little_padding(length: int, sizes: tuple[int, ...]) -> None:
    chunks = chunked(0, length, sizes)
    assert [start for start, _ in chunks] == [sum(part for _, part in chunks[:i]) for i in range(len(chunks))]
    assert sum(part for _, part in chunks) == length
    for _, part in chunks:
        padding = pick_bucket(sizes, part) - part
        assert padding < MAX_PADDING or part < sizes[0]


@given(st.integers(1, 9000), st.integers(0, 40), st.sampled_from([GPU, GPU[:-1], (16, 64, 256)]))
def test_chunks_after_a_shared_prefix_are_those_of_the_whole_prompt(length: int, largest: int, sizes: tuple[int, ...]) -> None:
    shared = min(largest, (length - 1) // sizes[-1]) * sizes[-1]
    assert chunked(shared, length, sizes) == [chunk for chunk in chunked(0, length, sizes) if chunk[0] >= shared]


def test_sizes_follow_device_and_context() -> None:
    assert prefill_chunks("cuda", 131072) == GPU and GPU[-1] == 2048
    assert prefill_chunks("cuda", 1793) == GPU and prefill_chunks("cuda", 1792) == GPU[:-1]
    assert prefill_chunks("cuda", 512) == prefill_chunks("cpu", 64) == (16, 64, 256)
    assert small_plan(runtime={"prefill_chunks": [5, 7]}, device="cuda").prefill_chunks == (5, 7), "what was given stays"


def test_a_cycle_sends_no_more_for_larger_chunks() -> None:
    one = {"page_size": 1, "buckets": [1], "max_rows": 1}
    small, large = (small_plan("eagle3", runtime={"prefill_chunks": chunks, **one}) for chunks in ([256], [256, 2048]))
    layouts = MailLayout.of(small), MailLayout.of(large)
    assert layouts[0].joins == layouts[1].joins, "words of a cycle's message"
    assert layouts[1].size - layouts[0].size == 4 * (2048 - 256), "a token and a page-table entry each"


def test_a_cycle_copies_the_front_of_the_message_and_a_chunk_all_of_it() -> None:
    plan = captured_plan("chain")
    cycle = make_cycle(plan, None)
    key, prefill = plan.key(1, GREEDY), PrefillKey(8, GREEDY)
    cycle.prepare([key, prefill])
    rear = cycle.arena["mail"][cycle.layout.joins :]
    pages = [(0, column, 1 + column) for column in range(plan.table_width)]
    cycle.read(cycle.launch(prefill, Message(lanes=(0,), pages=pages[: plan.page_updates], chunks=[Chunk([3, 1, 4], 0, 3)])))
    words, tokens = cycle.layout.prompt_parts(cycle.arena["mail"], 1, 8)
    assert (words.tolist(), tokens.tolist()) == ([[0, 3, 3, -1, 3, 0]], [[3, 1, 4, 0, 0, 0, 0, 0]])
    rear.fill_(77)
    cycle.read(cycle.launch(key, Message(lanes=(0,))))
    assert set(rear.tolist()) == {77}


def test_every_page_of_a_chunk_arrives() -> None:
    """A chunk of one-token pages changes more of the page table than the front of a message has room for."""
    plan = captured_plan("chain", page_size=1, prefill_chunks=[8, 64], buckets=[1], max_rows=1)
    layout = MailLayout.of(plan)
    assert layout.max_chunk_pages > 0
    cycle = make_cycle(plan, None)
    cycle.prepare([PrefillKey(64, GREEDY)])
    pages = [(0, column, 1 + column) for column in range(layout.max_pages + layout.max_chunk_pages)][: plan.table_width]
    assert len(pages) > plan.page_updates
    cycle.read(cycle.launch(PrefillKey(64, GREEDY), Message(lanes=(0,), pages=pages, chunks=[Chunk([5] * 60, 0, 60)])))
    assert cycle.arena["page_table_RP"][0, : len(pages)].tolist() == [page for _, _, page in pages]


@pytest.fixture(scope="module")
def long_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return mirror_pair(tmp_path_factory.mktemp("long"), max_positions=2112)


@pytest.mark.parametrize("variant", ["eagle3", "none"])
def test_tokens_do_not_depend_on_the_chunks(long_pair: Pair, variant: str) -> None:
    """Around the end of the largest chunk and past it; the draft, which computes what the target does, misses nothing for it either."""
    lengths = LONG if variant == "eagle3" else LONG[-1:]
    prompt_ids = prompts(len(lengths), lengths)
    shape: dict[str, Any] = {"num_steps": 3, "topk": 1, "num_draft_tokens": 4} if variant == "eagle3" else {}
    found = {}
    for chunks in ([256], list(GPU)):
        llm = long_pair.llm(variant=variant, max_rows=1, buckets=[1], prefill_chunks=chunks, **shape)
        outputs = llm.generate(prompt_ids, SamplingParams(max_tokens=6, ignore_eos=True))
        found[chunks[-1]] = ids(outputs), [output.metrics.acceptance_length for output in outputs]
    assert found[256] == found[2048]
    assert found[2048][0] == [long_pair.greedy(prompt, 6, ignore_eos=True) for prompt in prompt_ids]


def test_short_memory_leaves_out_the_largest_default_chunks() -> None:
    target = model_facts(max_position_embeddings=4096)
    runtime = RuntimeConfig(name="captured", num_pages=300)
    config = Config(model=ModelConfig(path="target"), runtime=runtime, hardware=HardwareConfig(memory_gib=1))
    plan = make_plan(config, target, draft_facts(), device="cuda")
    assert plan.prefill_chunks == GPU

    def memory(*chunks: int) -> int:
        return plan_memory(replace(plan, prefill_chunks=chunks), config, (10**6, 10**5)).total

    def fitting(room: int, chunks: list[int] | None = None) -> tuple[int, ...]:
        spoken = replace(
            config, hardware=HardwareConfig(memory_gib=(room + 1) / 0.9 / GIB), runtime=replace(runtime, prefill_chunks=chunks)
        )
        found, its = fit_memory(make_plan(spoken, target, draft_facts(), device="cuda"), spoken, (10**6, 10**5))
        assert its.total <= its.budget or found.prefill_chunks == tuple(chunks or GPU)
        return found.prefill_chunks

    assert memory(*GPU) > memory(*GPU[:4]) > memory(*GPU[:3])
    assert fitting(memory(*GPU)) == GPU
    assert fitting(memory(*GPU) - 10**6) == GPU[:4]
    assert fitting(memory(*GPU[:4]) - 10**6) == GPU[:3]
    assert fitting(memory(*GPU[:3]) - 10**6) == GPU, "where nothing fits, the message is about what was planned"
    assert fitting(memory(*GPU) - 10**6, list(GPU)) == GPU, "what was given stays"


def test_an_engine_logs_chunks_that_it_left_out(long_pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(CHUNKS, "cpu", (16, 64, 256, 1024))
    monkeypatch.setattr(memory_module, "SMALLEST_CHUNK", 64)
    roomy = long_pair.llm(prefill_chunks=None, max_rows=1, buckets=[1])
    assert roomy.plan.prefill_chunks[-1] == 1024
    with caplog.at_level(logging.WARNING):
        tight = long_pair.llm(prefill_chunks=None, max_rows=1, buckets=[1], memory_gib=(roomy.memory.total - 2**16) / 0.9 / GIB)
    assert tight.plan.prefill_chunks[-1] == 256
    assert "prompts are read in chunks of up to 256 tokens, not 1024" in caplog.text


def test_a_chunk_without_memory_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    plan = captured_plan("chain")

    def refuse(program: Any) -> bool:
        stage = program.stages[-1]
        return stage.name == "first_token" and stage.chunk > 8

    cycle = make_cycle(plan, lambda arena: TapeCapturer(arena, refuse))
    with caplog.at_level(logging.WARNING):
        cycle.prepare([*cycle.prefills(GREEDY), plan.key(1, GREEDY)])
    assert "no program for prefill of 16 tokens, greedy; a launch reads at most 8 tokens of a prompt" in caplog.text
    assert cycle.prefills(GREEDY) == (PrefillKey(8, GREEDY), PrefillKey(8, GREEDY, 2)) and plan.prefill_chunks == (8, 16)
    scheduler = Scheduler(plan, cycle, None)
    scheduler.add_programs(GREEDY, (1,), cycle.prefills(GREEDY))
    request = Request(index=0, prompt=[5] * 21, params=SamplingParams(), stop_ids=(), budget=4)
    scheduler.add(request)
    while scheduler.busy:
        scheduler.step()
    assert len(request.output) == 4


def test_a_run_builds_the_chunks_that_its_prompts_can_fill(long_pair: Pair) -> None:
    """With their output, which a preempted row reads again. A longer one builds the others; tokens are those of an engine that has all."""
    llm = long_pair.llm(prefill_chunks=[16, 64, 512], max_rows=1, buckets=[1])
    first = llm.generate([[5] * 20], SamplingParams(max_tokens=8, ignore_eos=True))[0]

    def sizes() -> set[int]:
        return {key.chunk for key in llm.keys(1, GREEDY) if isinstance(key, PrefillKey) and llm._engine.cycle.prepared(key)}

    assert sizes() == {16, 64}
    longer = llm.generate([[5] * 260], SamplingParams(max_tokens=8, ignore_eos=True))[0]
    assert sizes() == {16, 64, 512}
    warm = long_pair.llm(prefill_chunks=[16, 64, 512], max_rows=1, buckets=[1])
    warm.warm_up()
    found = warm.generate([[5] * 20, [5] * 260], SamplingParams(max_tokens=8, ignore_eos=True))
    assert [output.token_ids for output in found] == [first.token_ids, longer.token_ids]


def test_the_smallest_chunk_is_always_built() -> None:
    def sizes(chunks: tuple[int, ...], tokens: int | None) -> set[int]:
        plan = replace(small_plan(), prefill_chunks=chunks)
        return {key.chunk for key in prefill_keys(plan, GREEDY, tokens)}

    chunks = (16, 64, 256, 1024, 2048)
    assert sizes((512, 1024), 20) == {512}
    assert sizes(chunks, 768) == {16, 64, 256} and sizes(chunks, 769) == {16, 64, 256, 1024} and sizes(chunks, None) == {*chunks}

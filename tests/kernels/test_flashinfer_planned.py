"""Planned attention without FlashInfer: lists against their definition, the adapter against the references, stale plans, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from graphspec.errors import CaptureError, ConfigError
from graphspec.kernels.flashinfer import version
from graphspec.kernels.flashinfer.lists import key_lists, max_places
from graphspec.kernels.flashinfer.planner import Planner
from graphspec.kernels.flashinfer.wrappers import WORKSPACE_BYTES, workspace_bytes
from graphspec.kernels.host_step import HeadShape, PreparedCall, RowSpan
from tests.support.fake_cuda import NoHostTraffic, load_cuda_guard
from tests.support.flashinfer_wrappers import StandIns, install
from tests.support.planned import LATENT, Case, cases

CASES = cases()


@pytest.fixture(params=[False, True], ids=["0.6", "0.7"])
def stand_ins(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    monkeypatch.setattr(version, "PROMPT_DIMS", (16,))
    return install(monkeypatch, new=request.param)


def slots_of(lists: Any, lane: int, page_size: int) -> list[int]:
    """Every key of a lane as a slot of the pool: page times page size, plus the offset."""
    places = lists.places[lists.key_offsets[lane] : lists.key_offsets[lane + 1]].tolist()
    if lists.page_size == 1:
        return places[: lists.lengths[lane]]
    return [place * page_size + i for place in places for i in range(page_size)][: lists.lengths[lane]]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("begin", [0, 1])
@pytest.mark.parametrize(
    ("anchor", "tokens", "extent", "spans"),
    [
        ("root", 4, 4, [(7, 11), (15, 19), (1, 5)]),
        ("root", 1, 3, [(7, 10), (31, 34), (1, 4)]),
        # A window of 4 entries of which 3, 1 and 4 count.
        ("window", 4, 4, [(6, 9), (16, 17), (1, 5)]),
        # A chunk of 8 rows of which 8, 3 and 1 count; the last is at the end of what the table holds.
        ("chunk", 8, 8, [(8, 16), (24, 27), (47, 48)]),
    ],
)
def test_lists_mean_what_the_queries_see(
    page_size: int, begin: int, anchor: Any, tokens: int, extent: int, spans: list[tuple[int, int]]
) -> None:
    """Query t of T sees all but the last T - 1 - t keys of its lane: the row's slots from ``begin`` to its own, each once."""
    columns = 48 // page_size
    call = PreparedCall("draft", anchor, extent, tokens, LATENT, begin)
    rng = np.random.default_rng(tokens)
    tables = rng.permutation(len(spans) * columns).reshape(-1, columns).astype(np.int32) + 1
    rows = []
    for table, (start, known) in zip(tables, spans, strict=True):
        # What was never handed out is page 0.
        pages = np.where(np.arange(columns) < -(-known // page_size), table, 0).astype(np.int32)
        rows.append(RowSpan(pages, start + extent, known))
    lists = key_lists(call, rows, len(spans) + 2, page_size)
    assert lists.query_offsets.tolist() == list(range(0, (len(spans) + 2) * tokens + 1, tokens))
    assert len(lists.places) == lists.key_offsets[-1] <= max_places(call, len(spans) + 2, page_size, columns)
    assert {a.dtype for a in (lists.places, lists.lengths, lists.key_offsets, lists.query_offsets)} == {np.dtype(np.int32)}
    for lane, (start, known) in enumerate(spans):
        found, pages = slots_of(lists, lane, page_size), rows[lane].pages

        def place(slot: int, pages: Any = pages) -> int:
            return int(pages[slot // page_size]) * page_size + slot % page_size

        first = start + extent - tokens
        for t in range(known - first):
            assert found[: len(found) - (tokens - 1 - t)] == [place(slot) for slot in range(begin, first + t + 1)]
        owned = {int(page) for page in pages if page}
        assert {slot // page_size for slot in found} <= owned, "what no query sees is not in the dummy page"
    for lane in range(len(spans), len(spans) + 2):
        assert lists.lengths[lane] == tokens and set(slots_of(lists, lane, page_size)) <= set(range(page_size))
    assert lists.last_page_lengths.tolist() == [(n - 1) % lists.page_size + 1 for n in lists.lengths.tolist()]


@pytest.mark.parametrize("name", CASES)
def test_the_adapter_equals_the_reference(stand_ins: StandIns, name: str) -> None:
    """Launch after launch: rows that moved, fewer of them, an empty program, all through one wrapper."""
    call, starts, counts = CASES[name]
    planner, case = Planner("cpu"), Case(call, starts, counts)
    for moved, used in ((starts, counts), ([s + 1 for s in starts], counts), (starts[:1], counts[:1]), ([], []), (starts, counts)):
        case.move(moved, used)
        case.plan(planner)
        torch.testing.assert_close(case.run(planner), case.reference().float(), rtol=2e-6, atol=2e-6)
    kind = "latent" if call.shape.latent else "prefill"
    assert [run for run, _ in stand_ins.runs] == [kind] * 5 == [run for run, _, _ in stand_ins.plans]


@pytest.mark.parametrize("name", ["verify", "extend", "step", "chunk"])
def test_a_stale_plan_gives_something_else(stand_ins: StandIns, name: str) -> None:
    """A launch with a stale plan: no error, but results that these tests detect as wrong."""
    call, starts, counts = CASES[name]
    planner, case = Planner("cpu"), Case(call, starts, counts)
    case.plan(planner)
    case.move([start + 1 for start in starts], counts)
    stale = case.run(planner)
    assert (stale - case.reference()).nan_to_num(nan=1.0).abs().max() > 1e-3
    case.plan(planner)
    torch.testing.assert_close(case.run(planner), case.reference().float(), rtol=2e-6, atol=2e-6)


def test_what_is_not_served() -> None:
    planner = Planner("cpu")
    of_heads = HeadShape(32, 8, 128, 0, 0.1)
    served = PreparedCall("target", "chunk", 64, 64, of_heads)
    assert planner.bind(served) is not None and planner.bind(served) == planner.bind(PreparedCall("target", "chunk", 64, 64, of_heads))
    # 80 is no head dimension of the prefill kernels; a drafter that skips a token has a first chunk of fewer keys than queries.
    assert planner.bind(PreparedCall("target", "chunk", 64, 64, HeadShape(32, 8, 80, 0, 0.1))) is None
    for shape in (of_heads, LATENT):
        assert planner.bind(PreparedCall("draft", "chunk", 64, 64, shape, 1)) is None
    assert planner.bind(PreparedCall("draft", "window", 4, 4, LATENT, 1)) is not None


def test_a_launch_without_a_plan_is_refused(stand_ins: StandIns) -> None:
    planner, case = Planner("cpu"), Case(*CASES["verify"])
    with pytest.raises(CaptureError, match="a plan before the launch, found none for 4 lanes"):
        case.run(planner)
    case.plan(planner)
    with pytest.raises(CaptureError, match=r"scale 0\.3, as planned, found 0\.5"):
        case.run(planner, scale=0.5)


def test_a_launch_that_would_differ_from_a_captured_one_is_refused(stand_ins: StandIns) -> None:
    """Grid and offsets are in the graph; a plan that says others must not reach it."""
    planner, case = Planner("cpu"), Case(*CASES["verify"])
    case.plan(planner)
    slot = planner._slots[case.call][1]
    slot.wrappers[case.lanes]._info = (7, 7)
    with pytest.raises(CaptureError, match=r"a launch like the first one, \(7, 7\)"):
        case.plan(planner)


def test_staging_memory_is_not_written_before_it_was_copied(stand_ins: StandIns) -> None:
    """A plan waits for the event after the copies of the one before, then for nothing else."""
    planner, case = Planner("cpu"), Case(*CASES["chunk"])
    case.plan(planner)
    staged, order = planner._slots[case.call][1].wrappers[case.lanes]._staged, []

    class Event:
        def synchronize(self) -> None:
            order.append(staged.clone())

    planner._staged = Event()  # type: ignore[assignment]
    before = staged.clone()
    case.move([start + 4 for start in CASES["chunk"][1][:2]], [1, 1])
    case.plan(planner)
    assert len(order) == 1 and torch.equal(order[0], before) and not torch.equal(staged, before)


@pytest.mark.parametrize("name", ["verify", "chunk"])
def test_nothing_is_read_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is planned: FlashInfer is not even imported, the operator is opaque to fake tensors."""
    monkeypatch.setattr(version, "PROMPT_DIMS", (16,))
    load_cuda_guard()
    case, planner = Case(*CASES[name]), Planner("cuda")
    bound, shape = planner.bind(case.call), case.call.shape
    assert bound is not None
    with FakeTensorMode(), NoHostTraffic() as watch:
        query = torch.empty(case.query.shape, device="cuda")
        pool, valid = torch.empty(case.pool.shape, device="cuda"), torch.empty(case.valid_BT.shape, dtype=torch.bool, device="cuda")
        if shape.latent:
            found = bound.latent(query[..., : shape.dim], query[..., shape.dim :], pool, 1, valid, shape.scale)
        else:
            found = bound.chunk(query, pool, 1, valid, shape.scale)
    assert watch.ops > 0 and tuple(found.shape) == (*case.query.shape[:3], shape.dim) and found.device.type == "cuda"


@pytest.mark.parametrize("name", ["extend", "chunk"])
def test_a_compiled_region_stays_whole_and_follows_its_plan(stand_ins: StandIns, name: str) -> None:
    planner, case = Planner("cpu"), Case(*CASES[name])
    case.plan(planner)
    bound, shape = planner.bind(case.call), case.call.shape
    assert bound is not None
    pool = case.poisoned()

    def attend(query: Tensor, valid_BT: Tensor) -> Tensor:
        if shape.latent:
            return bound.latent(query[..., : shape.dim], query[..., shape.dim :], pool, 1, valid_BT, shape.scale) + 0
        return bound.chunk(query, pool, 1, valid_BT, shape.scale) + 0

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=False, backend="aot_eager")
    first = compiled(case.query, case.valid_BT)
    torch.testing.assert_close(first, case.reference().float(), rtol=2e-6, atol=2e-6)
    case.move([start + 1 for start in CASES[name][1][:2]], [1, 1])
    case.plan(planner)
    torch.testing.assert_close(compiled(case.query, case.valid_BT), case.reference().float(), rtol=2e-6, atol=2e-6)


def test_workspace_bound() -> None:
    """A chunk of 2048 tokens of Llama-3.1-8B: 64 blocks of 128 rows, more than twice 132 multiprocessors over 8 heads."""
    call = PreparedCall("target", "chunk", 2048, 2048, HeadShape(32, 8, 128, 0, 0.1))
    assert workspace_bytes(call, 132, "fa2") == 32 * 64 * 128 * 129 * 4 + 4096 > WORKSPACE_BYTES == workspace_bytes(call, 132, "fa3")
    assert workspace_bytes(PreparedCall("target", "root", 8, 8, HeadShape(128, 1, 512, 64, 0.1)), 132, "fa2") == WORKSPACE_BYTES


DEEPSEEK: dict[str, Any] = {
    "page_size": 1, "dtype": "bfloat16", "num_heads": 128, "num_kv_heads": 1, "head_dim": 64, "windows": (None,), "latent": (512, 64),
}  # fmt: skip


@pytest.mark.parametrize("change", [{}, {"num_heads": 16}, {"page_size": 64}, {"dtype": "float16"}, {"latent": (256, 64)}])
def test_latent_shapes_served(change: dict[str, Any]) -> None:
    version.check_pool("target", **{**DEEPSEEK, **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_heads": 40}, ("target", "heads that divides 128", "found 40")),
        ({"num_heads": 256}, ("target", "heads that divides 128", "found 256")),
        ({"latent": (384, 64)}, ("target", "128, 256, 512", "found 384")),
        ({"latent": (512, 32)}, ("target", "multiple of 64", "found 32")),
        ({"dtype": "float32"}, ("hardware.dtype", "bfloat16")),
    ],
)
def test_latent_shapes_refused(change: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        version.check_pool("target", **{**DEEPSEEK, **change})
    assert all(word in str(error.value) for word in ("flashinfer", *words))

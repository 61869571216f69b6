"""The real FlashInfer on a GPU: ``xqa`` under random trees, planned wrappers at lengths that change. Error against float64, the same bits
again. Skipped where FlashInfer is not installed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from graphspec.kernels import select_kernels
from graphspec.kernels.attention.tree_attention import tree_attention
from graphspec.kernels.flashinfer import version
from graphspec.kernels.flashinfer.planner import Planner
from graphspec.kernels.flashinfer.xqa import bind_window
from graphspec.kernels.host_step import HeadShape, PreparedCall
from tests.kernels.cases.attention import random_pool
from tests.support.float_law import assert_float_law
from tests.support.planned import Case, cases, generate, self_drafting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(version.installed() is None, reason="flashinfer-python is not installed"),
]

PAGE_SIZES = (16, 64)


def tree_words(lanes: int, tokens: int, generator: torch.Generator) -> Tensor:
    """Ancestors of random trees: every node but the root hangs under a random one before it, and sees what that sees, and itself."""
    bits = torch.zeros(lanes, tokens, 64 * -(-tokens // 64), dtype=torch.bool)
    for lane in range(lanes):
        for node in range(tokens):
            if node:
                bits[lane, node] = bits[lane, int(torch.randint(0, node, (1,), generator=generator))]
            bits[lane, node, node] = True
    return (bits.view(lanes, tokens, -1, 64).to(torch.int64) << torch.arange(64)).sum(-1)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("ends", "tokens"),
    [([2000], 1), ([2000], 8), ([2001], 64), ([5, 700, 0, 9000], 32), ([0, 1, 15, 16, 63, 64, 65, 4096], 8), ([300], 33), ([300], 65)],
)
def test_random_trees(ends: list[int], tokens: int, dtype: torch.dtype, page_size: int) -> None:
    """Error at most twice that of the reference in the same dtype, plus one rounding of the largest result."""
    generator = torch.Generator().manual_seed(tokens)
    lanes, queries, groups, dim = len(ends), 32, 8, 128
    columns = -(-(max(ends) + tokens) // page_size) + 1
    pool, table = random_pool(generator, lanes=lanes, columns=columns, page_size=page_size, heads=groups, dim=dim, layers=2)
    # Slots after the window may hold anything.
    for lane, end in enumerate(ends):
        for slot in range(end + tokens, columns * page_size):
            pool[:, :, table[lane, slot // page_size], slot % page_size] = torch.nan
    query = torch.randn(lanes, tokens, queries, dim, generator=generator).to(dtype).cuda()
    pool, table, end_B = pool.to(dtype).cuda(), table.cuda(), torch.tensor(ends).cuda()
    words = tree_words(lanes, tokens, generator).cuda()
    begin = torch.zeros(lanes, tokens, dtype=torch.int64).cuda()
    scale = dim**-0.5
    oracle = tree_attention(query.double(), pool.double(), 1, table, begin, end_B, words, scale)
    reference = tree_attention(query, pool, 1, table, begin, end_B, words, scale)
    bound = bind_window(table, page_size, end_B, words)
    found = bound(query, pool, 1, scale)
    # The kernel rounds the weights to 16 bits before it sums values, as the fused one does; the reference does not.
    assert_float_law(found, reference, oracle)
    for _ in range(10):
        assert torch.equal(bound(query, pool, 1, scale), found)


def test_captured_equals_direct_at_other_lengths() -> None:
    """Lengths and masks are read on the device: a graph captured at one length gives the bits of a direct call at another."""
    generator = torch.Generator().manual_seed(0)
    pool, table = random_pool(generator, lanes=2, columns=64, page_size=16, heads=8, dim=128, layers=1)
    pool, table = pool.bfloat16().cuda(), table.cuda()
    query = torch.randn(2, 8, 32, 128, generator=generator).bfloat16().cuda()
    end_B, words = torch.tensor([3, 40]).cuda(), tree_words(2, 8, generator).cuda()

    def attend() -> Tensor:
        return bind_window(table, 16, end_B, words)(query, pool, 0, 128**-0.5)

    graph, captured = capture(attend)
    for ends in ([3, 40], [900, 0], [511, 1000]):
        end_B.copy_(torch.tensor(ends))
        words.copy_(tree_words(2, 8, generator))
        graph.replay()
        assert torch.equal(captured, attend())


LLAMA, DEEPSEEK, LITE = HeadShape(32, 8, 128, 0, 128**-0.5), HeadShape(128, 1, 512, 64, 192**-0.5), HeadShape(16, 1, 512, 64, 192**-0.5)
DTYPES = [torch.bfloat16, torch.float16]


def capture(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """One call, warmed up on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


def check(case: Case, found: Tensor) -> None:
    """As close to float64 as twice the reference in the same dtype, plus one rounding of the largest result; padding gives 0."""
    oracle, reference = case.reference(), case.reference(case.query.dtype)
    rounding = torch.finfo(case.query.dtype).eps * oracle.abs().max()
    assert found.isfinite().all() and not found[~case.valid_BT].any()
    assert (found.double() - oracle).abs().max() <= 2 * (reference.double() - oracle).abs().max() + rounding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("latent", [DEEPSEEK, LITE], ids=["128-heads", "16-heads"])
@pytest.mark.parametrize("name", cases())
def test_planned_calls(name: str, latent: HeadShape, dtype: torch.dtype) -> None:
    """A captured launch that is planned again for every replay, with NaN in everything unseen; short rows, idle lanes."""
    call, starts, counts = cases(latent, LLAMA)[name]
    planner, case = Planner("cuda"), Case(call, starts, counts, page_size=16, device="cuda", dtype=dtype)
    pool = case.poisoned()
    case.plan(planner)
    graph, captured = capture(lambda: case.run(planner, pool))
    for moved, used in ((starts, counts), ([s + 1 for s in starts], counts), (starts[:1], counts[:1]), ([], []), (starts, counts)):
        # In place: the graph knows the addresses.
        before = case.valid_BT
        case.move(moved, used)
        before.copy_(case.valid_BT)
        case.valid_BT = before
        pool.copy_(case.poisoned())
        case.plan(planner)
        graph.replay()
        check(case, captured)
        assert torch.equal(captured, case.run(planner, pool)), "captured equals direct"


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(
    ("call", "starts", "counts"),
    [
        (PreparedCall("target", "root", 4, 4, DEEPSEEK), [3000, 17, 0, 911], [4, 4, 4, 4]),
        (PreparedCall("draft", "window", 4, 4, DEEPSEEK, 1), [3001, 18, 1, 912], [4, 1, 3, 2]),
        (PreparedCall("draft", "root", 2, 1, DEEPSEEK, 1), [3001, 18, 1, 912], [1, 1, 1, 1]),
        (PreparedCall("target", "root", 1, 1, LITE), [3000, 17, 0, 911], [1, 1, 1, 1]),
        (PreparedCall("target", "chunk", 256, 256, DEEPSEEK), [1024], [200]),
        (PreparedCall("target", "chunk", 256, 256, LLAMA), [1024], [200]),
        (PreparedCall("target", "chunk", 256, 256, LLAMA), [0], [256]),
        (PreparedCall("target", "chunk", 64, 64, LLAMA, 0, 128), [2048], [60]),
    ],
    ids=lambda value: f"{value.anchor}-{value.tokens}-{value.shape.heads}" if isinstance(value, PreparedCall) else None,
)
def test_planned_calls_of_real_lengths(call: PreparedCall, starts: list[int], counts: list[int], page_size: int) -> None:
    """Prefixes long enough to be split among blocks; the same plan gives the same bits."""
    planner = Planner("cuda")
    case = Case(call, starts, counts, page_size=page_size, columns=4096 // page_size, device="cuda", dtype=torch.bfloat16)
    for shorter in (0, 1, 700):
        case.move([max(start - shorter, call.begin) for start in starts], counts)
        case.plan(planner)
        pool = case.poisoned()
        found = case.run(planner, pool)
        check(case, found)
        for _ in range(3):
            case.plan(planner)
            assert torch.equal(case.run(planner, pool), found)


def test_plans_do_not_wait_for_the_device() -> None:
    """No argument of a plan is on the device."""
    call, starts, counts = cases(DEEPSEEK, LLAMA)["verify"]
    planner, case = Planner("cuda"), Case(call, starts, counts, page_size=16, device="cuda", dtype=torch.bfloat16)
    case.plan(planner)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.plan(planner)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.seconds(240)
@pytest.mark.parametrize("structure", ["heads", "latent"])
def test_a_target_that_drafts_for_itself(structure: str) -> None:
    """Whole engines: the tokens of captured programs are those of direct launches, and almost every draft is right.

    Draft and verification read the same prefix through kernels of other tiles, so a near-tie may fall the other way in bfloat16.
    """
    outputs = []
    for runtime in ("captured", "compiled"):
        cycle = self_drafting(
            structure, device="cuda", runtime=runtime, mode="fused", dtype="bfloat16",
            kernels=lambda plan: select_kernels(plan.kernels, plan.attention, "cuda", dtype=plan.dtype),
        )  # fmt: skip
        requests = generate(cycle, (70, 3, 40, 1))
        outputs.append([request.output for request in requests])
        runs = [run for request in requests for run in request.metrics.cycle_tokens[:-1]]
        assert len(outputs[-1][0]) == 24 and sum(runs) / len(runs) > 3.5
    assert outputs[0] == outputs[1]

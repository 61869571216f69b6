"""The real ``xqa`` on a GPU, under random trees: error against float64, the same bits again. Skipped where FlashInfer is not installed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphspec.kernels.flashinfer import version
from graphspec.kernels.flashinfer.xqa import bind_window
from graphspec.kernels.tree_attention import random_pool, tree_attention

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
    # Behind the window there may be anything.
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
    assert found.dtype == dtype and found.isfinite().all()
    # The kernel rounds the weights to 16 bits before it sums values, as the fused one does; the reference does not.
    rounding = torch.finfo(dtype).eps * oracle.abs().max()
    assert (found.double() - oracle).abs().max() <= 2 * (reference.double() - oracle).abs().max() + rounding
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

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    for ends in ([3, 40], [900, 0], [511, 1000]):
        end_B.copy_(torch.tensor(ends))
        words.copy_(tree_words(2, 8, generator))
        graph.replay()
        assert torch.equal(captured, attend())

"""Fused tree, walk, move and commit on a GPU: bit for bit the references, launch after launch, and captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphspec.kernels import OPS
from graphspec.kernels.op import KernelOp
from tests.kernels.cases import cases_of
from tests.kernels.cases.tree import commit_case

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

MINE = {op.name: op for op in OPS if op.name in ("tree_build", "chain_layout", "tree_walk", "kv_move", "page_feature_write", "commit_rows")}
BY_OP = [pytest.param(op, id=name) for name, op in MINE.items()]


def on_gpu(case: dict[str, Any], dtype: torch.dtype | None = None) -> dict[str, Any]:
    """A copy of the case on the device; KV and features in ``dtype``. Scores decide the tree and stay as they are."""

    def copy(key: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        cast = dtype is not None and value.is_floating_point() and key != "score_BM"
        return value.to("cuda", dtype if cast else value.dtype, copy=True)

    return {key: copy(key, value) for key, value in case.items()}


def written(op: KernelOp, case: dict[str, Any]) -> list[torch.Tensor]:
    """What the op may write, the dummy page left out."""
    return [case[k][:, :, 1:] if case[k].dim() == 6 else case[k] for k in op.mutates if case[k] is not None]


def assert_same_bits(op: KernelOp, case: dict[str, Any], dtype: torch.dtype | None) -> None:
    expected, first, second = on_gpu(case, dtype), on_gpu(case, dtype), on_gpu(case, dtype)
    op.reference(**expected)
    for own in (first, second):
        op.call(op.implementation("fused"), own)
    for e, f, s in zip(written(op, expected), written(op, first), written(op, second), strict=True):
        assert torch.equal(f, e)
        assert torch.equal(s, e)


@pytest.mark.references(*MINE)
@pytest.mark.parametrize("op", BY_OP)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_equals_the_reference(op: KernelOp, dtype: torch.dtype | None) -> None:
    for seed in range(40):
        for case in cases_of(op, torch.Generator().manual_seed(seed)):
            assert_same_bits(op, case, dtype)


def test_commit_at_the_size_of_a_model() -> None:
    """Many concurrent programs and warps, so that a thread that reads values another has already overwritten is detected."""
    for seed, kind in enumerate(({"features": 3 * 4096}, {"features": 4096, "lookback": 3, "vocab": 1000}, {"history": 4096})):
        for lanes in (1, 8, 64):
            case = commit_case(torch.Generator().manual_seed(seed), lanes, 64, 6, **kind)
            assert_same_bits(MINE["commit_rows"], case, torch.bfloat16)


def test_kv_move_at_the_size_of_a_model() -> None:
    lanes, pages, generator = 8, 8 * 8 + 1, torch.Generator().manual_seed(0)
    path = torch.stack([torch.cat((torch.zeros(1), torch.randperm(63, generator=generator)[:15] + 1)) for _ in range(lanes)])
    case = {
        "kv_pool": torch.randn(8, 2, pages, 16, 8, 128, generator=generator),
        "table_RP": (torch.randperm(pages - 1, generator=generator) + 1).view(lanes, 8).to(torch.int32),
        "seq_len_R": torch.randint(0, 60, (lanes,), generator=generator),
        "path_BA": path.to(torch.int64),
        "accept_len_B": torch.tensor([16, 0, 1, 2, 15, 16, 7, 16]),
    }
    assert_same_bits(MINE["kv_move"], case, torch.bfloat16)


@pytest.mark.parametrize("op", BY_OP)
def test_replayed_equals_direct(op: KernelOp) -> None:
    case = cases_of(op, torch.Generator().manual_seed(1))[0]
    direct, captured = on_gpu(case), on_gpu(case)
    fused = op.implementation("fused")
    op.call(fused, direct)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        op.call(fused, on_gpu(case))
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.call(fused, captured)
    graph.replay()
    torch.cuda.synchronize()
    for d, c in zip(written(op, direct), written(op, captured), strict=True):
        assert torch.equal(d, c)

"""Large tensors in huge pages: what the system is asked for, and that values stay. Whether it has any to give is its own affair."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from graphspec.graphs import cycle
from graphspec.kernels import huge_pages
from graphspec.kernels.huge_pages import COLLAPSE, HUGEPAGE, SIZE, use_huge_pages
from graphspec.kernels.native import pack_linear
from tests.support.engines import mirror_pair


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Every request, of a system that refuses them all."""
    found: list[tuple[int, int, int]] = []

    def madvise(begin: int, size: int, advice: int) -> int:
        found.append((begin, size, advice))
        return -1

    monkeypatch.setattr(huge_pages.ctypes, "CDLL", lambda name: SimpleNamespace(madvise=madvise))
    monkeypatch.setattr(huge_pages.sys, "platform", "linux")
    return found


def test_values_stay() -> None:
    tensor = torch.arange(6 * SIZE // 4, dtype=torch.int32)
    expected = tensor.clone()
    assert use_huge_pages(tensor) is tensor and torch.equal(tensor, expected)


def test_whole_pages_of_a_weight_are_asked_for(asked: list[tuple[int, int, int]]) -> None:
    packed = pack_linear(torch.randn(1024, 3072))
    (begin, size, first), (again, same, second) = asked
    assert (first, second) == (HUGEPAGE, COLLAPSE) and (begin, size) == (again, same)
    assert begin % SIZE == size % SIZE == 0 and size >= SIZE
    assert packed.data_ptr() <= begin and begin + size <= packed.data_ptr() + packed.nbytes


def test_nothing_is_asked_for_other_tensors(asked: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    for tensor in (torch.zeros(8), torch.zeros(2 * SIZE - 1, dtype=torch.uint8), torch.empty(8 * SIZE, device="meta")):
        assert use_huge_pages(tensor) is tensor
    monkeypatch.setattr(huge_pages.sys, "platform", "darwin")
    use_huge_pages(torch.zeros(6 * SIZE, dtype=torch.uint8))
    assert not asked


def test_kv_pools_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []
    monkeypatch.setattr(cycle, "use_huge_pages", given.append)
    llm = mirror_pair(tmp_path).llm()
    assert {llm.cycle.arena[name].data_ptr() for name in ("target_kv", "draft_kv")} <= {tensor.data_ptr() for tensor in given}

"""FlashInfer's planned wrappers as plain loops, from their documented semantics, to replace FlashInfer on a machine without a GPU.

``plan`` checks its arguments and writes a work list into its own memory; ``run`` reads only that memory and the caller's buffers: run again
after the sequences grew, it gives the result that was planned, as the kernels do. Masked values are multiplied by 0, as in the kernels.
Argument names are those of the oldest and newest supported version.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.xqa import StandIn

GARBAGE = 1e4
"""Result of a softmax over nothing, which is undefined in the kernels."""


def attend(query_QD: Tensor, keys_nQD: Tensor, values_nQE: Tensor, seen: slice, scale: float) -> Tensor:
    """One query over the keys that it sees, separate for each head."""
    mask = torch.ones(len(keys_nQD), dtype=torch.bool)
    mask[seen] = False
    if mask.all():
        return torch.full((query_QD.shape[0], values_nQE.shape[-1]), GARBAGE, dtype=torch.float64)
    score = torch.einsum("qd,nqd->qn", query_QD.double(), keys_nQD.double()) * scale
    return torch.einsum("qn,nqe->qe", score.masked_fill(mask, -torch.inf).softmax(-1), values_nQE.double())


def check_lists(page_size: int, offsets: Tensor, key_offsets: Tensor, places: Tensor, lengths: Tensor, reserved: Tensor) -> None:
    """Checks that ``plan`` of both wrappers makes of its lists."""
    for tensor in (offsets, key_offsets, places, lengths):
        assert tensor.dtype == torch.int32 and tensor.dim() == 1 and tensor.is_contiguous()
    lanes = len(lengths)
    assert len(offsets) == len(key_offsets) == lanes + 1 and offsets[0] == key_offsets[0] == 0
    assert bool((offsets.diff() >= 0).all()) and bool((lengths >= 0).all())
    assert torch.equal(key_offsets.diff(), (lengths + page_size - 1) // page_size), "pages of a lane follow from its number of keys"
    assert int(key_offsets[-1]) <= len(places) <= len(reserved) and reserved.dtype == torch.int32
    assert places.data_ptr() == reserved.data_ptr(), "places lie on the device already"


class Plan:
    """A work list at a fixed address, and the values that ``run`` passes to the kernel."""

    def __init__(self, lanes: int) -> None:
        self.offsets, self.key_offsets = (torch.zeros(lanes + 1, dtype=torch.int32) for _ in range(2))
        self.lengths = torch.zeros(lanes, dtype=torch.int32)
        self.count = 0

    def write(self, offsets: Tensor, key_offsets: Tensor, lengths: Tensor) -> None:
        assert lengths.shape == self.lengths.shape, "the batch can't change during the life of a wrapper"
        self.offsets.copy_(offsets)
        self.key_offsets.copy_(key_offsets)
        self.lengths.copy_(lengths)
        self.count += 1

    def lane(self, lane: int, places: Tensor, page_size: int) -> tuple[range, list[tuple[int, int]]]:
        """Rows of a lane's queries, and page and slot of its keys."""
        begin, end = self.offsets[lane : lane + 2].tolist()
        first = int(self.key_offsets[lane])
        spots = [(int(places[first + n // page_size]), n % page_size) for n in range(int(self.lengths[lane]))]
        return range(begin, end), spots


class PrefillStandIn:
    """``flashinfer.BatchPrefillWithPagedKVCacheWrapper``."""

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False, qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None, paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None, *, backend: str = "auto",
    ) -> None:  # fmt: skip
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD" and use_cuda_graph and backend in ("fa2", "fa3")
        assert qo_indptr_buf is not None and paged_kv_indptr_buf is not None
        assert paged_kv_indices_buf is not None and paged_kv_last_page_len_buf is not None
        assert len(qo_indptr_buf) == len(paged_kv_indptr_buf) == len(paged_kv_last_page_len_buf) + 1
        self._places = paged_kv_indices_buf
        self._work = Plan(len(paged_kv_last_page_len_buf))
        self._plan_info: list[int] = []

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool, sm_scale: float, window_left: int, q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert causal and num_qo_heads % num_kv_heads == 0 and q_data_type == kv_data_type
        assert bool((paged_kv_last_page_len > 0).all()) and bool((paged_kv_last_page_len <= page_size).all())
        lengths = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        check_lists(page_size, qo_indptr, paged_kv_indptr, paged_kv_indices, lengths, self._places)
        self._work.write(qo_indptr, paged_kv_indptr, lengths)
        self._shape = num_qo_heads, num_kv_heads, head_dim_qk
        self._page_size, self._scale, self._window, self._dtype = page_size, sm_scale, window_left, q_data_type
        self._plan_info = [num_qo_heads, int(qo_indptr[-1])]
        StandIns.current.plans.append(("prefill", int(qo_indptr[-1]), int(lengths[0])))

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor, enable_pdl: bool) -> Tensor:
        heads, groups, dim = self._shape
        keys, values = paged_kv_cache
        assert tuple(q.shape) == (int(self._work.offsets[-1]), heads, dim) == tuple(out.shape), "q has the rows that were planned"
        assert q.dtype == keys.dtype == self._dtype and tuple(keys.shape[1:]) == (self._page_size, groups, dim) == tuple(values.shape[1:])
        assert not enable_pdl
        StandIns.current.runs.append(("prefill", len(q)))
        for lane in range(len(self._work.lengths)):
            rows, spots = self._work.lane(lane, self._places, self._page_size)
            key_nGD, value_nGD = (torch.stack([side[page, slot] for page, slot in spots]) for side in (keys, values))
            for index, row in enumerate(rows):
                last = len(spots) - len(rows) + index
                seen = slice(max(0, last - self._window) if self._window >= 0 else 0, max(0, last + 1))
                key_nQD, value_nQD = (side.repeat_interleave(heads // groups, 1) for side in (key_nGD, value_nGD))
                out[row].copy_(attend(q[row], key_nQD, value_nQD, seen, self._scale))
        return out


class LatentStandIn:
    """``flashinfer.mla.BatchMLAPagedAttentionWrapper`` as of 0.6: flat lists, tensors by position."""

    def __init__(
        self, float_workspace_buffer: Tensor, use_cuda_graph: bool = False, qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None, kv_indices: Tensor | None = None, kv_len_arr: Tensor | None = None, backend: str = "auto",
    ) -> None:  # fmt: skip
        assert float_workspace_buffer.dtype == torch.uint8 and use_cuda_graph and backend in ("fa2", "fa3")
        assert qo_indptr is not None and kv_indptr is not None and kv_indices is not None and kv_len_arr is not None
        assert len(qo_indptr) == len(kv_indptr) == len(kv_len_arr) + 1
        self._places = kv_indices
        self._work = Plan(len(kv_len_arr))
        self._plan_info: list[int] = []

    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor, num_heads: int, head_dim_ckv: int,
        head_dim_kpe: int, page_size: int, causal: bool, sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        check_lists(page_size, qo_indptr, kv_indptr, kv_indices, kv_len_arr, self._places)
        assert q_data_type == kv_data_type
        if causal:
            assert bool((kv_len_arr >= qo_indptr.diff()).all()), "offsets of fewer keys than queries are unsigned"
        self._work.write(qo_indptr, kv_indptr, kv_len_arr)
        self._shape, self._page_size, self._scale = (num_heads, head_dim_ckv, head_dim_kpe), page_size, sm_scale
        self._causal, self._dtype = causal, q_data_type
        # Clusters of two blocks from 64 rows a lane on: the grid follows from the queries.
        self._plan_info = [2 if int(qo_indptr[-1]) * num_heads // len(kv_len_arr) > 64 else 1, len(kv_len_arr)]
        StandIns.current.plans.append(("latent", int(qo_indptr[1]), int(kv_len_arr[0])))

    def run(self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, *, out: Tensor) -> Tensor:
        heads, rank, rope = self._shape
        count = int(self._work.offsets[-1])
        assert tuple(q_nope.shape) == (count, heads, rank) == tuple(out.shape) and tuple(q_pe.shape) == (count, heads, rope)
        assert tuple(ckv_cache.shape[1:]) == (self._page_size, rank) and tuple(kpe_cache.shape[1:]) == (self._page_size, rope)
        assert {t.dtype for t in (q_nope, q_pe, ckv_cache, kpe_cache, out)} == {self._dtype} and ckv_cache.stride(-1) == 1
        StandIns.current.runs.append(("latent", int(self._work.offsets[1])))
        for lane in range(len(self._work.lengths)):
            rows, spots = self._work.lane(lane, self._places, self._page_size)
            latent_nL, rope_nR = (torch.stack([cache[page, slot] for page, slot in spots]) for cache in (ckv_cache, kpe_cache))
            key_nE = torch.cat((latent_nL, rope_nR), -1)
            for index, row in enumerate(rows):
                seen = slice(len(spots) - len(rows) + index + 1 if self._causal else len(spots))
                key_nQE, value_nQL = (side[:, None].expand(-1, heads, -1) for side in (key_nE, latent_nL))
                out[row].copy_(attend(torch.cat((q_nope[row], q_pe[row]), -1), key_nQE, value_nQL, seen, self._scale))
        return out


class MetadataStandIn:
    """``flashinfer.mla.MLAPlanMetadata``."""

    @staticmethod
    def csr(**lists: Tensor) -> dict[str, Tensor]:
        assert set(lists) == {"qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"}
        return lists


class NewLatentStandIn(LatentStandIn):
    """The same as of 0.7: keywords only, lists in one object, queries and caches as pairs whose layout was planned."""

    def plan(self, *, metadata: dict[str, Tensor], query_layout: str, kv_cache_layout: str, **fixed: Any) -> None:  # type: ignore[override]
        assert query_layout == kv_cache_layout == "split"
        super().plan(**metadata, **fixed)

    def run(self, *, query: tuple[Tensor, Tensor], kv_cache: tuple[Tensor, Tensor], out: Tensor) -> Tensor:  # type: ignore[override]
        return super().run(*query, *kv_cache, out=out)


class StandIns(StandIn):
    """``xqa`` and both wrappers; keeps ``(kind, queries, keys of the first lane)`` of plans and ``(kind, queries)`` of runs."""

    current: StandIns

    def __init__(self, *, new: bool) -> None:
        super().__init__()
        self.plans: list[tuple[str, int, int]] = []
        self.runs: list[tuple[str, int]] = []
        self.BatchPrefillWithPagedKVCacheWrapper = PrefillStandIn
        self.mla: Any = ModuleType("flashinfer.mla")
        self.mla.BatchMLAPagedAttentionWrapper = NewLatentStandIn if new else LatentStandIn
        if new:
            self.mla.MLAPlanMetadata = MetadataStandIn
        StandIns.current = self


def install(monkeypatch: pytest.MonkeyPatch, *, new: bool = True) -> StandIns:
    """Make ``import flashinfer`` find new stand-ins, of version 0.7 or 0.6."""
    module = StandIns(new=new)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", module.mla)
    return module

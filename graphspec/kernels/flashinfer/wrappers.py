"""FlashInfer's planned attention under one interface: created once per call and batch, planned before each launch, run in the program.

Both wrappers are created with ``use_cuda_graph=True``. Their ``plan`` then writes to memory at fixed addresses, and the values that ``run``
passes to the kernel (grid, tile, offsets) depend only on the numbers of queries, heads and multiprocessors. Every plan checks this,
because a captured launch keeps those values.

Source: flashinfer/prefill.py, flashinfer/mla and include/flashinfer/attention/scheduler.cuh of versions 0.6.18.post1 and 0.7.2.post1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import CaptureError
from ..host_step import PreparedCall, RowSpan
from .lists import KeyLists, key_lists, max_places, place_tokens

WORKSPACE_BYTES = 128 * 2**20
"""Least scratch for partial results."""
TILE_ROWS = 128
"""Most query rows (token x head of a group) of a block of FA2's prefill."""


def backend_for(device: torch.device) -> str:
    """The backend that ``auto`` chooses for these calls: FA3 on compute capability 9.x, else FA2.

    It is passed explicitly, so that every plan of a wrapper uses the same one.
    """
    return "fa3" if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9 else "fa2"


def workspace_bytes(call: PreparedCall, multiprocessor_count: int, backend: str) -> int:
    """Bytes of scratch of a call: FA2's prefill reserves a float32 result and a sum for each row of each block of the grid."""
    if call.shape.latent or backend != "fa2":
        return WORKSPACE_BYTES
    group = call.shape.heads // call.shape.groups
    blocks = max(2 * multiprocessor_count // call.shape.groups, -(-call.tokens * group // TILE_ROWS))
    return max(WORKSPACE_BYTES, call.shape.heads * blocks * TILE_ROWS * (call.shape.dim + 1) * 4 + 4096)


class Wrapper:
    """One call at one number of lanes.

    Args:
        call: the planned call.
        lanes: of the program.
        page_size: tokens of a page.
        table_width: columns of a row's page table.
        dtype: of queries and KV.
        workspace: uint8 scratch, shared by all calls.
    """

    def __init__(self, call: PreparedCall, lanes: int, page_size: int, table_width: int, dtype: torch.dtype, workspace: Tensor) -> None:
        self.call, self.lanes, self.page_size, self.dtype = call, lanes, page_size, dtype
        device = self._device = workspace.device
        capacity = max_places(call, lanes, page_size, table_width)
        self._places = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._staged = torch.zeros(capacity, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._info: tuple[int, ...] | None = None
        self._wrapper = self._make(workspace, *(torch.zeros(n, dtype=torch.int32, device=device) for n in (lanes + 1, lanes + 1, lanes)))

    def _make(self, workspace: Tensor, query_offsets: Tensor, key_offsets: Tensor, lengths: Tensor) -> Any:
        raise NotImplementedError

    def _plan(self, lists: KeyLists, places: Tensor) -> None:
        raise NotImplementedError

    def plan(self, spans: list[RowSpan]) -> None:
        """Plan for these rows. Reads nothing from the device; the copies of the previous plan must have finished.

        Raises:
            CaptureError: the launch would differ from the first one in values that a captured launch keeps.
        """
        lists = key_lists(self.call, spans, self.lanes, self.page_size)
        count = len(lists.places)
        self._staged[:count].copy_(torch.from_numpy(lists.places))
        places = self._places[:count]
        places.copy_(self._staged[:count], non_blocking=True)
        self._plan(lists, places)
        # The numbers that run() passes to the kernel by value; all supported versions have this attribute.
        info = tuple(int(number) for number in self._wrapper._plan_info)  # noqa: SLF001
        if self._info is None:
            self._info = info
        elif info != self._info:
            raise CaptureError("kernels.attention", f"a launch like the first one, {self._info}", info)


class PromptWrapper(Wrapper):
    """``BatchPrefillWithPagedKVCacheWrapper``: causal attention of one prompt chunk over keys and values of heads."""

    def _make(self, workspace: Tensor, query_offsets: Tensor, key_offsets: Tensor, lengths: Tensor) -> Any:
        import flashinfer

        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=query_offsets,
            paged_kv_indptr_buf=key_offsets,
            paged_kv_indices_buf=self._places,
            paged_kv_last_page_len_buf=lengths,
            backend=backend_for(self._device),
        )

    def _plan(self, lists: KeyLists, places: Tensor) -> None:
        shape = self.call.shape
        self._wrapper.plan(
            qo_indptr=torch.from_numpy(lists.query_offsets),
            paged_kv_indptr=torch.from_numpy(lists.key_offsets),
            paged_kv_indices=places,
            paged_kv_last_page_len=torch.from_numpy(lists.last_page_lengths),
            num_qo_heads=shape.heads,
            num_kv_heads=shape.groups,
            head_dim_qk=shape.dim,
            page_size=lists.page_size,
            causal=True,
            sm_scale=shape.scale,
            # Counted without the query's own slot.
            window_left=-1 if self.call.window is None else self.call.window - 1,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
        )

    def run(self, query_NQD: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """``out[n, q]`` for queries ``[B * T, Q, D]``; keys and values ``[pages, page_size, G, D]``."""
        # No programmatic launch: the kernel must start after its predecessor has ended.
        self._wrapper.run(query_NQD, (keys, values), out=out, enable_pdl=False)


class LatentWrapper(Wrapper):
    """``BatchMLAPagedAttentionWrapper``: causal attention over latent rows. FlashInfer 0.7 renamed its arguments."""

    def _make(self, workspace: Tensor, query_offsets: Tensor, key_offsets: Tensor, lengths: Tensor) -> Any:
        import flashinfer

        self._metadata = getattr(flashinfer.mla, "MLAPlanMetadata", None)
        return flashinfer.mla.BatchMLAPagedAttentionWrapper(
            workspace,
            use_cuda_graph=True,
            qo_indptr=query_offsets,
            kv_indptr=key_offsets,
            kv_indices=self._places,
            kv_len_arr=lengths,
            backend=backend_for(self._device),
        )

    def _plan(self, lists: KeyLists, places: Tensor) -> None:
        shape = self.call.shape
        values = {
            "qo_indptr": torch.from_numpy(lists.query_offsets),
            "kv_indptr": torch.from_numpy(lists.key_offsets),
            "kv_indices": places,
            "kv_len_arr": torch.from_numpy(lists.lengths),
        }
        fixed = {
            "num_heads": shape.heads,
            "head_dim_ckv": shape.dim,
            "head_dim_kpe": shape.rope_dim,
            "page_size": lists.page_size,
            # A single query sees all keys either way; without the mask the kernel compares nothing.
            "causal": self.call.tokens > 1,
            "sm_scale": shape.scale,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
        }
        if self._metadata is None:
            self._wrapper.plan(**values, **fixed)
        else:
            self._wrapper.plan(metadata=self._metadata.csr(**values), query_layout="split", kv_cache_layout="split", **fixed)

    def run(self, query_latent_NQL: Tensor, query_rope_NQR: Tensor, pool: Tensor, out: Tensor) -> None:
        """``out[n, q]`` for queries ``[B * T, Q, L]`` and ``[B * T, Q, R]``; ``pool`` is ``[pages, page_size, E]``."""
        rows = pool.view(-1, place_tokens(self.call, self.page_size), pool.shape[-1])
        parts = rows.split((self.call.shape.dim, self.call.shape.rope_dim), -1)
        if self._metadata is None:
            self._wrapper.run(query_latent_NQL, query_rope_NQR, *parts, out=out)
        else:
            self._wrapper.run(query=(query_latent_NQL, query_rope_NQR), kv_cache=parts, out=out)


def make_wrapper(call: PreparedCall, lanes: int, page_size: int, table_width: int, dtype: torch.dtype, workspace: Tensor) -> Wrapper:
    """The wrapper for the call, :class:`LatentWrapper` or :class:`PromptWrapper`."""
    kind = LatentWrapper if call.shape.latent else PromptWrapper
    return kind(call, lanes, page_size, table_width, dtype, workspace)

"""``flashinfer.xqa`` as plain loops, from its documented semantics: a module that replaces FlashInfer on a machine without a GPU.

It checks what the kernel can't: types, shapes, contiguity, and that the counters are zero.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

MASKED = -1e30
"""The kernel masks with a finite score: where everything is masked, its softmax is arbitrary."""


class StandIn(ModuleType):
    """Counts its calls by number of queries."""

    def __init__(self) -> None:
        super().__init__("flashinfer")
        self.calls: list[int] = []

    def xqa(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, seq_lens: Tensor, output: Tensor, workspace_buffer: Tensor,
        semaphores: Tensor, num_kv_heads: int, page_size: int, *, q_scale: float, kv_layout: str, enable_pdl: bool, q_seq_len: int,
        mask: Tensor | None,
    ) -> None:  # fmt: skip
        self.calls.append(q_seq_len)
        lanes, heads, dim = q.shape[0], q.shape[-2], q.shape[-1]
        assert tuple(q.shape) == ((lanes, 1, heads, dim) if q_seq_len == 1 else (lanes, 1, q_seq_len, heads, dim))
        assert output.shape == q.shape and output.dtype == q.dtype and output.is_contiguous() and q.is_contiguous()
        assert kv_layout == "NHD" and not enable_pdl
        assert k_cache.shape == v_cache.shape and tuple(k_cache.shape[1:]) == (page_size, num_kv_heads, dim)
        assert page_table.dtype == torch.int32 and page_table.is_contiguous() and int(page_table.min()) >= 0
        assert seq_lens.dtype == torch.uint32 and tuple(seq_lens.shape) == (lanes, 1)
        assert workspace_buffer.dtype == torch.uint8 and semaphores.dtype == torch.uint32 and not semaphores.view(torch.int32).any()
        assert (mask is None) == (q_seq_len == 1)
        if mask is not None:
            assert mask.dtype == torch.uint16 and mask.is_contiguous()
            assert tuple(mask.shape) == (lanes, q_seq_len, 2 * math.ceil(q_seq_len / 32))
        for lane in range(lanes):
            length = int(seq_lens[lane, 0])
            assert q_seq_len <= length <= page_table.shape[1] * page_size
            places = [(int(page_table[lane, s // page_size]), s % page_size) for s in range(length)]
            keys = torch.stack([k_cache[page, slot] for page, slot in places]).double()
            values = torch.stack([v_cache[page, slot] for page, slot in places]).double()
            for token in range(q_seq_len):
                seen = torch.ones(length, dtype=torch.bool)
                for j in range(q_seq_len) if mask is not None else ():
                    seen[length - q_seq_len + j] = bool(int(mask[lane, token, j // 16]) >> (j % 16) & 1)
                for head in range(heads):
                    group = head // (heads // num_kv_heads)
                    query = (q[lane, 0, head] if mask is None else q[lane, 0, token, head]).double()
                    score = torch.where(seen, keys[:, group] @ query * q_scale / math.sqrt(dim), MASKED)
                    result = torch.softmax(score, 0) @ values[:, group]
                    (output[lane, 0, head] if mask is None else output[lane, 0, token, head]).copy_(result)


def install(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Make ``import flashinfer`` find a new stand-in."""
    module = StandIn()
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return module

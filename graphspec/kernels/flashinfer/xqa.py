"""``flashinfer.xqa`` as attention of T queries over their prefix and exactly the T slots after it.

The kernel needs no plan, so nothing can become stale in a CUDA graph; the sequence length is read on the device; the number of splits
follows from the shapes. Every query sees the slots before the last T, and of the last T those whose bit is set in its mask, so every tree
can be represented. It supports neither a first visible slot nor a window wider than the queries; such calls use other kernels.

Source: flashinfer/xqa.py and csrc/xqa/mha.cu (``applyMaskFromInput``) of versions 0.6.18 to 0.7.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import CaptureError, ConfigError
from ..fused.launch import like_first, multiprocessors, operator

WORKSPACE_BYTES = 128 * 2**20
"""Scratch for partial results, one buffer per device; :func:`scratch_bytes` bounds what a call needs."""
SEMAPHORES = 1 << 16
ROWS_PER_BLOCK = 32
"""Rows (token x query head of one group) of a block with more than one query token: ``M_TILESIZE`` of csrc/xqa/defines.h."""


def pack_words(ancestors_BTX: Tensor) -> Tensor:
    """The kernel's mask: bit j of query t's row is bit j of its ancestor words, for the T slots after the prefix.

    The kernel's uint16 row of ``2 * ceil(T / 32)`` words is, in memory, the int32 row returned here (little endian).

    Args:
        ancestors_BTX: int64 words, 64 bits each; ``64 * X >= T``. Bits from T on are dropped.

    Returns:
        int32 ``[B, T, ceil(T / 32)]``.

    Raises:
        CaptureError: fewer bits than queries.
    """
    tokens, words = ancestors_BTX.shape[1:]
    if 64 * words < tokens:
        raise CaptureError("ancestors", f"at least {tokens} bits, one per query", 64 * words)
    halves = math.ceil(tokens / 32)
    half_W = torch.arange(halves, device=ancestors_BTX.device)
    bits_W = (tokens - 32 * half_W).clamp(max=32)
    kept_W = (torch.ones_like(half_W) << bits_W) - 1
    packed_BTW = (ancestors_BTX.index_select(2, half_W >> 1) >> (32 * (half_W & 1))) & kept_W
    # The same 32 bits as a signed number; out-of-range conversions are device-dependent.
    return torch.where(packed_BTW >= 1 << 31, packed_BTW - (1 << 32), packed_BTW).to(torch.int32)


def scratch_bytes(lanes: int, tokens: int, heads: int, groups: int, dim: int, multiprocessor_count: int) -> int:
    """Most workspace bytes of one call: per split and block of rows, maxima, sums and a 16-bit tile of results."""
    blocks = math.ceil(tokens * (heads // groups) / ROWS_PER_BLOCK)
    splits = max(1, multiprocessor_count // (lanes * groups))
    return lanes * groups * blocks * splits * ROWS_PER_BLOCK * (2 * dim + 8) + 4096


_scratch: dict[torch.device, tuple[Tensor, Tensor]] = {}
_built: set[tuple[Any, ...]] = set()
"""Kernels that have run, by FlashInfer's compile-time parameters: the first run of each compiles or loads it."""


def _buffers(device: torch.device) -> tuple[Tensor, Tensor]:
    """Workspace, and zeroed counters, which the kernel resets to zero. Shared by all calls, since they are ordered on one stream."""
    if device not in _scratch:
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        _scratch[device] = workspace, torch.zeros(SEMAPHORES, dtype=torch.int32, device=device).view(torch.uint32)
    return _scratch[device]


def xqa_attention(
    query_BTQD: Tensor, kv_pool: Tensor, layer: int, table_BP: Tensor, length_B1: Tensor, mask_BTW: Tensor | None, scale: float
) -> Tensor:
    """One launch of ``flashinfer.xqa``.

    Args:
        query_BTQD: bfloat16 or float16, as the pool.
        kv_pool: ``[layers, 2, pages, page_size, G, D]``, read only.
        layer: static.
        table_BP: int32, contiguous, no entry below 0.
        length_B1: int32, from T to ``P * page_size``: slots of the prefix and the window.
        mask_BTW: of :func:`pack_words`; None for T = 1, which has no mask: the query sees all of ``length``.
        scale: static; multiplies the scores.

    Returns:
        ``[B, T, Q, D]`` in the dtype of the query.

    Raises:
        CaptureError: the kernel would be built during a capture.
        ConfigError: a batch too large for the workspace.
    """
    import flashinfer

    lanes, tokens, heads, dim = query_BTQD.shape
    pool = kv_pool[layer]
    page_size, groups = pool.shape[2], pool.shape[3]
    device, capturing = query_BTQD.device, query_BTQD.is_cuda and torch.cuda.is_current_stream_capturing()
    built = (device, query_BTQD.dtype, page_size, dim, heads // groups, tokens)
    if capturing and built not in _built:
        raise CaptureError("kernels.attention", "a warm-up before the capture", f"the first launch of xqa for {tokens} tokens, captured")
    needed = scratch_bytes(lanes, tokens, heads, groups, dim, multiprocessors(device))
    counters = lanes * groups * math.ceil(tokens * (heads // groups) / ROWS_PER_BLOCK)
    if needed > WORKSPACE_BYTES or counters > SEMAPHORES:
        found = f"{lanes} lanes of {tokens} tokens, which need {needed} bytes and {counters} counters"
        raise ConfigError("kernels.attention", f"at most {WORKSPACE_BYTES} bytes of workspace and {SEMAPHORES} counters", found)
    workspace, semaphores = _buffers(device)
    query = query_BTQD.contiguous()
    out = torch.empty_like(query)
    # With one query the kernel takes [B, 1, Q, D], else [B, 1, T, Q, D]: the 1 is the beam.
    beam = (lanes, 1, heads, dim) if tokens == 1 else (lanes, 1, tokens, heads, dim)
    flashinfer.xqa(
        query.view(beam), pool[0], pool[1], table_BP, length_B1.view(torch.uint32), out.view(beam), workspace, semaphores,
        groups, page_size,
        # The kernel multiplies by 1 / sqrt(D) itself.
        q_scale=scale * math.sqrt(dim),
        kv_layout="NHD",
        # Without programmatic launch, it starts after the kernel before it.
        enable_pdl=False,
        q_seq_len=tokens,
        mask=None if mask_BTW is None else mask_BTW.view(torch.uint16),
    )  # fmt: skip
    _built.add(built)
    return out


OP = operator("flashinfer_xqa", xqa_attention, fake=like_first)


@dataclass(frozen=True, slots=True, eq=False)  # Dynamo of torch 2.11 hashes what it calls, before it has fields
class XqaWindow:
    """Arguments that all layers of one call share."""

    table_BP: Tensor
    length_B1: Tensor
    mask_BTW: Tensor | None
    sees_BT11: Tensor

    def __call__(self, query_BTQD: Tensor, kv_pool: Tensor, layer: int, scale: float) -> Tensor:
        out_BTQD: Tensor = OP(query_BTQD, kv_pool, layer, self.table_BP, self.length_B1, self.mask_BTW, scale)
        # A fully masked query has an empty softmax, and the kernel's result for it is arbitrary.
        return torch.where(self.sees_BT11, out_BTQD, 0.0)


def bind_window(table_BP: Tensor, page_size: int, prefix_end_B: Tensor, ancestors_BTX: Tensor) -> XqaWindow:
    """Lengths and mask of one call, computed once for all layers; see :meth:`graphspec.kernels.registry.KernelSet.own_window`."""
    tokens, slots = ancestors_BTX.shape[1], table_BP.shape[1] * page_size
    # A lane without a request may have any length; the kernel subtracts T from it, unsigned.
    end_B = prefix_end_B.clamp(0, slots - tokens)
    packed_BTW = pack_words(ancestors_BTX)
    sees_BT = (prefix_end_B > 0)[:, None] | (packed_BTW != 0).any(-1)
    if tokens == 1:
        length_B1, mask_BTW = (end_B[:, None] + packed_BTW[:, :, 0]).clamp(min=1), None
    else:
        length_B1, mask_BTW = end_B[:, None] + tokens, packed_BTW
    return XqaWindow(table_BP.clamp(min=0).contiguous(), length_B1.to(torch.int32), mask_BTW, sees_BT[..., None, None])

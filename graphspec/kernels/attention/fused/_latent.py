"""What both forms of latent attention share: sizes of splits and tiles, their launches in groups, and the kernel that merges splits.

With many lanes, tokens and heads the partials of all splits would take gigabytes: 8 trees of 100 nodes with 128 heads have 3.3 million.
So tiles are processed in groups whose partials fit ``SCRATCH``. Each group takes two launches, and all groups share the same memory. With
32 splits a group is 15 tiles, 480 programs, which fill an H200; a chain of up to 6 nodes of DeepSeek-V3 at batch 1 is one group. A program
that folded several splits would need two accumulators, 256 registers per thread, and pass them through memory twice.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ....errors import ConfigError
from ...fused.launch import Launch, launch
from ...fused.work import Situation, Work, works

SPLIT = 256
"""Fewest slots of a split; doubled until :data:`SPLITS` splits cover a lane."""

SPLITS = 32
"""Most splits of a lane; bounds the memory and time of the merge."""

WINDOW = 128
"""Slots that ancestor words can address."""

SCRATCH = 64 * 2**20
"""Most bytes of partials of one launch. Groups of tiles reuse them, so a larger grid needs no more."""

DOUBLINGS = 16
MERGE = 8
"""Splits that a merging program loads at once."""


def prefix_work(launch: Launch, at: Situation) -> Work:
    """Either form reads each lane's rows once, in blocks."""
    values = launch.values
    lanes, block = values["table"].shape[0], values["BLOCK_N"]
    slots = at.context + values["tokens"]
    blocks = -(-slots // (block * values["splits"]))
    row = (values["width"] + values["rope"]) * values["pool"].element_size()
    return Work(
        bytes=lanes * slots * row, programs=launch.programs, in_flight=(launch.num_stages - 1) * block * row,
        memory=1 + blocks / max(launch.num_stages - 1, 1), cache=2,
    )  # fmt: skip


def _merge_work(launch: Launch, at: Situation) -> Work:
    values = launch.values
    return Work(cache=1 + -(-values["splits"] // values["MERGE"]), alone=values["splits"] * values["width"] * 4)


@works(_merge_work)
@triton.jit(do_not_specialize=["first_pair"])
def _merge(
    partial, peak, total, out, first_pair, tiles, rows_of_lane, splits, width,
    SPLITS: tl.constexpr, MERGE: tl.constexpr, LATENT: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row of a launch): merge the splits of one row, in order."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    line = tl.program_id(0).to(tl.int64)
    pair = first_pair + tl.program_id(0) // BLOCK_M
    row = pair % tiles * BLOCK_M + tl.program_id(0) % BLOCK_M
    if row >= rows_of_lane:
        return
    channel = tl.arange(0, LATENT)
    every = tl.arange(0, SPLITS)
    highest = tl.max(tl.load(peak + line * splits + every, mask=every < splits, other=-float("inf")), 0)
    pivot = tl.where(highest == -float("inf"), 0.0, highest)
    mixed = tl.zeros((LATENT,), tl.float32)
    whole = 0.0
    for start in range(0, splits, MERGE):
        split = start + tl.arange(0, MERGE)
        sums = tl.load(total + line * splits + split, mask=split < splits, other=0.0)
        used = sums != 0
        weight = tl.exp2(tl.load(peak + line * splits + split, mask=used, other=-float("inf")) - pivot)
        source = partial + (line * splits + split)[:, None] * width + channel[None, :]
        rows = tl.load(source, mask=used[:, None] & (channel < width)[None, :], other=0.0)
        mixed += tl.sum(rows * weight[:, None], 0)
        whole += tl.sum(sums * weight, 0)
    mixed = mixed * (1.0 / tl.where(whole == 0, 1.0, whole))
    target = (pair // tiles).to(tl.int64) * rows_of_lane + row
    tl.store(out + target * width + channel, mixed, mask=channel < width)


def blocks(dtype: torch.dtype) -> tuple[int, int]:
    """``(BLOCK_M, BLOCK_N)``, from the dtype only, so that a row's bits do not depend on shapes.

    A warp group multiplies 64 rows at once. Their 512 output channels take half the register file, which leaves no room for blocks of 64
    slots.
    """
    return (64, 32) if dtype.itemsize == 2 else (16, 16)


def group_of(pairs: int, size: int) -> int:
    """(lane, tile) pairs per launch: as many as fit :data:`SCRATCH`, in groups of equal size.

    Args:
        pairs: total number of pairs.
        size: bytes of the partials of one pair.
    """
    groups = triton.cdiv(pairs, max(SCRATCH // size, 1))
    return triton.cdiv(pairs, groups)


def splits_of(table: Tensor, latent_pool: Tensor) -> int:
    """Splits of a lane, from the slots of its whole table row."""
    return min(SPLITS, triton.cdiv(table.shape[1] * latent_pool.shape[3], SPLIT))


def attend(
    kernel: Any,
    query_latent: Tensor,
    query_rope: Tensor,
    latent_pool: Tensor,
    layer: int,
    table: Tensor,
    begin: Tensor,
    end: Tensor,
    valid: Tensor | None,
    ancestors: Tensor | None,
    scale: float,
    *,
    tokens_of_tile: int,
    splits: int,
    merged: bool,
    **constants: Any,
) -> Tensor:
    """Launch ``kernel``, and the merge of its splits, for each group of tiles: weighted sums ``[lanes, tokens, heads, width]``.

    Args:
        kernel: that writes the partials of a tile's splits, or its sums if they are not ``merged``.
        query_latent, query_rope, latent_pool, layer, table, begin, end, valid, ancestors, scale: of the op; a chunk has no ``ancestors``,
            a window no ``valid``.
        tokens_of_tile: the tokens whose heads a tile may hold: all of a lane, or 1.
        splits: of a lane.
        merged: whether the merge writes the result.
        constants: further ones of ``kernel``.
    """
    lanes, tokens, heads, width = query_latent.shape
    rope, page_size = query_rope.shape[-1], latent_pool.shape[3]
    block_m, block_n = blocks(query_latent.dtype)
    out = query_latent.new_empty(lanes, tokens, heads, width)
    rows = tokens_of_tile * heads
    tiles = triton.cdiv(rows, block_m)
    group = pairs = lanes * tokens // tokens_of_tile * tiles
    target, peak, total = out, None, None
    if merged:
        group = group_of(pairs, splits * block_m * (width + 2) * 4)
        target = out.new_empty(group * block_m, splits, width, dtype=torch.float32)
        peak, total = (out.new_empty(group * block_m, splits, dtype=torch.float32) for _ in range(2))
    latent, turned = triton.next_power_of_2(max(width, 16)), triton.next_power_of_2(max(rope, 16))
    begin, end = begin.contiguous(), end.contiguous()
    valid, ancestors = (None if each is None else each.contiguous() for each in (valid, ancestors))
    for first in range(0, pairs, group):
        taken = min(group, pairs - first)
        launch(
            kernel, (splits, taken),
            query_latent, query_rope, latent_pool[layer], table, begin, end, valid, ancestors,
            target, peak, total, scale * math.log2(math.e),
            first, tiles, tokens, heads, width, rope, table.shape[1], splits, table.stride(0),
            *query_latent.stride()[:3], *query_rope.stride()[:3],
            SPLITS=SPLITS, SPLIT=SPLIT, DOUBLINGS=DOUBLINGS, **constants,
            WORDS=0 if ancestors is None else ancestors.shape[-1], CHUNK=valid is not None, PAGE=page_size,
            LATENT=latent, ROPE=turned, EXACT=(latent, turned) == (width, rope), BLOCK_M=block_m, BLOCK_N=block_n,
            num_warps=8 if query_latent.dtype.itemsize == 2 else 4, num_stages=3,
        )  # fmt: skip
        if merged:
            launch(
                _merge, (taken * block_m,), target, peak, total, out, first, tiles, rows, splits, width,
                SPLITS=SPLITS, MERGE=MERGE, LATENT=latent, BLOCK_M=block_m,
            )  # fmt: skip
    return out


def check_words(ancestors_BTX: Tensor) -> None:
    """Raises ConfigError if there are more words than slots of a window can be addressed by."""
    if ancestors_BTX.shape[-1] > WINDOW // 64:
        raise ConfigError("ancestors_BTX", f"at most {WINDOW // 64} words", ancestors_BTX.shape[-1])

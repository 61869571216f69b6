"""Triton kernel of :mod:`graphspec.kernels.attention.page_feature_write`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused.launch import launch, register

BLOCK = 2048
"""Channels of a feature row copied by one program."""


@triton.jit
def _page_feature_write(
    pool, table, begin, length, feature, path, lane_row, page_size, columns, tokens, width, channels,
    THROUGH_ROWS: tl.constexpr, PATH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (lane, e, chunk): copy a chunk of the feature of the token that fills the e-th page of its lane, if there is one."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lane = tl.program_id(0).to(tl.int64)
    count = tl.load(length + lane)
    if count > 0:
        first = tl.load(begin + tl.load(lane_row + lane) if THROUGH_ROWS else begin + lane)
        token = page_size - 1 - first % page_size + tl.program_id(1) * page_size
        if token < count:
            page = tl.load(table + lane * columns + (first + token) // page_size).to(tl.int64)
            source = tl.load(path + lane * width + token) if PATH else token
            channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
            inside = channel < channels
            kept = tl.load(feature + (lane * tokens + source) * channels + channel, mask=inside)
            tl.store(pool + page * channels + channel, kept, mask=inside)


def page_feature_write(
    page_feature: Tensor,
    page_size: int,
    table_BP: Tensor,
    begin_R: Tensor,
    length_B: Tensor,
    feature_BTF: Tensor,
    path_BA: Tensor | None = None,
    lane_row_B: Tensor | None = None,
) -> None:
    lanes, tokens, channels = feature_BTF.shape
    width = tokens if path_BA is None else path_BA.shape[1]
    # For prompt chunks, begins and lengths are strided columns of the message.
    launch(
        _page_feature_write, (lanes, triton.cdiv(width, page_size), triton.cdiv(channels, BLOCK)), page_feature, table_BP,
        begin_R.contiguous(), length_B.contiguous(), feature_BTF, path_BA, lane_row_B, page_size, table_BP.shape[1], tokens, width,
        channels, THROUGH_ROWS=lane_row_B is not None, PATH=path_BA is not None, BLOCK=BLOCK,
    )  # fmt: skip


OP = register(page_feature_write)

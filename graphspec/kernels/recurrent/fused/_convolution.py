"""The causal convolution of one token, shared by verification, prompts and the commit so that all three give the same bits."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_tap(total, place, node, nodes, stride, columns_end, channels, weight, in_channels, in_columns):
    """``total`` plus one tap of the convolution: an input times its weight, for a block of channels.

    Args:
        place: index of the input: >= 0 counts tokens, < 0 counts committed columns back from the newest, -1.
        node, nodes, stride: index of the token at ``place`` (unused below 0), pointers to the channels of token 0, stride between tokens.
        columns_end, channels: pointers just past the newest column, stride between columns.
        weight: pointers to this tap's weights.
        in_channels, in_columns: masks of the channels that exist, and of those that the columns hold.
    """
    of_node = tl.load(nodes + node * stride, mask=in_channels & (place >= 0), other=0.0)
    of_row = tl.load(columns_end + tl.minimum(place, -1) * channels, mask=in_columns & (place < 0), other=0.0)
    factor = tl.load(weight, mask=in_channels, other=0.0)
    # An explicit fma: left to the compiler, contraction could differ between kernels.
    return tl.fma(tl.where(place >= 0, of_node, of_row).to(tl.float32), factor.to(tl.float32), total)


@triton.jit
def activated(total, dtype: tl.constexpr):
    """SiLU of a sum that was rounded to ``dtype``, in ``dtype``."""
    total = total.to(dtype).to(tl.float32)
    return (total / (1.0 + tl.exp(-total))).to(dtype)

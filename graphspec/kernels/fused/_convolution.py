"""What the Triton kernels that convolve a token share, so that its result has the same bits in verification, prompts and the commit."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_tap(total, place, node, nodes, stride, columns_end, channels, weight, inside, known):
    """``total`` and one input of some channels times its weight.

    Args:
        place: of the input: from 0 on among the tokens, below 0 among the committed columns, of which -1 is the newest.
        node, nodes, stride: the token at ``place`` where there is one, where the channels of token 0 lie, and how far tokens lie apart.
        columns_end, channels: where the channels would lie after the newest column, and how far columns lie apart.
        weight: where this tap's weights lie.
        inside, known: which channels there are, and which of them the columns have.
    """
    of_node = tl.load(nodes + node * stride, mask=inside & (place >= 0), other=0.0)
    of_row = tl.load(columns_end + tl.minimum(place, -1) * channels, mask=known & (place < 0), other=0.0)
    factor = tl.load(weight, mask=inside, other=0.0)
    # Fused by name: a compiler that may choose could round a sum another way in another kernel.
    return tl.fma(tl.where(place >= 0, of_node, of_row).to(tl.float32), factor.to(tl.float32), total)


@triton.jit
def activated(total, dtype: tl.constexpr):
    """SiLU of a sum that was rounded to ``dtype``, in ``dtype``."""
    total = total.to(dtype).to(tl.float32)
    return (total / (1.0 + tl.exp(-total))).to(dtype)

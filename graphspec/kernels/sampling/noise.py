"""Gumbel noise from a counter hash: a pure function of (seed, position, token), so every stage gets the same bits.

The 32-bit mixer is ``lowbias32`` of Chris Wellons' hash-prospector (public domain, https://github.com/skeeto/hash-prospector): a
bijection found by search for the lowest avalanche bias. Seed and position are absorbed into *two* 32-bit words, in different order and
from different constants (the first 64 fractional bits of the golden ratio); with one word, two positions whose states differ in few bits
would get the same noise over the vocabulary, merely permuted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import Int64, kernel_op

MASK32 = 0xFFFFFFFF
KEY_A, KEY_B = 0x9E3779B9, 0x7F4A7C15
BELOW_ONE = 1.0 - 2.0**-24
"""The largest float32 below 1."""


def mix32(x: Tensor) -> Tensor:
    """``lowbias32`` on int64 values in [0, 2^32); a bijection of that range.

    Multipliers of 2^31 or more are written as negative residues mod 2^32, so that no product overflows int64.
    """
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK32
    x = x ^ (x >> 15)
    x = (x * (0x846CA68B - 2**32)) & MASK32
    return x ^ (x >> 16)


def _absorb(state: Tensor, *words: Tensor) -> Tensor:
    """Mix ``state``, then every word into it."""
    state = computed_once(mix32(state))
    for word in words:
        state = computed_once(mix32(state ^ word))
    return state


def computed_once(x: Tensor) -> Tensor:
    """``x`` itself, contiguous, which Inductor then computes once.

    It inlines an elementwise expression wherever it is used, and a mixer uses each of its intermediate values twice: three mixers in a
    row were traced as thousands of operations, and took minutes to compile. A value that is viewed with strides has to be a buffer.
    """
    return x.as_strided(x.shape, x.stride())


def counter_hash(seed_B: Tensor, position_BT: Tensor, token_V: Tensor) -> Tensor:
    """32 random bits per (seed, position, token).

    Args:
        seed_B: int64, all 64 bits count.
        position_BT: int64, the position of the token being sampled; the low 32 bits count.
        token_V: int64, target token ids; the low 32 bits count.

    Returns:
        int64 ``[B, T, V]`` in [0, 2^32).
    """
    low_B1, high_B1 = (seed_B & MASK32)[:, None], ((seed_B >> 32) & MASK32)[:, None]
    position_BT = position_BT & MASK32
    a_BT = _absorb(low_B1 ^ KEY_A, high_B1, position_BT)
    b_BT = _absorb(position_BT ^ KEY_B, low_B1, high_B1)
    first_BTV = mix32((token_V & MASK32) ^ a_BT[..., None])
    return mix32((first_BTV + b_BT[..., None]) & MASK32)


@kernel_op(native="native.cycle", fused="noise:OP", exact=False)
def gumbel_noise(seed_B: Int64, position_BT: Int64, token_V: Int64) -> Tensor:
    """Gumbel(0, 1) noise for sampling by argmax: ``argmax(logits + T * g)`` draws from ``softmax(logits / T)``.

    ``u = (r + 0.5) * 2^-32`` clamped below 1; ``-log1p(-u)`` is Exp(1), its negative logarithm Gumbel(0, 1). Always finite:
    within [-2.82, 22.88]. The 32 bits are the same everywhere; the two logarithms are the backend's and may differ in the last bits.

    Args:
        seed_B, position_BT, token_V: as for :func:`counter_hash`.

    Returns:
        float32 ``[B, T, V]``.
    """
    bits_BTV = counter_hash(seed_B, position_BT, token_V)
    uniform_BTV = ((bits_BTV.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=BELOW_ONE)
    return -torch.log(-torch.log1p(-uniform_BTV))

"""Helpers of the kernels over a vocabulary: counter hash, Gumbel noise, and (value, index) pairs packed into one ordered word."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ...fused.launch import INTERPRETED, Launch
from ...fused.work import ARRIVAL, Situation, Work
from ..noise import BELOW_ONE, KEY_A, KEY_B

_INTERPRETED = tl.constexpr(INTERPRETED)
_KEY_A = tl.constexpr(KEY_A)
_KEY_B = tl.constexpr(KEY_B)
_BELOW_ONE = tl.constexpr(BELOW_ONE)
LOWEST = tl.constexpr(-(1 << 63))
"""Smaller than every packed pair."""


def vocabulary_work(launch: Launch, at: Situation) -> Work:
    logits = launch.values["logits"]
    return Work(bytes=logits.numel() * logits.element_size(), programs=launch.programs, memory=1, cache=1 + ARRIVAL)


@triton.jit
def mix32(x):
    """``lowbias32`` on uint32."""
    x = x ^ (x >> 16)
    x = x * tl.full(x.shape, 0x7FEB352D, tl.uint32)
    x = x ^ (x >> 15)
    x = x * tl.full(x.shape, 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def hash_words(seed, position):
    """The two words that :func:`counter_hash` takes for a seed and a position, as vectors of one entry."""
    seed = seed.to(tl.int64) + tl.zeros([1], tl.int64)
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    where = (position.to(tl.int64) + tl.zeros([1], tl.int64)).to(tl.uint32)
    a = mix32(mix32(mix32(low ^ tl.full([1], _KEY_A, tl.uint32)) ^ high) ^ where)
    b = mix32(mix32(mix32(where ^ tl.full([1], _KEY_B, tl.uint32)) ^ low) ^ high)
    return a, b


@triton.jit
def counter_hash(a, b, token):
    """32 bits per token: :func:`graphspec.kernels.sampling.noise.counter_hash`."""
    return mix32(mix32(token.to(tl.uint32) ^ a) + b)


@triton.jit
def gumbel(bits):
    """Gumbel(0, 1) noise of 32 random bits: :func:`graphspec.kernels.sampling.noise.gumbel_noise`."""
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, _BELOW_ONE)
    if _INTERPRETED:
        # The interpreter has no log1p. In float64, log(w) * u / (1 - w) corrects for the rounding of w = 1 - u.
        wide = uniform.to(tl.float64)
        rest = 1.0 - wide
        exponential = tl.where(rest == 1.0, wide, -tl.log(rest) * wide / tl.where(rest == 1.0, 1.0, 1.0 - rest)).to(tl.float32)
    else:
        exponential = -libdevice.log1p(-uniform)
    return -log_exact(exponential)


@triton.jit
def perturb(x, temperature, a, b, token):
    """``x + temperature * noise`` if ``temperature``, a scalar, is positive; else ``x``, and no noise is computed."""
    if temperature > 0:
        x += temperature * gumbel(counter_hash(a, b, token))
    return x


@triton.jit
def exp_exact(x):
    """``exp`` to within two ulp; the GPU's fast one loses a bit for every doubling of ``-x``."""
    return tl.exp(x) if _INTERPRETED else libdevice.exp(x)


@triton.jit
def log_exact(x):
    """``log`` to within two ulp."""
    return tl.log(x) if _INTERPRETED else libdevice.log(x)


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def ordered(x):
    """An int32 with the order of the float32; both zeros give 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(image):
    """The inverse of :func:`ordered`."""
    return (image ^ ((image >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pack(x, index):
    """One int64 that orders by value, then by lower index; ``index`` in [0, 2^31)."""
    return (ordered(x).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def packed_value(packed):
    return unordered((packed >> 32).to(tl.int32))


@triton.jit
def packed_index(packed):
    return 0x7FFFFFFF - (packed & 0x7FFFFFFF)


@triton.jit
def arrive(counter, parts):
    """True in the last of ``parts`` programs, to which the stores of the others are visible; it resets the counter to 0."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1
    if last:
        tl.store(counter, 0)
    return last

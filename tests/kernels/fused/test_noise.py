"""The counter hash in uint32 arithmetic, bit for bit, and its Gumbel noise."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from graphspec.kernels.sampling.fused._vocabulary import counter_hash, gumbel, hash_words
from graphspec.kernels.sampling.noise import BELOW_ONE
from graphspec.kernels.sampling.noise import counter_hash as reference_hash

from ._vocabulary import DEVICE, call, functions

SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 1 << 32, -(1 << 31), 0x9E3779B97F4A7C15 - 2**64]
POSITIONS = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40 + 7]
TOKENS = [0, 1, 128255, 2**31 - 1, 2**31, 2**32 - 1]


@triton.jit
def _bits(seed, position, token, out, count: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, count)
    a, b = hash_words(tl.load(seed + row), tl.load(position + row))
    tl.store(out + row * count + column, counter_hash(a, b, tl.load(token + column)).to(tl.int64))


@triton.jit
def _noise_of(bits, out, count: tl.constexpr):
    column = tl.arange(0, count)
    tl.store(out + column, gumbel(tl.load(bits + column).to(tl.uint32)))


def test_hash_bits_equal_the_reference() -> None:
    pairs = torch.tensor([(s, p) for s in SEEDS for p in POSITIONS])
    token = torch.tensor([*TOKENS, 5, 6])
    out = torch.empty(len(pairs), len(token), dtype=torch.int64, device=DEVICE)
    seed, position = (x.contiguous().to(DEVICE) for x in pairs.unbind(1))
    _bits[(len(pairs),)](seed, position, token.to(DEVICE), out, count=len(token))
    assert torch.equal(out.cpu(), reference_hash(pairs[:, 0], pairs[:, 1:], token)[:, 0])


def exact(bits: Tensor) -> Tensor:
    """The noise in float64, from the uniform number that float32 gives."""
    uniform = ((bits.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=BELOW_ONE).double()
    return -torch.log(-torch.log1p(-uniform))


def test_noise_at_both_ends_and_between() -> None:
    ends = torch.tensor([0, 1, 2, 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFF00, 0xFFFFFE00, 1 << 31, 1 << 8, 0xA1D2A4C1])
    bits = torch.cat((ends, torch.randint(0, 1 << 32, (1024 - len(ends),), generator=torch.Generator().manual_seed(0))))
    out = torch.empty(len(bits), device=DEVICE)
    _noise_of[(1,)](bits.to(DEVICE), out, count=len(bits))
    out = out.cpu().double()
    assert out.isfinite().all() and out.min() > -2.82 and out.max() < 22.88
    oracle = exact(bits)
    # Two roundings: of the exponential, which moves its logarithm by as much in absolute terms, and of the result.
    assert ((out - oracle).abs() <= 2**-22 + 2**-23 * oracle.abs()).all()


@pytest.mark.parametrize(("lanes", "positions", "vocab"), [(1, 1, 1), (2, 3, 37), (1, 2, 1025)])
def test_noise_equals_the_reference_closely_and_itself_exactly(lanes: int, positions: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    case = {
        "seed_B": torch.randint(-(2**62), 2**62, (lanes,), generator=generator),
        "position_BT": torch.randint(0, 5000, (lanes, positions), generator=generator),
        "token_V": torch.randperm(4 * vocab, generator=generator)[:vocab],
    }
    reference, fused = functions("gumbel_noise")
    (found,), (again,) = call(fused, case), call(fused, case)
    assert torch.equal(found, again)
    torch.testing.assert_close(found, reference(**case), rtol=5e-7, atol=5e-7)
    (last,) = call(fused, {k: v[-1:] if k != "token_V" else v for k, v in case.items()})
    assert torch.equal(last, found[-1:])

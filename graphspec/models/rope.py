"""Rotary position embedding: one table for every position, or frequencies per token where they depend on the length.

Frequencies and cos / sin are float32 and computed in the order transformers uses, so that both agree to the last bit or nearly so.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..facts.rope import NO_ROPE
from ..kernels.formulas import Rotation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..facts import RopeFacts
    from .attention import Attention


def _base_frequency(theta: float, head_dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim))


def _yarn_frequency(rope: RopeFacts, head_dim: int) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): interpolate long wavelengths, keep short ones, a linear ramp between."""

    def dimension(rotations: float) -> float:
        return head_dim * math.log(rope.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    period = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    keep = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    return 1.0 / (rope.factor * period) * (1 - keep) + 1.0 / period * keep


def _llama3_frequency(rope: RopeFacts, head_dim: int) -> Tensor:
    """Llama 3.1: divide long wavelengths by the factor, keep short ones, interpolate smoothly between."""
    frequency = _base_frequency(rope.theta, head_dim)
    context, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / frequency
    smooth = (context / wavelength - low) / (high - low)
    medium = (1 - smooth) * frequency / rope.factor + smooth * frequency
    scaled = torch.where(wavelength > context / low, frequency / rope.factor, frequency)
    return torch.where((wavelength >= context / high) & (wavelength <= context / low), medium, scaled)


def _proportional_frequency(rope: RopeFacts, head_dim: int) -> Tensor:
    """The pairs of a whole head, of which a share turns, the fastest ones, and the others stand still."""
    turning = int(rope.partial_rotary_factor * head_dim // 2)
    frequency = _base_frequency(rope.theta, head_dim) / rope.factor
    return torch.cat((frequency[:turning], torch.zeros(head_dim // 2 - turning, device="cpu")))


def rope_frequency(rope: RopeFacts, head_dim: int) -> Tensor:
    """Angular frequency of each rotated pair, float32 ``[D / 2]`` on the CPU; for kind "dynamic" the one of a short sequence.

    Where only part of the head is rotated, D is that part here and in everything below.
    """
    head_dim = rope.rotary_dim(head_dim)
    if rope.kind == NO_ROPE:
        return torch.zeros(head_dim // 2, device="cpu")
    if rope.kind == "linear":
        return _base_frequency(rope.theta, head_dim) / rope.factor
    if rope.kind == "yarn":
        return _yarn_frequency(rope, head_dim)
    if rope.kind == "llama3":
        return _llama3_frequency(rope, head_dim)
    if rope.kind == "proportional":
        return _proportional_frequency(rope, head_dim)
    return _base_frequency(rope.theta, head_dim)


class RotaryEmbedding(nn.Module):
    """cos and sin of each token's position.

    Args:
        rope: kind and parameters.
        head_dim: of the whole head.
        max_positions: rows of the table; positions are clamped into it, which only affects rows that are not read.
        others: further rotations, whose tables follow in the same tensor, ``max_positions`` rows each.
    """

    def __init__(self, rope: RopeFacts, head_dim: int, max_positions: int, others: Sequence[RopeFacts] = ()) -> None:
        super().__init__()
        self.rope, self.rotary_dim, self.max_positions = rope, rope.rotary_dim(head_dim), max_positions
        self.table_LD: Tensor
        self.exponent_D: Tensor
        if rope.kind == "dynamic":
            exponent = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32, device="cpu") / self.rotary_dim
            self.register_buffer("exponent_D", exponent, persistent=False)
        else:
            tables = [self._table(rope, rope_frequency(rope, head_dim))]
            for other in others:
                still = torch.zeros(self.rotary_dim // 2, device="cpu")
                tables.append(self._table(other, still if other.kind == NO_ROPE else rope_frequency(other, head_dim)))
            self.register_buffer("table_LD", torch.cat(tables), persistent=False)

    def _table(self, rope: RopeFacts, frequency: Tensor) -> Tensor:
        angle = torch.arange(self.max_positions, dtype=torch.float32, device="cpu")[:, None] * frequency
        return torch.cat((angle.cos(), angle.sin()), dim=-1) * rope.attention_factor

    def of(self, attention: Attention) -> Rotation:
        """How the query tokens of ``attention`` are rotated."""
        position_BT = attention.position_BT
        rotation: Rotation = self(position_BT, attention.rope_length_BT if self.rope.kind == "dynamic" else position_BT)
        return rotation

    def forward(self, position_BT: Tensor, rope_length_BT: Tensor) -> Rotation:
        """How tokens at int64 positions are rotated; the lengths, int64, matter to kind "dynamic" only."""
        if self.rope.kind == "dynamic":
            angle_BTD = position_BT[..., None].float() * self._dynamic_frequency(rope_length_BT)
            table_LD = torch.cat((angle_BTD.cos(), angle_BTD.sin()), dim=-1).flatten(0, 1)
            return Rotation(table_LD, torch.arange(table_LD.shape[0], device=table_LD.device).view(position_BT.shape))
        return Rotation(self.table_LD, position_BT)

    def _dynamic_frequency(self, rope_length_BT: Tensor) -> Tensor:
        """Dynamic NTK: beyond the trained context the base grows with the length the token was computed at."""
        context, factor = self.rope.original_max_position_embeddings, self.rope.factor
        growth_BT = factor * rope_length_BT.clamp(min=context).float() / context - (factor - 1)
        base_BT = self.rope.theta * growth_BT ** (self.rotary_dim / (self.rotary_dim - 2))
        return 1.0 / (base_BT[..., None] ** self.exponent_D)

"""Gated delta net (arXiv 2412.06464), as Qwen3-Next and Qwen3.5 have it in the place of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.formulas import Rotation
from ..kernels.linear.linear import Hidden
from .layers import Linear, RMSNorm, row_parallel_linear
from .recurrent_net import RecurrentNet

if TYPE_CHECKING:
    from ..facts import ModelFacts, RecurrentFacts
    from .attention import Attention


class GroupedProjection(Linear):
    """The input projection of a checkpoint that stores it key head by key head, in two tensors (Qwen3-Next).

    Args:
        in_features: of the input.
        facts: sizes of the heads.
        parts: output rows of queries, keys and values, output gate, rates, decays.
    """

    def __init__(self, in_features: int, facts: RecurrentFacts, *parts: int) -> None:
        super().__init__(in_features, *parts)
        self.facts = facts
        if facts.sharding.sharded:
            wide, narrow = (2 * facts.key_dim, facts.value_dim, facts.value_dim), (0, 1, 1)
            self.shard_rows(facts.sharding.grouped_shard(*wide), facts.sharding.grouped_shard(*narrow))

    @property
    def stored_parts(self) -> tuple[int, ...]:
        mixed, gate, rate, decay = self.parts
        return mixed + gate, rate + decay

    def arrange(self, weight: Tensor) -> Tensor:
        facts = self.facts
        values = facts.value_heads // facts.key_heads
        wide, narrow = weight.split(self.stored_parts)
        sizes = (facts.key_dim, facts.key_dim, values * facts.value_dim, values * facts.value_dim)
        parts = (*wide.unflatten(0, (facts.key_heads, -1)).split(sizes, 1), *narrow.unflatten(0, (facts.key_heads, -1)).chunk(2, 1))
        return torch.cat([part.flatten(0, 1) for part in parts])


class GatedDeltaNet(RecurrentNet):
    """Projection, causal convolution, gated delta rule, a norm scaled by a gate, projection.

    Args:
        facts: sizes; ``facts.recurrent`` is there.
        layer: index of this layer, for the place of its states.
    """

    def __init__(self, facts: ModelFacts, layer: int) -> None:
        super().__init__(facts, layer)
        own = self.recurrent
        values = own.value_heads * own.value_dim
        parts = (own.channels, values, own.value_heads, own.value_heads)
        if facts.family.grouped_projection:
            self.in_proj: Linear = GroupedProjection(facts.hidden_size, own, *parts)
        else:
            self.in_proj = Linear(facts.hidden_size, *parts)
            if own.sharding.sharded:
                self.in_proj.shard_rows(own.channel_shard, own.value_shard(own.value_dim), own.value_shard(1), own.value_shard(1))
        self.norm = RMSNorm(own.value_dim, facts.rms_norm_eps)
        self.out_proj = row_parallel_linear(own.sharding, values, facts.hidden_size)

    def inner(self, x_BTH: Hidden, rotation: Rotation, attention: Attention, norm: RMSNorm | None) -> Tensor:
        del rotation  # positions don't matter
        input_BTE, gate_BTE, rate_BTH, decay_BTH = self.in_proj(x_BTH, norm).split(self.in_proj.parts, dim=-1)
        decay_BTH = -self.A_log.exp() * F.softplus(decay_BTH.float() + self.dt_bias)
        gates_BTG = torch.cat((decay_BTH, torch.sigmoid(rate_BTH).float()), -1)
        out_BTHV = self.mix(attention, input_BTE, gates_BTG, None)
        normed_BTHV = self.norm(out_BTHV)
        gated_BTHV = normed_BTHV * F.silu(gate_BTE.unflatten(-1, out_BTHV.shape[2:]).float())
        return gated_BTHV.to(input_BTE.dtype).flatten(2)

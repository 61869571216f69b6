"""Mamba-2 (arXiv 2405.21060), as Nemotron-H and Granite 4 have it in the place of attention, and Falcon-H1 next to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.formulas import Rotation, rms_norm
from ..kernels.linear.linear import Hidden
from .layers import Linear, ParameterShards, RMSNorm, ShardedModule, make_parameter, row_parallel_linear
from .recurrent_net import RecurrentNet

if TYPE_CHECKING:
    from ..facts import ModelFacts
    from .attention import Attention


class Mamba2(RecurrentNet, ShardedModule):
    """Projection, causal convolution, selective state space, a gate and a norm over groups of channels, projection.

    Args:
        facts: sizes; ``facts.recurrent.ssm`` is there.
        layer: index of this layer, for the place of its states.
    """

    float32_names = ("A_log", "dt_bias", "skip_H")

    def __init__(self, facts: ModelFacts, layer: int) -> None:
        own = facts.recurrent
        assert own is not None and own.ssm is not None, "a model with Mamba-2 layers"
        super().__init__(facts, layer, conv_bias=own.ssm.conv_bias)
        width = own.value_heads * own.value_dim
        self.in_proj = Linear(facts.hidden_size, width, own.channels, own.value_heads, bias=own.ssm.projection_bias)
        self.skip_H = make_parameter(own.value_heads)
        self.scales = facts.multipliers.ssm
        self.norm = RMSNorm(width, facts.rms_norm_eps) if own.ssm.norm else None
        self.out_proj = row_parallel_linear(own.sharding, width, facts.hidden_size, bias=own.ssm.projection_bias)
        self.sharded = own.splits_groups
        if own.sharding.sharded:
            inner, heads = own.value_shard(own.value_dim), own.value_shard(1)
            self.in_proj.shard_rows(inner, own.channel_shard, heads)
            if self.norm is not None:
                self.norm.shards = {"weight": ParameterShards(0, (inner,))}
            self.shards["skip_H"] = ParameterShards(0, (heads,))

    def inner(self, x_BTH: Hidden, rotation: Rotation, attention: Attention, norm: RMSNorm | None) -> Tensor:
        del rotation  # positions don't matter
        gate_BTE, input_BTE, step_BTH = self._project(x_BTH, norm)
        step_BTH = F.softplus(step_BTH.float() + self.dt_bias)
        gates_BTG = torch.cat((-self.A_log.exp() * step_BTH, step_BTH), -1)
        out_BTHV = self.mix(attention, input_BTE, gates_BTG, self.skip_H)
        gated_BTE = out_BTHV.flatten(2).float() * F.silu(gate_BTE.float())
        if self.norm is not None:
            # Each group of heads that share B and C is normed by itself.
            groups = self.recurrent.key_heads
            gated_BTGE = gated_BTE.unflatten(-1, (groups, -1))
            mean_BTG1 = self._mean_square(gated_BTGE, self.norm) if self.sharded else self.norm.mean_square(gated_BTGE)
            weight_GE = self.norm.weight.float().view(groups, -1)
            gated_BTE = rms_norm(gated_BTGE, weight_GE, self.norm.eps, mean_square=mean_BTG1).flatten(2)
        return gated_BTE.to(input_BTE.dtype)

    def _mean_square(self, gated_BTGE: Tensor, norm: RMSNorm) -> Tensor:
        """``[B, T, G, 1]``: for each of this rank's runs of heads, of its whole group, whose other heads other ranks may have."""
        own = self.recurrent.sharding
        runs_BTR = self.comm.all_gather(norm.sum_squares(gated_BTGE)[..., 0])
        group_BTG1 = runs_BTR.unflatten(-1, (-1, own.copies)).sum(-1, keepdim=True) / (own.copies * gated_BTGE.shape[-1])
        begin = own.rank * len(own.key_heads)
        return group_BTG1.expand(-1, -1, -1, own.copies).flatten(2)[..., begin : begin + len(own.key_heads), None]

    def _project(self, x_BTH: Hidden, norm: RMSNorm | None) -> tuple[Tensor, ...]:
        """Output gate, the convolution's input, steps."""
        parts = self.in_proj(x_BTH, norm).split(self.in_proj.parts, dim=-1)
        if all(scale == 1 for scale in self.scales):
            return tuple(parts)
        gate_BTE, input_BTE, step_BTH = parts
        keys = self.recurrent.key_heads * self.recurrent.key_dim
        inputs = input_BTE.split((gate_BTE.shape[-1], keys, keys), dim=-1)
        scaled = [part * scale for part, scale in zip((gate_BTE, *inputs, step_BTH), self.scales, strict=True)]
        return scaled[0], torch.cat(scaled[1:-1], -1), scaled[-1]

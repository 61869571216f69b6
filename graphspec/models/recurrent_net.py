"""Base of the recurrent nets that replace attention: a convolution, a rule, and the place of their states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .layers import ParameterShards, TokenMixer, make_parameter
from .recurrence import Convolution

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..facts import ModelFacts
    from .attention import Attention


class RecurrentNet(TokenMixer):
    """A causal convolution, then a matrix per head that each token updates and reads.

    Args:
        facts: sizes; ``facts.recurrent`` is there.
        layer: index of this layer, for the place of its states.
        conv_bias: the convolution has one.
    """

    last = "out_proj"
    float32_names: tuple[str, ...] = ("A_log", "dt_bias")
    """Parameters that are always loaded in float32."""

    def __init__(self, facts: ModelFacts, layer: int, *, conv_bias: bool = False) -> None:
        super().__init__()
        assert facts.recurrent is not None, "a model with recurrent layers"
        self.recurrent, self.layer = facts.recurrent, facts.place(layer)
        self.conv_weight_E1O = make_parameter(self.recurrent.channels, 1, self.recurrent.taps)
        self.conv_bias_E = make_parameter(self.recurrent.channels) if conv_bias else None
        self.A_log = make_parameter(self.recurrent.value_heads)
        self.dt_bias = make_parameter(self.recurrent.value_heads)
        self.shards: dict[str, ParameterShards] = {}
        if self.recurrent.sharding.sharded:
            channels, heads = (ParameterShards(0, (one,)) for one in (self.recurrent.channel_shard, self.recurrent.value_shard(1)))
            self.shards = {"conv_weight_E1O": channels, "conv_bias_E": channels, "A_log": heads, "dt_bias": heads}

    def mix(self, attention: Attention, input_BTE: Tensor, gate_BTG: Tensor, skip_H: Tensor | None) -> Tensor:
        """Convolution and rule, see :class:`~graphspec.models.recurrence.Recurrence`; ``[B, T, H, V]``."""
        assert attention.recurrence is not None, "a caller that brings states"
        convolution = Convolution(self.conv_weight_E1O[:, 0], self.conv_bias_E)
        return attention.recurrence(self.layer, input_BTE, gate_BTG, convolution, skip_H)


def stack_convolutions(nets: Sequence[RecurrentNet]) -> Convolution:
    """The weights of all layers' convolutions in one tensor each, for an op over all layers. Each net's own become views of them.

    Args:
        nets: in the order of their states.
    """

    def stacked(name: str) -> Tensor | None:
        if getattr(nets[0], name) is None:
            return None
        whole = torch.stack([getattr(net, name).detach() for net in nets])
        for net, own in zip(nets, whole, strict=True):
            setattr(net, name, nn.Parameter(own, requires_grad=False))
        return whole

    weight_UE1O = stacked("conv_weight_E1O")
    assert weight_UE1O is not None, "every convolution has weights"
    return Convolution(weight_UE1O[:, :, 0], stacked("conv_bias_E"))

"""Layers in which a recurrent net and attention read one input (Falcon-H1, arXiv 2507.22448)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.linear.linear import Hidden, hidden_of
from .layers import RMSNorm, SelfAttention, add
from .mamba2 import Mamba2
from .mlp import MLP

if TYPE_CHECKING:
    from ..facts import ModelFacts
    from ..kernels.formulas import Rotation
    from .attention import Attention


class ScaledMLP(MLP):
    """SwiGLU with a multiplier of the gate.

    Args:
        facts: sizes, biases and multipliers.
    """

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__(facts)
        self.gate_scale = facts.multipliers.mlp[0]

    def inner(self, x: Hidden, norm: RMSNorm | None) -> Tensor:
        gate, up = hidden_of(self.gate_up_proj(x, norm)).chunk(2, dim=-1)
        return F.silu(self.gate_scale * gate) * up


class ParallelLayer(nn.Module):
    """A recurrent net and attention over one normed input, both added to the residual stream, then an MLP.

    Args:
        facts: sizes and multipliers.
        layer: index of this layer.
    """

    def __init__(self, facts: ModelFacts, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm.of(facts)
        self.mamba = Mamba2(facts, layer)
        self.self_attn = SelfAttention(facts, layer)
        self.post_attention_layernorm = RMSNorm.of(facts)
        self.mlp = ScaledMLP(facts)
        self.scales = facts.multipliers.ssm_output, facts.multipliers.attention_output
        self.mlp_scale = facts.multipliers.mlp[1]

    def forward(self, residual_BTH: Hidden, rotation: Rotation, attention: Attention) -> Hidden:
        """See :meth:`graphspec.models.decoder.DecoderLayer.forward`."""
        nets = zip(self.scales, (self.mamba, self.self_attn), strict=True)
        recurrent_BTH, attended_BTH = (scale * net(residual_BTH, rotation, attention, self.input_layernorm) for scale, net in nets)
        residual_BTH = add(residual_BTH, recurrent_BTH + attended_BTH)
        return add(residual_BTH, self.mlp_scale * self.mlp(residual_BTH, self.post_attention_layernorm))

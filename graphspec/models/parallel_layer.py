"""Layers in which a recurrent net and attention read one input (Falcon-H1, arXiv 2507.22448)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.linear import Hidden, ResidualStream, finish, hidden_of
from .layers import RMSNorm, SelfAttention
from .mamba2 import Mamba2
from .mlp import MLP

if TYPE_CHECKING:
    from ..facts import ModelFacts
    from ..kernels.formulas import Rotation
    from .attention import Attention


class ScaledMLP(MLP):
    """SwiGLU with multipliers of the gate and of the result.

    Args:
        facts: sizes, biases and multipliers.
    """

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__(facts)
        self.scales = facts.multipliers.mlp

    def forward(
        self,
        x: Hidden,
        norm: RMSNorm | None = None,
        residual: Hidden | None = None,
        valid: Tensor | None = None,
    ) -> Hidden:
        """As of :class:`~graphspec.models.mlp.MLP`."""
        del valid
        gate, up = hidden_of(self.gate_up_proj(x, norm)).chunk(2, dim=-1)
        before, after = self.scales
        return finish(after * hidden_of(self.down_proj(F.silu(before * gate) * up)), residual, gated=False, float32=False)


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

    def forward(self, residual_BTH: Hidden, rotation: Rotation, attention: Attention) -> Hidden:
        """As of :class:`~graphspec.models.llama.DecoderLayer`."""
        x_BTH = hidden_of(residual_BTH)
        nets = zip(self.scales, (self.mamba, self.self_attn), strict=True)
        recurrent_BTH, attended_BTH = (scale * net(x_BTH, rotation, attention, self.input_layernorm) for scale, net in nets)
        x_BTH = x_BTH + (recurrent_BTH + attended_BTH)
        x_BTH = x_BTH + self.mlp(x_BTH, self.post_attention_layernorm, valid=attention.valid_BT)
        return ResidualStream(x_BTH) if isinstance(residual_BTH, ResidualStream) else x_BTH

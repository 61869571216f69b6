"""MLPs: SwiGLU, and Nemotron-H's squared ReLU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..facts.sharding import UNSHARDED
from ..kernels.linear import Hidden, hidden_of
from .layers import Linear, ParameterShards, RMSNorm, row_parallel_linear

if TYPE_CHECKING:
    from ..facts import ModelFacts


def _down_proj(facts: ModelFacts, width: int, *, partial: bool) -> Linear:
    """The projection that ends an MLP; ``partial`` as of :class:`MLP`."""
    sharding = facts.sharding
    assert not (partial and sharding.sharded and facts.mlp_bias), "a bias that every rank would add"
    found = row_parallel_linear(UNSHARDED if partial else sharding, width, facts.hidden_size, bias=facts.mlp_bias)
    if sharding.sharded:
        found.shards = {"weight": ParameterShards(1, (sharding.shard(width),))}
    return found


class DenseMLP(nn.Module):
    """Base of the MLPs, which differ in what they do before their last projection."""

    down_proj: Linear

    def inner(self, x: Hidden, norm: RMSNorm | None) -> Tensor:
        """The input of the last projection."""
        raise NotImplementedError

    def forward(self, x: Hidden, norm: RMSNorm | None = None, residual: Hidden | None = None, valid: Tensor | None = None) -> Hidden:
        """``residual + mlp(norm(x))``, ``[..., H]``; without norm and residual, the plain block. Tokens that aren't valid cost no less."""
        del valid
        out: Hidden = self.down_proj(self.inner(x, norm), residual=residual)
        return out


class MLP(DenseMLP):
    """SwiGLU (arXiv 2002.05202).

    Args:
        facts: sizes and biases.
        intermediate_size: where it isn't that of the facts.
        partial: if the model is sharded, leave the sum over ranks to the caller.
    """

    def __init__(self, facts: ModelFacts, intermediate_size: int | None = None, *, partial: bool = False) -> None:
        super().__init__()
        width, sharding = intermediate_size or facts.intermediate_size, facts.sharding
        self.gate_up_proj = Linear(facts.hidden_size, width, width, bias=facts.mlp_bias)
        self.down_proj = _down_proj(facts, width, partial=partial)
        if sharding.sharded:
            self.gate_up_proj.shard_rows(sharding.shard(width), sharding.shard(width))

    def inner(self, x: Hidden, norm: RMSNorm | None) -> Tensor:
        return hidden_of(self.gate_up_proj(x, norm, gated=True))


class SquaredReluMLP(DenseMLP):
    """``down(relu(up x)^2)``, without a gate (arXiv 2109.08668).

    Args:
        facts: sizes and biases.
        intermediate_size: where it isn't that of the facts.
        partial: as of :class:`MLP`.
    """

    def __init__(self, facts: ModelFacts, intermediate_size: int | None = None, *, partial: bool = False) -> None:
        super().__init__()
        width, sharding = intermediate_size or facts.intermediate_size, facts.sharding
        self.up_proj = Linear(facts.hidden_size, width, bias=facts.mlp_bias)
        self.down_proj = _down_proj(facts, width, partial=partial)
        if sharding.sharded:
            self.up_proj.shard_rows(sharding.shard(width))

    def inner(self, x: Hidden, norm: RMSNorm | None) -> Tensor:
        return torch.relu(self.up_proj(x, norm)).square()


def dense_mlp(facts: ModelFacts, intermediate_size: int | None = None, *, partial: bool = False) -> DenseMLP:
    """The MLP that the family has; ``partial`` as of :class:`MLP`."""
    return (SquaredReluMLP if facts.family.squared_relu else MLP)(facts, intermediate_size, partial=partial)

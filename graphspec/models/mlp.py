"""MLPs: SwiGLU, GeGLU, and Nemotron-H's squared ReLU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..facts.sharding import UNSHARDED
from ..kernels.formulas import gelu_mul
from ..kernels.linear.linear import Hidden, hidden_of
from .layers import Linear, ParameterShards, RMSNorm, row_parallel_linear

if TYPE_CHECKING:
    from ..facts import ModelFacts


class DenseMLP(nn.Module):
    """Base of the MLPs, which differ in what enters their last projection.

    Args:
        facts: sizes and biases.
        intermediate_size: where it isn't that of the facts.
        partial: if the model is sharded, leave the sum over ranks to the caller.
    """

    def __init__(self, facts: ModelFacts, intermediate_size: int | None = None, *, partial: bool = False) -> None:
        super().__init__()
        width, sharding = intermediate_size or facts.intermediate_size, facts.sharding
        assert not (partial and sharding.sharded and facts.mlp_bias), "a bias that every rank would add"
        entering = self.make_entering(facts, width)
        self.down_proj = row_parallel_linear(UNSHARDED if partial else sharding, width, facts.hidden_size, bias=facts.mlp_bias)
        if sharding.sharded:
            entering.shard_rows(*(sharding.shard(part) for part in entering.parts))
            self.down_proj.shards = {"weight": ParameterShards(1, (sharding.shard(width),))}

    def make_entering(self, facts: ModelFacts, width: int) -> Linear:
        """Make the projections before the last one."""
        raise NotImplementedError

    def inner(self, x: Hidden, norm: RMSNorm | None) -> Tensor:
        """The input of the last projection."""
        raise NotImplementedError

    def forward(self, x: Hidden, norm: RMSNorm | None = None, residual: Hidden | None = None, valid: Tensor | None = None) -> Hidden:
        """``residual + mlp(norm(x))``, ``[..., H]``; without norm and residual, the plain block. Tokens that aren't valid cost no less."""
        del valid
        out: Hidden = self.down_proj(self.inner(x, norm), residual=residual)
        return out


class MLP(DenseMLP):
    """SwiGLU (arXiv 2002.05202)."""

    def make_entering(self, facts: ModelFacts, width: int) -> Linear:
        self.gate_up_proj = Linear(facts.hidden_size, width, width, bias=facts.mlp_bias)
        return self.gate_up_proj

    def inner(self, x: Hidden, norm: RMSNorm | None) -> Tensor:
        return hidden_of(self.gate_up_proj(x, norm, gated=True))


class SquaredReluMLP(DenseMLP):
    """``down(relu(up x)^2)``, without a gate (arXiv 2109.08668)."""

    def make_entering(self, facts: ModelFacts, width: int) -> Linear:
        self.up_proj = Linear(facts.hidden_size, width, bias=facts.mlp_bias)
        return self.up_proj

    def inner(self, x: Hidden, norm: RMSNorm | None) -> Tensor:
        return torch.relu(self.up_proj(x, norm)).square()


class GeluMLP(MLP):
    """GeGLU (arXiv 2002.05202) with the tanh approximation of GELU (arXiv 1606.08415)."""

    def inner(self, x: Hidden, norm: RMSNorm | None) -> Tensor:
        return gelu_mul(hidden_of(self.gate_up_proj(x, norm)))


_MLPS: dict[str, type[DenseMLP]] = {"silu": MLP, "gelu_tanh": GeluMLP, "relu2": SquaredReluMLP}


def dense_mlp(facts: ModelFacts, intermediate_size: int | None = None, *, partial: bool = False) -> DenseMLP:
    """The MLP that the family has; arguments of :class:`DenseMLP`."""
    return _MLPS[facts.family.activation](facts, intermediate_size, partial=partial)

"""Mixtures of experts: DeepSeek-V2 (arXiv 2405.04434, section 2.2), DeepSeek-V3 (arXiv 2412.19437, section 2.1.2), Qwen3-MoE."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.linear.linear import Hidden, finish, hidden_of
from ..kernels.linear.moe_mlp import moe_mlp
from ..kernels.linear.moe_route import moe_route
from .layers import KernelModule, Linear, ParameterShards, RMSNorm, ShardedModule, make_parameter
from .mlp import dense_mlp

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..facts import ModelFacts
    from ..kernels.registry import KernelSet


class MixtureOfExperts(KernelModule, ShardedModule):
    """A router, its experts, and shared experts that every token goes to.

    Args:
        facts: sizes; ``facts.experts`` is not None.
    """

    float32_names = ("correction_E",)

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        assert facts.experts is not None, "a model with experts"
        experts = self.experts = facts.experts
        hidden, width = facts.hidden_size, experts.intermediate_size
        self.router = Linear(hidden, experts.num_experts)
        self.router.float32_names = ("weight",) if experts.float32_router else ()
        self.correction_E = make_parameter(experts.num_experts) if experts.sigmoid else None
        entering = width if facts.family.activation == "relu2" else 2 * width
        self.gate_up_EFH = make_parameter(experts.num_experts, entering, hidden)
        self.down_EHF = make_parameter(experts.num_experts, hidden, width)
        self.shared_experts = dense_mlp(facts, experts.shared_size, partial=True) if experts.shared_size else None
        self.shared_gate = Linear(hidden, 1) if experts.shared_gate else None
        self.sharded = facts.sharding.sharded
        self.shards: dict[str, ParameterShards] = {}
        if self.sharded:
            shard = facts.sharding.shard(width)
            entering_shards = (shard,) if facts.family.activation == "relu2" else (shard, shard)
            self.shards = {"gate_up_EFH": ParameterShards(-2, entering_shards), "down_EHF": ParameterShards(-1, (shard,))}
        self.route: Callable[..., tuple[Tensor, Tensor]] = moe_route
        self.mix: Callable[..., Tensor] = moe_mlp

    def use_kernels(self, kernels: KernelSet) -> None:
        self.route, self.mix = kernels.moe_route, kernels.moe_mlp

    def forward(self, stream_BTH: Hidden, norm: RMSNorm | None = None, residual_BTH: Hidden | None = None, *, valid: Tensor) -> Hidden:
        """``residual + mixture(norm(x))``, ``[B, T, H]``; either may be absent. Tokens that are not valid go to no expert of the router."""
        facts, weight = self.experts, self.router.weight
        x_BTH = hidden_of(stream_BTH) if norm is None else norm(stream_BTH)
        routed_BTH = x_BTH.to(weight.dtype) if weight is not None else x_BTH
        logits_BTE = self.router(routed_BTH, float32=True)
        index_TK, weight_TK = self.route(
            logits_BTE.flatten(0, 1), self.correction_E, valid.flatten(), facts.topk, facts.groups, facts.topk_groups, facts.group_best,
            facts.sigmoid, facts.normalize, facts.scaling,
        )  # fmt: skip
        out_BTH = self.mix(x_BTH.flatten(0, 1), index_TK, weight_TK, self.gate_up_EFH, self.down_EHF).view_as(x_BTH)
        if self.shared_experts is not None and self.shared_gate is not None:
            out_BTH = out_BTH + torch.sigmoid(self.shared_gate(x_BTH)) * self.shared_experts(x_BTH)
        elif self.shared_experts is not None:
            out_BTH = self.shared_experts(x_BTH, residual=out_BTH)
        if self.sharded:
            out_BTH = self.comm.all_reduce(out_BTH)
        return finish(out_BTH, residual_BTH, gated=False, float32=False)

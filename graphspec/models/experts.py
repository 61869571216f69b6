"""Mixtures of experts: DeepSeek-V2 (arXiv 2405.04434, section 2.2), DeepSeek-V3 (arXiv 2412.19437, section 2.1.2), Qwen-MoE, gpt-oss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..kernels.linear.linear import Hidden, finish, hidden_of
from ..kernels.linear.moe_mlp import moe_mlp
from ..kernels.linear.moe_route import moe_route
from ..kernels.linear.packed_moe_mlp import packed_moe_mlp
from .layers import KernelModule, Linear, ParameterShards, RMSNorm, ShardedModule, UnscaledNorm, make_parameter
from .mlp import dense_mlp
from .packed_weight import PackedWeight

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
    WEIGHTS = ("gate_up_EFH", "down_EHF")

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__()
        assert facts.experts is not None, "a model with experts"
        experts = self.experts = facts.experts
        hidden, width = facts.hidden_size, experts.intermediate_size
        stream = experts.latent_size or hidden
        self.router = Linear(hidden, experts.num_experts, bias=experts.biases)
        self.router.float32_names = ("weight",) if experts.float32_router else ()
        self.correction_E = make_parameter(experts.num_experts) if experts.corrected else None
        entering = width if facts.family.activation == "relu2" else 2 * width
        self.gate_up_EFH: nn.Parameter | PackedWeight | None = make_parameter(experts.num_experts, entering, stream)
        self.down_EHF: nn.Parameter | PackedWeight | None = make_parameter(experts.num_experts, stream, width)
        self.gate_up_bias_EF = make_parameter(experts.num_experts, entering) if experts.biases else None
        self.down_bias_EH = make_parameter(experts.num_experts, stream) if experts.biases else None
        self.latent_in = Linear(hidden, stream) if experts.latent_size else None
        self.latent_out = Linear(stream, hidden) if experts.latent_size else None
        self.width, self.gated = width, entering == 2 * width
        self.gelu = facts.family.activation == "gelu_tanh"
        self.stored: dict[str, torch.dtype | None] = {}
        """Dtypes of the experts' stored weights, as in :class:`Linear`."""
        self.activations = "full"
        """As in :class:`Linear`."""
        self.native_gate_up: Tensor | None
        self.native_down: Tensor | None
        for name in ("native_gate_up", "native_down"):
            self.register_buffer(name, None, persistent=False)
        self.shared_experts = dense_mlp(facts, experts.shared_size, partial=True) if experts.shared_size else None
        self.shared_gate = Linear(hidden, 1) if experts.shared_gate else None
        self.sharded = facts.sharding.sharded
        self.shards: dict[str, ParameterShards] = {}
        if self.sharded:
            shard = facts.sharding.shard(width)
            entering_shards = (shard,) if facts.family.activation == "relu2" else (shard, shard)
            self.shards = {
                "gate_up_EFH": ParameterShards(-2, entering_shards),
                "down_EHF": ParameterShards(-1, (shard,)),
                "gate_up_bias_EF": ParameterShards(-1, entering_shards),
            }
        # Results of ranks are added: one of them has the bias.
        self.adds_bias = facts.sharding.rank == 0
        self.route: Callable[..., tuple[Tensor, Tensor]] = moe_route
        self.mix: Callable[..., Tensor] = moe_mlp
        self.mix_codes: Callable[..., Tensor] = packed_moe_mlp

    def use_kernels(self, kernels: KernelSet) -> None:
        self.route, self.mix, self.mix_codes = kernels.moe_route, kernels.moe_mlp, kernels.packed_moe_mlp

    def set_experts(self, name: str, weight: PackedWeight) -> None:
        """Give the experts a weight of low precision, ``[E * rows, channels]``, of one segment."""
        delattr(self, name)
        setattr(self, name, weight)

    def pack(self) -> None:
        """Replace the weights by what the native op reads. float32 on the CPU only."""
        from ..kernels.native import experts as native

        if self.native_down is not None:
            return
        for name in self.WEIGHTS:
            weight = getattr(self, name)
            if isinstance(weight, PackedWeight):
                [own], activations = weight.segments, weight.activations
            else:
                own, activations = weight.flatten(0, 1), self.activations
            packed = native.pack_experts(own, self.experts.num_experts, self.stored.get(name), activations)
            setattr(self, f"native_{name.rpartition('_')[0]}", packed)
            setattr(self, name, None)
        self._mix_native = native.mix

    def _mix(self, x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """The sum of the chosen experts' results."""
        facts = self.experts
        down_bias_EH = self.down_bias_EH if self.adds_bias else None
        how = (self.gate_up_bias_EF, down_bias_EH, facts.alpha, facts.limit, self.gelu)
        if self.native_down is not None:
            native = (self.native_gate_up, self.native_down, self.width, self.gated)
            mixed: Tensor = self._mix_native(x_TH, index_TK, weight_TK, *native, *how)
            return mixed
        if isinstance(self.gate_up_EFH, PackedWeight) and isinstance(self.down_EHF, PackedWeight):
            return self.mix_codes(x_TH, index_TK, weight_TK, *self.gate_up_EFH.segments, *self.down_EHF.segments, *how)
        return self.mix(x_TH, index_TK, weight_TK, self.gate_up_EFH, self.down_EHF, *how)

    def choose(self, stream_BTH: Hidden, x_BTH: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Experts and weights of every token (:func:`.moe_route`), from the residual stream and what enters the experts."""
        del stream_BTH
        facts, weight = self.experts, self.router.weight
        routed_BTH = x_BTH.to(weight.dtype) if weight is not None else x_BTH
        logits_BTE = self.router(routed_BTH, float32=True)
        return self.route(
            logits_BTE.flatten(0, 1), self.correction_E, valid.flatten(), facts.topk, facts.groups, facts.topk_groups, facts.group_best,
            facts.sigmoid, facts.normalize, facts.scaling,
        )  # fmt: skip

    def forward(self, stream_BTH: Hidden, norm: RMSNorm | None = None, residual_BTH: Hidden | None = None, *, valid: Tensor) -> Hidden:
        """``residual + mixture(norm(x))``, ``[B, T, H]``; either may be absent. Tokens that are not valid go to no expert of the router."""
        x_BTH = hidden_of(stream_BTH) if norm is None else norm(stream_BTH)
        index_TK, weight_TK = self.choose(stream_BTH, x_BTH, valid)
        stream_TH: Tensor = (x_BTH if self.latent_in is None else self.latent_in(x_BTH)).flatten(0, 1)
        mixed_TH = self._mix(stream_TH, index_TK, weight_TK)
        # Of several ranks each projects its own part: the sum of these is that of the whole.
        out_BTH: Tensor = (mixed_TH if self.latent_out is None else self.latent_out(mixed_TH)).view_as(x_BTH)
        if self.shared_experts is not None and self.shared_gate is not None:
            out_BTH = out_BTH + torch.sigmoid(self.shared_gate(x_BTH)) * self.shared_experts(x_BTH)
        elif self.shared_experts is not None:
            out_BTH = self.shared_experts(x_BTH, residual=out_BTH)
        if self.sharded:
            out_BTH = self.comm.all_reduce(out_BTH)
        return finish(out_BTH, residual_BTH, gated=False, float32=False)


class ScaledMixture(MixtureOfExperts):
    """A mixture whose router reads the residual stream through a norm without weights, times a vector; numbers scale its experts (Gemma 4).

    Args:
        facts: sizes; ``facts.experts`` is not None.
    """

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__(facts)
        self.router_scale_H = make_parameter(facts.hidden_size)
        self.expert_scale_E = make_parameter(self.experts.num_experts)
        self.router_norm, self.factor = UnscaledNorm(facts.rms_norm_eps), facts.hidden_size**-0.5

    def choose(self, stream_BTH: Hidden, x_BTH: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        read_BTH = self.router_norm(stream_BTH) * self.router_scale_H * self.factor
        index_TK, weight_TK = super().choose(stream_BTH, read_BTH, valid)
        return index_TK, weight_TK * self.expert_scale_E[index_TK.clamp(min=0)].float()


class DenseAndExperts(nn.Module):
    """A dense MLP and a mixture of experts side by side, each between norms of its own (Gemma 4).

    Args:
        facts: sizes; ``facts.experts`` is not None.
        layer: index of the layer.
    """

    def __init__(self, facts: ModelFacts, layer: int) -> None:
        super().__init__()
        self.dense = dense_mlp(facts, facts.mlp_size(layer))
        self.mixture = ScaledMixture(facts)
        self.dense_norm, self.entering_norm, self.mixture_norm = (RMSNorm.of(facts) for _ in range(3))

    def forward(self, stream_BTH: Hidden, norm: RMSNorm | None = None, residual_BTH: Hidden | None = None, *, valid: Tensor) -> Hidden:
        """``residual + norm(mlp(norm(x))) + norm(mixture(norm(x)))``, ``[B, T, H]``, as :meth:`MixtureOfExperts.forward`."""
        dense_BTH = self.dense_norm(self.dense(stream_BTH, norm))
        mixed_BTH = self.mixture_norm(self.mixture(stream_BTH, self.entering_norm, valid=valid))
        return finish(dense_BTH + mixed_BTH, residual_BTH, gated=False, float32=False)

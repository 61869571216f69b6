"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) in absorbed form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..kernels.formulas import grown
from ..kernels.linear.head_product import head_product
from ..kernels.linear.linear import Hidden
from .attention import LatentTransform
from .layers import KernelModule, Linear, ParameterShards, RMSNorm, TokenMixer, make_parameter, row_parallel_linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..facts import ModelFacts
    from ..kernels.formulas import Rotation
    from ..kernels.registry import KernelSet
    from .attention import Attention


class LatentAttention(TokenMixer, KernelModule):
    """Projections around an attention over one latent row per token that all heads share.

    Keys and values of a head are the row times its ``W_UK`` and ``W_UV``. Here ``W_UK`` is multiplied into the query and ``W_UV`` applied
    after the attention, so that neither keys nor values are ever built.

    Args:
        facts: sizes and biases; ``facts.latent`` is there.
        layer: index of this layer, for its KV.
        input_size: width of the input where it isn't the hidden size.
    """

    def __init__(self, facts: ModelFacts, layer: int, input_size: int | None = None) -> None:
        super().__init__()
        assert facts.latent is not None, "a model with latent attention"
        latent = self.latent = facts.latent
        self.layer = layer
        self.query_growth = facts.rope.query_growth
        heads, query = facts.num_heads, facts.num_heads * (latent.nope_dim + latent.rope_dim)
        bias, size = facts.attention_bias, input_size or facts.hidden_size
        self.qkv_a_proj: Linear | None = None
        self.q_a_layernorm: RMSNorm | None = None
        if latent.query_rank is None:
            queries = self.q_proj = Linear(size, query)
            self.kv_a_proj = Linear(size, latent.row_dim, bias=bias)
        else:
            self.qkv_a_proj = Linear(size, latent.query_rank, latent.row_dim, bias=bias)
            self.q_a_layernorm = RMSNorm(latent.query_rank, latent.norm_eps)
            queries = self.q_b_proj = Linear(latent.query_rank, query)
        self.kv_a_layernorm = RMSNorm(latent.rank, latent.norm_eps)
        # Per head the rows of W_UK, then those of W_UV, as the checkpoint has them.
        self.kv_b_QDL = make_parameter(heads, latent.nope_dim + latent.value_dim, latent.rank)
        self.o_proj = row_parallel_linear(facts.sharding, heads * latent.value_dim, facts.hidden_size, bias=facts.output_bias)
        self.head_product: Callable[[Tensor, Tensor], Tensor] = head_product
        self.shards: dict[str, ParameterShards] = {}
        if facts.sharding.sharded:
            # Compressed queries and the latent row are every rank's.
            queries.shard_rows(facts.sharding.shard(query))
            self.shards = {"kv_b_QDL": ParameterShards(0, (facts.sharding.shard(heads * (latent.nope_dim + latent.value_dim)),))}

    def inner(self, x_BTH: Hidden, rotation: Rotation, attention: Attention, norm: RMSNorm | None) -> Tensor:
        facts = self.latent
        nope_BTQN, rope_BTQR, latent_BTE = self._project(x_BTH, norm)
        if self.query_growth is not None:
            growth_BT11 = grown(attention.position_BT, *self.query_growth).to(nope_BTQN.dtype)
            nope_BTQN, rope_BTQR = nope_BTQN * growth_BT11, rope_BTQR * growth_BT11
        key_QNL, value_QVL = self.kv_b_QDL.split((facts.nope_dim, facts.value_dim), dim=1)
        query_BTQL = self.head_product(nope_BTQN, key_QNL)
        mixed_BTQL = attention.latent(self.layer, query_BTQL, rope_BTQR, latent_BTE, self._transform(rotation), facts.scale)
        return self.head_product(mixed_BTQL, value_QVL.transpose(1, 2)).flatten(2)

    def use_kernels(self, kernels: KernelSet) -> None:
        self.head_product = kernels.head_product

    def write_kv(self, x_BTH: Hidden, rotation: Rotation, attention: Attention, norm: RMSNorm | None = None) -> None:
        """The KV write of a call, without its result."""
        _, rope_BTQR, latent_BTE = self._project(x_BTH, norm)
        attention.write_latent(self.layer, rope_BTQR, latent_BTE, self._transform(rotation))

    def _project(self, x_BTH: Hidden, norm: RMSNorm | None) -> tuple[Tensor, Tensor, Tensor]:
        """The two parts of the queries, and the latent row."""
        facts = self.latent
        if self.qkv_a_proj is None:
            query_BTE, latent_BTE = self.q_proj(x_BTH, norm), self.kv_a_proj(x_BTH, norm)
        else:
            low_BTE, latent_BTE = self.qkv_a_proj(x_BTH, norm).split(self.qkv_a_proj.parts, dim=-1)
            query_BTE = self.q_b_proj(low_BTE, self.q_a_layernorm)
        query_BTQD = query_BTE.unflatten(-1, (-1, facts.nope_dim + facts.rope_dim))
        nope_BTQN, rope_BTQR = query_BTQD.split((facts.nope_dim, facts.rope_dim), dim=-1)
        return nope_BTQN, rope_BTQR, latent_BTE

    def _transform(self, rotation: Rotation) -> LatentTransform:
        return LatentTransform(self.kv_a_layernorm.weight, self.kv_a_layernorm.eps, rotation, self.latent.interleaved)

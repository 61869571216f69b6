"""Attention of layers that lack projections: values that are keys, or keys and values of another layer (Gemma 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..kernels.formulas import apply_rope
from ..kernels.linear.linear import Hidden, hidden_of
from .layers import Linear, RMSNorm, SelfAttention

if TYPE_CHECKING:
    from ..facts import ModelFacts
    from ..kernels.formulas import Rotation
    from .attention import Attention


class KeyValueAttention(SelfAttention):
    """Attention whose values are its projected keys, before their norm and rotation."""

    def make_entering(self, input_size: int, query: int, key: int, bias: bool) -> Linear:
        self.qk_proj = Linear(input_size, query, key, bias=bias)
        return self.qk_proj

    def enter(self, x_BTH: Hidden, norm: RMSNorm | None) -> tuple[Tensor, Tensor, Tensor]:
        query_BTE, key_BTE = hidden_of(self.qk_proj(x_BTH, norm)).split(self.qk_proj.parts, dim=-1)
        return query_BTE, key_BTE, key_BTE


class BorrowingAttention(SelfAttention):
    """Attention over the keys and values that a layer before it has written.

    Args:
        facts: sizes and biases; ``facts.kv_sources`` names that layer.
        layer: index of this layer.
        input_size: width of the input where it isn't the hidden size.
    """

    def __init__(self, facts: ModelFacts, layer: int, input_size: int | None = None) -> None:
        super().__init__(facts, layer, input_size)
        assert not self.gated, "gates lie between the queries of the heads"
        self.k_norm = None

    def make_entering(self, input_size: int, query: int, key: int, bias: bool) -> Linear:
        del key
        self.q_proj = Linear(input_size, query, bias=bias)
        return self.q_proj

    def inner(self, x_BTH: Hidden, rotation: Rotation, attention: Attention, norm: RMSNorm | None) -> Tensor:
        query_BTQD = hidden_of(self.q_proj(x_BTH, norm)).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None:
            query_BTQD = self.q_norm(query_BTQD)
        query_BTQD = apply_rope(query_BTQD, *rotation.shifted(self.rope_rows).cos_sin(query_BTQD.dtype))
        return attention.read(self.layer, query_BTQD, self.scale, self.window_left, self.weighing()).flatten(2)

    def write_kv(self, x_BTH: Hidden, rotation: Rotation, attention: Attention, norm: RMSNorm | None = None) -> None:
        """Nothing: the layer has no keys and values of its own."""

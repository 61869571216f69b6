"""A whole stack of decoder layers as one native op on the CPU, made from modules that are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from torch import Tensor, nn

from ..kernels import resolve
from .layers import MLP, Embedding, Linear, RMSNorm, SelfAttention, pack_linear_layers
from .recurrent_net import RecurrentNet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..kernels.formulas import Rotation
    from ..kernels.native import stack
    from ..plan import Plan
    from .attention import Attention, PagedAttention


class PlainLayer(Protocol):
    """What a stack asks of a decoder layer: an attention, an MLP, a norm before each, and residuals around them."""

    @property
    def self_attn(self) -> nn.Module: ...

    @property
    def post_attention_layernorm(self) -> RMSNorm: ...

    @property
    def mlp(self) -> nn.Module: ...


def why_not(layers: Sequence[PlainLayer]) -> str | None:
    """What keeps layers from being a stack; None: nothing does."""
    if any(isinstance(layer.self_attn, RecurrentNet) for layer in layers):
        return "recurrent layers"
    if any(not isinstance(layer.self_attn, SelfAttention) for layer in layers):
        return "latent attention"
    if any(not isinstance(layer.mlp, MLP) for layer in layers):
        return "mixtures of experts"
    if any(getattr(layer, "post_feedforward_layernorm", None) is not None for layer in layers):
        return "norms after attention and MLP"
    if any(getattr(layer, "residual_scale", 1) != 1 for layer in layers):
        return "a multiplier of what blocks add"
    if any(cast("SelfAttention", layer.self_attn).norms_apart for layer in layers):
        return "query and key norms over all heads together, or scaled in float32"
    return None


def _scale(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else norm.scale()


def _product(linear: Linear) -> stack.Product:
    from ..kernels.native.stack import Product

    assert linear.weight is not None, "layers that are not packed yet"
    return Product(linear.weight, linear.bias, linear.stored)


class DecoderStack(nn.Module):
    """Layers of a network as one op, see :mod:`graphspec.kernels.native.stack`. Their projections give their weights up for it.

    Args:
        layers: of one attention shape, float32, on the CPU; :func:`why_not` has nothing against them.
        input_norms: the norm in front of each layer's attention, None where it reads what enters as it is.
        rotary_dim: rotated part of a head.
        final_norm: after the last layer; None: there is none.
        tap_layers: layers whose entering residual stream is a feature.
    """

    def __init__(
        self,
        layers: Sequence[PlainLayer],
        input_norms: Sequence[RMSNorm | None],
        rotary_dim: int,
        final_norm: RMSNorm | None = None,
        tap_layers: Sequence[int] = (),
    ) -> None:
        super().__init__()
        from ..kernels.native import stack

        attentions, mlps = [cast("SelfAttention", layer.self_attn) for layer in layers], [cast("MLP", layer.mlp) for layer in layers]
        first = attentions[0]
        query, key, _ = first.qkv_proj.parts
        dim, eps = first.head_dim, layers[0].post_attention_layernorm.eps
        shape = stack.StackShape(query // dim // (2 if first.gated else 1), key // dim, dim, rotary_dim, first.gated, eps, first.scale)
        taps = sorted(tap_layers)
        norms = [*input_norms, final_norm, *(layer.post_attention_layernorm for layer in layers), *(a.q_norm for a in attentions)]
        assert all(norm is None or norm.eps == eps for norm in norms), "one epsilon"
        described = [
            stack.Layer(
                input_norm=_scale(norm),
                qkv=_product(attention.qkv_proj),
                query_norm=_scale(attention.q_norm),
                key_norm=_scale(attention.k_norm),
                out=_product(attention.o_proj),
                mlp_norm=layer.post_attention_layernorm.scale(),
                gate_up=_product(mlp.gate_up_proj),
                down=_product(mlp.down_proj),
                window=attention.window_left,
                kv_layer=attention.layer,
                tap=taps.index(index) if index in taps else None,
            )
            for index, (layer, norm, attention, mlp) in enumerate(zip(layers, input_norms, attentions, mlps, strict=True))
        ]
        self.weights: Tensor
        self.plan: Tensor
        for name, tensor in zip(("weights", "plan"), stack.pack_stack(shape, described, _scale(final_norm)), strict=True):
            self.register_buffer(name, tensor, persistent=False)
        self.taps, self.count = len(taps), len(layers)
        self._decode: Callable[..., tuple[Tensor, Tensor]] = stack.decode
        for attention, mlp in zip(attentions, mlps, strict=True):
            for linear in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
                linear.weight = None

    def forward(
        self, residual_BTH: Tensor, rotation: Rotation, attention: Attention, entering_BTE: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Hidden states ``[B, T, H]`` after the last layer, or the final norm where there is one, and features ``[B, T, taps * H]``.

        ``entering_BTE``: what the first layer's attention reads, already normed, where it is not the residual stream.
        """
        return self._run(residual_BTH, rotation, attention, entering_BTE, (0, self.count, self.taps, True, False))

    def layer(self, index: int, residual_BTH: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        """The residual stream after one layer, from the one before it."""
        return self._run(residual_BTH, rotation, attention, None, (index, index + 1, 0, False, False))[0]

    def write_kv(
        self,
        residual_BTH: Tensor,
        rotation: Rotation,
        attention: Attention,
        entering_BTE: Tensor | None = None,
        index: int | None = None,
    ) -> None:
        """The KV that a call writes, or that one layer does, where nobody reads what lies after it."""
        layers = (0, self.count) if index is None else (index, index + 1)
        self._run(residual_BTH, rotation, attention, entering_BTE, (*layers, 0, False, True))

    def _run(
        self,
        residual_BTH: Tensor,
        rotation: Rotation,
        attention: Attention,
        entering_BTE: Tensor | None,
        how: tuple[int, int, int, bool, bool],
    ) -> tuple[Tensor, Tensor]:
        paged = cast("PagedAttention", attention)
        return self._decode(
            residual_BTH, entering_BTE, paged.kv_pool, self.weights, self.plan, *rotation, paged.table_BP, paged.slot_BT, paged.valid_BT,
            paged.position_BT, *paged.visibility(), *how,
        )  # fmt: skip


class DraftEntry(nn.Module):
    """What a drafter's layers read, as one native op: embeddings and hidden states side by side, see :mod:`graphspec.kernels.native.rows`.

    Args:
        embedding: of the tokens.
        embedding_norm, hidden_norm: of each half; None: it is read as it is.
        hidden_first: hidden states on the left.
    """

    def __init__(
        self, embedding: Embedding, embedding_norm: RMSNorm | None, hidden_norm: RMSNorm | None, hidden_first: bool = False
    ) -> None:
        super().__init__()
        from ..kernels.native import rows

        self.embedding, self.hidden_first, self._enter = embedding, hidden_first, rows.enter
        norms = [norm for norm in (embedding_norm, hidden_norm) if norm is not None]
        self.eps = norms[0].eps if norms else 0.0
        assert all(norm.eps == self.eps for norm in norms), "one epsilon"
        self.register_buffer("embedding_scale", _scale(embedding_norm), persistent=False)
        self.register_buffer("hidden_scale", _scale(hidden_norm), persistent=False)

    def forward(self, token_BT: Tensor, hidden_BTH: Tensor, valid_BT: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, T, 2 * H]``, and the hidden states themselves; zero before any norm where a token is not valid."""
        entering: tuple[Tensor, Tensor] = self._enter(
            token_BT, valid_BT, self.embedding.weight, hidden_BTH, self.embedding_scale, self.hidden_scale, self.eps, self.hidden_first
        )
        return entering


def packs(plan: Plan) -> bool:
    """The linear layers of an engine with this plan are native, their weights packed."""
    return resolve("kernels.linear", plan.linear, plan.kernels, plan.device, plan.dtype) == "native"


def pack_network(network: nn.Module, plan: Plan) -> str | None:
    """Pack the weights of a network, and run its decoder layers as one native op from now on.

    On the device ``meta`` this settles sizes alone.

    Returns:
        Why the layers still run op by op; None where they don't.
    """
    reason: str | None = "set by kernels.mode, kernels.linear or kernels.attention"
    # Chosen one by one, attention and linear layers are ops of their own.
    if plan.target.sharding.sharded:
        reason = "several ranks, whose sums stand between the ops"
    elif plan.linear == plan.attention == "auto":
        pack: Callable[[], str | None] | None = getattr(network, "pack_stack", None)
        reason = "a network of another package" if pack is None else pack()
    if reason is None:
        from ..kernels.native import rows

        for module in network.modules():
            if isinstance(module, Embedding):
                module.lookup = rows.embed
    pack_linear_layers(network)
    return reason

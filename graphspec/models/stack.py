"""A whole stack of decoder layers as one native op on the CPU, made from modules that are loaded."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn

from ..kernels import resolve
from ..kernels.linear.packed import Packed
from ..plan.buffers import DTYPES
from .experts import MixtureOfExperts
from .layers import Embedding, Linear, RMSNorm, SelfAttention
from .mlp import MLP, GeluMLP
from .packed_weight import PackedWeight
from .recurrent_net import RecurrentNet

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from ..kernels.formulas import Rotation
    from ..kernels.native import stack
    from ..plan.plan import Plan
    from .attention import Attention, PagedAttention


ROUNDED = {"int8": "of 8 bits", "bfloat16": "in bfloat16"}
"""Activations that products round, in words."""


class PlainLayer(Protocol):
    """The decoder layers that a stack can run: an attention and an MLP, each after a norm and inside a residual connection."""

    @property
    def self_attn(self) -> nn.Module: ...

    @property
    def post_attention_layernorm(self) -> RMSNorm: ...

    @property
    def mlp(self) -> nn.Module: ...


def packing_obstacle(layers: Sequence[PlainLayer]) -> str | None:
    """Why these layers can't be packed into a stack, in a few words; None: they can."""
    if any(isinstance(layer.self_attn, RecurrentNet) for layer in layers):
        return "recurrent layers"
    if any(not isinstance(layer.self_attn, SelfAttention) for layer in layers):
        return "latent attention"
    if any(not isinstance(layer.mlp, MLP) for layer in layers):
        return "mixtures of experts"
    if any(getattr(layer, "layer_input", None) is not None for layer in layers):
        return "inputs of each layer's own"
    if len({cast("SelfAttention", layer.self_attn).head_dim for layer in layers}) > 1:
        return "heads of several widths"
    if any(cast("SelfAttention", layer.self_attn).value_norm is not None for layer in layers):
        return "norms of values"
    if any(getattr(layer, "residual_scale", 1) != 1 for layer in layers):
        return "a multiplier of what blocks add"
    if any(cast("SelfAttention", layer.self_attn).norms_apart for layer in layers):
        return "query and key norms over all heads together, or scaled in float32"
    if any(cast("SelfAttention", layer.self_attn).query_growth is not None for layer in layers):
        return "queries that grow with the position"
    return next(filter(None, map(_format_obstacle, layers)), None)


def _format_obstacle(layer: PlainLayer) -> str | None:
    from ..kernels.native.stack import stacking_obstacle

    attention, mlp = cast("SelfAttention", layer.self_attn), cast("MLP", layer.mlp)
    products = map(_product, (attention.qkv_proj, attention.o_proj, mlp.down_proj))
    return stacking_obstacle(*products, gate_up=_product(mlp.gate_up_proj))


def _norms(layer: PlainLayer) -> tuple[RMSNorm | None, RMSNorm | None, RMSNorm | None]:
    """Before the MLP, after the attention, after the MLP."""
    after = getattr(layer, "post_feedforward_layernorm", None)
    if after is None:
        return layer.post_attention_layernorm, None, None
    return getattr(layer, "pre_feedforward_layernorm", None), layer.post_attention_layernorm, after


def _scale(norm: RMSNorm | None) -> Tensor | None:
    return None if norm is None else norm.scale()


def _product(linear: Linear, rows: slice = slice(None)) -> stack.Product:
    """``rows``: of the weight; by default all of them."""
    from ..kernels.native.stack import Product

    weight, bias = linear.weight, None if linear.bias is None else linear.bias[rows]
    assert weight is not None, "layers that are not packed yet"
    if isinstance(weight, PackedWeight):
        taken = weight if rows == slice(None) else weight.take(torch.arange(weight.shape[0], device="cpu")[rows])
        return Product(taken.float_segments, bias, linear.stored, weight.activations)
    return Product(weight[rows], bias, linear.stored, linear.activations)


class _Packed(nn.Module):
    """Layers in one tensor, with their plan in another: :func:`graphspec.kernels.native.stack.pack_stack`."""

    weights: Tensor
    plan: Tensor

    def __init__(
        self, shape: stack.StackShape, layers: Sequence[stack.Layer], final_norm: RMSNorm | None = None, last_tap: int | None = None
    ) -> None:
        super().__init__()
        from ..kernels.native.stack import decode, pack_stack

        for name, tensor in zip(("weights", "plan"), pack_stack(shape, layers, _scale(final_norm), last_tap), strict=True):
            self.register_buffer(name, tensor, persistent=False)
        self.count = len(layers)
        self._decode: Callable[..., tuple[Tensor, Tensor]] = decode

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


class KeyValueStack(_Packed):
    """Keys and values of several layers as one op, from one input and with one projection, whose weight it takes over.

    Args:
        projection: keys of the first layer, its values, keys of the next layer and so on; float32, on the CPU. :meth:`obstacle` has
            returned None for it.
        input_norm: of the input.
        attentions: of these layers, for their places in the pool and the norms of their keys.
        rotary_dim: rotated part of a head.
    """

    def __init__(self, projection: Linear, input_norm: RMSNorm, attentions: Sequence[SelfAttention], rotary_dim: int) -> None:
        from ..kernels.native.stack import Layer, StackShape

        assert all(own.k_norm is None or own.k_norm.eps == input_norm.eps for own in attentions), "one epsilon"
        dim = attentions[0].head_dim
        shape = StackShape(0, projection.parts[0] // dim, dim, rotary_dim, False, False, input_norm.eps, attentions[0].scale)
        layers = [
            Layer(
                input_norm=_scale(input_norm),
                qkv=product,
                query_norm=None,
                key_norm=_scale(own.k_norm),
                out=None,
                mlp_norm=None,
                gate_up=None,
                down=None,
                window=None,
                kv_layer=own.layer,
                rope_rows=own.rope_rows,
            )
            for own, product in zip(attentions, self._products(projection), strict=True)
        ]
        super().__init__(shape, layers)
        projection.weight = None

    @staticmethod
    def _products(projection: Linear) -> list[stack.Product]:
        key = projection.parts[0]
        return [_product(projection, slice(at, at + 2 * key)) for at in range(0, sum(projection.parts), 2 * key)]

    @classmethod
    def obstacle(cls, projection: Linear) -> str | None:
        """Why the layers can't be one op, in a few words; None: they can."""
        from ..kernels.native.stack import stacking_obstacle

        return stacking_obstacle(*cls._products(projection))

    def forward(self, hidden_BTH: Tensor, rotation: Rotation, attention: Attention) -> None:
        """Write the KV of all layers; the input is un-normed."""
        self._run(hidden_BTH, rotation, attention, None, (0, self.count, 0, False, True))


class DecoderStack(_Packed):
    """Layers of a network as one op, see :mod:`graphspec.kernels.native.stack`. It takes over the weights of their projections.

    Args:
        layers: of one attention shape, float32, on the CPU; :func:`packing_obstacle` returns None for them.
        input_norms: the norm before each layer's attention; None: the attention reads its input un-normed.
        rotary_dim: rotated part of a head.
        final_norm: after the last layer; None: there is none.
        tap_layers: layers whose input residual streams are features; the number of layers: the last one's output, un-normed.
        whole: of each layer, whether the tokens of a tree all see what its last one sees; empty: in none.
    """

    def __init__(
        self,
        layers: Sequence[PlainLayer],
        input_norms: Sequence[RMSNorm | None],
        rotary_dim: int,
        final_norm: RMSNorm | None = None,
        tap_layers: Sequence[int] = (),
        whole: Sequence[bool] = (),
    ) -> None:
        from ..kernels.native import stack

        attentions, mlps = [cast("SelfAttention", layer.self_attn) for layer in layers], [cast("MLP", layer.mlp) for layer in layers]
        first, gelu = attentions[0], isinstance(mlps[0], GeluMLP)
        query, key, _ = first.qkv_proj.parts
        dim, eps = first.head_dim, layers[0].post_attention_layernorm.eps
        heads = query // dim // (2 if first.gated else 1)
        shape = stack.StackShape(heads, key // dim, dim, rotary_dim, first.gated, gelu, eps, first.scale, first.softcap)
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
                mlp_norm=_scale(mlp_norm),
                gate_up=_product(mlp.gate_up_proj),
                down=_product(mlp.down_proj),
                window=attention.window_left,
                kv_layer=attention.layer,
                tap=taps.index(index) if index in taps else None,
                out_norm=_scale(out_norm),
                down_norm=_scale(down_norm),
                rope_rows=attention.rope_rows,
                sink_Q=attention.weighing().sink_Q,
                whole=index < len(whole) and whole[index],
            )
            for index, (norm, attention, mlp, (mlp_norm, out_norm, down_norm)) in enumerate(
                zip(input_norms, attentions, mlps, map(_norms, layers), strict=True)
            )
        ]
        super().__init__(shape, described, final_norm, taps.index(len(layers)) if len(layers) in taps else None)
        self.taps = len(taps)
        for attention, mlp in zip(attentions, mlps, strict=True):
            for linear in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
                linear.weight = None

    def forward(
        self, residual_BTH: Tensor, rotation: Rotation, attention: Attention, entering_BTE: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Hidden states ``[B, T, H]`` after the last layer, or the final norm where there is one, and features ``[B, T, taps * H]``.

        ``entering_BTE``: the input of the first layer's attention, already normed, if it is not the residual stream.
        """
        return self._run(residual_BTH, rotation, attention, entering_BTE, (0, self.count, self.taps, True, False))

    def layer(self, index: int, residual_BTH: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        """Run one layer: the residual stream after it, from the one before it."""
        return self._run(residual_BTH, rotation, attention, None, (index, index + 1, 0, False, False))[0]

    def write_kv(
        self,
        residual_BTH: Tensor,
        rotation: Rotation,
        attention: Attention,
        entering_BTE: Tensor | None = None,
        index: int | None = None,
    ) -> None:
        """Write the KV that a call writes, of all layers or of layer ``index`` only, without computing its result."""
        layers = (0, self.count) if index is None else (index, index + 1)
        self._run(residual_BTH, rotation, attention, entering_BTE, (*layers, 0, False, True))


class DraftInput(nn.Module):
    """The input of a drafter's layers as one native op: embeddings and hidden states side by side (:mod:`graphspec.kernels.native.cycle`).

    Args:
        embedding: the token embedding.
        embedding_norm, hidden_norm: the norm of each half; None: that half is not normed.
        hidden_first: put the hidden states on the left.
    """

    def __init__(
        self, embedding: Embedding, embedding_norm: RMSNorm | None, hidden_norm: RMSNorm | None, hidden_first: bool = False
    ) -> None:
        super().__init__()
        from ..kernels.native import cycle

        self.embedding, self.hidden_first, self._enter = embedding, hidden_first, cycle.enter
        norms = [norm for norm in (embedding_norm, hidden_norm) if norm is not None]
        self.eps = norms[0].eps if norms else 0.0
        assert all(norm.eps == self.eps for norm in norms), "one epsilon"
        self.register_buffer("embedding_scale", _scale(embedding_norm), persistent=False)
        self.register_buffer("hidden_scale", _scale(hidden_norm), persistent=False)

    def forward(self, token_BT: Tensor, hidden_BTH: Tensor, valid_BT: Tensor) -> tuple[Tensor, Tensor]:
        """The input ``[B, T, 2 * H]`` and the un-normed hidden states; both halves of invalid tokens are zero before the norms."""
        entering: tuple[Tensor, Tensor] = self._enter(
            token_BT, valid_BT, self.embedding.table, hidden_BTH, self.embedding_scale, self.hidden_scale, self.eps, self.hidden_first
        )
        return entering


def round_weights(network: nn.Module, plan: Plan) -> None:
    """Round a network's parameters to the plan's ``weight_dtype``, in place, where it is not the one they are held in.

    Codes of low precision and parameters that modules keep in float32 stay as they are. On the device ``meta`` only the dtype in which
    layers will be packed is set.
    """
    if plan.weight_dtype == plan.dtype:
        return
    dtype = DTYPES[plan.weight_dtype]
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta and name not in getattr(module, "float32_names", ()):
                parameter.data = parameter.data.to(dtype).to(parameter.dtype)
        if isinstance(module, Linear | Embedding) and isinstance(module.weight, nn.Parameter):
            module.stored = dtype
        if isinstance(module, MixtureOfExperts):
            module.stored |= {name: dtype for name in module.WEIGHTS if isinstance(getattr(module, name), nn.Parameter)}


def round_activations(network: nn.Module, to: Collection[str], shared: nn.Module | None = None) -> str:
    """Make native products round activations where their weights allow it, before weights are packed.

    Args:
        network: whose linear layers and experts are meant.
        to: int8: with weights of integer codes, in all or some rows; bfloat16: with weights whose numbers are all in bfloat16.
        shared: a network whose layers and weights stay as they are, also where ``network`` has them too.

    Returns:
        In how many products, in words; empty: in none.
    """
    from ..kernels.native import roundable

    kept = set() if shared is None else {id(module) for module in shared.modules()}
    counts, total = Counter[str](), 0
    for module in network.modules():
        if not isinstance(module, Linear | MixtureOfExperts):
            continue
        names = module.WEIGHTS if isinstance(module, MixtureOfExperts) else ("weight",)
        for name in names:
            weight = getattr(module, name)
            total += weight is not None
            owner: Linear | MixtureOfExperts | PackedWeight = module
            if isinstance(weight, PackedWeight):
                owner = weight
                fits = ["int8"] * any(isinstance(part, Packed) and roundable(part) for part in weight.segments)
                fits += ["bfloat16"] * any(isinstance(part, Tensor) and part.dtype is torch.bfloat16 for part in weight.segments)
            else:
                stored = module.stored.get(name) if isinstance(module, MixtureOfExperts) else module.stored
                fits = ["bfloat16"] * (weight is not None and stored is torch.bfloat16)
            kind = next((kind for kind in fits if kind in to), None)
            if kind is not None and id(owner) not in kept:
                owner.activations = kind
                counts[kind] += 1
    return ", ".join(f"activations {ROUNDED[kind]} in {count} of {total} products" for kind, count in counts.items())


def round_networks(target: nn.Module, draft: nn.Module | None, plan: Plan) -> dict[str, str]:
    """:func:`round_activations` of target and draft as the plan has it: in how many products, in words."""
    rounded = {"target": "" if plan.activations == "full" else round_activations(target, {plan.activations})}
    if draft is not None and plan.draft_activations == "auto" and uses_packed_weights(plan):
        rounded["draft"] = round_activations(draft, ROUNDED, target)
    return rounded


def uses_packed_weights(plan: Plan) -> bool:
    """Whether the linear layers of an engine with this plan are native, with packed weights."""
    return resolve("kernels.linear", plan.linear, plan.kernels, plan.device, plan.dtype) == "native"


def pack_network(network: nn.Module, plan: Plan) -> str | None:
    """Pack the weights of a network, and make its decoder layers run as one native op if they can.

    On the device ``meta`` only sizes are computed.

    Returns:
        Why the layers run op by op; None if they run as one op.
    """
    reason: str | None = "set by kernels.mode, kernels.linear or kernels.attention"
    # If the user chose attention or linear layers separately, they stay separate ops.
    if plan.target.sharding.sharded:
        reason = "several ranks, whose sums stand between the ops"
    elif plan.linear == plan.attention == "auto":
        pack: Callable[[], str | None] | None = getattr(network, "pack_stack", None)
        reason = "a network of another package" if pack is None else pack()
    for module in list(network.modules()):
        if isinstance(module, Linear | MixtureOfExperts) or (isinstance(module, Embedding) and (reason is None or module.has_codes)):
            module.pack()
    return reason

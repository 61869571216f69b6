"""A stack of decoder layers as one CPU op, with its weights in one tensor and its plan in another.

``graphspec_native::decode`` is opaque to ``torch.compile`` like the other native ops. Weights and plan belong to the module that holds
them: they are copied, moved and freed with it, and C++ keeps no reference between calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from ...errors import ConfigError
from ..huge_pages import use_huge_pages
from ..linear.packed import Packed, as_bytes
from ..op import Written
from . import ALIGNMENT, BLOCK, CODE, code_of, define_op, pack_linear, pack_segments
from .call import KV_DTYPES, bits, call, dense, require


@dataclass(frozen=True, slots=True)
class Product:
    """A projection ``[out, in]`` and its bias.

    Attributes:
        weight: float32, or segments as :func:`pack_segments` takes them, of which all but the last have a multiple of :data:`BLOCK` rows.
        bias: float32 ``[out]``.
        stored: the dtype that numbers are stored in, as :func:`pack_linear` takes it.
        activations: what products round them to, as :func:`pack_segments` takes it.
    """

    weight: Tensor | Sequence[Packed | Tensor]
    bias: Tensor | None = None
    stored: torch.dtype | None = None
    activations: str = "full"

    @property
    def segments(self) -> Sequence[Packed | Tensor]:
        """Top to bottom."""
        return (self.weight,) if isinstance(self.weight, Tensor) else self.weight

    @property
    def shape(self) -> tuple[int, int]:
        """``(out, in)``."""
        return sum(segment.shape[0] for segment in self.segments), self.segments[0].shape[1]


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer, all of it float32.

    Without ``out``, ``gate_up`` and ``down`` it only writes keys and values, of the stack's input; then all layers of the stack do.

    Attributes:
        input_norm: weights of the norm before the attention; None: no norm.
        qkv: queries, each followed by its gate if there are gates, then keys, then values.
        query_norm, key_norm: ``[D]``, before the rotation.
        out: projection of the attention's output.
        mlp_norm: weights of the norm before the MLP; None: no norm.
        gate_up: gate rows, then up rows.
        down: back to the hidden size.
        window: sliding window, None: none.
        kv_layer: of the pool.
        out_norm, down_norm: weights of the norm of what attention and MLP add; None: no norm.
        rope_rows: rows of the table of angles before those of this layer.
        sink_Q: a score of each head that has no value; None: there are none.
        whole: among the tokens of a tree each sees what the lane's last one sees, in place of its own ancestors.
        tap: index of the residual stream that enters this layer among the features; None: not tapped.
    """

    input_norm: Tensor | None
    qkv: Product
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Product | None
    mlp_norm: Tensor | None
    gate_up: Product | None
    down: Product | None
    window: int | None
    kv_layer: int
    tap: int | None = None
    out_norm: Tensor | None = None
    down_norm: Tensor | None = None
    rope_rows: int = 0
    sink_Q: Tensor | None = None
    whole: bool = False


@dataclass(frozen=True, slots=True)
class StackShape:
    """Shared by all layers: query heads, KV heads, head dimension, its rotated part, gates, GeGLU in place of SwiGLU, epsilon, scale
    and softcap of scores.
    """

    heads: int
    groups: int
    dim: int
    rotary: int
    gated: bool
    gelu: bool
    eps: float
    scale: float
    softcap: float = 0.0


class _Blob:
    """Tensors packed one after the other."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.size = 0

    def add(self, tensor: Tensor | None) -> int:
        """Offset in bytes; -1 for None."""
        if tensor is None:
            return -1
        offset = self.size
        data = tensor.detach().contiguous().flatten().view(torch.uint8)
        room = -data.numel() % ALIGNMENT
        self.parts += [data, data.new_zeros(room)]
        self.size += data.numel() + room
        return offset

    def product(self, product: Product | None) -> tuple[int, int, int]:
        if product is None:
            return -1, 0, -1
        pack = pack_linear if isinstance(product.weight, Tensor) else pack_segments
        packed = pack(product.weight, product.stored, product.activations)  # type: ignore[arg-type]
        return self.add(packed), code_of(packed), self.add(product.bias)


def stacking_obstacle(*products: Product, gate_up: Product | None = None) -> str | None:
    """Why a layer of these products can't be in a stack, in a few words; None: it can."""
    if any(segment.shape[0] % BLOCK for product in products for segment in product.segments[:-1]):
        return f"rows of a format that are no multiple of {BLOCK}"
    return "gates and ups of different formats" if gate_up is not None and len(gate_up.segments) > 1 else None


def _interleaved(product: Product) -> Product:
    """Gate and up rows in alternating blocks of 16, each half padded with zeros."""

    def blocks(tensor: Tensor) -> Tensor:
        halves = tensor.unflatten(0, (2, -1))
        padded = torch.nn.functional.pad(halves, (0, 0) * (halves.dim() - 2) + (0, -halves.shape[1] % 16))
        return padded.unflatten(1, (-1, 16)).transpose(0, 1).flatten(0, 2)

    [weight] = product.segments
    if isinstance(weight, Packed):
        by_row = {name: tensor for name, tensor in weight.tensors.items() if name != "group_of"}
        weight = weight.with_tensors({name: blocks(as_bytes(tensor)).view(tensor.dtype) for name, tensor in by_row.items()})
        return Product((weight,), None if product.bias is None else blocks(product.bias), activations=product.activations)
    return Product(blocks(weight), None if product.bias is None else blocks(product.bias), product.stored, product.activations)


def pack_stack(shape: StackShape, layers: Sequence[Layer], final_norm: Tensor | None, last_tap: int | None = None) -> tuple[Tensor, Tensor]:
    """``(weights, plan)`` for :func:`decode`: uint8 and int64, both one-dimensional, in the order of the structs in ``stack.cpp``.

    A weight whose every value is a bfloat16 or a float16 is kept in 16 bits. ``last_tap``: index of the residual stream after the last
    layer, before the final norm, among the features; None: not tapped.

    Raises:
        ConfigError: a tensor is not float32.
    """
    blob, rows = _Blob(), []
    for layer in layers:
        biases = [product.bias for product in (layer.qkv, layer.out, layer.gate_up, layer.down) if product is not None]
        norms = (layer.input_norm, layer.query_norm, layer.key_norm, layer.mlp_norm, layer.out_norm, layer.down_norm)
        for tensor in (*biases, *norms, layer.sink_Q):
            if tensor is not None:
                require("weights", tensor, torch.float32)
        input_norm, qkv = blob.add(layer.input_norm), blob.product(layer.qkv)
        of_heads, out = (blob.add(layer.query_norm), blob.add(layer.key_norm)), blob.product(layer.out)
        gate_up = None if layer.gate_up is None else _interleaved(layer.gate_up)
        mlp_norm, gates, down = blob.add(layer.mlp_norm), blob.product(gate_up), blob.product(layer.down)
        added = blob.add(layer.out_norm), blob.add(layer.down_norm), blob.add(layer.sink_Q)
        sizes = layer.qkv.shape[1], 0 if layer.down is None else layer.down.shape[1]
        window, tap = (-1 if value is None else value for value in (layer.window, layer.tap))
        places = (window, layer.kv_layer, tap, layer.rope_rows, layer.whole)
        rows += [input_norm, *qkv, *of_heads, *out, mlp_norm, *gates, *down, *added, *sizes, *places]
    *integers, eps, scale, softcap = astuple(shape)
    hidden = layers[0].qkv.shape[1] if layers[0].down is None else layers[0].down.shape[0]
    head = [len(layers), hidden, *integers, blob.add(final_norm), -1 if last_tap is None else last_tap]
    return use_huge_pages(torch.cat(blob.parts)), torch.tensor([*head, bits(eps), bits(scale), bits(softcap), *rows], dtype=torch.int64)


def _decode(
    residual: Tensor,
    entering: Tensor | None,
    kv_pool: Written[Tensor],
    weights: Tensor,
    plan: Tensor,
    rope: Tensor,
    rope_row: Tensor,
    table: Tensor,
    slot: Tensor,
    valid: Tensor,
    position: Tensor,
    begin: Tensor,
    end: Tensor | None,
    ancestors: Tensor | None,
    first: int,
    last: int,
    taps: int,
    final_norm: bool,
    kv_only: bool,
) -> tuple[Tensor, Tensor]:
    """Run hidden states through a stack of layers, and write their keys and values to the pool.

    Args:
        residual: float32, input of the first layer.
        entering: input of the first layer's attention, already normed, if it is another tensor than ``residual``.
        kv_pool: ``[layers, 2, pages, page_size, G, D]`` of one of :data:`.call.KV_DTYPES`, contiguous; written in place, in its dtype.
        weights, plan: of :func:`pack_stack`.
        rope: float32, cosines then sines; rope_row: int64, the row of each token, clamped into the table.
        table: int32. slot: int64, slot of each token's KV. valid: bool; KV of invalid tokens goes to the dummy page.
        position: int64, for sliding windows.
        begin: int64, first slot that each query sees without a window: that of position 0.
        end, ancestors: the prefix's end and the ancestor words, as :func:`graphspec.kernels.attention.tree_attention.tree_attention` takes
            them; both None: causal, as :func:`graphspec.kernels.attention.tree_attention.chunk_attention`.
        first, last: run layers ``first`` to ``last - 1``.
        taps: number of tapped layers of the stack; 0: return no features.
        final_norm: apply the stack's final norm, if it has one.
        kv_only: stop at the keys and values of the last layer.

    Returns:
        ``[B, T, H]`` after the last of these layers, and the concatenated tapped residual streams
        ``[B, T, taps * H]``; two empty tensors with ``kv_only``.

    Raises:
        ConfigError: rows are not float32, or the pool has another dtype or is not contiguous.
    """
    lanes, tokens, hidden = residual.shape
    _, _, pages, page_size, _, _ = kv_pool.shape
    if not kv_pool.is_contiguous() or kv_pool.dtype not in KV_DTYPES or residual.dtype is not torch.float32:
        expected = f"a contiguous pool of one of {', '.join(map(str, KV_DTYPES))}, and float32 rows"
        raise ConfigError("native decoder", expected, f"{kv_pool.dtype}, {residual.dtype}")
    out = residual.new_empty((0,) if kv_only else residual.shape)
    tapped = residual.new_empty((0,) if kv_only else (lanes, tokens, taps * hidden))
    read = (residual, entering, kv_pool, out, tapped, rope, rope_row, table, slot, position, begin, end, ancestors, valid)
    words = 0 if ancestors is None else ancestors.shape[2]
    call(
        "decode",
        (weights, plan, *(None if x is None else dense(x) for x in read)),
        lanes, tokens, table.shape[1], page_size, pages, words, rope.shape[0], CODE[kv_pool.dtype], first, last, taps, final_norm, kv_only,
    )  # fmt: skip
    return out, tapped


def _decode_shape(residual: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    taps, _, kv_only = rest[-3:]
    assert isinstance(taps, int)
    if kv_only:
        return residual.new_empty((0,)), residual.new_empty((0,))
    return residual.new_empty(residual.shape), residual.new_empty((*residual.shape[:-1], taps * residual.shape[-1]))


decode = define_op("decode", _decode, _decode_shape)

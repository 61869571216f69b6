"""C++ attention and linear layers for the CPU, in float32 arithmetic. Attention takes lengths and page tables; it reads visible slots only.

Registered with the dispatcher as ``graphspec_native::*``, so ``torch.compile(fullgraph=True)`` keeps each as one opaque op. The library is
built when this module is imported, which only happens if ``native`` is chosen.

The bits of a query's result depend only on the keys and values it sees (``attention.h``): they are the same for a token alone, in a tree,
in a chunk, and in any batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError
from ..formulas import rms_norm
from ..linear.linear import Hidden, finish, hidden_of
from ..linear.packed import Packed
from ..op import Signature
from ..registry import op_of
from .build import load
from .call import KV_DTYPES, bits, call, dense, require
from .pack import CODE, channels_of, code_of, pack_codes, pack_linear

load()
_library = torch.library.Library("graphspec_native", "FRAGMENT")
_float32, _int32, _int64, _bool = torch.float32, torch.int32, torch.int64, torch.bool


def _pool(kv_pool: Tensor) -> Tensor:
    if kv_pool.dtype not in KV_DTYPES:
        raise ConfigError("native attention: kv_pool", f"one of {', '.join(map(str, KV_DTYPES))}", str(kv_pool.dtype))
    if not kv_pool.is_contiguous():
        raise ConfigError("native attention: kv_pool", "a contiguous pool", f"strides {kv_pool.stride()}")
    return kv_pool


def _queries(query: Tensor, kv_pool: Tensor) -> Tensor:
    require("query", query, _float32)
    if query.shape[2] % kv_pool.shape[4] or query.shape[3] != kv_pool.shape[5]:
        expected = f"[B, T, a multiple of {kv_pool.shape[4]}, {kv_pool.shape[5]}]"
        raise ConfigError("native attention: query", expected, list(query.shape))
    return query if query.stride(3) == 1 else dense(query)


def _tree_attention(
    query_BTQD: Tensor,
    kv_pool: Tensor,
    layer: int,
    table_BP: Tensor,
    prefix_begin_BT: Tensor,
    prefix_end_B: Tensor,
    ancestors_BTX: Tensor,
    scale: float,
    sink_Q: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    query, kv_pool = _queries(query_BTQD, kv_pool), _pool(kv_pool)
    require("table", table_BP, _int32)
    for name, tensor in (("prefix_begin", prefix_begin_BT), ("prefix_end", prefix_end_B), ("ancestors", ancestors_BTX)):
        require(name, tensor, _int64)
    out = torch.empty(query.shape, dtype=_float32)
    tensors = (
        out,
        query,
        kv_pool,
        None if sink_Q is None else dense(sink_Q.float()),
        *map(dense, (table_BP, prefix_begin_BT, prefix_end_B, ancestors_BTX)),
    )
    call(
        "tree_attention",
        tensors,
        *_shape(query, kv_pool, table_BP, layer, ancestors_BTX.shape[2]),
        CODE[kv_pool.dtype],
        bits(scale),
        bits(softcap),
    )
    return out


def _chunk_attention(
    query_BTQD: Tensor,
    kv_pool: Tensor,
    layer: int,
    table_BP: Tensor,
    prefix_begin_BT: Tensor,
    slot_BT: Tensor,
    valid_BT: Tensor,
    scale: float,
    sink_Q: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    query, kv_pool = _queries(query_BTQD, kv_pool), _pool(kv_pool)
    require("table", table_BP, _int32)
    require("prefix_begin", prefix_begin_BT, _int64)
    require("slot", slot_BT, _int64)
    require("valid", valid_BT, _bool)
    out = torch.empty(query.shape, dtype=_float32)
    tensors = (
        out,
        query,
        kv_pool,
        None if sink_Q is None else dense(sink_Q.float()),
        *map(dense, (table_BP, prefix_begin_BT, slot_BT, valid_BT)),
    )
    call("chunk_attention", tensors, *_shape(query, kv_pool, table_BP, layer, 0), CODE[kv_pool.dtype], bits(scale), bits(softcap))
    return out


def _shape(query: Tensor, kv_pool: Tensor, table: Tensor, layer: int, words: int) -> tuple[int, ...]:
    """The fields of the C++ struct ``Shape``."""
    _, _, pages, page_size, groups, _ = kv_pool.shape
    lanes, tokens, heads, dim = query.shape
    return (lanes, tokens, heads, groups, dim, table.shape[1], page_size, pages, layer, words, *query.stride()[:3])


def _empty_like_query(query: Tensor, *_: object) -> Tensor:
    return query.new_empty(query.shape)


def _linear(x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None, norm_weight: Tensor | None, norm_eps: float) -> Tensor:
    """``norm(x[..., in]) @ weight.T + bias`` as float32 ``[..., outputs]``; a row's bits do not depend on the other rows.

    Args:
        x: float32.
        packed: of :func:`pack_linear`, :func:`pack_codes` or :func:`pack_segments`.
        outputs: rows of the weight before packing.
        bias: float32 ``[outputs]``.
        norm_weight: float32 ``[in]``, of an RMSNorm of ``x`` first.
        norm_eps: of that norm.

    Raises:
        ConfigError: ``x`` is not float32, or has another number of channels.
    """
    require("x", x, _float32)
    channels = channels_of(packed)
    if x.shape[-1] != channels:
        raise ConfigError("native linear: x", f"{channels} channels", x.shape[-1])
    rows = x if x.dim() == 2 and x.stride(1) == 1 else dense(x).view(-1, channels)
    out = torch.empty((*x.shape[:-1], outputs), dtype=_float32)
    words = (code_of(packed), channels, outputs, rows.shape[0], rows.stride(0))
    call("linear", (out, rows, bias, norm_weight, packed), *words, bits(norm_eps))
    return out


def _linear_shape(x: Tensor, packed: Tensor, outputs: int, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], outputs))


def define_op(
    name: str, kernel: Callable[..., Any], fake: Callable[..., Any] = lambda *_: None, signature: Signature | None = None
) -> Callable[..., Any]:
    """Register ``graphspec_native::name`` for the CPU, opaque to compilers.

    The op accepts any strides, so Inductor does not copy an argument for each op that reads it.

    Args:
        name: of the operator.
        kernel: annotated with plain types and groups of them.
        fake: results for fake tensors, from the flat arguments; default: no results.
        signature: with the parameters of the kernel; default: that of the kernel.

    Returns:
        A function with the signature.
    """
    border = Signature(kernel) if signature is None else signature
    # Sizes are concrete here, never symbolic.
    schema = name + border.schema.replace("SymInt", "int")
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    _library.impl(name, border.taking_flat(kernel), "CPU")
    torch.library.register_fake(f"graphspec_native::{name}", fake, lib=_library)
    return border.giving_flat(getattr(torch.ops.graphspec_native, name).default)


def implement(name: str, kernel: Callable[..., Any], fake: Callable[..., Any] = lambda *_: None) -> Callable[..., Any]:
    """:func:`define_op` with the signature of the op of that name in the catalog."""
    return define_op(name, kernel, fake, op_of(name).signature)


tree_attention = define_op("tree_attention", _tree_attention, _empty_like_query)
"""The op of this name in C++, as below. Raises ConfigError for an unsupported dtype or shape."""
chunk_attention = define_op("chunk_attention", _chunk_attention, _empty_like_query)
multiply_packed = define_op("linear", _linear, _linear_shape)


def linear(
    x: Hidden,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    norm_offset: bool = False,
    residual: Hidden | None = None,
    gated: bool = False,
    float32: bool = False,
) -> Hidden:
    """:func:`graphspec.kernels.linear.linear.linear` with packing and product in C++; norm, gate and residual in torch."""
    x = hidden_of(x)
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, norm_eps, norm_offset)
    return finish(multiply_packed(x, pack_linear(weight), weight.shape[0], bias, None, 0.0), residual, gated, float32)


def packed_linear(
    x: Hidden,
    weight: Packed,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    norm_offset: bool = False,
    residual: Hidden | None = None,
    gated: bool = False,
    float32: bool = False,
) -> Hidden:
    """:func:`graphspec.kernels.linear.packed_linear.packed_linear`, likewise."""
    x = hidden_of(x)
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, norm_eps, norm_offset)
    return finish(multiply_packed(x, pack_codes(weight), weight.shape[0], bias, None, 0.0), residual, gated, float32)

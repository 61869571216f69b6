"""C++ attention and linear layers for the CPU, float32. Attention reads lengths and page tables itself and visits visible slots only.

Registered with the dispatcher as ``graphspec_native::*``, so ``torch.compile(fullgraph=True)`` keeps each as one opaque op. The library is
built on import of this module, which happens when ``native`` is chosen and not before.

The result of a query depends on the keys and values it sees and on nothing else, bit for bit (see ``attention.cpp``): the same token
attends alike alone, in a tree, in a chunk, and in any batch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError
from ..formulas import rms_norm
from ..linear import Hidden, finish, hidden_of
from ..threads import team_threads
from .build import load

_native = load()
_tree, _chunk = _native.graphspec_tree_attention, _native.graphspec_chunk_attention
_multiply = _native.graphspec_linear
_library = torch.library.Library("graphspec_native", "FRAGMENT")
_float32, _int32, _int64, _bool = torch.float32, torch.int32, torch.int64, torch.bool


@functools.lru_cache(maxsize=4096)
def _longs(*values: int) -> tuple[int, object]:
    """Address of a C array that lives as long as its cache entry; callers keep the second item while they use the first."""
    array = (ctypes.c_int64 * len(values))(*values)
    return ctypes.addressof(array), array


def require(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """That a tensor has the dtype the C++ takes it for.

    Raises:
        ConfigError: it has another.
    """
    if tensor.dtype is not dtype:
        hint = "the native CPU kernels are float32 only; choose kernels.attention=reference for others" if dtype is _float32 else ""
        raise ConfigError(f"native attention: {name}", str(dtype), str(tensor.dtype), hint)


def _pool(kv_pool: Tensor) -> Tensor:
    require("kv_pool", kv_pool, _float32)
    if not kv_pool.is_contiguous():
        raise ConfigError("native attention: kv_pool", "a contiguous pool", f"strides {kv_pool.stride()}")
    return kv_pool


def _queries(query: Tensor, kv_pool: Tensor) -> Tensor:
    require("query", query, _float32)
    if query.shape[2] % kv_pool.shape[4] or query.shape[3] != kv_pool.shape[5]:
        expected = f"[B, T, a multiple of {kv_pool.shape[4]}, {kv_pool.shape[5]}]"
        raise ConfigError("native attention: query", expected, list(query.shape))
    return query if query.stride(3) == 1 else query.contiguous()


def _tree_attention(
    query: Tensor, kv_pool: Tensor, layer: int, table: Tensor, begin: Tensor, end: Tensor, ancestors: Tensor, scale: float
) -> Tensor:
    query, kv_pool = _queries(query, kv_pool), _pool(kv_pool)
    require("table", table, _int32)
    for name, tensor in (("prefix_begin", begin), ("prefix_end", end), ("ancestors", ancestors)):
        require(name, tensor, _int64)
    table, begin, end, ancestors = table.contiguous(), begin.contiguous(), end.contiguous(), ancestors.contiguous()
    lanes, tokens, heads, dim = query.shape
    _, _, pages, page_size, groups, _ = kv_pool.shape
    out = torch.empty((lanes, tokens, heads, dim), dtype=_float32)
    dims, _keep = _longs(
        lanes, tokens, heads, groups, dim, table.shape[1], page_size, pages, layer, ancestors.shape[2], *query.stride()[:3]
    )
    _tree(
        out.data_ptr(),
        query.data_ptr(),
        kv_pool.data_ptr(),
        table.data_ptr(),
        begin.data_ptr(),
        end.data_ptr(),
        ancestors.data_ptr(),
        dims,
        scale,
        team_threads(),
    )
    return out


def _chunk_attention(
    query: Tensor, kv_pool: Tensor, layer: int, table: Tensor, begin: Tensor, slot: Tensor, valid: Tensor, scale: float
) -> Tensor:
    query, kv_pool = _queries(query, kv_pool), _pool(kv_pool)
    require("table", table, _int32)
    require("prefix_begin", begin, _int64)
    require("slot", slot, _int64)
    require("valid", valid, _bool)
    table, begin, slot, valid = table.contiguous(), begin.contiguous(), slot.contiguous(), valid.contiguous()
    lanes, tokens, heads, dim = query.shape
    _, _, pages, page_size, groups, _ = kv_pool.shape
    out = torch.empty((lanes, tokens, heads, dim), dtype=_float32)
    dims, _keep = _longs(lanes, tokens, heads, groups, dim, table.shape[1], page_size, pages, layer, 0, *query.stride()[:3])
    _chunk(
        out.data_ptr(),
        query.data_ptr(),
        kv_pool.data_ptr(),
        table.data_ptr(),
        begin.data_ptr(),
        slot.data_ptr(),
        valid.data_ptr(),
        dims,
        scale,
        team_threads(),
    )
    return out


def _empty_like_query(query: Tensor, *_: object) -> Tensor:
    return query.new_empty(query.shape)


BITS = {torch.float32: 32, torch.bfloat16: 16, torch.float16: -16}


def _linear(x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None, norm_weight: Tensor | None, norm_eps: float) -> Tensor:
    require("x", x, _float32)
    channels = packed.shape[1]
    rows = x.reshape(-1, channels)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty((*x.shape[:-1], outputs), dtype=_float32)
    _multiply(
        out.data_ptr(),
        rows.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if norm_weight is None else norm_weight.data_ptr(),
        packed.data_ptr(),
        BITS[packed.dtype],
        channels,
        outputs,
        rows.shape[0],
        rows.stride(0),
        norm_eps,
        team_threads(),
    )
    return out


def _linear_shape(x: Tensor, packed: Tensor, outputs: int, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], outputs))


def define_op(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register ``graphspec_native::name`` for the CPU, opaque to compilers.

    Any strides will do: Inductor need not copy an argument that it has not computed yet for each op that reads it.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    _library.impl(name, kernel, "CPU")
    torch.library.register_fake(f"graphspec_native::{name}", fake, lib=_library)


_attention = "Tensor query, Tensor kv_pool, int layer, Tensor table, Tensor prefix_begin, Tensor {}, Tensor {}, float scale) -> Tensor"
define_op("tree_attention(" + _attention.format("prefix_end", "ancestors"), _tree_attention, _empty_like_query)
define_op("chunk_attention(" + _attention.format("slot", "valid"), _chunk_attention, _empty_like_query)
define_op(
    "linear(Tensor x, Tensor packed, int outputs, Tensor? bias, Tensor? norm_weight, float norm_eps) -> Tensor", _linear, _linear_shape
)


def tree_attention(
    query_BTQD: Tensor,
    kv_pool: Tensor,
    layer: int,
    table_BP: Tensor,
    prefix_begin_BT: Tensor,
    prefix_end_B: Tensor,
    ancestors_BTX: Tensor,
    scale: float,
) -> Tensor:
    """:func:`graphspec.kernels.tree_attention.tree_attention` in C++.

    Raises:
        ConfigError: a dtype or shape it wasn't written for.
    """
    out: Tensor = torch.ops.graphspec_native.tree_attention.default(
        query_BTQD, kv_pool, layer, table_BP, prefix_begin_BT, prefix_end_B, ancestors_BTX, scale
    )
    return out


def chunk_attention(
    query_BTQD: Tensor,
    kv_pool: Tensor,
    layer: int,
    table_BP: Tensor,
    prefix_begin_BT: Tensor,
    slot_BT: Tensor,
    valid_BT: Tensor,
    scale: float,
) -> Tensor:
    """:func:`graphspec.kernels.chunk_attention.chunk_attention` in C++.

    Raises:
        ConfigError: a dtype or shape it wasn't written for.
    """
    out: Tensor = torch.ops.graphspec_native.chunk_attention.default(
        query_BTQD, kv_pool, layer, table_BP, prefix_begin_BT, slot_BT, valid_BT, scale
    )
    return out


def pack_linear(weight: Tensor) -> Tensor:
    """``[ceil(out / 16), in, 16]`` from a float32 weight ``[out, in]``, for :func:`packed_linear`; the last block is padded with zeros.

    Where every value is a bfloat16, or every value a float16, the result is of that dtype: half the bytes, the same products to the bit.

    Raises:
        ConfigError: another dtype.
    """
    require("weight", weight, _float32)
    outputs, channels = weight.shape
    padded = torch.nn.functional.pad(weight.detach(), (0, 0, 0, -outputs % 16))
    packed = padded.view(-1, 16, channels).transpose(1, 2).contiguous()
    for narrow in (torch.bfloat16, torch.float16):
        found = packed.to(narrow)
        # By bits: as numbers, denormals that are flushed would all be equal.
        if torch.equal(found.float().view(_int32), packed.view(_int32)):
            return found
    return packed


def packed_linear(
    x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None = None, norm_weight: Tensor | None = None, norm_eps: float = 0.0
) -> Tensor:
    """``norm(x[..., in]) @ weight.T + bias`` as float32 ``[..., outputs]``; a row's bits do not depend on the other rows.

    Args:
        x: float32.
        packed: of :func:`pack_linear`.
        outputs: rows of the weight before packing.
        bias: float32 ``[outputs]``.
        norm_weight: float32 ``[in]``, of an RMSNorm of ``x`` first.
        norm_eps: of that norm.

    Raises:
        ConfigError: ``x`` is not float32.
    """
    out: Tensor = torch.ops.graphspec_native.linear.default(x, packed, outputs, bias, norm_weight, norm_eps)
    return out


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
    """:func:`graphspec.kernels.linear.linear` with the product in C++, packing included; norm, gate and residual are torch's."""
    x = hidden_of(x)
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, norm_eps, norm_offset)
    return finish(packed_linear(x, pack_linear(weight), weight.shape[0], bias), residual, gated, float32)

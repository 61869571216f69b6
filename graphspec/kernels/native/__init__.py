"""C++ attention and linear layers for the CPU, float32. Attention reads lengths and page tables itself and visits visible slots only.

Registered with the dispatcher as ``graphspec_native::*``, so ``torch.compile(fullgraph=True)`` keeps each as one opaque op. The library is
built on import of this module, which happens when ``native`` is chosen and not before.

The result of a query depends on the keys and values it sees and on nothing else, bit for bit (see ``attention.cpp``): the same token
attends alike alone, in a tree, in a chunk, and in any batch.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from ...errors import ConfigError
from ..formulas import rms_norm
from ..linear import Hidden, finish, hidden_of
from .build import load

_native = load()
_tree, _chunk = _native.graphspec_tree_attention, _native.graphspec_chunk_attention
_pack, _multiply = _native.graphspec_pack_linear, _native.graphspec_linear
_library = torch.library.Library("graphspec_native", "FRAGMENT")
_float32, _int32, _int64, _bool = torch.float32, torch.int32, torch.int64, torch.bool


@functools.lru_cache(maxsize=4096)
def _longs(*values: int) -> tuple[int, object]:
    """Address of a C array that lives as long as its cache entry; callers keep the second item while they use the first."""
    array = (ctypes.c_int64 * len(values))(*values)
    return ctypes.addressof(array), array


def _require(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype is not dtype:
        hint = "the native CPU kernels are float32 only; choose kernels.attention=reference for others" if dtype is _float32 else ""
        raise ConfigError(f"native attention: {name}", str(dtype), str(tensor.dtype), hint)


def _pool(kv_pool: Tensor) -> Tensor:
    _require("kv_pool", kv_pool, _float32)
    if not kv_pool.is_contiguous():
        raise ConfigError("native attention: kv_pool", "a contiguous pool", f"strides {kv_pool.stride()}")
    return kv_pool


def _queries(query: Tensor, kv_pool: Tensor) -> Tensor:
    _require("query", query, _float32)
    if query.shape[2] % kv_pool.shape[4] or query.shape[3] != kv_pool.shape[5]:
        expected = f"[B, T, a multiple of {kv_pool.shape[4]}, {kv_pool.shape[5]}]"
        raise ConfigError("native attention: query", expected, list(query.shape))
    return query if query.stride(3) == 1 else query.contiguous()


def _tree_attention(
    query: Tensor, kv_pool: Tensor, layer: int, table: Tensor, begin: Tensor, end: Tensor, ancestors: Tensor, scale: float
) -> Tensor:
    query, kv_pool = _queries(query, kv_pool), _pool(kv_pool)
    _require("table", table, _int32)
    for name, tensor in (("prefix_begin", begin), ("prefix_end", end), ("ancestors", ancestors)):
        _require(name, tensor, _int64)
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
        torch.get_num_threads(),
    )
    return out


def _chunk_attention(
    query: Tensor, kv_pool: Tensor, layer: int, table: Tensor, begin: Tensor, slot: Tensor, valid: Tensor, scale: float
) -> Tensor:
    query, kv_pool = _queries(query, kv_pool), _pool(kv_pool)
    _require("table", table, _int32)
    _require("prefix_begin", begin, _int64)
    _require("slot", slot, _int64)
    _require("valid", valid, _bool)
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
        torch.get_num_threads(),
    )
    return out


def _empty_like_query(query: Tensor, *_: object) -> Tensor:
    return query.new_empty(query.shape)


def _linear(x: Tensor, packed: Tensor, outputs: int) -> Tensor:
    _require("x", x, _float32)
    channels = packed.shape[1]
    rows = x.reshape(-1, channels)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    count = rows.shape[0]
    out = torch.empty((*x.shape[:-1], outputs), dtype=_float32)
    _multiply(out.data_ptr(), rows.data_ptr(), packed.data_ptr(), count, channels, outputs, rows.stride(0), torch.get_num_threads())
    return out


def _linear_shape(x: Tensor, packed: Tensor, outputs: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], outputs))


_attention = "Tensor query, Tensor kv_pool, int layer, Tensor table, Tensor prefix_begin, Tensor {}, Tensor {}, float scale"
for _name, _arguments, _kernel, _fake in (
    ("tree_attention", _attention.format("prefix_end", "ancestors") + ") -> Tensor", _tree_attention, _empty_like_query),
    ("chunk_attention", _attention.format("slot", "valid") + ") -> Tensor", _chunk_attention, _empty_like_query),
    ("linear", "Tensor x, Tensor packed, int outputs) -> Tensor", _linear, _linear_shape),
):
    # Any strides will do: Inductor need not copy an argument that it has not computed yet for each op that reads it.
    _library.define(f"{_name}({_arguments}", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    _library.impl(_name, _kernel, "CPU")
    torch.library.register_fake(f"graphspec_native::{_name}", _fake, lib=_library)


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

    Raises:
        ConfigError: another dtype.
    """
    _require("weight", weight, _float32)
    outputs, channels = weight.shape
    weight, packed = weight.contiguous(), torch.empty((-(-outputs // 16), channels, 16), dtype=_float32)
    _pack(packed.data_ptr(), weight.data_ptr(), outputs, channels)
    return packed


def packed_linear(x: Tensor, packed: Tensor, outputs: int) -> Tensor:
    """``x[..., in] @ weight.T`` as float32 ``[..., outputs]``; a row's bits do not depend on the other rows.

    Raises:
        ConfigError: ``x`` is not float32.
    """
    out: Tensor = torch.ops.graphspec_native.linear.default(x, packed, outputs)
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
    out = packed_linear(x, pack_linear(weight), weight.shape[0])
    return finish(out if bias is None else out + bias, residual, gated, float32)

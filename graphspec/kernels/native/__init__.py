"""C++ attention and linear layers for the CPU, in float32 arithmetic, and weights as the products read them (``product.h``).

Attention takes lengths and page tables; it reads visible slots only.

Registered with the dispatcher as ``graphspec_native::*``, so ``torch.compile(fullgraph=True)`` keeps each as one opaque op. The library is
built when this module is imported, which only happens if ``native`` is chosen.

The bits of a query's result depend only on the keys and values it sees (``attention.h``): they are the same for a token alone, in a tree,
in a chunk, and in any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError
from ..formulas import rms_norm
from ..huge_pages import use_huge_pages
from ..linear.linear import Hidden, finish, hidden_of
from ..linear.packed import Packed, check_packed, effective_minimums, effective_scales
from ..op import Signature
from ..registry import op_of
from .build import load
from .call import KV_DTYPES, bits, call, dense, require

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


BLOCK = 32
"""Outputs whose weights of a channel lie side by side."""
CODE = {
    "segments": 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3,
    "int4": 4, "uint4": 5, "e2m1": 6, "int8": 7, "uint8": 8, "e4m3": 9,
}  # fmt: skip
"""``Code`` in C++."""
NONE, ZERO, MINIMUM, MINIMUM_APART = range(4)
"""``Offset`` in C++."""
ALIGNMENT = 64
"""Alignment of tensors that C++ streams, in bytes."""
FIELDS = 7
"""Of a ``Segment`` in C++."""
E4M3_FACTOR = 256.0
"""By which C++ reads codes of this kind too small."""


def _blocks(rows: Tensor) -> Tensor:
    """``[ceil(N / 32), 32, ...]``, padded with zeros."""
    padding = (0, 0) * (rows.dim() - 1) + (0, -rows.shape[0] % BLOCK)
    return torch.nn.functional.pad(rows, padding).unflatten(0, (-1, BLOCK))


def _narrowest(*tensors: Tensor, stored: torch.dtype | None = None) -> torch.dtype:
    """The 16-bit dtype that has every value, else float32; on ``meta``, where there are no values, ``stored``."""
    if tensors[0].is_meta:
        return stored or torch.float32
    for narrow in (torch.bfloat16, torch.float16):
        # Compared as bits: as numbers, flushed denormals would all be equal.
        if all(torch.equal(x.to(narrow).float().view(torch.int32), x.view(torch.int32)) for x in tensors):
            return narrow
    return torch.float32


def pack_linear(weight: Tensor, stored: torch.dtype | None = None, activations: str = "full") -> Tensor:
    """``[ceil(out / 32), in, 32]`` from a float32 weight ``[out, in]``; the last block is padded with zeros.

    Where every value is a bfloat16, or every value a float16, the result is of that dtype: half the bytes, the same products to the bit. In
    bfloat16 the outputs of each half of a block take turns.

    Args:
        weight: float32 ``[out, in]``.
        stored: for weights on the device ``meta``, which have no values: the 16-bit dtype of the checkpoint, None: a wider one.
        activations: others than full: the result is that of :func:`pack_segments`.

    Raises:
        ConfigError: another dtype.
    """
    require("weight", weight, torch.float32)
    if activations != "full":
        return pack_segments([weight], stored, activations)
    weight = weight.detach()
    blocks = _blocks(weight.to(_narrowest(weight, stored=stored))).transpose(1, 2)
    if blocks.dtype is torch.bfloat16:
        blocks = blocks.unflatten(2, (2, BLOCK // 2)).transpose(2, 3).flatten(2)
    return use_huge_pages(blocks.contiguous())


def _codes(weight: Packed) -> Tensor:
    """uint8 ``[blocks, K, bytes]``: the 32 codes of each channel. Those of 4 bits share bytes with those of the block's other half."""
    if weight.bits == 8:
        return _blocks(weight.codes.view(torch.uint8)).transpose(1, 2)
    codes = _blocks(torch.stack((weight.codes & 15, weight.codes >> 4), -1).flatten(1))
    low, high = codes.unflatten(1, (2, BLOCK // 2)).unbind(1)
    return (low | high << 4).transpose(1, 2)


def _segment(weight: Packed, activations: str) -> tuple[Tensor, list[int]]:
    """The data of a segment, and its description without the place."""
    check_packed(weight, "native products: weight")
    outputs, channels = weight.shape
    scales, minimums = effective_scales(weight), effective_minimums(weight)
    zeros, group = None if weight.zeros is None else weight.zeros.float(), weight.group
    if weight.code == "e4m3":
        if not weight.codes.is_meta and bool((weight.codes.view(torch.uint8) & 127 == 127).any()):
            raise ConfigError("native products: weight", "codes that are numbers", "NaN")
        scales, zeros = scales * E4M3_FACTOR, None if zeros is None else zeros / E4M3_FACTOR
    offsets, kind = (zeros, ZERO) if zeros is not None else (minimums, NONE if minimums is None else MINIMUM)
    tables = [scales] if offsets is None else [scales, offsets]
    stored = weight.scales.dtype if weight.super_scales is None and weight.scales.element_size() == 2 else None
    dtype = _narrowest(*tables, stored=stored)
    # A code times a scale is exact if their significant bits fit into float32's.
    if kind == MINIMUM and not scales.is_meta and bool((scales.view(torch.int32) & ((1 << weight.bits) - 1)).any()):
        kind = MINIMUM_APART
    if weight.group_of is not None:
        # Groups that are no runs of channels: a scale for each channel.
        tables, group = [table[:, weight.group_of] for table in tables], 1
    table = torch.cat([_blocks(each.to(dtype)).transpose(1, 2).contiguous().view(torch.uint8) for each in tables], -1)
    codes, whole = _codes(weight), channels // group
    body = torch.cat((table[:, :whole], codes[:, : whole * group].unflatten(1, (whole, group)).flatten(2)), -1).flatten(1)
    rest = (table[:, whole:].flatten(1), codes[:, whole * group :].flatten(1))
    return torch.cat((body, *rest), -1), [CODE[weight.code], CODE[dtype], kind, group, outputs, activations == "int8" and roundable(weight)]


def _dense_segment(weight: Tensor, stored: torch.dtype | None, activations: str) -> tuple[Tensor, list[int]]:
    paired = activations == "bfloat16" and _narrowest(weight.detach(), stored=stored) is torch.bfloat16
    packed = _paired(weight.detach().bfloat16()) if paired else pack_linear(weight, stored)
    return packed.view(torch.uint8), [CODE[packed.dtype], CODE[packed.dtype], NONE, weight.shape[1], weight.shape[0], paired]


def _paired(weight: Tensor) -> Tensor:
    """``[ceil(out / 32), ceil(in / 2), 2, 16, 2]``, as ``paired.cpp`` reads it: a block's halves, their outputs, two channels of each."""
    blocks = _blocks(torch.nn.functional.pad(weight, (0, weight.shape[1] % 2)))
    return blocks.unflatten(1, (2, BLOCK // 2)).unflatten(3, (-1, 2)).permute(0, 3, 1, 2, 4).contiguous()


def roundable(weight: Packed) -> bool:
    """Whether products of this weight can take activations of 8 bits: its codes are integers, or halves of integers, runs of channels share
    scales, and channels come in 32.
    """
    return weight.code != "e4m3" and weight.group_of is None and weight.group % 16 == 0 == weight.shape[1] % 32


def pack_segments(segments: Sequence[Packed | Tensor], stored: torch.dtype | None = None, activations: str = "full") -> Tensor:
    """uint8, one-dimensional: a weight whose output rows are stored in these formats, top to bottom, as it describes itself.

    Each group of channels has its scales next to its codes, so a product reads one stream.

    Args:
        segments: codes, or float32 ``[out, in]``.
        stored: as of :func:`pack_linear`.
        activations: what products round them to (``rounded.h``). int8: for codes that are :func:`roundable`; bfloat16: for numbers that are
            all in bfloat16; full: nothing. Others keep their activations.

    Raises:
        ConfigError: a tensor of another dtype or shape, NaN among codes of 8-bit floats, or rows of different length.
    """
    lengths = {segment.shape[1] for segment in segments}
    if len(lengths) != 1:
        raise ConfigError("native products: weight", "rows of one length", sorted(lengths))
    made = [
        _segment(segment, activations) if isinstance(segment, Packed) else _dense_segment(segment, stored, activations)
        for segment in segments
    ]
    words = [len(made), *lengths]
    size = _aligned(8 * (len(words) + FIELDS * len(made)))
    for data, description in made:
        words += [size, *description]
        size += _aligned(data.numel())
    parts = [torch.tensor(words, dtype=torch.int64, device=made[0][0].device).view(torch.uint8), *(data.flatten() for data, _ in made)]
    return use_huge_pages(torch.cat([torch.nn.functional.pad(part, (0, -part.numel() % ALIGNMENT)) for part in parts]))


def pack_codes(weight: Packed, activations: str = "full") -> Tensor:
    """:func:`pack_segments` of one segment. Products with full activations are bit for bit those of the float32 weight it stands for."""
    return pack_segments([weight], activations=activations)


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT


def channels_of(packed: Tensor) -> int:
    """Channels of a packed weight of either form."""
    return packed.shape[1] if packed.dim() == 3 else int(packed[8:16].view(torch.int64))


def outputs_of(packed: Tensor) -> int:
    """Output rows of a weight of :func:`pack_segments`."""
    words = packed[: len(packed) // 8 * 8].view(torch.int64)
    return int(words[7 : 2 + FIELDS * int(words[0]) : FIELDS].sum())


def code_of(packed: Tensor) -> int:
    """``Code`` of a packed weight of either form."""
    return CODE[packed.dtype if packed.dim() == 3 else "segments"]

"""Quantised tensors of safetensors files: what a layer has is recognised by the names, dtypes and shapes of its tensors.

Every layout here is published: DeepSeek's and Qwen's FP8 blocks, compressed-tensors (FP8, int8, packed int4 and int8, NVFP4, MXFP4), GPTQ,
AWQ, ModelOpt, and gpt-oss's experts in MXFP4. Recognising reads no data, so a layout that can't be loaded is refused before anything is
read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..facts.quantisation import LOADS, Quantisation
from ..kernels.linear.packed import Packed, check_packed

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where each of eight columns lies among the nibbles of AWQ's words."""
ACTIVATION_SCALES = ("input_scale", "input_global_scale", "output_scale", "input_zero_point")
"""Scales of activations, which stay in the dtype of the model here."""
BLOCKS = "_blocks"
"""End of the name of a tensor with the codes of all experts of a layer (gpt-oss)."""
CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "prob_scale")


class Stored(Protocol):
    """Named tensors of a checkpoint."""

    def describe(self, name: str) -> tuple[tuple[int, ...], str]: ...

    def tensor(self, name: str) -> Tensor: ...

    def key(self, name: str) -> str: ...


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight of low precision in a file.

    Attributes:
        shape: ``(N, K)``.
        format: of its codes, for messages.
        make: reads it.
        outline: the same with ``meta`` tensors, but for the order of channels, which is read where there is one.
    """

    shape: tuple[int, int]
    format: str
    make: Callable[[], Packed]
    outline: Callable[[], Packed]


@dataclass(frozen=True, slots=True)
class Layer:
    """The tensors of one layer.

    Attributes:
        stored: all tensors.
        prefix: of its names.
        parts: what stands after the prefix, and shape and dtype of each.
    """

    stored: Stored
    prefix: str
    parts: dict[str, tuple[tuple[int, ...], str]]

    def error(self, part: str, expected: str, found: object = None) -> CheckpointError:
        """About one of the tensors."""
        if found is None:
            found = "no such tensor" if part not in self.parts else f"{self.parts[part][1]} of shape {list(self.parts[part][0])}"
        return CheckpointError(self.stored.key(self.prefix + part), expected, found, LOADS)

    def need(self, part: str, *shapes: tuple[int, ...], dtypes: tuple[str, ...] = ()) -> tuple[int, ...]:
        """The shape of a tensor, which must be one of these."""
        shape, dtype = self.parts.get(part, ((), ""))
        if part not in self.parts or (shapes and shape not in shapes) or (dtypes and dtype not in dtypes):
            wanted = " or ".join(f"shape {list(one)}" for one in shapes) or f"a tensor of {len(shape)} dimensions"
            raise self.error(part, wanted + (f", {' or '.join(dtypes)}" if dtypes else ""))
        return shape

    def read(self, part: str) -> Tensor:
        """One of the tensors."""
        return self.stored.tensor(self.prefix + part)


WORDS = ("I32",)
FLOAT_SCALES = ("F32", "BF16", "F16")


def codes_of(stored: Stored, names: Iterable[str], quantisation: Quantisation) -> tuple[dict[str, Codes], dict[str, list[str]]]:
    """Weights of low precision by the name that their numbers would have, and the names of the tensors that belong to each.

    Raises:
        CheckpointError: tensors of a layer that don't fit together, or a layout that isn't known. Reads no data.
    """
    layers: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {}
    for name in names:
        prefix, _, part = name.rpartition(".")
        layers.setdefault(f"{prefix}.", {})[part] = stored.describe(name)
    found: dict[str, Codes] = {}
    used: dict[str, list[str]] = {}
    for prefix, parts in layers.items():
        layer = Layer(stored, prefix, parts)
        for part in CACHE_SCALES:
            if part in parts:
                raise layer.error(part, "no scale of the cache: keys and values are kept in the dtype of the model")
        codes, own = _recognise(layer, quantisation)
        if codes is not None:
            found[f"{prefix}weight"] = codes
            used[f"{prefix}weight"] = [prefix + part for part in (*own, *ACTIVATION_SCALES) if part in parts]
        for stem in (part.removesuffix(BLOCKS) for part, (_, dtype) in parts.items() if part.endswith(BLOCKS) and dtype == "U8"):
            found[prefix + stem] = _expert_blocks(layer, stem)
            used[prefix + stem] = [f"{prefix}{stem}{BLOCKS}", f"{prefix}{stem}_scales"]
    return found, used


def _recognise(layer: Layer, quantisation: Quantisation) -> tuple[Codes | None, tuple[str, ...]]:
    parts = layer.parts
    own: tuple[str, ...]
    if "qweight" in parts:
        read = {"gptq": _gptq, "awq": _awq}.get(quantisation.method)
        if read is None:
            raise layer.error("qweight", f"no such tensor in a checkpoint of {quantisation.method}")
        return read(layer, quantisation), ("qweight", "qzeros", "scales", "g_idx")
    if "weight_packed" in parts:
        own = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape", "weight_global_scale")
        kind = parts["weight_packed"][1]
        return (_packed_integers(layer) if kind in WORDS else _packed_floats(layer, "weight_packed", "weight_global_scale", True)), own
    dtype = parts["weight"][1] if "weight" in parts else ""
    if dtype == "U8":
        own = ("weight", "weight_scale", "weight_scale_2")
        return _packed_floats(layer, "weight", "weight_scale_2", False), own
    if dtype in ("F8_E4M3", "I8"):
        own = ("weight", "weight_scale", "weight_scale_inv", "weight_zero_point")
        return _whole_bytes(layer, "e4m3" if dtype == "F8_E4M3" else "int8", quantisation.block), own
    return None, ()


def _codes(layer: Layer, shape: tuple[int, int], name: str, make: Callable[[], Packed], outline: Packed, order: str = "") -> Codes:
    """``order``: the tensor that tells the group of each channel, which the outline has too."""
    key = layer.stored.key(f"{layer.prefix}weight")
    check_packed(outline, key)

    def checked() -> Packed:
        made = make()
        check_packed(made, key)
        return made

    def described() -> Packed:
        return outline._replace(group_of=_group_of(layer, order, shape[1], outline.scales.shape[1])) if order else outline

    return Codes(shape, name, checked, described)


def _meta(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8}


def _group(layer: Layer, channels: int, groups: int, part: str) -> int:
    if groups < 1 or channels % groups:
        raise layer.error(part, f"groups that divide {channels} channels", f"{groups} of them")
    return channels // groups


def _whole_bytes(layer: Layer, code: str, block: tuple[int, int] | None) -> Codes:
    """FP8 or int8 with a scale per tensor, row, or block of rows and channels."""
    outputs, channels = layer.need("weight")
    part = "weight_scale_inv" if "weight_scale_inv" in layer.parts else "weight_scale"
    shape = layer.need(part, dtypes=FLOAT_SCALES)
    if "weight_zero_point" in layer.parts:
        raise layer.error("weight_zero_point", "no such tensor: codes of 8 bits are symmetric")
    if len(shape) <= 1 or shape == (1, 1):
        if shape not in ((), (1,), (1, 1), (outputs,)):
            raise layer.error(part, f"one scale, or {outputs} of them")
        height, group = (1 if shape == (outputs,) else outputs), channels
    else:
        # Without a stated block: a scale for each row, of all channels.
        height, group = (1, channels) if block is None or shape == (outputs, 1) else block
        if (-(-outputs // height), -(-channels // group)) != shape:
            wanted = "row" if block is None else f"block of {list(block)}"
            raise layer.error(part, f"a scale for each {wanted} of {[outputs, channels]}")
    groups = -(-channels // group)

    def make() -> Packed:
        scales = layer.read(part)
        scales = scales.reshape(-1, groups) if scales.dim() != 2 else scales
        return Packed(layer.read("weight"), scales.repeat_interleave(height, 0)[:outputs].contiguous(), code, group)

    dtype = torch.float8_e4m3fn if code == "e4m3" else torch.int8
    outline = Packed(_meta(dtype, outputs, channels), _meta(_DTYPES[layer.parts[part][1]], outputs, groups), code, group)
    return _codes(layer, (outputs, channels), code, make, outline)


def _packed_integers(layer: Layer) -> Codes:
    """``pack-quantized`` of compressed-tensors: words along the channels, the lowest bits first, stored plus half of the range."""
    outputs, words = layer.need("weight_packed", dtypes=WORDS)
    rows, groups = layer.need("weight_scale", dtypes=FLOAT_SCALES)
    layer.need("weight_shape", (2,), dtypes=("I64", "I32"))
    channels = layer.read("weight_shape").tolist()[1]
    bits = 32 * words // channels if channels and 32 * words % channels == 0 else 0
    if bits not in (4, 8) or rows != outputs:
        raise layer.error("weight_packed", f"{outputs} rows of 4 or 8 bits for each of {channels} channels")
    group = _group(layer, channels, groups, "weight_scale")
    zeros = "weight_zero_point" in layer.parts
    if zeros:
        layer.need("weight_zero_point", (-(-outputs * bits // 32), groups), dtypes=WORDS)
    if "weight_g_idx" in layer.parts:
        layer.need("weight_g_idx", (channels,))
    code = ("uint4" if zeros else "int4") if bits == 4 else "int8"

    def make() -> Packed:
        codes = layer.read("weight_packed").contiguous().view(torch.uint8)
        # Stored plus 128, so the highest bit is that of the signed number, turned.
        codes = codes if bits == 4 else (codes ^ 128).view(torch.int8)
        zero = None
        if zeros:
            stored = layer.read("weight_zero_point").t().contiguous().view(torch.uint8)
            zero = _nibbles(stored) if bits == 4 else (stored ^ 128).view(torch.int8)
            zero = zero.t()[:outputs].contiguous()
        return Packed(
            codes, layer.read("weight_scale"), code, group, zeros=zero, group_of=_group_of(layer, "weight_g_idx", channels, groups)
        )

    codes = _meta(torch.uint8 if bits == 4 else torch.int8, outputs, channels * bits // 8)
    zero = _meta(torch.uint8 if bits == 4 else torch.int8, outputs, groups) if zeros else None
    outline = Packed(codes, _meta(_DTYPES[layer.parts["weight_scale"][1]], outputs, groups), code, group, zeros=zero)
    return _codes(layer, (outputs, channels), f"int{bits}", make, outline, "weight_g_idx")


def _group_of(layer: Layer, part: str, channels: int, groups: int) -> Tensor | None:
    """The group of each channel where it isn't that of its place."""
    if part not in layer.parts:
        return None
    group_of = layer.read(part).to(torch.int32)
    if group_of.min() < 0:  # compressed-tensors' "not set"
        return None
    if group_of.max() >= groups:
        raise layer.error(part, f"groups from 0 to {groups - 1}", int(group_of.max()))
    in_order = torch.arange(channels, dtype=torch.int32) // (channels // groups)
    return None if torch.equal(group_of, in_order) else group_of


def _packed_floats(layer: Layer, part: str, overall: str, divides: bool) -> Codes:
    """NVFP4, with an e4m3 scale for 16 channels and one for the tensor, and MXFP4, with a power of two for 32."""
    outputs, pairs = layer.need(part, dtypes=("U8",))
    rows, groups = layer.need("weight_scale", dtypes=("F8_E4M3", "U8"))
    channels = 2 * pairs
    group = _group(layer, channels, groups, "weight_scale")
    powers = layer.parts["weight_scale"][1] == "U8"
    if rows != outputs or group != (32 if powers else 16):
        raise layer.error("weight_scale", f"{outputs} rows, and a scale for {32 if powers else 16} of {channels} channels")
    if not powers:
        layer.need(overall, (), (1,), dtypes=("F32",))

    def make() -> Packed:
        scales = layer.read("weight_scale")
        if powers:
            return Packed(layer.read(part), scales.view(torch.float8_e8m0fnu), "e2m1", group)
        whole = layer.read(overall).reshape(1, 1).expand(outputs, 1).contiguous()
        return Packed(layer.read(part), scales, "e2m1", group, super_scales=whole, divides=divides)

    scales = _meta(torch.float8_e8m0fnu if powers else torch.float8_e4m3fn, outputs, groups)
    whole = None if powers else _meta(torch.float32, outputs, 1)
    outline = Packed(_meta(torch.uint8, outputs, pairs), scales, "e2m1", group, super_scales=whole, divides=divides and not powers)
    return _codes(layer, (outputs, channels), "mxfp4" if powers else "nvfp4", make, outline)


def _expert_blocks(layer: Layer, stem: str) -> Codes:
    """MXFP4 of all experts in one tensor: bytes ``[E, N, groups, 16]`` and scales ``[E, N, groups]``, powers of two."""
    part, scale_part = stem + BLOCKS, f"{stem}_scales"
    shape = layer.parts[part][0]
    if len(shape) != 4 or shape[3] != 16:
        raise layer.error(part, "shape [experts, rows, groups, 16]")
    layer.need(scale_part, shape[:3], dtypes=("U8",))
    rows, groups = shape[0] * shape[1], shape[2]

    def make() -> Packed:
        codes = layer.read(part).reshape(rows, 16 * groups)
        return Packed(codes, layer.read(scale_part).reshape(rows, groups).view(torch.float8_e8m0fnu), "e2m1", 32)

    outline = Packed(_meta(torch.uint8, rows, 16 * groups), _meta(torch.float8_e8m0fnu, rows, groups), "e2m1", 32)
    check_packed(outline, key := layer.stored.key(layer.prefix + stem))

    def checked() -> Packed:
        made = make()
        check_packed(made, key)
        return made

    return Codes((rows, 32 * groups), "mxfp4", checked, lambda: outline)


def _nibbles(packed: Tensor) -> Tensor:
    """The 4-bit numbers of bytes, the lower half first: twice as many columns."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def paired(nibbles: Tensor) -> Tensor:
    """The reverse of :func:`_nibbles`."""
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4


def _gptq(layer: Layer, quantisation: Quantisation) -> Codes:
    """Words along the channels, but transposed; zero points along the outputs, in the first version one too low."""
    words, outputs = layer.need("qweight", dtypes=WORDS)
    _, zero_words = layer.need("qzeros", dtypes=WORDS)
    bits = next((bits for bits in (4, 8) if zero_words == -(-outputs * bits // 32)), 0)
    if not bits:
        raise layer.error("qzeros", f"words of 4 or 8 bits for each of {outputs} outputs")
    channels = words * 32 // bits
    groups, _ = layer.need("scales", dtypes=FLOAT_SCALES)
    layer.need("scales", (groups, outputs))
    layer.need("qzeros", (groups, zero_words))
    if "g_idx" in layer.parts:
        layer.need("g_idx", (channels,), dtypes=("I32", "I64"))
    group = _group(layer, channels, groups, "scales")
    code = f"uint{bits}"

    def make() -> Packed:
        codes = layer.read("qweight").t().contiguous().view(torch.uint8)
        zeros = layer.read("qzeros").contiguous().view(torch.uint8)
        zeros = (_nibbles(zeros) if bits == 4 else zeros)[:, :outputs].t()
        # A zero point of the last code is stored as the first, and wraps around.
        zeros = (zeros.to(torch.int16) + quantisation.zero_offset) % (2**bits) if quantisation.zero_offset else zeros
        scales = layer.read("scales").t().contiguous()
        return Packed(
            codes, scales, code, group, zeros=zeros.to(torch.uint8).contiguous(), group_of=_group_of(layer, "g_idx", channels, groups)
        )

    scale_dtype = _DTYPES[layer.parts["scales"][1]]
    codes, zeros = _meta(torch.uint8, outputs, channels * bits // 8), _meta(torch.uint8, outputs, groups)
    outline = Packed(codes, _meta(scale_dtype, outputs, groups), code, group, zeros=zeros)
    return _codes(layer, (outputs, channels), f"int{bits}", make, outline, "g_idx")


def _awq(layer: Layer, _: Quantisation) -> Codes:
    """Words along the outputs, eight columns in the order :data:`AWQ_ORDER`."""
    channels, words = layer.need("qweight", dtypes=WORDS)
    outputs = 8 * words
    groups, _columns = layer.need("scales", dtypes=FLOAT_SCALES)
    layer.need("scales", (groups, outputs))
    layer.need("qzeros", (groups, words), dtypes=WORDS)
    group = _group(layer, channels, groups, "scales")

    def columns(part: str) -> Tensor:
        """``[outputs, rows]`` of words ``[rows, outputs / 8]``."""
        nibbles = _nibbles(layer.read(part).contiguous().view(torch.uint8)).unflatten(1, (-1, 8))
        return nibbles[..., list(AWQ_ORDER)].flatten(1).t().contiguous()

    def make() -> Packed:
        return Packed(paired(columns("qweight")), layer.read("scales").t().contiguous(), "uint4", group, zeros=columns("qzeros"))

    codes, zeros = _meta(torch.uint8, outputs, channels // 2), _meta(torch.uint8, outputs, groups)
    scales = _meta(_DTYPES[layer.parts["scales"][1]], outputs, groups)
    return _codes(layer, (outputs, channels), "int4", make, Packed(codes, scales, "uint4", group, zeros=zeros))

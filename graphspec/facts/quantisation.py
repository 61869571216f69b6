"""How a checkpoint's weights are quantised: ``quantization_config`` of ``config.json``, or ``hf_quant_config.json`` next to it.

The formats are told apart by the tensors that a layer has (:mod:`graphspec.weights.quantised`). What is read here is what tensors don't
say: the method, and whether a stored zero point is one too low. Everything that would change the computation and
isn't supported is refused here, before a tensor is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..config.checks import brief
from ..errors import CheckpointError
from .files import MAX_CONFIG, find_file, plain, read_json
from .keys import is_integer

METHODS = ("fp8", "compressed-tensors", "gptq", "awq", "modelopt", "mxfp4")
LOADS = "FP8 (e4m3), int4 and int8 groups (compressed-tensors, GPTQ, AWQ), MXFP4 and NVFP4 load, and GGUF files"
FORMATS = (
    "float-quantized", "naive-quantized", "int-quantized", "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized",
    "mixed-precision", "dense",
)  # fmt: skip
"""Formats of compressed-tensors."""
ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4")
"""Algorithms of ModelOpt."""
WORDS = ("qweight", "weight_packed")
"""What a layer has in place of ``weight`` where several codes are one number of a file."""
SIDECAR = "hf_quant_config.json"


@dataclass(frozen=True, slots=True)
class Scheme:
    """The form of a layer's codes, as far as a configuration tells; tensors decide where there are any.

    Attributes:
        code: of :data:`graphspec.kernels.linear.packed.CODES`.
        group: channels that share a scale; 0: all of a row.
        scale: dtype of the scales.
        zeros: there are zero points.
        whole: one more scale for the tensor.
        targets: which layers, as compressed-tensors spells it.
    """

    code: str
    group: int
    scale: str
    zeros: bool = False
    whole: bool = False
    targets: tuple[str, ...] = ("Linear",)


@dataclass(frozen=True, slots=True)
class Quantisation:
    """What tensors don't say.

    Attributes:
        method: one of :data:`METHODS`.
        zero_offset: what is added to a stored zero point: 1 in GPTQ's first version.
        block: rows and channels of a block that has one scale, where scales belong to blocks.
        schemes: of layers, the first whose targets match.
        ignored: names and patterns of layers in full precision.
    """

    method: str
    zero_offset: int = 0
    block: tuple[int, int] | None = None
    schemes: tuple[Scheme, ...] = ()
    ignored: tuple[str, ...] = ()

    def scheme(self, layer: str) -> Scheme | None:
        """The codes of a linear layer by its name in the checkpoint; None: it has full precision."""
        if any(_names(pattern, layer) for pattern in self.ignored):
            return None
        return next((one for one in self.schemes if any(target == "Linear" or _names(target, layer) for target in one.targets)), None)


def _names(pattern: str, layer: str) -> bool:
    """Whether an entry of a list of layers means this one: ``re:`` and wildcards as they say, else some consecutive parts of its name."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], layer) is not None
        except re.error:
            return False
    return fnmatchcase(layer, pattern) if "*" in pattern else f".{pattern}." in f".{layer}."


def stored_quantisation(folder: Path) -> tuple[Any, str] | None:
    """What a checkpoint folder says of its quantisation, as in ``config.json``, and file and key; None: its weights are numbers."""
    config = folder / "config.json"
    values = read_json(config, MAX_CONFIG).get("quantization_config") if find_file(config) else None
    if values not in (None, {}):
        return values, f"{config}: quantization_config"
    sidecar = folder / SIDECAR
    if not find_file(sidecar):
        return None
    values = read_json(sidecar, MAX_CONFIG).get("quantization")
    if isinstance(values, Mapping):
        values = {"quant_method": "modelopt", **values}
    return values, f"{sidecar}: quantization"


def read_quantisation(folder: Path) -> Quantisation | None:
    """The quantisation of a checkpoint folder; None: its weights are numbers.

    Raises:
        CheckpointError: a method, a format or a cache scheme that isn't supported, or a file that can't be read. Names the key.
    """
    found = stored_quantisation(folder)
    return None if found is None else parse_quantisation(*found)


def parse_quantisation(values: Any, key: str) -> Quantisation:
    """The quantisation that a configuration describes.

    Args:
        values: of ``quantization_config``.
        key: file and key, for messages.

    Raises:
        CheckpointError: as :func:`read_quantisation`.
    """
    if not isinstance(values, Mapping):
        raise CheckpointError(key, "an object", brief(values))
    method = values.get("quant_method") or ("modelopt" if "quant_algo" in values else None)
    if method not in METHODS:
        raise CheckpointError(f"{key}.quant_method", "one of " + ", ".join(METHODS), brief(method), LOADS)
    for name in ("kv_cache_scheme", "kv_cache_quant_algo"):
        if values.get(name) not in (None, {}, ""):
            raise CheckpointError(f"{key}.{name}", "null: keys and values are kept in the dtype of the model", brief(values[name]))
    checks = {
        "fp8": _fp8, "compressed-tensors": _compressed_tensors, "gptq": _gptq, "awq": _awq, "modelopt": _modelopt, "mxfp4": _mxfp4,
    }  # fmt: skip
    ignored = [name for key in ("ignore", "modules_to_not_convert", "exclude_modules") for name in _texts(values.get(key))]
    # The language-model head is quantised where a list of layers says so.
    ignored += ["lm_head"] if method in ("fp8", "gptq", "awq") else []
    return replace(checks[str(method)](values, key), ignored=tuple(ignored))


def _texts(values: object) -> Iterable[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


def _one_of(values: Mapping[str, Any], key: str, name: str, allowed: tuple[object, ...], default: object) -> Any:
    found = values.get(name, default)
    if found not in allowed or isinstance(found, bool):
        raise CheckpointError(f"{key}.{name}", "one of " + ", ".join(map(str, allowed)), brief(found), LOADS)
    return found


def _block(values: Mapping[str, Any], key: str, name: str) -> tuple[int, int] | None:
    found = values.get(name)
    if found is None:
        return None
    sizes = isinstance(found, list | tuple) and len(found) == 2 and all(is_integer(size) and size > 0 for size in found)
    if not sizes:
        raise CheckpointError(f"{key}.{name}", "null, or rows and channels of a block", brief(found))
    return int(found[0]), int(found[1])


def _fp8(values: Mapping[str, Any], key: str) -> Quantisation:
    _one_of(values, key, "fmt", ("e4m3", None), None)
    block = _block(values, key, "weight_block_size")
    return Quantisation("fp8", block=block, schemes=(Scheme("e4m3", block[1] if block else 0, "float32"),))


def _compressed_tensors(values: Mapping[str, Any], key: str) -> Quantisation:
    _one_of(values, key, "format", FORMATS, "dense")
    sparsity = values.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise CheckpointError(f"{key}.sparsity_config.format", "dense", brief(sparsity["format"]), LOADS)
    if values.get("transform_config") not in (None, {}):
        raise CheckpointError(f"{key}.transform_config", "none: weights are not rotated", brief(values["transform_config"]))
    groups = values.get("config_groups", {})
    weights = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
    blocks = [_block(one, f"{key}.config_groups.weights", "block_structure") for one in weights if isinstance(one, Mapping)]
    schemes = [_scheme(group) for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
    found = tuple(scheme for scheme in schemes if scheme is not None)
    return Quantisation("compressed-tensors", block=next((block for block in blocks if block is not None), None), schemes=found)


def _scheme(group: Mapping[str, Any]) -> Scheme | None:
    """The scheme of one entry of compressed-tensors' ``config_groups``; None: its weights are not quantised."""
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        return None
    targets = tuple(_texts(group.get("targets"))) or ("Linear",)
    kind: tuple[Any, Any] = (weights.get("num_bits"), weights.get("type", "int"))
    size, block = weights.get("group_size"), weights.get("block_structure")
    size = block[1] if isinstance(block, list) and len(block) == 2 else size
    size = size if is_integer(size) and size > 0 else 0
    if kind == (4, "float"):
        small = size == 32
        return Scheme("e2m1", size or 16, "uint8" if small else "float8_e4m3fn", whole=not small, targets=targets)
    zeros = weights.get("symmetric", True) is False
    codes: dict[tuple[Any, Any], str] = {(8, "float"): "e4m3", (4, "int"): "uint4" if zeros else "int4", (8, "int"): "int8"}
    code = codes.get(kind)
    return None if code is None else Scheme(code, size, "bfloat16", zeros, targets=targets)


def _gptq(values: Mapping[str, Any], key: str) -> Quantisation:
    bits = _one_of(values, key, "bits", (4, 8), None)
    version = _layout(values, key, "checkpoint_format", ("gptq", "gptq_v2"))
    dynamic = values.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise CheckpointError(f"{key}.dynamic", "null, or an object of patterns", brief(dynamic))
    for pattern, changes in dynamic.items():
        # Which layers a pattern means, and that they are left in full precision, is seen in their tensors.
        if isinstance(changes, Mapping) and "bits" in changes:
            _one_of(changes, f"{key}.dynamic.{plain(pattern)}", "bits", (4, 8), None)
    return Quantisation("gptq", int(version == "gptq"), schemes=(Scheme(f"uint{bits}", _size(values), "float16", True),))


def _awq(values: Mapping[str, Any], key: str) -> Quantisation:
    _layout(values, key, "version", ("gemm",))
    _one_of(values, key, "bits", (4,), None)
    return Quantisation("awq", schemes=(Scheme("uint4", _size(values), "float16", True),))


def _size(values: Mapping[str, Any]) -> int:
    """``group_size``; 0: there is none."""
    size = values.get("group_size")
    return size if is_integer(size) and size > 0 else 0


def _layout(values: Mapping[str, Any], key: str, older: str, allowed: tuple[str, ...]) -> str:
    """The layout of the words, which newer files have under ``format``; the older name decides where both are there. Default: the first."""
    name = older if values.get(older) is not None or values.get("format") is None else "format"
    found = values.get(name) if values.get(name) is not None else allowed[0]
    if not isinstance(found, str) or found.lower() not in allowed:
        raise CheckpointError(f"{key}.{name}", "one of " + ", ".join(allowed), brief(found), LOADS)
    return found.lower()


def _modelopt(values: Mapping[str, Any], key: str) -> Quantisation:
    found = _one_of(values, key, "quant_algo", ALGORITHMS, None)
    scheme = Scheme("e2m1", 16, "float8_e4m3fn", whole=True) if "NVFP4" in found else Scheme("e4m3", 0, "float32")
    return Quantisation("modelopt", schemes=(scheme,))


def _mxfp4(values: Mapping[str, Any], key: str) -> Quantisation:
    """gpt-oss: the experts alone."""
    del values, key
    return Quantisation("mxfp4", schemes=(Scheme("e2m1", 32, "float8_e8m0fnu", targets=("experts",)),))

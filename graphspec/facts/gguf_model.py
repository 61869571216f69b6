"""A GGUF file as a checkpoint folder: the configuration and the tokenizer that a Hugging Face checkpoint of its model would have.

The folder is made once, in the cache, with a link to the file. Everything else reads it like any other checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
import tempfile
from pathlib import Path
from typing import Any

from ..config.checks import LONG, brief
from ..config.paths import reason
from ..errors import CheckpointError, ResourceError
from ..host.native_build import ELSEWHERE, cache_folder
from .files import find_file
from .gguf import ARCHITECTURE, GgufHeader, parts_of, read_headers
from .gguf_families import (
    ARCHITECTURES,
    EXPERTS,
    KEY_HEADS,
    MLP_WIDTH,
    NAMES,
    SLIDING_WINDOW,
    Architecture,
    integer,
    number,
    prediction_heads,
)
from .gguf_tokenizer import chat_templates, ends_of, read_gguf_tokenizer, special_ids

WEIGHTS = "model.gguf"
"""Name of the first file in the folder; the others of a split model are next to it."""
LAYOUT = 5
"""Version of the folder; it counts up when something else is written into it."""


NEUTRAL: dict[str, tuple[float, ...]] = {
    "attention.value_length": (), "attention.scale": (0,), "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,),
    "attention.causal": (1,), "attn_logit_softcapping": (0,), "final_logit_softcapping": (0,), "logit_scale": (0, 1),
    "embedding_scale": (0, 1), "residual_scale": (0, 1), "use_parallel_residual": (0,), "expert_count": (0,),
    "rope.scaling.attn_factor": (0, 1), "rope.scaling.yarn_attn_factor": (1,), "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
}  # fmt: skip
"""Keys that would change the computation, and the values with which they don't. A width of values is neutral if it is that of keys."""
_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.((?:nextn\.)?\w+)(?:\.(\w+))?")
_FREQUENCIES = "rope_freqs.weight"
"""Divisors of the frequencies of a rotation."""
_STANDING = 1e20
"""A divisor above this makes a pair of channels stand still."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The only scaling of Llama 3 that was published; ``factor`` follows from the divisors."""


def architecture_of(header: GgufHeader) -> Architecture:
    """The row of a model.

    Raises:
        CheckpointError: an architecture that doesn't load.
    """
    name = header.metadata.get(ARCHITECTURE)
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise header.error(ARCHITECTURE, "one of " + ", ".join(ARCHITECTURES), "others load from safetensors")
    return ARCHITECTURES[name]


def hf_name(header: GgufHeader, name: str) -> str | None:
    """A tensor's name in a Hugging Face checkpoint, with ``#`` for the number of an expert where it holds all of them; None: it is none of
    the weights.

    Raises:
        CheckpointError: an unknown tensor.
    """
    if name == _FREQUENCIES:
        return None
    row = architecture_of(header)
    stem, _, leaf = name.rpartition(".")
    if stem in NAMES and leaf in ("weight", "bias"):
        return f"{NAMES[stem]}.{leaf}"
    match = _LAYER.fullmatch(name)
    if match is not None:
        layer, part, last = match.groups()
        if row.skips_heads and int(layer) >= integer(header, f"{header.metadata[ARCHITECTURE]}.block_count") - prediction_heads(header):
            return None
        if (whole := row.names.get(f"{part}.{last or ''}")) is not None:
            return f"model.layers.{layer}.{whole}"
        if (found := row.names.get(part)) is not None and leaf in ("weight", "bias"):
            return f"model.layers.{layer}.{found}.{leaf}"
    raise CheckpointError(f"{header.file}: {brief(name, LONG)}", f"a tensor of {row.name}", "another one")


def norm_offset(header: GgufHeader, name: str) -> bool:
    """The tensor is the weight of a norm that a Hugging Face checkpoint has minus 1."""
    return architecture_of(header).offset and name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")


def row_order(header: GgufHeader, name: str) -> int | None:
    """The number of heads whose rows are interleaved in this tensor; None: they lie as in a Hugging Face checkpoint."""
    if not architecture_of(header).interleaved:
        return None
    arch = header.metadata[ARCHITECTURE]
    heads = integer(header, f"{arch}.attention.head_count")
    if ".attn_q." in name:
        return heads
    return integer(header, f"{arch}.attention.head_count_kv", heads) if ".attn_k." in name else None


def config_of(headers: list[GgufHeader]) -> dict[str, Any]:
    """The ``config.json`` of a model.

    Raises:
        CheckpointError: an architecture that doesn't load, or a key that is missing or means something that isn't supported.
    """
    first = headers[0]
    row, arch = architecture_of(first), first.metadata[ARCHITECTURE]
    heads, width = integer(first, f"{arch}.attention.head_count"), integer(first, f"{arch}.embedding_length")
    head_dim = integer(first, f"{arch}.attention.key_length", max(width // heads, 1))
    names = {name for header in headers for name in header.tensors}
    merged = GgufHeader(first.file, first.metadata, {name: tensor for header in headers for name, tensor in header.tensors.items()})
    if "token_embd.weight" not in names:
        raise CheckpointError(f"{first.file}: token_embd.weight", "the embedding", "no such tensor")
    width_of_mlp, mixtures = f"{arch}.{MLP_WIDTH}", EXPERTS in row.reads
    layers = integer(first, f"{arch}.block_count") - prediction_heads(first)
    rope = _rope(headers, arch, head_dim)
    by_layer: dict[str, Any] = {} if KEY_HEADS in row.reads else {"num_key_value_heads": integer(first, f"{arch}.{KEY_HEADS}", heads)}
    if MLP_WIDTH not in row.reads:
        by_layer["intermediate_size"] = None if mixtures and width_of_mlp not in first.metadata else integer(first, width_of_mlp)
    config: dict[str, Any] = {
        "architectures": [row.name],
        "vocab_size": merged.tensors["token_embd.weight"].shape[0],
        "hidden_size": width,
        **by_layer,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "rms_norm_eps": number(first, f"{arch}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": integer(first, f"{arch}.context_length"),
        "tie_word_embeddings": "output.weight" not in names,
        "hidden_act": row.activation,
        "rope_parameters": rope if row.ropes is None else row.ropes(first, rope),
        "dtype": "bfloat16",
        **special_ids(first),
        **row.config(merged),
    }
    if (rotated := integer(first, f"{arch}.rope.dimension_count", head_dim)) != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    _check_neutral(first, arch, head_dim, row)
    if ends := ends_of(first):
        config["eos_token_id"] = ends
    window = first.metadata.get(f"{arch}.attention.sliding_window")
    if window and SLIDING_WINDOW not in row.reads:
        if row.windowed is None:
            raise first.error(f"{arch}.attention.sliding_window", f"no sliding window in {row.name}")
        config |= {"architectures": [row.windowed], "sliding_window": window}
    return config


def _check_neutral(header: GgufHeader, arch: str, head_dim: int, row: Architecture) -> None:
    for name, values in NEUTRAL.items():
        if name in row.reads:
            continue
        key, allowed = f"{arch}.{name}", values or (head_dim,)
        if key in header.metadata and header.metadata[key] not in allowed:
            hint = "mixtures of experts load from safetensors" if name == "expert_count" else ""
            raise header.error(key, " or ".join(f"{value:g}" for value in allowed), hint)


def _rope(headers: list[GgufHeader], arch: str, head_dim: int) -> dict[str, Any]:
    header = headers[0]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": number(header, f"{arch}.rope.freq_base", 10000.0)}
    factor = f"{arch}.rope.scaling.factor"
    if factor not in header.metadata and f"{arch}.rope.scale_linear" in header.metadata:
        factor = f"{arch}.rope.scale_linear"
    kind = header.metadata.get(f"{arch}.rope.scaling.type", "linear" if header.metadata.get(factor, 0) else "none")
    if kind not in ("none", "linear", "yarn"):
        raise header.error(f"{arch}.rope.scaling.type", "one of none, linear, yarn")
    if kind != "none":
        rope |= {"rope_type": kind, "factor": number(header, factor)}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = integer(header, f"{arch}.rope.scaling.original_context_length")
        for name in ("beta_fast", "beta_slow"):
            if (key := f"{arch}.rope.scaling.yarn_{name}") in header.metadata:
                rope[name] = number(header, key)
        if not architecture_of(header).truncates:
            rope["truncate"] = False
    for holder in headers:
        if _FREQUENCIES in holder.tensors and architecture_of(header).stands:
            rope |= {"rope_type": "proportional", "partial_rotary_factor": _turning_share(holder, head_dim)}
        elif _FREQUENCIES in holder.tensors:
            if kind != "none":
                raise header.error(f"{arch}.rope.scaling.type", f"none next to {_FREQUENCIES}")
            rope |= {"rope_type": "llama3", **_LLAMA3, "factor": _llama3_factor(holder, rope["rope_theta"], head_dim)}
    return rope


def _divisors(header: GgufHeader, head_dim: int) -> tuple[float, ...]:
    """Those of the frequencies, which this file has."""
    file, tensor = header.file, header.tensors[_FREQUENCIES]
    if tensor.type != "F32" or tensor.shape != (head_dim // 2,):
        raise CheckpointError(f"{file}: {_FREQUENCIES}", f"F32 of shape {[head_dim // 2]}", f"{tensor.type} of shape {list(tensor.shape)}")
    with file.open("rb") as stream:
        stream.seek(tensor.begin)
        return struct.unpack(f"<{tensor.nbytes // 4}f", stream.read(tensor.nbytes))


def _turning_share(header: GgufHeader, head_dim: int) -> float:
    """The share of a head's pairs that turn, the first ones."""
    found = _divisors(header, head_dim)
    turning = sum(divisor == 1 for divisor in found)
    if not turning or any(divisor != 1 for divisor in found[:turning]) or not all(divisor > _STANDING for divisor in found[turning:]):
        raise CheckpointError(f"{header.file}: {_FREQUENCIES}", f"ones, then numbers above {_STANDING:g}", "others")
    return turning / len(found)


def _llama3_factor(header: GgufHeader, theta: float, head_dim: int) -> float:
    """The factor of Llama 3's scaling, whose divisors this file has."""
    file, found = header.file, _divisors(header, head_dim)
    factor, count = max(found), len(found)
    if not factor >= 1 or not theta > 1:
        raise CheckpointError(f"{file}: {_FREQUENCIES}", "divisors of at least 1, and a base above 1", f"{factor:g}, {theta:g}")
    original, low, high = (_LLAMA3[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    for place, divisor in enumerate(found):
        length = 2 * math.pi * theta ** (place / count)
        smooth = (original / length - low) / (high - low)
        wanted = 1.0 if length < original / high else factor if length > original / low else 1 / ((1 - smooth) / factor + smooth)
        if not abs(divisor / wanted - 1) <= 1e-3:  # nor a NaN
            raise CheckpointError(f"{file}: {_FREQUENCIES}", "the divisors of Llama 3's scaling", f"{divisor:g} at {place}, not {wanted:g}")
    return round(factor, 4)


def weights_file(folder: Path, place: int) -> Path:
    """Where the folder that stands for a model has its file number ``place``."""
    return folder / (WEIGHTS if place == 0 else f"model-{place}.gguf")


def weights_files(folder: Path) -> list[Path]:
    """The GGUF files of such a folder, in order; empty: it is another kind of folder."""
    found: list[Path] = []
    while find_file(file := weights_file(folder, len(found))):
        found.append(file)
    return found


def gguf_folder(file: Path) -> Path:
    """The folder that stands for a GGUF file, made in the cache where it isn't there yet.

    Args:
        file: the only one, or the first of a split model.

    Raises:
        CheckpointError: the file can't be read, or its model or tokenizer isn't supported.
        ResourceError: there is no cache folder, or it can't be written.
    """
    parts = parts_of(file)
    headers, parts = read_headers(parts), [part.resolve() for part in parts]
    stamp = [LAYOUT, *((str(part), part.stat().st_size, part.stat().st_mtime_ns) for part in parts)]
    folder = cache_folder() / "gguf" / f"{file.stem[:80]}-{hashlib.sha256(json.dumps(stamp).encode()).hexdigest()[:16]}"
    if (folder / "config.json").is_file():
        return folder
    config, tokenizer = config_of(headers), read_gguf_tokenizer(headers[0])
    if tokenizer is not None and (templates := chat_templates(headers[0])):
        tokenizer[1]["chat_template"] = templates
    try:
        _write(folder, parts, config, tokenizer)
    except OSError as error:
        raise ResourceError("cache folder", f"a place where {folder} can be written", reason(error), ELSEWHERE) from error
    return folder


def _write(folder: Path, parts: list[Path], config: dict[str, Any], tokenizer: tuple[dict[str, Any], dict[str, Any]] | None) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Written whole, then moved to its place: another process may look for it at the same time.
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        made_folder = Path(made) / "folder"
        made_folder.mkdir()
        for place, part in enumerate(parts):
            weights_file(made_folder, place).symlink_to(part)
        for name, values in zip(("tokenizer.json", "tokenizer_config.json"), tokenizer or (), strict=False):
            (made_folder / name).write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
        (made_folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        try:
            made_folder.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise

"""GGUF files of tiny checkpoints, written by the ``gguf`` package."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import Tensor

LETTERS = [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ!.,", "Ġ", "Ċ"]
OFFSET = ("gemma", "gemma2", "gemma3")
"""Architectures whose files have norm weights as they are applied; transformers has them minus 1."""
INTERLEAVED = ("llama", "smollm3", "granite")
"""Those whose queries and keys lie as Llama's first release had them."""
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")


def gguf_name(name: str, arch: str, layers: int) -> str:
    """A tensor's name in a file, by the package's own table."""
    key = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[arch]
    name = (
        name.replace("mlp.gate.moe_statics", "mlp.moe_statics")
        .replace(".e_score_correction_bias", ".e_score_correction.bias")
        .replace(".sinks", ".sinks.weight")
    )
    for part, stored in (("router.scale", "ffn_gate_inp.scale"), ("router.per_expert_scale", "ffn_down_exps.scale")):
        if name.endswith(part):
            return f"blk.{name.split('.')[2]}.{stored}"
    if name.endswith(("layer_scalar", ".experts.gate_up_proj", ".experts.down_proj")):
        name += ".weight"
    found = gguf.get_tensor_name_map(key, layers).get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with one tensor for all experts, as files have them."""
    found: dict[str, Any] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: [int(p) if p.isdigit() else p for p in item[0].split(".")]):
        if match := _EXPERT.fullmatch(name):
            found.setdefault(f"{match[1]}.{match[3]}", []).append(tensor)
        else:
            found[name] = tensor
    return {name: torch.stack(value) if isinstance(value, list) else value for name, value in found.items()}


def blocks(shape: tuple[int, ...], kind: Type, generator: np.random.Generator) -> np.ndarray[Any, Any]:
    """Random blocks of a type; the float16 factors in them are small numbers."""
    channels, size = gguf.GGML_QUANT_SIZES[kind]
    count, rows = shape[-1] // channels, math.prod(shape[:-1])
    raw = generator.integers(0, 256, (rows, count, size), dtype=np.uint8)
    if kind == Type.MXFP4:
        raw[..., 0] = generator.integers(118, 122, (rows, count))
    halves = {Type.Q6_K: (208,), Type.Q8_0: (0,), Type.Q4_0: (0,), Type.Q5_0: (0,), Type.MXFP4: ()}.get(kind, (0, 2))
    for place in halves:
        factor = (generator.random((rows, count)) * (1e-4 if "K" in kind.name else 1e-2)).astype(np.float16)
        raw[..., place : place + 2] = factor[..., None].view(np.uint8)
    return raw.reshape(*shape[:-1], count * size)


def _gates_apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts of gpt-oss as llama.cpp has them: gates and up projections, which take turns in a checkpoint, in tensors of their own."""
    found = {}
    for name, tensor in tensors.items():
        stem, _, part = name.rpartition(".")
        if not stem.endswith(".experts"):
            found[name] = tensor
            continue
        leaf, rows = ("bias", tensor) if part.endswith("_bias") else ("weight", tensor.transpose(1, 2))
        both = part.startswith("gate_up")
        each = {"gate_proj": rows[:, ::2], "up_proj": rows[:, 1::2]} if both else {"down_proj": rows}
        found |= {f"{stem}.{own}.{leaf}": value.contiguous() for own, value in each.items()}
    return found


def _gates_together(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of :func:`_gates_apart`."""
    found = dict(tensors)
    for name in [name for name in tensors if ".experts." in name]:
        stem, part, leaf = name.rsplit(".", 2)
        rows = found.pop(name)
        if part == "up_proj":
            continue
        if part == "gate_proj":
            rows = torch.stack((rows, tensors[f"{stem}.up_proj.{leaf}"]), 2).flatten(1, 2)
        own = "gate_up_proj" if part == "gate_proj" else part
        found[f"{stem}.{own}{'_bias' if leaf == 'bias' else ''}"] = (rows if leaf == "bias" else rows.transpose(1, 2)).contiguous()
    return found


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """The rotation of layers that see everything."""
    found: dict[str, Any] = config["rope_parameters"]
    return found.get("full_attention", found)


def write_gguf(
    source: Path, file: Path, kinds: dict[str, Type], *, arch: str, default: Type = Type.F32, seed: int = 0, tokenizer: bool = True,
    metadata: dict[str, Any] | None = None, more: dict[str, Tensor] | None = None,
) -> Path:  # fmt: skip
    """Write a checkpoint as GGUF, with new random blocks where a type is given, and the same numbers as a folder.

    Args:
        source: a checkpoint folder with one ``model.safetensors``.
        file: where the GGUF goes.
        kinds: types of tensors by the last part of their GGUF name (``attn_q``); others are ``default``.
        arch: as GGUF calls it.
        default: of matrices that ``kinds`` doesn't name; vectors are float32.
        seed: of the blocks.
        tokenizer: write one of 61 tokens.
        metadata: keys to add, None removes one.
        more: float32 tensors that the checkpoint has not.

    Returns:
        A folder with the numbers in float32, for transformers.
    """
    import json
    import shutil

    config = json.loads((source / "config.json").read_text())
    generator = np.random.default_rng(seed)
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    values: dict[str, Any] = {
        f"{arch}.context_length": config["max_position_embeddings"], f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.block_count": config["num_hidden_layers"], f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": heads, f"{arch}.attention.head_count_kv": groups,
        f"{arch}.rope.freq_base": float(_rope(config)["rope_theta"]),
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    }  # fmt: skip
    if config.get("head_dim"):
        values |= {f"{arch}.attention.key_length": config["head_dim"], f"{arch}.rope.dimension_count": config["head_dim"]}
    if tokenizer:
        tokens = [*LETTERS[: config["vocab_size"] - 4], "ab", "<|end|>", "<s>", "</s>"]
        types = [1] * (len(tokens) - 3) + [3] * 3
        last = len(tokens) - 1
        values |= {
            "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, "tokenizer.ggml.bos_token_id": last - 1,
            "tokenizer.ggml.eos_token_id": last, "tokenizer.ggml.eot_token_id": last - 2,
            "tokenizer.chat_template": "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<|end|>{% endfor %}",
        }  # fmt: skip
    values |= metadata or {}
    writer = gguf.GGUFWriter(file, arch)
    for key, value in values.items():
        if value is None:
            continue
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    numbers: dict[str, Tensor] = {}
    layers = config["num_hidden_layers"] + (config.get("num_nextn_predict_layers") or 0)
    tensors = load_file(source / "model.safetensors")
    tensors = _gates_apart(tensors) if arch == "gpt-oss" else stacked(tensors)
    for name, tensor in tensors.items():
        # As converters do, without dimensions of 1; a single number has one.
        stored, shape = gguf_name(name, arch, layers), tensor.shape
        tensor = tensor.squeeze() if tensor.numel() > 1 else tensor.flatten()
        part = stored.split(".")[-2]
        number = tensor.dim() == 1 or part == "ffn_gate_inp" or stored.endswith(".bias")
        kind = Type.F32 if number else kinds.get(part, default if tensor.dim() == 2 else Type.F16)
        if kind in (Type.F32, Type.F16):
            data = tensor.float().numpy().astype(np.float32 if kind == Type.F32 else np.float16)
            plain = torch.from_numpy(data.astype(np.float32))
        else:
            data = blocks(tuple(tensor.shape), kind, generator)
            plain = torch.from_numpy(gguf.quants.dequantize(data, kind))
        for projection, count in ((".attn_q.", heads), (".attn_k.", groups)):
            if arch in INTERLEAVED and projection in stored:
                # The file has the halves of a rotation next to each other; numbers are those of the file, put apart.
                plain = plain.unflatten(0, (count, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()
        if arch in OFFSET and stored.endswith("norm.weight"):
            plain = plain - 1
        if ".experts." in name and arch not in ("gpt-oss", "gemma4"):
            before, after = name.split(".experts.")
            numbers |= {f"{before}.experts.{expert}.{after}": each.clone() for expert, each in enumerate(plain)}
        else:
            numbers[name] = plain.view(shape)
        writer.add_tensor(stored, data, raw_dtype=kind)
    for name, tensor in (more or {}).items():
        writer.add_tensor(name, tensor.numpy())
    if arch == "gpt-oss":
        numbers = _gates_together(numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    folder = file.with_suffix("")
    shutil.copytree(source, folder)
    save_file(numbers, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return folder


Stored = dict[str, tuple[np.ndarray[Any, Any], Type]]
"""Tensors of a file as they lie there."""


def copy_gguf(
    source: Path, file: Path, change: Callable[[Stored], Stored] = lambda tensors: tensors,
    metadata: dict[str, tuple[Any, ...]] | None = None, *, bare: bool = False,
) -> Path:  # fmt: skip
    """Write a file again, with other tensors and metadata.

    Args:
        source: to read.
        file: to write.
        change: gives the tensors of the copy.
        metadata: keys to add or replace: value, kind, and kind of the entries of an array.
        bare: of the source's metadata, copy nothing but the architecture.
    """
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    values = {
        field.name: (field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
        for field in (() if bare else reader.fields.values())
        if not field.name.startswith(("GGUF.", "general.architecture"))
    }
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in (values | (metadata or {})).items():
        if key == "general.architecture":
            writer.kv_data[0][key] = gguf.GGUFValue(*value)
        else:
            writer.add_key_value(key, *value)
    for name, (data, kind) in change({each.name: (np.array(each.data), each.tensor_type) for each in reader.tensors}).items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file

"""GGUF files of tiny checkpoints, written by the ``gguf`` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import Tensor

LETTERS = [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ!.,", "Ġ", "Ċ"]
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    stem, _, leaf = name.rpartition(".")
    if stem.startswith("model.layers."):
        layer, part = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{NAMES[part]}.{leaf}"
    return f"{NAMES[stem]}.{leaf}"


def blocks(shape: tuple[int, ...], kind: Type, generator: np.random.Generator) -> np.ndarray[Any, Any]:
    """Random blocks of a type; the float16 factors in them are small numbers."""
    channels, size = gguf.GGML_QUANT_SIZES[kind]
    count = shape[-1] // channels
    raw = generator.integers(0, 256, (shape[0], count, size), dtype=np.uint8)
    halves = {Type.Q6_K: (208,), Type.Q8_0: (0,), Type.Q4_0: (0,), Type.Q5_0: (0,)}.get(kind, (0, 2))
    for place in halves:
        factor = (generator.random((shape[0], count)) * (1e-4 if "K" in kind.name else 1e-2)).astype(np.float16)
        raw[..., place : place + 2] = factor[..., None].view(np.uint8)
    return raw.reshape(shape[0], count * size)


def write_gguf(
    source: Path, file: Path, kinds: dict[str, Type], *, arch: str, default: Type = Type.F32, seed: int = 0, tokenizer: bool = True,
    metadata: dict[str, Any] | None = None,
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
        f"{arch}.rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
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
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    numbers: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stored = gguf_name(name)
        kind = Type.F32 if tensor.dim() == 1 else kinds.get(stored.split(".")[-2], default)
        if kind in (Type.F32, Type.F16):
            data = tensor.float().numpy().astype(np.float32 if kind == Type.F32 else np.float16)
            plain = torch.from_numpy(data.astype(np.float32))
        else:
            data = blocks(tuple(tensor.shape), kind, generator)
            plain = torch.from_numpy(gguf.quants.dequantize(data, kind))
        for part, count in ((".attn_q.", heads), (".attn_k.", groups)):
            if arch == "llama" and part in stored:
                # The file has the halves of a rotation next to each other; numbers are those of the file, put apart.
                plain = plain.unflatten(0, (count, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()
        numbers[name] = plain
        writer.add_tensor(stored, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    folder = file.with_suffix("")
    shutil.copytree(source, folder)
    save_file(numbers, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return folder

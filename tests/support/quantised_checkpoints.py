"""Checkpoints in the published layouts of quantised weights, and the same weights as numbers.

Codes are drawn, and every layout stores them as its own format says. The numbers come from the definition of the format, in float64 or in
the order of operations that its own implementation has, and never from :mod:`graphspec`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Made = tuple[dict[str, Tensor], Tensor]
"""Tensors of a layer by what stands after its name, and its numbers in float32."""
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def words(values: Tensor, bits: int) -> Tensor:
    """int32 ``[rows, columns * bits / 32]`` of unsigned numbers, the first in the lowest bits."""
    per = 32 // bits
    padded = torch.nn.functional.pad(values.to(torch.int64), (0, -values.shape[1] % per))
    shifts = torch.arange(per) * bits
    packed = (padded.unflatten(1, (-1, per)) << shifts).sum(-1)
    return (((packed + 2**31) % 2**32) - 2**31).to(torch.int32)


def spread(per_group: Tensor, group: int, channels: int) -> Tensor:
    return per_group.float().repeat_interleave(group, 1)[:, :channels]


def fp8(shape: tuple[int, int], scales: str, generator: torch.Generator) -> Made:
    """``scales``: tensor, channel, or block (of 16 rows and 16 channels)."""
    outputs, channels = shape
    codes = torch.randn(shape, generator=generator).mul(8).to(torch.float8_e4m3fn)
    if scales == "block":
        scale = torch.rand(-(-outputs // 16), -(-channels // 16), generator=generator) / 64
        numbers = codes.float() * scale.repeat_interleave(16, 0)[:outputs].repeat_interleave(16, 1)[:, :channels]
        return {"weight": codes, "weight_scale_inv": scale}, numbers
    scale = torch.rand((1,) if scales == "tensor" else (outputs, 1), generator=generator) / 64
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(1)}, codes.float() * scale


def pack_quantized(
    shape: tuple[int, int], generator: torch.Generator, bits: int = 4, group: int = 16, zeros: bool = False, order: bool = False
) -> Made:
    outputs, channels = shape
    groups = channels // group
    codes = torch.randint(0, 2**bits, shape, generator=generator)
    scale = (torch.rand(outputs, groups, generator=generator) / 64).bfloat16()
    zero = torch.randint(0, 2**bits, (outputs, groups), generator=generator) if zeros else torch.full((outputs, groups), 2 ** (bits - 1))
    group_of = torch.arange(channels) // group
    if order:
        group_of = group_of[torch.randperm(channels, generator=generator)]
    numbers = (codes - zero[:, group_of]).float() * scale.float()[:, group_of]
    made = {"weight_packed": words(codes, bits), "weight_scale": scale, "weight_shape": torch.tensor(shape)}
    if zeros:
        made["weight_zero_point"] = words(zero.t(), bits).t().contiguous()
    if order:
        made["weight_g_idx"] = group_of.to(torch.int32)
    return made, numbers


def gptq(shape: tuple[int, int], generator: torch.Generator, bits: int = 4, group: int = 16, version: int = 1, order: bool = False) -> Made:
    outputs, channels = shape
    groups = channels // group
    codes = torch.randint(0, 2**bits, (channels, outputs), generator=generator)
    zero = torch.randint(0, 2**bits, (groups, outputs), generator=generator)
    scale = (torch.rand(groups, outputs, generator=generator) / 64).half()
    group_of = torch.arange(channels) // group
    if order:
        group_of = group_of[torch.randperm(channels, generator=generator)]
    numbers = ((codes - zero[group_of]).float() * scale.float()[group_of]).t().contiguous()
    stored = (zero - 1) % 2**bits if version == 1 else zero
    made = {
        "qweight": words(codes.t(), bits).t().contiguous(),
        "qzeros": words(stored, bits),
        "scales": scale,
        "g_idx": group_of.to(torch.int32),
    }
    return made, numbers


def awq(shape: tuple[int, int], generator: torch.Generator, group: int = 16) -> Made:
    outputs, channels = shape
    groups = channels // group
    codes = torch.randint(0, 16, (channels, outputs), generator=generator)
    zero = torch.randint(0, 16, (groups, outputs), generator=generator)
    scale = (torch.rand(groups, outputs, generator=generator) / 64).half()
    numbers = ((codes - zero.repeat_interleave(group, 0)).float() * scale.float().repeat_interleave(group, 0)).t().contiguous()
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def packed(values: Tensor) -> Tensor:
        return words(values.unflatten(1, (-1, 8))[..., order].flatten(1), 4)

    return {"qweight": packed(codes), "qzeros": packed(zero), "scales": scale}, numbers


def nvfp4(shape: tuple[int, int], generator: torch.Generator, modelopt: bool = True) -> Made:
    outputs, channels = shape
    codes = torch.randint(0, 16, shape, generator=generator)
    scale = torch.rand(outputs, channels // 16, generator=generator).to(torch.float8_e4m3fn)
    overall = torch.rand(1, generator=generator) / 32 if modelopt else 300 + torch.rand(1, generator=generator)
    both = scale.float() * overall if modelopt else scale.float() / overall
    numbers = E2M1[codes] * spread(both, 16, channels)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    if modelopt:
        return {"weight": packed, "weight_scale": scale, "weight_scale_2": overall[0], "input_scale": torch.ones(())}, numbers
    return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": overall, "input_global_scale": torch.ones(1)}, numbers


def mxfp4(shape: tuple[int, int], generator: torch.Generator) -> Made:
    outputs, channels = shape
    codes = torch.randint(0, 16, shape, generator=generator)
    power = torch.randint(118, 124, (outputs, channels // 32), generator=generator).to(torch.uint8)
    numbers = E2M1[codes] * spread(torch.exp2(power.float() - 127), 32, channels)
    return {"weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), "weight_scale": power}, numbers


def _compressed(format_: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "config_groups": groups,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[tuple[int, int], torch.Generator], Made]]] = {
    "fp8-block": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16], "activation_scheme": "dynamic"},
        lambda s, g: fp8(s, "block", g),
    ),
    "fp8-tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, lambda s, g: fp8(s, "tensor", g)),
    "float-quantized": (_compressed("float-quantized", num_bits=8, type="float", strategy="channel"), lambda s, g: fp8(s, "channel", g)),
    "pack-quantized": (_compressed("pack-quantized", num_bits=4, strategy="group", group_size=16), pack_quantized),
    "pack-quantized-zeros": (_compressed("pack-quantized", num_bits=4, symmetric=False), lambda s, g: pack_quantized(s, g, zeros=True)),
    "pack-quantized-8": (_compressed("pack-quantized", num_bits=8), lambda s, g: pack_quantized(s, g, bits=8)),
    "pack-quantized-order": (_compressed("pack-quantized", num_bits=4, actorder="group"), lambda s, g: pack_quantized(s, g, order=True)),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}, gptq),
    "gptq-order": ({"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True}, lambda s, g: gptq(s, g, order=True)),
    "gptq-8": ({"quant_method": "gptq", "bits": 8, "group_size": 32}, lambda s, g: gptq(s, g, bits=8, group=32)),
    "gptq-v2": ({"quant_method": "gptq", "bits": 4, "group_size": 16, "checkpoint_format": "gptq_v2"}, lambda s, g: gptq(s, g, version=2)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}, awq),
    "nvfp4-modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}, nvfp4),
    "nvfp4-compressed": (_compressed("nvfp4-pack-quantized", num_bits=4, type="float"), lambda s, g: nvfp4(s, g, modelopt=False)),
    "mxfp4": (_compressed("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32), mxfp4),
}
"""``quantization_config`` and the tensors of a layer, by a name for the layout."""


def quantise(source: Path, folder: Path, layout: str, *, seed: int = 0) -> tuple[Path, Path]:
    """Two copies of a checkpoint whose projections have new random weights: one in the layout, one in float32 numbers.

    Args:
        source: a checkpoint with one ``model.safetensors``.
        folder: the copies go below it.
        layout: a key of :data:`LAYOUTS`.
        seed: of the codes.
    """
    config, make = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(seed)
    packed, plain = folder / layout, folder / f"{layout}-plain"
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = numbers[name] = tensor.float() if tensor.is_floating_point() else tensor
            continue
        made, numbers[name] = make((tensor.shape[0], tensor.shape[1]), generator)
        tensors |= {name.removesuffix("weight") + part: value.contiguous() for part, value in made.items()}
    for target, content in ((packed, tensors), (plain, numbers)):
        shutil.copytree(source, target)
        save_file(content, target / "model.safetensors", metadata={"format": "pt"})
        values = json.loads((target / "config.json").read_text()) | {"dtype": "float32"}
        (target / "config.json").write_text(json.dumps(values | ({"quantization_config": config} if target is packed else {})))
    return packed, plain


GPT_OSS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
}


def quantise_gpt_oss(source: Path, folder: Path, *, seed: int = 0) -> tuple[Path, Path]:
    """Two copies of a checkpoint of gpt-oss whose experts have new random weights: one in MXFP4 as published, one in float32 numbers."""
    generator = torch.Generator().manual_seed(seed)
    packed, plain = folder / "mxfp4", folder / "mxfp4-plain"
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors[name] = numbers[name] = tensor
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, channels, outputs = tensor.shape
            made, own = mxfp4((experts * outputs, channels), generator)
            del tensors[name]
            tensors[f"{name}_blocks"] = made["weight_packed"].view(experts, outputs, channels // 32, 16)
            tensors[f"{name}_scales"] = made["weight_scale"].view(experts, outputs, channels // 32)
            numbers[name] = own.view(experts, outputs, channels).transpose(1, 2).contiguous()
    for target, content in ((packed, tensors), (plain, numbers)):
        shutil.copytree(source, target)
        save_file(content, target / "model.safetensors", metadata={"format": "pt"})
        if target is packed:
            values = json.loads((target / "config.json").read_text())
            (target / "config.json").write_text(json.dumps(values | {"quantization_config": GPT_OSS}))
    return packed, plain

"""Calls of the ops of ``graphspec.kernels.linear`` in the shapes of real models, by file; their kernels are compiled ahead of time."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from graphspec.kernels import op_of
from graphspec.kernels.fused.launch import launcher
from graphspec.kernels.groups import Heads
from graphspec.kernels.linear.fused.linear import linear, linear_summed, shape_of
from graphspec.kernels.linear.fused.linear_choice import LinearConfig, LinearShape, fast_config, invariant_config
from graphspec.kernels.linear.fused.linear_kv_write import linear_kv_write
from graphspec.kernels.linear.fused.packed_linear import dequantised, packed_linear, packed_linear_summed
from graphspec.kernels.linear.fused.packed_moe_mlp import packed_moe_mlp
from graphspec.kernels.linear.packed import CODES, Packed, code_bits
from tests.kernels.proof.calls import AotCase, aot_case

AOT: dict[str, tuple[AotCase, ...]] = {}


def _meta(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def _linear_call(rows: int, outputs: int, inputs: int, *parts: str, config: LinearConfig | None = None) -> dict[str, Any]:
    own = torch.float32 if "fp32" in parts else torch.float16 if "fp16" in parts else torch.bfloat16

    def meta(*shape: int, dtype: torch.dtype = own) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    call: dict[str, Any] = {"x": meta(rows, inputs), "weight": meta(outputs, inputs)}
    if "norm" in parts or "summed" in parts:
        call |= {"norm_weight": meta(inputs), "norm_eps": 1e-5}
    if "summed" in parts:
        before = LinearShape(rows, inputs, inputs, "bfloat16", residual=True)
        use = invariant_config(before) if "invariant" in parts else fast_config(before)
        call["squares"] = meta(rows, inputs // (64 if use is None else use.tile_outputs), dtype=torch.float32)
    if "stream" in parts:
        call["residual"] = meta(rows, outputs)
    call |= {"gated": "gated" in parts, "float32": "float32" in parts}
    if "invariant" in parts:
        config = invariant_config(shape_of(call["x"], call["weight"], None, call.get("norm_weight"), None, call["gated"], False))
    return call | {"config": None if config is None else config.encoded()}


SHAPES: tuple[tuple[str, int, int, tuple[str, ...]], ...] = (
    ("qkv", 6144, 4096, ("summed",)),
    ("o", 4096, 4096, ("stream",)),
    ("gate-up", 28672, 4096, ("summed", "gated")),
    ("down", 4096, 14336, ("stream",)),
    ("head", 128256, 4096, ("float32",)),
    ("first-qkv", 6144, 4096, ("norm",)),
    ("eagle3-fc", 4096, 12288, ()),
    ("eagle3-qkv", 6144, 8192, ()),
    ("eagle3-head", 32000, 4096, ("norm", "float32")),
)
"""Name, outputs, inputs and parts of the products of Llama-3.1-8B and its EAGLE-3 head. ``summed``: the previous product gives the squares;
``stream``: this one returns them."""


def _linear(name: str, rows: int, outputs: int, inputs: int, *parts: str) -> AotCase:
    launcher = linear_summed if "stream" in parts else linear
    return AotCase(f"llama-8b-{name}", launcher, lambda: _linear_call(rows, outputs, inputs, *parts))


AOT["linear"] = (
    *(_linear(f"{name}-m{rows}", rows, out, inp, *parts) for name, out, inp, parts in SHAPES for rows in (1, 16, 64)),
    _linear("first-qkv-m8", 8, 6144, 4096, "norm"),
    _linear("eagle3-head-m8", 8, 32000, 4096, "norm", "float32"),
    *(_linear(f"{name}-invariant", 8, out, inp, *parts, "invariant") for name, out, inp, parts in SHAPES),
    _linear("qkv-fp32", 64, 6144, 4096, "norm", "fp32"),
    _linear("gate-up-fp32", 8, 28672, 4096, "norm", "gated", "fp32"),
    _linear("gate-up-fp32-invariant", 8, 28672, 4096, "norm", "gated", "fp32", "invariant"),
    _linear("o-fp32-invariant", 8, 4096, 4096, "stream", "fp32", "invariant"),
)


def _linear_kv_write(name: str, rows: int, inputs: int, *parts: str, dim: int = 128, heads: tuple[int, int] = (32, 8)) -> AotCase:
    """Parts are those of :func:`_linear_call`, ``head-norm``, and the name of the format of codes."""

    def made() -> dict[str, Any]:
        queries, groups = heads
        call = _linear_call(rows, (queries + 2 * groups) * dim, inputs, *parts)
        for key in ("residual", "gated", "float32"):
            call.pop(key, None)
        codes = next((part for part in parts if part in FORMATS), None)
        weight = call["weight"] if codes is None else FORMATS[codes].without_data(*call["weight"].shape)
        x = call["x"].unsqueeze(0)
        if call["config"] is None:
            shape = shape_of(x, weight, None, call.get("norm_weight"), None, False, False, call.get("squares"))
            call["config"] = cast("LinearConfig", fast_config(shape)).encoded()
        optional = {"bias": None, "norm_weight": None, "norm_eps": 0.0, "norm_offset": False}
        places = op_of("rope_kv_write").without_data(
            {"B": 1, "T": rows, "P": 128}, query_BTQD=x, key_BTGD=x, value_BTGD=x, rope_LD=(torch.float32, 4096, dim),
            kv_pool=(x.dtype, 32, 2, 1025, 16, groups, dim), layer=5,
        )  # fmt: skip
        where = {key: places[key] for key in ("rope_LD", "rope_row_BT", "kv_pool", "layer", "table_BP", "slot_BT", "valid_BT")}
        squares = call["squares"].unsqueeze(0) if "squares" in call else None
        if "head-norm" in parts:
            where |= {key: torch.empty(dim, dtype=x.dtype, device="meta") for key in ("query_norm", "key_norm")} | {"head_eps": 1e-6}
        return {**optional, **call, "x": x, "weight": weight, "squares": squares, "heads": Heads(**where)}

    return AotCase(name, linear_kv_write, made)


_MODELS = {
    "deepseek-v3": (256, 8, 7168, 2048),
    "deepseek-v2-lite": (64, 6, 2048, 1408),
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "nemotron-3-nano": (128, 6, 2688, 1856),
    "gpt-oss-120b": (128, 4, 2880, 2880),
    "gemma-4-26b-a4b": (128, 8, 2816, 704),
}
"""Experts, experts per token, hidden size and width. Experts of Nemotron have no gate, Gemma's GeGLU."""


def _gpt_oss_experts(name: str, tokens: int) -> AotCase:
    """With biases and clamped gates; they are numbers of the dtype of the activations, whatever the weights are."""
    experts, topk, hidden, width = _MODELS[name]
    sizes, of = {"T": tokens, "K": topk, "E": experts, "H": hidden, "F": width}, torch.bfloat16
    entering = 2 * width
    return aot_case(
        f"{name}-t{tokens}", "moe_mlp", sizes, x_TH=of, gate_up_EFH=(of, experts, entering, hidden), down_EHF=of,
        gate_up_bias_EF=(of, experts, entering), down_bias_EH=of, alpha=1.702, limit=7.0,
    )  # fmt: skip


def _moe_mlp(name: str, tokens: int) -> AotCase:
    if name.startswith("gpt-oss"):
        return _gpt_oss_experts(name, tokens)
    experts, topk, hidden, width = _MODELS[name]
    sizes, both = (
        {"T": tokens, "K": topk, "E": experts, "H": hidden, "F": width},
        (torch.bfloat16, experts, (1 if "nemotron" in name else 2) * width, hidden),
    )
    return aot_case(
        f"{name}-t{tokens}", "moe_mlp", sizes, x_TH=torch.bfloat16, gate_up_EFH=both, down_EHF=torch.bfloat16,
        gate_up_bias_EF=None, down_bias_EH=None, **({"gelu": True} if "gemma" in name else {}),
    )  # fmt: skip


AOT["moe_mlp"] = tuple(_moe_mlp(name, tokens) for name in _MODELS for tokens in (1, 8, 32, 256, 2048))


def _moe_route(
    name: str, tokens: int, experts: int, topk: int, groups: int, topk_groups: int, sigmoid: bool, normalize: bool, corrected: bool
) -> AotCase:
    return aot_case(
        name, "moe_route", {"T": tokens, "E": experts}, topk=topk, groups=groups, topk_groups=topk_groups,
        group_best=2 if sigmoid else 1, sigmoid=sigmoid, normalize=normalize, scaling=2.5, **({} if corrected else {"bias_E": None}),
    )  # fmt: skip


AOT["moe_route"] = (
    _moe_route("deepseek-v3", 8, 256, 8, 8, 4, True, True, True),
    _moe_route("deepseek-v2", 8, 160, 6, 8, 3, False, False, False),
    _moe_route("deepseek-v2-lite", 1, 64, 6, 1, 1, False, False, False),
    _moe_route("qwen3-30b-a3b", 32, 128, 8, 1, 1, False, True, False),
    _moe_route("kimi-k2", 1, 384, 8, 1, 1, True, True, True),
    _moe_route("ernie-4.5-21b-a3b", 8, 64, 6, 1, 1, False, True, True),
)


class Format(NamedTuple):
    """A published format, as far as a kernel depends on it: code, channels of a scale (0: all) and dtypes of its fields."""

    code: str
    group: int
    scales: torch.dtype
    zeros: torch.dtype | None = None
    minimums: torch.dtype | None = None
    supers: torch.dtype | None = None
    super_channels: int = 0
    divides: bool = False

    def without_data(self, outputs: int, inputs: int) -> Packed:
        """A weight of ``meta`` tensors."""

        def meta(columns: int, dtype: torch.dtype | None) -> Tensor | None:
            return None if dtype is None else torch.empty(outputs, columns, dtype=dtype, device="meta")

        group = self.group or inputs
        groups, supers = inputs // group, inputs // (self.super_channels or inputs)
        codes, scales = meta(inputs * code_bits(self.code) // 8, CODES[self.code]), meta(groups, self.scales)
        assert codes is not None and scales is not None
        return Packed(
            codes, scales, self.code, group, meta(supers, self.supers), meta(groups, self.zeros), meta(groups, self.minimums),
            meta(supers, self.supers if self.minimums is not None else None), divides=self.divides,
        )  # fmt: skip


FORMATS = {
    "int4": Format("int4", 128, torch.bfloat16),
    "int4-zeros": Format("uint4", 128, torch.float16, zeros=torch.uint8),
    "fp8-channel": Format("e4m3", 0, torch.float32),
    "fp8-block": Format("e4m3", 128, torch.float32),
    "mxfp4": Format("e2m1", 32, torch.float8_e8m0fnu),
    "nvfp4": Format("e2m1", 16, torch.float8_e4m3fn, supers=torch.float32, divides=True),
    "q8-0": Format("int8", 32, torch.float16),
    "q4-1": Format("uint4", 32, torch.float16, minimums=torch.float16),
    "q4-k": Format("uint4", 32, torch.uint8, minimums=torch.uint8, supers=torch.float16, super_channels=256),
    "q6-k": Format("int8", 16, torch.int8, supers=torch.float16, super_channels=256),
}
"""As the readers of checkpoints make them."""


def _packed_linear_call(kind: Format, rows: int, outputs: int, inputs: int, gated: bool) -> dict[str, Any]:
    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    made: dict[str, Any] = {"x": meta(rows, inputs), "weight": kind.without_data(outputs, inputs), "gated": gated}
    return made | ({"norm_weight": meta(inputs), "norm_eps": 1e-5} if gated else {"residual": meta(rows, outputs)})


def _packed_linear(name: str, kind: Format) -> tuple[AotCase, ...]:
    down = [
        AotCase(f"{name}-down-m{rows}", packed_linear_summed, partial(_packed_linear_call, kind, rows, 4096, 14336, False))
        for rows in (1, 8, 32)
    ]
    gate_up = AotCase(f"{name}-gate-up-m8", packed_linear, partial(_packed_linear_call, kind, 8, 28672, 4096, True))
    whole = AotCase(
        f"{name}-numbers",
        dequantised,
        lambda: {"weight": kind.without_data(4096, 14336), "like": torch.empty(0, dtype=torch.bfloat16, device="meta")},
    )
    return *down, gate_up, whole


AOT["linear_kv_write"] = (
    *(_linear_kv_write(f"llama-8b-m{rows}", rows, 4096, "summed") for rows in (1, 8, 16, 32, 64)),
    _linear_kv_write("llama-8b-first-m8", 8, 4096, "norm"),
    *(_linear_kv_write(f"llama-8b-eagle3-m{rows}", rows, 8192) for rows in (1, 4, 16)),
    _linear_kv_write("llama-8b-invariant", 8, 4096, "summed", "invariant"),
    _linear_kv_write("llama-8b-fp32", 8, 4096, "norm", "fp32"),
    *(_linear_kv_write(f"llama-1b-m{rows}", rows, 2048, "norm", dim=64) for rows in (1, 32)),
    *(_linear_kv_write(f"qwen3-8b-m{rows}", rows, 4096, "summed", "head-norm") for rows in (1, 8, 32, 64)),
    _linear_kv_write("qwen3-8b-invariant", 8, 4096, "summed", "head-norm", "invariant"),
    _linear_kv_write("qwen3-8b-int4-m8", 8, 4096, "norm", "head-norm", "int4"),
    *(
        _linear_kv_write(f"llama-8b-{name}-m{rows}", rows, 4096, "norm", name)
        for name in ("int4", "fp8-channel", "q4-k")
        for rows in (8, 32)
    ),
)


def _sum_squares(name: str, *sizes: int) -> AotCase:
    return AotCase(name, launcher(op_of("sum_squares"), "batch_invariant"), lambda: {"x": _meta(*sizes)})


AOT["sum_squares"] = (
    _sum_squares("gemma-2-9b-m8", 1, 8, 3584),
    _sum_squares("olmo-2-32b-keys-m8", 1, 8, 1024),
    _sum_squares("qwen3.6-values-m8", 1, 8, 32, 128),
)
LATENTS = {"deepseek-v3": (128, 128, 512), "deepseek-v2-lite": (16, 128, 512)}
"""Heads, channels of a key and of a value, and of a latent row."""


def head_product_case(model: str, rows: int, values: bool) -> AotCase:
    """The product before latent attention, whose queries lie next to what is rotated, or the one after it."""
    heads, dim, latent = LATENTS[model]

    def made() -> dict[str, Any]:
        weight = _meta(heads, 2 * dim, latent)
        if values:
            return {"x_BTQK": _meta(1, rows, heads, latent), "weight_QKO": weight[:, dim:].transpose(1, 2)}
        return {"x_BTQK": _meta(1, rows, heads, dim + 64)[..., :dim], "weight_QKO": weight[:, :dim]}

    called = launcher(op_of("head_product"), "batch_invariant")
    return AotCase(f"{model}-{'values' if values else 'queries'}-m{rows}", called, made)


AOT["head_product"] = tuple(head_product_case(model, rows, values) for model in LATENTS for values in (False, True) for rows in (1, 8, 64))
AOT["packed_linear"] = tuple(case for name, kind in FORMATS.items() for case in _packed_linear(name, kind))


def _packed_moe_mlp_call(kind: Format, model: str, tokens: int) -> dict[str, Any]:
    experts, topk, hidden, width = _MODELS[model]

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    made: dict[str, Any] = {
        "x_TH": meta(tokens, hidden),
        "index_TK": meta(tokens, topk, dtype=torch.int64),
        "weight_TK": meta(tokens, topk, dtype=torch.float32),
        "gate_up": kind.without_data(experts * 2 * width, hidden),
        "down": kind.without_data(experts * hidden, width),
    }
    if model.startswith("gpt-oss"):
        made |= {"gate_up_bias_EF": meta(experts, 2 * width), "down_bias_EH": meta(experts, hidden), "alpha": 1.702, "limit": 7.0}
    return made


_PACKED_EXPERTS = {
    "gpt-oss-120b": ("mxfp4",),
    "qwen3-30b-a3b": ("fp8-block", "fp8-channel", "int4", "int4-zeros", "nvfp4"),
}
"""Formats in which the experts of a model are published."""
AOT["packed_moe_mlp"] = tuple(
    AotCase(f"{model}-{name}-t{tokens}", packed_moe_mlp, partial(_packed_moe_mlp_call, FORMATS[name], model, tokens))
    for model, names in _PACKED_EXPERTS.items()
    for name in names
    for tokens in ((1, 8, 32, 256) if name in ("mxfp4", "fp8-block") else (8, 256))
)

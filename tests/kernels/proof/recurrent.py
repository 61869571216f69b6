"""Calls of the ops of ``graphspec.kernels.recurrent`` in the shapes of real models, by file; their kernels are compiled ahead of time."""

from __future__ import annotations

import torch
import triton

from tests.kernels.proof.calls import AotCase, aot_case

AOT: dict[str, tuple[AotCase, ...]] = {}

QWEN3_NEXT = {"U": 36, "H": 32, "K": 128, "V": 128, "E": 8192, "G": 64, "R": 65}
NEMOTRON_H = {"U": 24, "H": 128, "K": 128, "V": 64, "E": 10240, "G": 256, "R": 65}
"""Sizes of the recurrent layers of Nemotron-H-8B."""
WIDE_STATE = {**NEMOTRON_H, "K": 256, "E": 8704}
"""The same with twice the state size and one group, as configurations of Granite 4 and Bamba may have."""


def _conv_shift(name: str, units: int, lanes: int, tokens: int, width: int, dtype: torch.dtype = torch.bfloat16) -> AotCase:
    sizes = {**QWEN3_NEXT, "B": lanes, "T": tokens, "A": width, "O": 3}
    given = {"input_UBTE": (dtype, units, lanes, tokens, QWEN3_NEXT["E"]), "column_RUOE": dtype, "layer": 0}
    return aot_case(name, "conv_shift", sizes, **given, **({} if "run" in name else {"fresh_B": None}))


AOT["conv_shift"] = (
    _conv_shift("qwen3-next-b1-n16-a6", 36, 1, 16, 6),
    _conv_shift("qwen3-next-run-b1-t256-fp32", 1, 1, 256, 256, torch.float32),
)


def _delta_chunk(name: str, lanes: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> AotCase:
    return aot_case(name, "delta_chunk", {**QWEN3_NEXT, "B": lanes, "T": tokens}, layer=3, mixed_BTE=dtype)


AOT["delta_chunk"] = (_delta_chunk("qwen3-next-b1-t512", 1, 512), _delta_chunk("qwen3-next-b4-t256-fp32", 4, 256, torch.float32))


def _delta_scan(name: str, lanes: int, tokens: int) -> AotCase:
    given = {} if "fresh" in name else {"fresh_B": None}
    return aot_case(name, "delta_scan", {**QWEN3_NEXT, "B": lanes, "T": tokens}, layer=3, mixed_BTE=torch.bfloat16, **given)


AOT["delta_scan"] = (_delta_scan("qwen3-next-b8-t64", 8, 64), _delta_scan("qwen3-next-fresh-b1-t256", 1, 256))


def _delta_solve(name: str, lanes: int, nodes: int, dtype: torch.dtype = torch.bfloat16) -> AotCase:
    return aot_case(name, "delta_solve", {**QWEN3_NEXT, "B": lanes, "T": nodes, "X": 1}, layer=3, mixed_BTE=dtype)


AOT["delta_solve"] = (
    _delta_solve("qwen3-next-b1-n8", 1, 8),
    _delta_solve("qwen3-next-b8-n32", 8, 32),
    _delta_solve("qwen3-next-b1-n64-fp32", 1, 64, torch.float32),
)


def _delta_walk(name: str, lanes: int, nodes: int, dtype: torch.dtype = torch.bfloat16) -> AotCase:
    sizes = {**QWEN3_NEXT, "B": lanes, "T": nodes, "X": triton.cdiv(nodes, 64)}
    return aot_case(name, "delta_walk", sizes, layer=3, mixed_BTE=dtype)


AOT["delta_walk"] = (
    _delta_walk("qwen3-next-b1-n1", 1, 1),
    _delta_walk("qwen3-next-b8-n16", 8, 16),
    _delta_walk("qwen3-next-b1-n128-fp32", 1, 128, torch.float32),
)


def _ssm_chunk(name: str, sizes: dict[str, int], lanes: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> AotCase:
    return aot_case(name, "ssm_chunk", {**sizes, "B": lanes, "T": tokens}, layer=3, mixed_BTE=dtype)


AOT["ssm_chunk"] = (
    _ssm_chunk("nemotron-h-b1-t512", NEMOTRON_H, 1, 512),
    _ssm_chunk("nemotron-h-b4-t256-fp32", NEMOTRON_H, 4, 256, torch.float32),
    _ssm_chunk("wide-state-b1-t512", WIDE_STATE, 1, 512),
)


def _ssm_dual(name: str, sizes: dict[str, int], lanes: int, nodes: int, dtype: torch.dtype = torch.bfloat16) -> AotCase:
    return aot_case(name, "ssm_dual", {**sizes, "B": lanes, "T": nodes, "X": 1}, layer=3, mixed_BTE=dtype)


AOT["ssm_dual"] = (
    _ssm_dual("nemotron-h-b1-n8", NEMOTRON_H, 1, 8),
    _ssm_dual("nemotron-h-b8-n32", NEMOTRON_H, 8, 32),
    _ssm_dual("nemotron-h-b1-n64-fp32", NEMOTRON_H, 1, 64, torch.float32),
    _ssm_dual("wide-state-b8-n16", WIDE_STATE, 8, 16),
)


def _ssm_scan(name: str, model: dict[str, int], lanes: int, tokens: int) -> AotCase:
    given = {} if "fresh" in name else {"fresh_B": None}
    return aot_case(name, "ssm_scan", {**model, "B": lanes, "T": tokens}, layer=3, mixed_BTE=torch.bfloat16, **given)


AOT["ssm_scan"] = (
    _ssm_scan("nemotron-h-b8-t64", NEMOTRON_H, 8, 64),
    _ssm_scan("nemotron-h-fresh-b1-t256", NEMOTRON_H, 1, 256),
    _ssm_scan("wide-state-b8-t16", WIDE_STATE, 8, 16),
)


def _ssm_walk(name: str, sizes: dict[str, int], lanes: int, nodes: int, dtype: torch.dtype = torch.bfloat16) -> AotCase:
    return aot_case(name, "ssm_walk", {**sizes, "B": lanes, "T": nodes, "X": triton.cdiv(nodes, 64)}, layer=3, mixed_BTE=dtype)


AOT["ssm_walk"] = (
    _ssm_walk("nemotron-h-b1-n1", NEMOTRON_H, 1, 1),
    _ssm_walk("nemotron-h-b8-n16", NEMOTRON_H, 8, 16),
    _ssm_walk("nemotron-h-b1-n128-fp32", NEMOTRON_H, 1, 128, torch.float32),
    _ssm_walk("wide-state-b8-n16", WIDE_STATE, 8, 16),
)


def _state_commit(name: str, model: dict[str, int], lanes: int, tokens: int, width: int, dtype: torch.dtype = torch.bfloat16) -> AotCase:
    selective = model is not QWEN3_NEXT
    sizes, weight = {**model, "B": lanes, "T": tokens, "A": width, "O": 3}, (dtype, model["U"], model["E"], 4)
    given = {"input_UBTE": dtype, "column_RUOE": dtype, "weight_UEO": weight, "bias_UE": dtype if selective else None}
    return aot_case(name, "state_commit", sizes, **given, selective=selective)


AOT["state_commit"] = (
    _state_commit("qwen3-next-b1-n1", QWEN3_NEXT, 1, 1, 1),
    _state_commit("qwen3-next-b8-n16-a6", QWEN3_NEXT, 8, 16, 6),
    _state_commit("qwen3-next-b1-n64-a9-fp32", QWEN3_NEXT, 1, 64, 9, torch.float32),
    _state_commit("nemotron-h-b1-n8-a6", NEMOTRON_H, 1, 8, 6),
    _state_commit("wide-state-b8-n64-a9", WIDE_STATE, 8, 64, 9),
)


def _tree_conv(name: str, lanes: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> AotCase:
    sizes = {**QWEN3_NEXT, "B": lanes, "T": tokens, "O": 3}
    given = {"input_BTE": dtype, "column_RUOE": dtype, "weight_EO": (dtype, QWEN3_NEXT["E"], 4), "layer": 3}
    given |= {"bias_E": dtype} if "bias" in name else {"bias_E": None}
    return aot_case(name, "tree_conv", sizes, **given, **({} if "run" in name else {"fresh_B": None}))


AOT["tree_conv"] = (
    _tree_conv("qwen3-next-b1-n16", 1, 16),
    _tree_conv("qwen3-next-run-b1-t256", 1, 256),
    _tree_conv("bias-b8-n64-fp32", 8, 64, torch.float32),
)

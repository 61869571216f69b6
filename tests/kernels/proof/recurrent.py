"""Calls of the ops of ``graphspec.kernels.recurrent`` in the shapes of real models, by file; their kernels are compiled ahead of time."""

from __future__ import annotations

from typing import Any

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


def _delta(name: str, op: str, lanes: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> AotCase:
    given: dict[str, Any] = {"skip_H": None} | ({"fresh_B": None} if op == "state_scan" and "fresh" not in name else {})
    sizes = {**QWEN3_NEXT, "B": lanes, "T": tokens, "X": triton.cdiv(tokens, 64)}
    return aot_case(f"qwen3-next-{name}", op, sizes, layer=3, mixed_BTE=dtype, **given)


def _ssm(name: str, op: str, model: dict[str, int], lanes: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> AotCase:
    given: dict[str, Any] = {"fresh_B": None} if op == "state_scan" and "fresh" not in name else {}
    return aot_case(name, op, {**model, "B": lanes, "T": tokens, "X": triton.cdiv(tokens, 64)}, layer=3, mixed_BTE=dtype, **given)


AOT["state_walk"] = (
    _delta("b1-n1", "state_walk", 1, 1),
    _delta("b8-n16", "state_walk", 8, 16),
    _delta("b1-n128-fp32", "state_walk", 1, 128, torch.float32),
    _ssm("nemotron-h-b1-n1", "state_walk", NEMOTRON_H, 1, 1),
    _ssm("nemotron-h-b8-n16", "state_walk", NEMOTRON_H, 8, 16),
    _ssm("nemotron-h-b1-n128-fp32", "state_walk", NEMOTRON_H, 1, 128, torch.float32),
    _ssm("wide-state-b8-n16", "state_walk", WIDE_STATE, 8, 16),
    _delta("tree-b1-n8", "state_tree", 1, 8),
    _delta("tree-b8-n32", "state_tree", 8, 32),
    _delta("tree-b1-n64-fp32", "state_tree", 1, 64, torch.float32),
    _ssm("nemotron-h-tree-b1-n8", "state_tree", NEMOTRON_H, 1, 8),
    _ssm("nemotron-h-tree-b8-n32", "state_tree", NEMOTRON_H, 8, 32),
    _ssm("nemotron-h-tree-b1-n64-fp32", "state_tree", NEMOTRON_H, 1, 64, torch.float32),
    _ssm("wide-state-tree-b8-n16", "state_tree", WIDE_STATE, 8, 16),
)
AOT["state_scan"] = (
    _delta("b8-t64", "state_scan", 8, 64),
    _delta("fresh-b1-t256", "state_scan", 1, 256),
    _ssm("nemotron-h-b8-t64", "state_scan", NEMOTRON_H, 8, 64),
    _ssm("nemotron-h-fresh-b1-t256", "state_scan", NEMOTRON_H, 1, 256),
    _ssm("wide-state-b8-t16", "state_scan", WIDE_STATE, 8, 16),
    _delta("chunk-b1-t512", "state_chunk", 1, 512),
    _delta("chunk-b4-t256-fp32", "state_chunk", 4, 256, torch.float32),
    _ssm("nemotron-h-chunk-b1-t512", "state_chunk", NEMOTRON_H, 1, 512),
    _ssm("nemotron-h-chunk-b4-t256-fp32", "state_chunk", NEMOTRON_H, 4, 256, torch.float32),
    _ssm("wide-state-chunk-b1-t512", "state_chunk", WIDE_STATE, 1, 512),
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

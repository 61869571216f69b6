"""Ops of the cycle that choose, in C++: what ``torch.compile`` writes for them is long, and most of a draft step's time.

Contracts stand next to the references, in the files of the same names one folder up.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import ConfigError
from ..noise import gumbel_noise
from ..threads import team_threads
from . import define_op, require
from .build import load

_library = load()
_address = Tensor.data_ptr


def _fields(tensors: Sequence[Tensor], *values: int) -> bytes:
    """What a C++ struct of pointers, then int64 is filled with. The tensors must live until the call is over."""
    return struct.pack(f"={len(tensors) + len(values)}q", *map(_address, tensors), *values)


def _written(*slots: Tensor) -> None:
    for slot in slots:
        if not slot.is_contiguous():
            raise ConfigError("native cycle op", "contiguous slots", f"strides {slot.stride()}")


def _top_rows(keys: Tensor, topk: int, target_token: Tensor | None) -> tuple[Tensor, Tensor]:
    require("keys", keys, torch.float32)
    keys = keys.contiguous()
    logprob, token = _top_shape(keys, topk, target_token)
    rows, vocab = keys.numel() // keys.shape[-1], keys.shape[-1]
    target = 0 if target_token is None else target_token.data_ptr()
    _library.graphspec_draft_topk(_fields((logprob, token, keys), target, rows, vocab, topk, team_threads()))
    return logprob, token


def _top_shape(keys: Tensor, topk: int, target_token: Tensor | None) -> tuple[Tensor, Tensor]:
    shape = (*keys.shape[:-1], topk)
    return keys.new_empty(shape), keys.new_empty(shape, dtype=torch.int64)


def _draft_level(
    increment: Tensor, next_token: Tensor, level: int, beams: bool, shift: int, lane_row: Tensor, status: Tensor, seq_len: Tensor,
    score: Tensor, token: Tensor, parent: Tensor, beam_token: Tensor, beam_index: Tensor, beam_source: Tensor, beam_path: Tensor,
    beam_ancestors: Tensor, beam_valid: Tensor, beam_slot: Tensor, beam_position: Tensor, beam_end: Tensor, next_position: Tensor,
) -> None:  # fmt: skip
    slots = (
        score, token, parent, beam_token, beam_index, beam_source, beam_path, beam_ancestors, beam_valid, beam_slot, beam_position,
        beam_end, next_position,
    )  # fmt: skip
    _written(*slots)
    require("increment", increment, torch.float32)
    increment, next_token, lane_row = increment.contiguous(), next_token.contiguous(), lane_row.contiguous()
    sizes = (*increment.shape, score.shape[1], beam_path.shape[2], beam_ancestors.shape[2])
    _library.graphspec_draft_level(_fields((increment, next_token, lane_row, status, seq_len, *slots), level, beams, shift, *sizes))


def _tree_build(
    score: Tensor, token: Tensor, parent: Tensor, lane_row: Tensor, window_token: Tensor, window_len: Tensor, node_token: Tensor,
    node_parent: Tensor, node_depth: Tensor, node_ancestors: Tensor, max_depth: int,
) -> None:  # fmt: skip
    nodes = node_token, node_parent, node_depth, node_ancestors
    _written(*nodes)
    require("score", score, torch.float32)
    read = tuple(x.contiguous() for x in (score, token, parent, lane_row, window_token, window_len))
    lanes, count, words = node_ancestors.shape
    sizes = (max_depth, lanes, score.shape[1], count, words, window_token.shape[1])
    _library.graphspec_tree_build(_fields((*read, *nodes), *sizes))


def _nothing(*_: object) -> None:
    """The fake of an op that only writes its arguments."""


_LEVEL = ("score", "token", "parent", "beam_token", "beam_index", "beam_source", "beam_path", "beam_ancestors", "beam_valid", "beam_slot",
          "beam_position", "beam_end", "next_position")  # fmt: skip
_NODES = ("node_token", "node_parent", "node_depth", "node_ancestors")
define_op("draft_topk(Tensor keys, int topk, Tensor? target_token) -> (Tensor, Tensor)", _top_rows, _top_shape)
define_op("draft_level" + torch.library.infer_schema(_draft_level, mutates_args=_LEVEL), _draft_level, _nothing)
define_op("tree_build" + torch.library.infer_schema(_tree_build, mutates_args=_NODES), _tree_build, _nothing)
_ops = torch.ops.graphspec_native


def draft_topk(
    logits_BTVd: Tensor, topk: int, target_token_Vd: Tensor | None, seed_B: Tensor | None, position_B: Tensor | None,
    temperature_B: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`graphspec.kernels.draft_topk.draft_topk` in C++; the noise, where there is any, is torch's."""
    key_BTVd = logits_BTVd
    if seed_B is not None:
        assert position_B is not None and temperature_B is not None
        token_Vd = torch.arange(logits_BTVd.shape[-1], device=logits_BTVd.device) if target_token_Vd is None else target_token_Vd
        noise_B1Vd, temperature_B11 = gumbel_noise(seed_B, position_B[:, None], token_Vd), temperature_B[:, None, None]
        key_BTVd = torch.where(temperature_B11 > 0, logits_BTVd + temperature_B11 * noise_B1Vd, logits_BTVd)
    out: tuple[Tensor, Tensor] = _ops.draft_topk.default(key_BTVd, topk, target_token_Vd)
    return out


def draft_level(
    increment_BEK: Tensor, next_BEK: Tensor, level: int, beams: bool, shift: int, lane_row_B: Tensor, status_R: Tensor, seq_len_R: Tensor,
    candidate_score_BM: Tensor, candidate_token_BM: Tensor, candidate_parent_BM: Tensor, beam_token_BK: Tensor, beam_index_BK: Tensor,
    beam_source_BK: Tensor, beam_path_BKS: Tensor, beam_ancestors_BKX: Tensor, beam_valid_BK: Tensor, beam_slot_BK: Tensor,
    beam_position_BK: Tensor, beam_end_B: Tensor, next_position_B: Tensor,
) -> None:  # fmt: skip
    """:func:`graphspec.kernels.draft_level.draft_level` in C++."""
    _ops.draft_level.default(
        increment_BEK, next_BEK, level, beams, shift, lane_row_B, status_R, seq_len_R, candidate_score_BM, candidate_token_BM,
        candidate_parent_BM, beam_token_BK, beam_index_BK, beam_source_BK, beam_path_BKS, beam_ancestors_BKX, beam_valid_BK, beam_slot_BK,
        beam_position_BK, beam_end_B, next_position_B,
    )  # fmt: skip


def tree_build(
    score_BM: Tensor, token_BM: Tensor, parent_BM: Tensor, lane_row_B: Tensor, window_token_RAc: Tensor, window_len_R: Tensor,
    node_token_BN: Tensor, node_parent_BN: Tensor, node_depth_BN: Tensor, node_ancestors_BNX: Tensor, max_depth: int,
) -> None:  # fmt: skip
    """:func:`graphspec.kernels.tree_build.tree_build_into` in C++."""
    _ops.tree_build.default(
        score_BM, token_BM, parent_BM, lane_row_B, window_token_RAc, window_len_R, node_token_BN, node_parent_BN, node_depth_BN,
        node_ancestors_BNX, max_depth,
    )  # fmt: skip

"""Ops of the cycle that choose, in C++: what ``torch.compile`` writes for them is long, and most of a draft step's time.

Contracts stand next to the references, in the files of the same names one folder up.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from ...errors import ConfigError
from ..groups import Beams, Candidates, Nodes
from ..noise import gumbel_noise
from ..op import WRITTEN
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
    increment_BEK: Tensor, next_BEK: Tensor, level: int, beams: bool, shift: int, lane_row_B: Tensor, status_R: Tensor, seq_len_R: Tensor,
    candidates: Annotated[Candidates, WRITTEN], carried: Annotated[Beams, WRITTEN],
) -> None:  # fmt: skip
    slots = (*candidates, *carried)
    _written(*slots)
    require("increment", increment_BEK, torch.float32)
    increment, next_token, lane_row = increment_BEK.contiguous(), next_BEK.contiguous(), lane_row_B.contiguous()
    pool, depth, words = candidates.candidate_score_BM.shape[1], carried.beam_path_BKS.shape[2], carried.beam_ancestors_BKX.shape[2]
    sizes = (*increment.shape, pool, depth, words)
    _library.graphspec_draft_level(_fields((increment, next_token, lane_row, status_R, seq_len_R, *slots), level, beams, shift, *sizes))


def _tree_build(
    score_BM: Tensor, token_BM: Tensor, parent_BM: Tensor, lane_row_B: Tensor, window_token_RAc: Tensor, window_len_R: Tensor,
    nodes: Annotated[Nodes, WRITTEN], max_depth: int,
) -> None:  # fmt: skip
    _written(*nodes)
    require("score", score_BM, torch.float32)
    read = tuple(x.contiguous() for x in (score_BM, token_BM, parent_BM, lane_row_B, window_token_RAc, window_len_R))
    lanes, count, words = nodes.node_ancestors_BNX.shape
    sizes = (max_depth, lanes, score_BM.shape[1], count, words, window_token_RAc.shape[1])
    _library.graphspec_tree_build(_fields((*read, *nodes), *sizes))


def _marginal_pool(
    increment_BSK: Tensor, next_BSK: Tensor, lane_row_B: Tensor, status_R: Tensor, candidates: Annotated[Candidates, WRITTEN]
) -> None:
    _written(*candidates)
    require("increment", increment_BSK, torch.float32)
    read = tuple(x.contiguous() for x in (increment_BSK, next_BSK, lane_row_B, status_R))
    _library.graphspec_marginal_pool(_fields((*read, *candidates), *increment_BSK.shape))


_topk = define_op("draft_topk", _top_rows, _top_shape)
draft_level = define_op("draft_level", _draft_level)
"""The op of this name in C++."""
marginal_pool = define_op("marginal_pool", _marginal_pool)
"""The op of this name in C++."""
tree_build = define_op("tree_build", _tree_build)
""":func:`graphspec.kernels.tree_build.tree_build_into` in C++."""


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
    out: tuple[Tensor, Tensor] = _topk(key_BTVd, topk, target_token_Vd)
    return out

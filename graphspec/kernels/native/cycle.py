"""Top-k, draft levels, n-grams and trees in C++; compiled by ``torch.compile`` they would take most of a draft step's time.

Contracts are next to the references, in the files of the same names one folder up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..groups import Beams, Candidates, Nodes
from ..op import Written
from . import define_op, implement
from .call import call, dense, require, require_slots


def _top_rows(
    logits_BTVd: Tensor, topk: int, target_token_Vd: Tensor | None, seed_B: Tensor | None, position_B: Tensor | None,
    temperature_B: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    logits = logits_BTVd
    require("logits", logits, torch.float32)
    logprob, token = _top_shape(logits, topk)
    read = (None if x is None else dense(x) for x in (logits, target_token_Vd, seed_B, position_B, temperature_B))
    call("draft_topk", (logprob, token, *read), logits.shape[0] * logits.shape[1], logits.shape[2], topk, logits.shape[1])
    return logprob, token


def _top_shape(logits: Tensor, topk: int, *_: object) -> tuple[Tensor, Tensor]:
    shape = (*logits.shape[:-1], topk)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)


def _draft_level(
    increment_BEK: Tensor, next_BEK: Tensor, level: int, beams: bool, shift: int, lane_row_B: Tensor, status_R: Tensor, seq_len_R: Tensor,
    candidates: Written[Candidates], carried: Written[Beams],
) -> None:  # fmt: skip
    slots = (*candidates, *carried)
    require_slots(*slots)
    require("increment", increment_BEK, torch.float32)
    pool, depth, words = candidates.candidate_score_BM.shape[1], carried.beam_path_BKS.shape[2], carried.beam_ancestors_BKX.shape[2]
    read = (*map(dense, (increment_BEK, next_BEK, lane_row_B)), status_R, seq_len_R)
    call("draft_level", (*read, *slots), level, beams, shift, *increment_BEK.shape, pool, depth, words)


def _tree_build(
    score_BM: Tensor, token_BM: Tensor, parent_BM: Tensor, lane_row_B: Tensor, window_token_RAc: Tensor, window_len_R: Tensor,
    nodes: Written[Nodes], max_depth: int,
) -> None:  # fmt: skip
    require_slots(*nodes)
    require("score", score_BM, torch.float32)
    read = map(dense, (score_BM, token_BM, parent_BM, lane_row_B, window_token_RAc, window_len_R))
    lanes, count, words = nodes.node_ancestors_BNX.shape
    sizes = (max_depth, lanes, score_BM.shape[1], count, words, window_token_RAc.shape[1])
    call("tree_build", (*read, *nodes), *sizes)


def _marginal_pool(increment_BSK: Tensor, next_BSK: Tensor, lane_row_B: Tensor, status_R: Tensor, candidates: Written[Candidates]) -> None:
    require_slots(*candidates)
    require("increment", increment_BSK, torch.float32)
    read = map(dense, (increment_BSK, next_BSK, lane_row_B, status_R))
    call("marginal_pool", (*read, *candidates), *increment_BSK.shape)


def _ngram_match(
    history_RL: Tensor, lane_row_B: Tensor, status_R: Tensor, seq_len_R: Tensor, candidates: Written[Candidates], num_paths: int,
    depth: int, min_match: int, max_match: int,
) -> None:  # fmt: skip
    require_slots(*candidates)
    read = map(dense, (history_RL, lane_row_B, status_R, seq_len_R))
    call("ngram_match", (*read, *candidates), lane_row_B.shape[0], history_RL.shape[1], num_paths, depth, min_match, max_match)


draft_topk = implement("draft_topk", _top_rows, _top_shape)
"""The op of this name in C++, as below."""
draft_level = define_op("draft_level", _draft_level)
marginal_pool = define_op("marginal_pool", _marginal_pool)
ngram_match = define_op("ngram_match", _ngram_match)
tree_build = define_op("tree_build", _tree_build)
""":func:`graphspec.kernels.tree.tree_build.tree_build_into` in C++."""

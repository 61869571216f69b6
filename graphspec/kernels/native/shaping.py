"""Penalties, biases and bans of logits, small gathers, and rows of masks, in C++.

Contracts are next to the references, in :mod:`..sampling` and :mod:`..tree`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..groups import Biases, Penalties
from . import define_op, implement
from .call import call, dense, require, require_slots


def _penalise(
    logits_BTV: Tensor, lane_row_B: Tensor, penalties: Penalties, path_BTs: Tensor | None, target_token_Vd: Tensor | None
) -> Tensor:
    require("logits", logits_BTV, torch.float32)
    require("output_count", penalties.output_count_RV, torch.int32)
    require("prompt_seen", penalties.prompt_seen_RV, torch.int8)
    require_slots(*penalties)
    out = _shape(logits_BTV)
    read = (None if x is None else dense(x) for x in (path_BTs, target_token_Vd))
    sizes = (*out.shape, penalties.output_count_RV.shape[1], 0 if path_BTs is None else path_BTs.shape[2])
    call("penalise", (out, dense(logits_BTV), dense(lane_row_B), *penalties, *read), *sizes)
    return out


def _mask_tokens(
    logits_BTV: Tensor, lane_row_B: Tensor, allowed_RU: Tensor | None, token_mask_BTVw: Tensor | None, target_token_Vd: Tensor | None
) -> Tensor:
    require("logits", logits_BTV, torch.float32)
    out = _shape(logits_BTV)
    read = [None if x is None else dense(x) for x in (allowed_RU, token_mask_BTVw, target_token_Vd)]
    sizes = (0 if x is None else x.shape[-1] * x.element_size() for x in read[:2])
    call("mask_tokens", (out, dense(logits_BTV), dense(lane_row_B), *read), *out.shape, *sizes)
    return out


def _bias_logits(
    logits_BTV: Tensor, lane_row_B: Tensor, biases: Biases, position_BT: Tensor, target_token_Vd: Tensor | None, vocab_size: int
) -> Tensor:
    require("logits", logits_BTV, torch.float32)
    require_slots(*biases)
    out = _shape(logits_BTV)
    read = (dense(position_BT), None if target_token_Vd is None else dense(target_token_Vd))
    sizes = (*out.shape, biases.bias_id_RI.shape[1], biases.stop_id_RE.shape[1], position_BT.shape[1], vocab_size)
    call("bias_logits", (out, dense(logits_BTV), dense(lane_row_B), *biases, *read), *sizes)
    return out


def _ban_words(logits_BTV: Tensor, lane_row_B: Tensor, bad_word_RBwBt: Tensor, before_BTt: Tensor) -> Tensor:
    require("logits", logits_BTV, torch.float32)
    require_slots(bad_word_RBwBt)
    out = _shape(logits_BTV)
    read = map(dense, (logits_BTV, lane_row_B))
    call("ban_words", (out, *read, bad_word_RBwBt, dense(before_BTt)), *out.shape, *bad_word_RBwBt.shape[1:])
    return out


def _shape(logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape)


def _node_paths(token_BN: Tensor, ancestors_BNX: Tensor) -> Tensor:
    out = _paths_shape(token_BN, ancestors_BNX)
    call("node_paths", (out, dense(token_BN), dense(ancestors_BNX)), *ancestors_BNX.shape)
    return out


def _paths_shape(token: Tensor, ancestors: Tensor) -> Tensor:
    return token.new_empty((*token.shape, token.shape[1]))


def _take_rows(x_R: Tensor, row_B: Tensor) -> Tensor:
    require_slots(x_R)
    out = _rows_shape(x_R, row_B)
    call("take_rows", (out, x_R, dense(row_B)), row_B.numel(), x_R[0].numel() * x_R.element_size())
    return out


def _rows_shape(x: Tensor, row: Tensor) -> Tensor:
    return x.new_empty((*row.shape, *x.shape[1:]))


def _put_first(score_BTK: Tensor, token_BTK: Tensor, forced_BS: Tensor, path_BTs: Tensor | None) -> tuple[Tensor, Tensor]:
    out = _first_shape(score_BTK, token_BTK)
    drafted = -1 if path_BTs is None else path_BTs.shape[2]
    read = (None if x is None else dense(x) for x in (score_BTK, token_BTK, forced_BS, path_BTs))
    call("put_first", (*out, *read), *score_BTK.shape, forced_BS.shape[1], drafted)
    return out


def _first_shape(score: Tensor, token: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return score.new_empty(score.shape), token.new_empty(token.shape)


def _append_masks(
    token_BA: Tensor, feature_BAF: Tensor, begin_B: Tensor, known_B: Tensor, mask_feature_F: Tensor, mask_token: int, masks: int,
    shift: int, num_words: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    require("feature", feature_BAF, torch.float32)
    require("mask feature", mask_feature_F, torch.float32)
    out = _masked_shape(token_BA, feature_BAF, masks, shift, num_words)
    read = map(dense, (token_BA, feature_BAF, begin_B, known_B, mask_feature_F))
    call("append_masks", (*out, *read), *feature_BAF.shape, mask_token, masks, shift, num_words)
    return out


def _masked_shape(token_BA: Tensor, feature_BAF: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    masks, _, num_words = rest[-3:]
    lanes, entries, steps = token_BA.shape[0], token_BA.shape[1] + masks, masks + 1

    def new(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return token_BA.new_empty((lanes, *shape), dtype=dtype)

    return (
        new(entries), new(entries, dtype=torch.bool), new(entries), new(entries), new(entries, num_words),
        feature_BAF.new_empty(lanes, entries, feature_BAF.shape[2]), new(steps), new(steps, dtype=torch.bool), new(steps),
    )  # fmt: skip


def _mask_block(
    token_BA: Tensor, known_B: Tensor, next_B: Tensor, mask_token: int, rows: int, steps: int, shift: int, num_words: int
) -> tuple[Tensor, ...]:
    out = _block_shape(token_BA, known_B, next_B, mask_token, rows, steps, shift, num_words)
    read = map(dense, (token_BA, known_B, next_B))
    call("mask_block", (*out, *read), *token_BA.shape, mask_token, rows, steps, shift, num_words)
    return out


def _block_shape(token_BA: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    rows, steps, _, num_words = rest[-4:]

    def new(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return token_BA.new_empty((token_BA.shape[0], *shape), dtype=dtype)

    return new(rows), new(rows, dtype=torch.bool), new(rows), new(rows), new(rows, num_words), new(steps)


penalise = implement("penalise", _penalise, _shape)
"""The op of this name in C++, as below."""
mask_tokens = implement("mask_tokens", _mask_tokens, _shape)
bias_logits = implement("bias_logits", _bias_logits, _shape)
ban_words = implement("ban_words", _ban_words, _shape)
append_masks = implement("append_masks", _append_masks, _masked_shape)
put_first = implement("put_first", _put_first, _first_shape)
mask_block = implement("mask_block", _mask_block, _block_shape)
node_paths = define_op("node_paths", _node_paths, _paths_shape)
""":meth:`graphspec.kernels.registry.KernelSet.node_paths` in C++, as below."""
take_rows = define_op("take_rows", _take_rows, _rows_shape)

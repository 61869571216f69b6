"""Ops that update the rows' state, in C++: message, windows, nodes, walk and commit.

Contracts are next to the references, in the files of the same names one folder up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..groups import Lanes, Limits, Nodes, Penalties, Progress, RowRequest, Run, Truncation, Window
from . import implement
from .call import call, dense, require, require_slots

_int32, _int64 = torch.int32, torch.int64


def _mail_apply(
    mail: Tensor, lanes_at: int, aborts_at: int, pages_at: int, pages_end: int, joins_at: int, joins: int, join_words: int,
    lanes: Lanes, rows: RowRequest, truncation: Truncation | None, penalties: Penalties | None,
) -> None:  # fmt: skip
    groups = (*lanes, *rows, *(truncation or (None,) * 3), *(penalties or (None,) * 5))
    require_slots(mail, *groups)
    require("page table", rows.page_table_RP, _int32)
    counts = (0, 0) if penalties is None else tuple(x.shape[1] * x.element_size() for x in penalties[3:])
    sizes = (*lanes.lane_table_BP.shape, rows.stop_id_RE.shape[1], *counts)
    call("mail_apply", (mail, *groups), lanes_at, aborts_at, pages_at, pages_end, joins_at, joins, join_words, *sizes)


def _draft_window(
    lane_row_B: Tensor, status_R: Tensor, seq_len_R: Tensor, window: Window, shift: int, width: int, num_words: int
) -> tuple[Tensor, ...]:
    require_slots(lane_row_B, status_R, seq_len_R, *window)
    if window.window_feature_RAcF is not None:
        require("window_feature", window.window_feature_RAcF, torch.float32)
    out = _window_shape(lane_row_B, status_R, seq_len_R, *window, shift, width, num_words)
    lookback = out[0].shape[1] - width
    sizes = (lane_row_B.shape[0], width, num_words, shift, window.window_token_RAc.shape[1], out[-1].shape[2], lookback)
    call("draft_window", (*out, lane_row_B, status_R, seq_len_R, *window), *sizes)
    return out


def _window_shape(
    lane_row_B: Tensor, status_R: Tensor, seq_len_R: Tensor, window_len_R: Tensor, window_token_RAc: Tensor,
    window_feature_RAcF: Tensor | None, lookback_token_RY: Tensor | None, lookback_feature_RYF: Tensor | None,
    shift: int, width: int, num_words: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    lanes, entries = lane_row_B.shape[0], width + (0 if lookback_token_RY is None else lookback_token_RY.shape[1])

    def new(*shape: int, dtype: torch.dtype = _int64) -> Tensor:
        return lane_row_B.new_empty((lanes, *shape), dtype=dtype)

    features, of = (0, torch.float32) if window_feature_RAcF is None else (window_feature_RAcF.shape[2], window_feature_RAcF.dtype)
    return (
        new(entries), new(entries, dtype=torch.bool), new(entries), new(entries), new(), new(entries, num_words), new(), new(),
        new(entries, features, dtype=of),
    )  # fmt: skip


def _take_last(hidden_BTH: Tensor, known_B: Tensor, out_BH: Tensor) -> None:
    require_slots(hidden_BTH, known_B, out_BH)
    lanes, entries, size = hidden_BTH.shape
    call("take_last", (out_BH, hidden_BTH, known_B), lanes, entries, size * hidden_BTH.element_size())


def _chain_layout(
    score_BM: Tensor | None, token_BM: Tensor | None, lane_row_B: Tensor, window_token_RAc: Tensor, window_len_R: Tensor, nodes: Nodes
) -> None:
    require_slots(score_BM, token_BM, lane_row_B, window_token_RAc, window_len_R, *nodes)
    sizes = (*nodes.node_ancestors_BNX.shape, window_token_RAc.shape[1])
    call("chain_layout", (score_BM, token_BM, lane_row_B, window_token_RAc, window_len_R, *nodes), *sizes)


def _verify_rows(
    lane_row_B: Tensor, status_R: Tensor, seq_len_R: Tensor, node_token_BN: Tensor, node_depth_BN: Tensor, node_ancestors_BNX: Tensor
) -> tuple[Tensor, ...]:
    read = (lane_row_B, status_R, seq_len_R, node_token_BN, node_depth_BN, node_ancestors_BNX)
    require_slots(*read)
    out = _verify_shape(*read)
    call("verify_rows", (*out, *read), *node_ancestors_BNX.shape)
    return out


def _verify_shape(
    lane_row_B: Tensor, status_R: Tensor, seq_len_R: Tensor, node_token_BN: Tensor, node_depth_BN: Tensor, node_ancestors_BNX: Tensor
) -> tuple[Tensor, ...]:
    shape = node_token_BN.shape
    new = node_token_BN.new_empty
    return (
        new(shape), new(shape, dtype=torch.bool), new(shape), new(shape), new(shape), new(shape[:1]), new(node_ancestors_BNX.shape),
    )  # fmt: skip


def _tree_walk(
    nodes: Nodes, drawn_BN: Tensor, finite_BN: Tensor, depth_cap_B: Tensor | None, lane_row_B: Tensor, limits: Limits, draft_context: int,
    run: Run,
) -> None:  # fmt: skip
    require_slots(*nodes, depth_cap_B, lane_row_B, *limits, *run)
    drawn, finite = dense(drawn_BN), dense(finite_BN)
    sizes = (*nodes.node_ancestors_BNX.shape, run.path_BA.shape[1], limits.stop_id_RE.shape[1])
    call("tree_walk", (*nodes, drawn, finite, depth_cap_B, lane_row_B, *limits, *run), draft_context, *sizes)


def _kv_move(
    kv_pool: Tensor, table_RP: Tensor, seq_len_R: Tensor, path_BA: Tensor, accept_len_B: Tensor, lane_row_B: Tensor | None
) -> None:
    require_slots(kv_pool, table_RP, seq_len_R, path_BA, accept_len_B, lane_row_B)
    require("page table", table_RP, _int32)
    layers, sides, pages, page_size, groups, dim = kv_pool.shape
    row = groups * dim * kv_pool.element_size()
    sizes = (*path_BA.shape, layers * sides, pages, page_size, table_RP.shape[1], row)
    call("kv_move", (kv_pool, table_RP, seq_len_R, path_BA, accept_len_B, lane_row_B), *sizes)


def _page_feature_write(
    page_feature: Tensor, page_size: int, table_BP: Tensor, begin_R: Tensor, length_B: Tensor, feature_BTF: Tensor,
    path_BA: Tensor | None, lane_row_B: Tensor | None,
) -> None:  # fmt: skip
    require("page table", table_BP, _int32)
    require("page feature", page_feature, feature_BTF.dtype)
    feature, length, begin = dense(feature_BTF), dense(length_B), dense(begin_R)
    require_slots(page_feature, table_BP, path_BA, lane_row_B)
    lanes, tokens, channels = feature.shape
    width = tokens if path_BA is None else path_BA.shape[1]
    sizes = (lanes, page_size, table_BP.shape[1], tokens, width, channels * feature.element_size())
    call("page_feature_write", (page_feature, table_BP, begin, length, feature, path_BA, lane_row_B), *sizes)


def _commit_rows(
    lane_row_B: Tensor, run: Run, feature_BNF: Tensor | None, cycle_1: Tensor, ring_ZBJ: Tensor, window: Window, progress: Progress,
    history_RL: Tensor | None, output_count_RV: Tensor | None, append: bool,
) -> None:  # fmt: skip
    # The ring may be a slice of one with more lanes.
    require_slots(lane_row_B, *run, feature_BNF, cycle_1, ring_ZBJ[0], *window, *progress, history_RL, output_count_RV)
    if output_count_RV is not None:
        require("output_count", output_count_RV, _int32)
    tensors = (lane_row_B, *run, feature_BNF, cycle_1, ring_ZBJ, *window, *progress, history_RL, output_count_RV)
    lookback, history, vocab = (
        0 if x is None else x.shape[1] for x in (window.lookback_token_RY, history_RL, output_count_RV)
    )  # fmt: skip
    features = 0 if feature_BNF is None else feature_BNF.shape[2] * feature_BNF.element_size()
    capacity, nodes = window.window_token_RAc.shape[1], run.sample_BN.shape[1]
    ring = ring_ZBJ.shape[0], ring_ZBJ.stride(0)
    call(
        "commit_rows",
        tensors,
        lane_row_B.shape[0],
        nodes,
        run.path_BA.shape[1],
        capacity,
        features,
        lookback,
        history,
        vocab,
        *ring,
        append,
    )


mail_apply = implement("mail_apply", _mail_apply)
"""The op of this name in C++, as those below."""
draft_window = implement("draft_window", _draft_window, _window_shape)
take_last = implement("take_last", _take_last)
chain_layout = implement("chain_layout", _chain_layout)
verify_rows = implement("verify_rows", _verify_rows, _verify_shape)
tree_walk = implement("tree_walk", _tree_walk)
kv_move = implement("kv_move", _kv_move)
page_feature_write = implement("page_feature_write", _page_feature_write)
commit_rows = implement("commit_rows", _commit_rows)

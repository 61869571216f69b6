"""Ops of a cycle in C++, other than products and attention: draft levels and trees, the rows' state, sampling, and gathers of rows.

Compiled by ``torch.compile`` they would take most of a draft step's time. Contracts are next to the references, in :mod:`..tree`,
:mod:`..sampling` and :mod:`..attention`. Embeddings, a drafter's input and gathers are not in the catalog: networks whose layers are one
native op (:mod:`graphspec.models.stack`) call them in place of torch, and :class:`NativeKernels` has those that stages call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import ConfigError
from ..groups import Beams, Candidates, Lanes, Limits, LogprobRing, Nodes, Penalties, Progress, RowRequest, Run, Truncation, Window
from ..op import Written
from ..registry import KernelSet
from . import CODE, channels_of, code_of, define_op, implement, outputs_of
from .call import bits, call, dense, require, require_slots
from .shaping import node_paths, take_rows


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


def _note_logprobs(
    logits_BNV: Tensor, path_BA: Tensor, sample_BN: Tensor, cycle_1: Tensor, ring: Written[LogprobRing], alternatives: int
) -> None:
    require("logits", logits_BNV, torch.float32)
    # A ring may be a slice of one with more lanes; entries of a lane are next to each other.
    require_slots(*(x[0, :1] for x in ring))
    chosen, top, _ = ring
    strides = (*chosen.stride()[:2], *top.stride()[:3])
    read = map(dense, (logits_BNV, path_BA, sample_BN, cycle_1))
    call("note_logprobs", (*read, *ring), *logits_BNV.shape, path_BA.shape[1], alternatives, chosen.shape[0], *strides)


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


def _forced_run(forced_BS: Tensor, candidates: Written[Candidates]) -> None:
    require_slots(*candidates)
    require("score", candidates[0], torch.float32)
    lanes, depth = forced_BS.shape
    call("forced_run", (dense(forced_BS), *candidates), lanes, depth, candidates[0].shape[1] // depth)


def _host_tree(mail: Tensor, trees_at: int, capacity: int, lane_row_B: Tensor, status_R: Tensor, candidates: Written[Candidates]) -> None:
    require_slots(mail, *candidates)
    require("score", candidates[0], torch.float32)
    call("host_tree", (mail, *map(dense, (lane_row_B, status_R)), *candidates), trees_at, capacity, *candidates[0].shape)


def _node_contexts(recent_token_RBt: Tensor, lane_row_B: Tensor, node_token_BN: Tensor, node_parent_BN: Tensor) -> Tensor:
    require_slots(recent_token_RBt)
    out = _contexts_shape(recent_token_RBt, lane_row_B, node_token_BN)
    read = map(dense, (lane_row_B, node_token_BN, node_parent_BN))
    call("node_contexts", (out, recent_token_RBt, *read), *node_token_BN.shape, recent_token_RBt.shape[1])
    return out


def _contexts_shape(recent_token_RBt: Tensor, _: Tensor, node_token_BN: Tensor, *__: object) -> Tensor:
    return node_token_BN.new_empty((*node_token_BN.shape, recent_token_RBt.shape[1] - 1))


def _note_tokens(token_BN: Tensor, path_BA: Tensor | None, count_B: Tensor, lane_row_B: Tensor, recent_token_RBt: Written[Tensor]) -> None:
    require_slots(recent_token_RBt)
    path = None if path_BA is None else dense(path_BA)
    sizes = (*token_BN.shape, token_BN.shape[1] if path is None else path.shape[1], recent_token_RBt.shape[1])
    call("note_tokens", (dense(token_BN), path, dense(count_B), dense(lane_row_B), recent_token_RBt), *sizes)


draft_topk = implement("draft_topk", _top_rows, _top_shape)
"""The op of this name in C++, as below."""
note_logprobs = define_op("note_logprobs", _note_logprobs)
draft_level = define_op("draft_level", _draft_level)
marginal_pool = define_op("marginal_pool", _marginal_pool)
ngram_match = define_op("ngram_match", _ngram_match)
forced_run = implement("forced_run", _forced_run)
host_tree = implement("host_tree", _host_tree)
node_contexts = implement("node_contexts", _node_contexts, _contexts_shape)
note_tokens = implement("note_tokens", _note_tokens)
tree_build = define_op("tree_build", _tree_build)
""":func:`graphspec.kernels.tree.tree_build.tree_build_into` in C++."""


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


def _table(weight: Tensor, hidden: int) -> tuple[int, int, int]:
    """The fields of the C++ struct ``Table`` after its pointers, of float32 ``[V, H]`` or a weight of :func:`.pack_segments`.

    Raises:
        ConfigError: another dtype or width.
    """
    if weight.dtype is torch.uint8:
        code, outputs, channels = code_of(weight), outputs_of(weight), channels_of(weight)
    else:
        require("embedding", weight, torch.float32)
        code, (outputs, channels) = CODE[weight.dtype], weight.shape
    if channels != hidden:
        raise ConfigError("native kernels: embedding", f"{hidden} channels", channels)
    return code, outputs, channels


def _embed(token: Tensor, valid: Tensor, weight: Tensor, hidden: int) -> Tensor:
    """Rows of a weight, float32 ``[..., hidden]``; zero where a token is not valid or out of range. Only these are dequantised."""
    table = _table(weight, hidden)
    out = _embed_shape(token, valid, weight, hidden)
    call("embed", (out, dense(token), dense(valid), dense(weight)), *table, token.numel())
    return out


def _embed_shape(token: Tensor, valid: Tensor, weight: Tensor, hidden: int) -> Tensor:
    return weight.new_empty((*token.shape, hidden), dtype=torch.float32)


def _enter(
    token: Tensor, valid: Tensor, weight: Tensor, hidden: Tensor, embedding_norm: Tensor | None, hidden_norm: Tensor | None, eps: float,
    hidden_first: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Concatenated embeddings and hidden states, each normed if it has norm weights; and the hidden states before the norm.

    Args:
        token: int64 ``[B, T]``. valid: bool; rows that are not valid are zero before any norm, whatever they hold.
        weight: of the embedding, float32 ``[V, H]`` or of :func:`.pack_segments`.
        hidden: float32 ``[B, T, H]``.
        embedding_norm, hidden_norm: weights of RMSNorms, float32 ``[H]``; None: no norm.
        eps: of both norms.
        hidden_first: whether hidden states come before embeddings.

    Returns:
        ``[B, T, 2 * H]`` and ``[B, T, H]``.

    Raises:
        ConfigError: embedding or hidden states are not float32.
    """
    require("hidden", hidden, torch.float32)
    table = _table(weight, hidden.shape[-1])
    out = _enter_shape(token, valid, weight, hidden)
    norms = (None if x is None else dense(x) for x in (embedding_norm, hidden_norm))
    tensors = (*out, dense(hidden), *norms, dense(token), dense(valid), dense(weight))
    call("enter", tensors, *table, token.numel(), hidden_first, bits(eps))
    return out


def _enter_shape(token: Tensor, valid: Tensor, weight: Tensor, hidden: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    size = hidden.shape[-1]
    return hidden.new_empty((*token.shape, 2 * size)), hidden.new_empty((*token.shape, size))


def _carry(hidden: Tensor, source: Tensor, valid: Tensor) -> Tensor:
    require("hidden", hidden, torch.float32)
    out = _carry_shape(hidden, source, valid)
    lanes, after, size = out.shape
    call("carry", (out, *map(dense, (hidden, source, valid))), lanes, hidden.shape[1], after, size)
    return out


def _carry_shape(hidden: Tensor, source: Tensor, valid: Tensor) -> Tensor:
    return hidden.new_empty((*source.shape, hidden.shape[2]))


def _positions(lane_row: Tensor, seq_len: Tensor, depth: Tensor) -> Tensor:
    out = depth.new_empty(depth.shape)
    call("positions", (out, *map(dense, (lane_row, seq_len, depth))), *depth.shape)
    return out


def _positions_shape(lane_row: Tensor, seq_len: Tensor, depth: Tensor) -> Tensor:
    return depth.new_empty(depth.shape)


embed = define_op("embed", _embed, _embed_shape)
enter = define_op("enter", _enter, _enter_shape)
_carried = define_op("carry", _carry, _carry_shape)
_sampled = define_op("positions", _positions, _positions_shape)


@dataclass(frozen=True, slots=True)
class NativeKernels(KernelSet):
    """The kernel set of ``kernels.mode=native``."""

    records: ClassVar[bool] = True

    def carry(self, hidden_BEH: Tensor, source_BK: Tensor, valid_BK: Tensor) -> Tensor:
        carried: Tensor = _carried(hidden_BEH, source_BK, valid_BK)
        return carried

    def sampled_positions(self, lane_row_B: Tensor, seq_len_R: Tensor, depth_BN: Tensor) -> Tensor:
        positions: Tensor = _sampled(lane_row_B, seq_len_R, depth_BN)
        return positions

    def take_rows(self, x_R: Tensor, row_B: Tensor) -> Tensor:
        found: Tensor = take_rows(x_R, row_B)
        return found

    def note_logprobs(
        self, logits_BNV: Tensor, path_BA: Tensor, sample_BN: Tensor, cycle_1: Tensor, ring: LogprobRing, alternatives: int
    ) -> None:
        note_logprobs(logits_BNV, path_BA, sample_BN, cycle_1, ring, alternatives)

    def node_paths(self, token_BN: Tensor, ancestors_BNX: Tensor) -> Tensor:
        paths: Tensor = node_paths(token_BN, ancestors_BNX)
        return paths


def _gumbel_noise(seed_B: Tensor, position_BT: Tensor, token_V: Tensor) -> Tensor:
    out = _noise_shape(seed_B, position_BT, token_V)
    call("gumbel_noise", (out, *map(dense, (seed_B, position_BT, token_V))), *out.shape)
    return out


def _noise_shape(seed_B: Tensor, position_BT: Tensor, token_V: Tensor) -> Tensor:
    return seed_B.new_empty((*position_BT.shape, token_V.shape[0]), dtype=torch.float32)


gumbel_noise = implement("gumbel_noise", _gumbel_noise, _noise_shape)
"""The op of this name in C++."""


def _filter_logits(logits_BTV: Tensor, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor) -> Tensor:
    require("logits", logits_BTV, torch.float32)
    out = torch.empty(logits_BTV.shape, dtype=torch.float32)
    call("filter_logits", (out, *map(dense, (logits_BTV, temperature_B, top_k_B, top_p_B, min_p_B))), *out.shape)
    return out


filter_logits = implement("filter_logits", _filter_logits, lambda logits, *_: logits.new_empty(logits.shape))
"""The op of this name in C++."""


def _sample_tokens(
    logits_BTV: Tensor, temperature_B: Tensor | None, seed_B: Tensor | None, position_BT: Tensor | None, top_k_B: Tensor | None,
    top_p_B: Tensor | None, min_p_B: Tensor | None, strict: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    require("logits", logits_BTV, torch.float32)
    token, sound = _sample_shape(logits_BTV)
    read = (logits_BTV, temperature_B, seed_B, position_BT, top_k_B, top_p_B, min_p_B)
    call("sample_tokens", (token, sound, *(None if x is None else dense(x) for x in read)), *logits_BTV.shape, strict)
    return token, sound


def _sample_shape(logits: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return logits.new_empty(logits.shape[:2], dtype=torch.int64), logits.new_empty(logits.shape[:2], dtype=torch.bool)


sample_tokens = implement("sample_tokens", _sample_tokens, _sample_shape)
"""The op of this name in C++."""

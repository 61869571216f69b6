"""Triton kernel of :mod:`graphspec.kernels.tree.commit_rows`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused.launch import launch, register
from ...groups import Progress, Run, Window
from ..commit_rows import RING_HEADER

CHUNK = 2048
"""Channels of a feature row copied by one program."""
TILE = 512
"""Entries, lanes times window, that the bookkeeping loads at a time."""


@triton.jit
def _bookkeeping(
    lane_row, sample, path, accept_len, outcome, cycle, ring, window_token, window_len, seq_len, budget, status,
    lookback_token, history, output_count,
    lanes, nodes, accept_width, capacity, ring_depth, ring_stride, ring_lane_stride, lookback, positions, vocab,
    LANES: tl.constexpr, WIDTH: tl.constexpr, LOOKBACK: tl.constexpr, HISTORY: tl.constexpr, COUNTS: tl.constexpr,
    APPEND: tl.constexpr, HEADER: tl.constexpr,
):  # fmt: skip
    """Everything but the features. One program for all lanes, since it advances the cycle counter, which no other program may read."""
    count = tl.load(cycle)
    slot = ring + (count % ring_depth) * ring_stride
    entry = tl.arange(0, WIDTH)[None, :]
    for begin in range(0, lanes, LANES):
        # Padded lanes of different turns may share a row.
        tl.debug_barrier()
        lane = (begin + tl.arange(0, LANES)).to(tl.int64)
        in_lanes = lane < lanes
        row = tl.load(lane_row + lane, mask=in_lanes, other=0)
        length = tl.load(accept_len + lane, mask=in_lanes, other=0)
        moved = in_lanes & (length > 0)
        state = tl.load(outcome + lane, mask=in_lanes, other=0)
        old_status = tl.load(status + row, mask=in_lanes, other=0)
        tokens_before = tl.load(seq_len + row, mask=moved, other=0)
        tokens_left = tl.load(budget + row, mask=moved, other=0)
        before = tl.load(window_len + row, mask=moved, other=0) if APPEND else tl.zeros_like(length)
        inside = in_lanes[:, None] & (entry < accept_width)
        valid = inside & (entry < length[:, None])
        node = tl.load(path + lane[:, None] * accept_width + entry, mask=valid, other=0)
        token = tl.load(sample + lane[:, None] * nodes + node, mask=valid, other=-1)
        if LOOKBACK:
            back = tl.arange(0, LOOKBACK)[None, :]
            kept = moved[:, None] & (back < lookback)
            source = tl.load(window_len + row, mask=moved, other=0)[:, None] + back
            of_back = tl.load(lookback_token + row[:, None] * lookback + source, mask=kept & (source < lookback), other=0)
            at_window = window_token + row[:, None] * capacity + source - lookback
            of_window = tl.load(at_window, mask=kept & (source >= lookback), other=0)
        # Other threads of this program overwrite below what was read above.
        tl.debug_barrier()
        if LOOKBACK:
            tl.store(lookback_token + row[:, None] * lookback + back, tl.where(source < lookback, of_back, of_window), mask=kept)

        at_lane = slot + lane * ring_lane_stride
        tl.store(at_lane, length, mask=in_lanes)
        tl.store(at_lane + 1, state, mask=in_lanes)
        tl.store(at_lane[:, None] + HEADER + entry, token, mask=inside)
        place = before[:, None] + entry
        written = valid & (place < capacity) if APPEND else inside & moved[:, None]
        tl.store(window_token + row[:, None] * capacity + place, token, mask=written)
        if HISTORY:
            position = tokens_before[:, None] + 1 + entry
            tl.store(history + row[:, None] * positions + position, token, mask=valid & (position < positions))
        if COUNTS:
            tl.atomic_add(output_count + row[:, None] * vocab + token, 1, mask=valid)
        tl.store(window_len + row, before + length, mask=moved)
        tl.store(seq_len + row, tokens_before + length, mask=moved)
        tl.store(budget + row, tokens_left - length, mask=moved)
        tl.store(status + row, state, mask=in_lanes & (state != old_status))
    # All threads must have read the counter.
    tl.debug_barrier()
    tl.store(cycle, count + 1)


@triton.jit
def _commit_rows(
    lane_row, sample, path, accept_len, outcome, feature, cycle, ring, window_token, window_len, seq_len, budget, status,
    window_feature, lookback_token, lookback_feature, history, output_count,
    lanes, nodes, accept_width, capacity, channels, ring_depth, ring_stride, ring_lane_stride, lookback, positions, vocab,
    LANES: tl.constexpr, WIDTH: tl.constexpr, LOOKBACK: tl.constexpr, HISTORY: tl.constexpr, COUNTS: tl.constexpr, APPEND: tl.constexpr,
    BOOKS: tl.constexpr, FEATURES: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, HEADER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program 0 does the bookkeeping. The others copy features: one window entry each, or with a lookback all entries of a lane."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    if BOOKS and program == 0:
        _bookkeeping(
            lane_row, sample, path, accept_len, outcome, cycle, ring, window_token, window_len, seq_len, budget, status,
            lookback_token, history, output_count,
            lanes, nodes, accept_width, capacity, ring_depth, ring_stride, ring_lane_stride, lookback, positions, vocab,
            LANES, WIDTH, LOOKBACK, HISTORY, COUNTS, APPEND, HEADER,
        )  # fmt: skip
    elif FEATURES:
        share = program - 1 if BOOKS else program
        channel = (share % CHUNKS) * CHUNK + tl.arange(0, CHUNK)
        inside = channel < channels
        share = share // CHUNKS
        lane = (share if LOOKBACK else share // accept_width).to(tl.int64)
        begin = 0 if LOOKBACK else share % accept_width
        end = accept_width if LOOKBACK else begin + 1
        length = tl.load(accept_len + lane)
        if length > 0:
            row = tl.load(lane_row + lane)
            windows = window_feature + row * capacity * channels + channel
            if LOOKBACK:
                # Entries only move to lower places, so ascending order reads each before it is overwritten; the barriers order the
                # threads of this program.
                backs = lookback_feature + row * lookback * channels + channel
                old = tl.load(window_len + row)
                for back in range(lookback):
                    source = old + back
                    if source < lookback:
                        kept = tl.load(backs + source * channels, mask=inside)
                    else:
                        kept = tl.load(windows + (source - lookback) * channels, mask=inside)
                    tl.debug_barrier()
                    tl.store(backs + back * channels, kept, mask=inside)
                    tl.debug_barrier()
            offset = tl.load(window_len + row) if APPEND else 0
            for entry in range(begin, end):
                node = tl.load(path + lane * accept_width + entry, mask=entry < length, other=0)
                at_node = feature + (lane * nodes + node) * channels + channel
                copied = tl.load(at_node, mask=inside & (entry < length), other=0.0)
                written = inside & (entry < length) & (offset + entry < capacity) if APPEND else inside
                tl.store(windows + (offset + entry) * channels, copied, mask=written)


def commit_rows(
    lane_row_B: Tensor,
    run: Run,
    feature_BNF: Tensor | None,
    cycle_1: Tensor,
    ring_ZBJ: Tensor,
    window: Window,
    progress: Progress,
    history_RL: Tensor | None,
    output_count_RV: Tensor | None,
    append: bool,
) -> None:
    lanes, width = run.path_BA.shape
    padded = triton.next_power_of_2(width)
    channels = 0 if feature_BNF is None else feature_BNF.shape[2]
    # Appending does not move the beginning of the window, so the lookback stays.
    lookback = 0 if window.lookback_token_RY is None or append else window.lookback_token_RY.shape[1]
    chunks = triton.cdiv(channels, CHUNK)
    copies = lanes * chunks * (1 if lookback else width)
    # Features of the lookback and of appended entries are addressed by the old window length, so they are copied first and a second
    # launch does the bookkeeping.
    launches = [(False, True, copies), (True, False, 1)] if (lookback or append) and copies else [(True, copies > 0, copies + 1)]
    for books, features, programs in launches:
        launch(
            _commit_rows, (programs,), lane_row_B, *run, feature_BNF, cycle_1, ring_ZBJ, window.window_token_RAc, window.window_len_R,
            *progress, *window[2:], history_RL, output_count_RV, lanes, run.sample_BN.shape[1], width, window.window_token_RAc.shape[1],
            channels, ring_ZBJ.shape[0],
            ring_ZBJ.stride(0), ring_ZBJ.stride(1), lookback, 0 if history_RL is None else history_RL.shape[1],
            0 if output_count_RV is None else output_count_RV.shape[1],
            LANES=min(triton.next_power_of_2(lanes), max(1, TILE // padded)), WIDTH=padded,
            LOOKBACK=triton.next_power_of_2(lookback) if lookback else 0, HISTORY=history_RL is not None,
            COUNTS=output_count_RV is not None, APPEND=append, BOOKS=books, FEATURES=features, CHUNKS=max(chunks, 1), CHUNK=CHUNK,
            HEADER=RING_HEADER,
        )  # fmt: skip


OP = register(commit_rows)

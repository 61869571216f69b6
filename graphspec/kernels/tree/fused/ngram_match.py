"""Triton kernel of :mod:`graphspec.kernels.tree.ngram_match`: one launch.

Every program scans one block of a lane's history and appends the occurrences it finds to the lane's list; programs past the row's length
exit at once. The last program of a lane to finish picks the paths from the whole list. The order of the list varies from run to run, but
the paths do not: they are maxima of ranks, and ranks are unique.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused.launch import launch, register, semaphores
from ...groups import LIVE, Candidates
from ..ngram_match import PATH_COST

BLOCK = 1024
"""Positions that one program scans."""
MERGE = 256
"""Occurrences processed at once while paths are picked."""


@triton.jit
def _occurrences(base, place, last, MIN: tl.constexpr, MAX: tl.constexpr, BLOCK: tl.constexpr):
    """Length of the match that ends at each position, up to ``MAX``, and whether it is at least ``MIN``."""
    running = place < last
    matched = tl.zeros([BLOCK], tl.int32)
    back = 0
    more = tl.max(running.to(tl.int32)) > 0
    while more:
        wanted = tl.load(base + last - back)
        running = running & (place >= back)
        running = running & (tl.load(base + place - back, mask=running, other=-1) == wanted)
        matched += running.to(tl.int32)
        back += 1
        more = (tl.max(running.to(tl.int32)) > 0) & (back < MAX)
    return matched, matched >= MIN


@triton.jit
def _longest(base, ranks, count, last, start, width, S: tl.constexpr, MAX: tl.constexpr, MERGE: tl.constexpr):
    """Position with the longest continuation among those that begin with the continuation of ``start``; ties by rank."""
    seed = tl.minimum(last - start, S)
    longest = start * 0
    first = 0
    while first < count:
        at = first + tl.arange(0, MERGE)
        rank = tl.load(ranks + at, mask=at < count, other=0)
        rank = tl.where(rank < 0, -1 - rank, rank)
        place = rank % width
        length = tl.minimum(last - place, S)
        begins = (at < count) & (length >= seed)
        for j in tl.static_range(S):
            wanted = tl.load(base + start + 1 + j, mask=j < seed, other=0)
            held = tl.load(base + place + 1 + j, mask=(at < count) & (j < seed) & (j < length), other=0)
            begins = begins & ((j >= seed) | (held == wanted))
        longest = tl.maximum(longest, tl.max(tl.where(begins, length * ((MAX + 1) * width) + rank, 0)))
        first += MERGE
    return longest % width


@triton.jit
def _close(base, ranks, count, last, best, width, S: tl.constexpr, MERGE: tl.constexpr):
    """Remove occurrences whose continuation is a prefix of that of ``best``. Returns the best remaining rank; -1: none."""
    path = tl.minimum(last - best, S)
    left = best * 0 - 1
    first = 0
    while first < count:
        at = first + tl.arange(0, MERGE)
        # Several threads may load an entry that one of them stores.
        tl.debug_barrier()
        rank = tl.load(ranks + at, mask=at < count, other=-1)
        listed = rank >= 0
        place = tl.where(listed, rank, 0) % width
        length = tl.minimum(last - place, S)
        contained = listed & (length <= path)
        for j in tl.static_range(S):
            wanted = tl.load(base + best + 1 + j, mask=j < path, other=0)
            held = tl.load(base + place + 1 + j, mask=listed & (j < length), other=0)
            contained = contained & ((j >= length) | (held == wanted))
        tl.debug_barrier()
        tl.store(ranks + at, -1 - rank, mask=contained)
        left = tl.maximum(left, tl.max(tl.where(contained, -1, rank)))
        first += MERGE
    return left


@triton.jit
def _ngram_match(
    history, lane_row, status, seq_len, score, token, parent, ranks, paths, counters, lanes, width,
    K: tl.constexpr, S: tl.constexpr, K_PAD: tl.constexpr, S_PAD: tl.constexpr, MIN: tl.constexpr, MAX: tl.constexpr,
    PATH_COST: tl.constexpr, LIVE: tl.constexpr, BLOCK: tl.constexpr, MERGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lane = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = tl.load(lane_row + lane)
    live = tl.load(status + row) == LIVE
    last = tl.where(live, tl.load(seq_len + row), -1)
    blocks = tl.maximum((last + BLOCK - 1) // BLOCK, 1)
    if block < blocks:
        base = history + row * width
        place = block * BLOCK + tl.arange(0, BLOCK)
        matched, usable = _occurrences(base, place, last, MIN, MAX, BLOCK)
        found = usable.to(tl.int32)
        ranks += lane * width
        first = tl.atomic_add(counters + lanes + lane, tl.sum(found))
        tl.store(ranks + first + tl.cumsum(found) - 1, matched.to(tl.int64) * width + place, mask=usable)
        # All stores of this program come before its arrival, and all arrivals before the last program's loads.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + lane, 1, sem="acq_rel")
        if arrived == blocks - 1:
            tl.debug_barrier()
            count = tl.atomic_xchg(counters + lanes + lane, 0)
            tl.atomic_xchg(counters + lane, 0)
            left = lane * 0 - 1
            at = 0
            while at < count:
                entry = at + tl.arange(0, MERGE)
                left = tl.maximum(left, tl.max(tl.load(ranks + entry, mask=entry < count, other=-1)))
                at += MERGE
            step, path = tl.arange(0, S_PAD), tl.arange(0, K_PAD)
            paths += lane * K * S
            for k in range(K):
                known = left >= 0
                best = lane * 0
                if known:
                    best = _longest(base, ranks, count, last, left % width, width, S, MAX, MERGE)
                    left = _close(base, ranks, count, last, best, width, S, MERGE)
                own = tl.load(base + best + 1 + step, mask=known & (step < S) & (step < last - best), other=-1)
                above = (path < k)[:, None] & (step < S)[None, :]
                earlier = tl.load(paths + path[:, None] * S + step[None, :], mask=above, other=-2)
                # Entries up to which this path is the same as each earlier one; the first that shares an entry stands for it.
                shared = tl.min(tl.where(earlier == own[None, :], S_PAD, step[None, :]), 1)
                keeper = tl.min(tl.where(shared[:, None] > step[None, :], path[:, None], k), 0)
                holder = tl.min(tl.where(shared[:, None] >= step[None, :], path[:, None], k), 0)
                used = (own >= 0) & (keeper == k)
                out = lane * K * S + step * K + k
                cost = (step + PATH_COST * k).to(tl.float32)
                tl.store(score + out, tl.where(used, -cost, float("-inf")), mask=step < S)
                tl.store(token + out, tl.where(used, own, -1), mask=step < S)
                tl.store(parent + out, tl.where(used & (step > 0), holder + K * (step - 1), -1).to(tl.int64), mask=step < S)
                tl.debug_barrier()
                tl.store(paths + k * S + step, own, mask=step < S)
                tl.debug_barrier()


def ngram_match(
    history_RL: Tensor,
    lane_row_B: Tensor,
    status_R: Tensor,
    seq_len_R: Tensor,
    candidates: Candidates,
    num_paths: int,
    depth: int,
    min_match: int,
    max_match: int,
) -> None:
    lanes, width = lane_row_B.shape[0], history_RL.shape[1]
    ranks, paths = history_RL.new_empty(lanes, width), history_RL.new_empty(lanes, num_paths, depth)
    launch(
        _ngram_match, (lanes, triton.cdiv(width, BLOCK)),
        history_RL, lane_row_B, status_R, seq_len_R, *candidates,
        ranks, paths, semaphores(history_RL.device, 2 * lanes), lanes, width,
        K=num_paths, S=depth, K_PAD=triton.next_power_of_2(num_paths), S_PAD=triton.next_power_of_2(depth), MIN=min_match, MAX=max_match,
        PATH_COST=PATH_COST, LIVE=LIVE, BLOCK=BLOCK, MERGE=MERGE,
    )  # fmt: skip


OP = register(ngram_match)

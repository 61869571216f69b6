"""Partial results of split-KV attention: load, store, fold, and the merge by several programs.

A partial is ``(acc, peak, total)``: the weighted sum of values, the largest score and the sum of weights relative to it. Folding is not
associative to the bit, so the order is fixed by slot number, on three levels: splits into runs, runs into stretches, stretches into the
result. A unit of work is a whole split, run or stretch, whose partial is in memory; the merge folds units exactly as one program would.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fold(acc, peak, total, next_acc, next_peak, next_total):
    """Online softmax: ``(acc, peak, total)`` combined with the partial of the next slots. An empty partial changes no bit."""
    joint = tl.maximum(peak, next_peak)
    safe = tl.where(joint == float("-inf"), 0.0, joint)
    keep = tl.exp2(peak - safe)
    add = tl.exp2(next_peak - safe)
    acc = tl.fma(acc, tl.broadcast_to(keep[:, None], acc.shape), next_acc * add[:, None])
    return acc, joint, tl.fma(total, keep, next_total * add)


@triton.jit
def empty(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The empty partial."""
    return tl.zeros([ROWS, WIDTH], tl.float32), tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)


@triton.jit
def load(part_acc, part_stat, slot, part, channel, rows, part_rows, DIM: tl.constexpr):
    """Load a partial that another thread wrote, bypassing L1, which may be stale."""
    valid = part < rows
    at = part_acc + slot * part_rows * DIM + part[:, None] * DIM + channel[None, :]
    acc = tl.load(at, mask=valid[:, None] & (channel < DIM)[None, :], other=0.0, cache_modifier=".cg")
    at = part_stat + slot * 2 * part_rows + part
    peak = tl.load(at, mask=valid, other=float("-inf"), cache_modifier=".cg")
    return acc, peak, tl.load(at + part_rows, mask=valid, other=0.0, cache_modifier=".cg")


@triton.jit
def store(part_acc, part_stat, slot, part, channel, rows, part_rows, acc, peak, total, DIM: tl.constexpr):
    valid = part < rows
    at = part_acc + slot * part_rows * DIM + part[:, None] * DIM + channel[None, :]
    tl.store(at, acc, mask=valid[:, None] & (channel < DIM)[None, :])
    at = part_stat + slot * 2 * part_rows + part
    tl.store(at, peak, mask=valid)
    tl.store(at + part_rows, total, mask=valid)


@triton.jit
def sink_weight(sinks, row, peak, REPEAT: tl.constexpr):
    """What the sinks of the rows' heads add to their sums of weights."""
    return tl.exp2(tl.load(sinks + row % REPEAT).to(tl.float32) * 1.4426950408889634 - peak)


@triton.jit
def capped(product, scale, cap):
    """Scores from products, base 2: ``cap * tanh(scale * product / cap)``; ``scale`` is divided by the cap, and the cap in base 2."""
    return cap * (1.0 - 2.0 / (tl.exp2(product * (scale * 2.8853900817779268)) + 1.0))


@triton.jit
def merged(
    part_acc, part_stat, scratch, part, channel, rows, part_rows, first_unit, units, unit, sinks, first_row,
    RUN: tl.constexpr, STRETCH: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, UNROLL: tl.constexpr,
    REPEAT: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """The result of rows ``part``: ``units`` units from ``first_unit`` on, of ``unit`` splits each, folded in order.

    ``sinks``: those of the ``REPEAT`` heads of the rows' group, with ``SINKS``; ``first_row``: that of the tile.
    """
    run_acc, run_peak, run_total = empty(ROWS, DIM_PAD)
    stretch_acc, stretch_peak, stretch_total = empty(ROWS, DIM_PAD)
    whole_acc, whole_peak, whole_total = empty(ROWS, DIM_PAD)
    for lowest in range(0, units, UNROLL):
        for step in tl.static_range(UNROLL):
            index = lowest + step
            new = load(part_acc, part_stat, scratch + index, part, channel, tl.where(index < units, rows, 0), part_rows, DIM)
            run_acc, run_peak, run_total = fold(run_acc, run_peak, run_total, new[0], new[1], new[2])
            # Selects, not branches, so that later loads can be issued early.
            end = (first_unit + index + 1) * unit
            closed = end % RUN == 0
            acc, peak, total = fold(stretch_acc, stretch_peak, stretch_total, run_acc, run_peak, run_total)
            stretch_acc, stretch_peak = tl.where(closed, acc, stretch_acc), tl.where(closed, peak, stretch_peak)
            stretch_total = tl.where(closed, total, stretch_total)
            run_acc, run_peak = tl.where(closed, 0.0, run_acc), tl.where(closed, float("-inf"), run_peak)
            run_total = tl.where(closed, 0.0, run_total)
            closed = end % STRETCH == 0
            acc, peak, total = fold(whole_acc, whole_peak, whole_total, stretch_acc, stretch_peak, stretch_total)
            whole_acc, whole_peak = tl.where(closed, acc, whole_acc), tl.where(closed, peak, whole_peak)
            whole_total = tl.where(closed, total, whole_total)
            stretch_acc, stretch_peak = tl.where(closed, 0.0, stretch_acc), tl.where(closed, float("-inf"), stretch_peak)
            stretch_total = tl.where(closed, 0.0, stretch_total)
    acc, peak, total = fold(stretch_acc, stretch_peak, stretch_total, run_acc, run_peak, run_total)
    acc, peak, total = fold(whole_acc, whole_peak, whole_total, acc, peak, total)
    if SINKS:
        total += sink_weight(sinks, first_row + part, peak, REPEAT)
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def first_group(counter, arriving, helpers, groups, POLLS: tl.constexpr):
    """Publish this program's partials and return the first group of rows that it merges; ``groups``: none.

    The last ``helpers`` of ``arriving`` programs to arrive share the merge. Each polls up to ``POLLS`` times until all have arrived; those
    still there then claim groups one by one until none is left. No program waits for one that may not be running: a program that has
    polled ``POLLS`` times exits, and the last to arrive need not poll. A program that gets a group sees the stores of all. ``counter`` is
    two words, 0 before the launch and 0 again once every program has left.
    """
    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
    group = groups
    if arrived > arriving - helpers:
        polls = 0
        while (arrived < arriving) & (polls < POLLS):
            arrived = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
            polls += 1
        if arrived == arriving:
            group = next_group(counter, helpers, groups)
        else:
            claims = tl.atomic_add(counter + 1, 1 << 16, sem="relaxed", scope="gpu")
            if tl.maximum((claims & 0xFFFF) - groups, 0) + (claims >> 16) + 1 == helpers:
                reset(counter)
    return group


@triton.jit
def next_group(counter, helpers, groups):
    """Claim the next group; ``groups`` if none is left, after which a program must not call this again."""
    claims = tl.atomic_add(counter + 1, 1, sem="relaxed", scope="gpu")
    group = claims & 0xFFFF
    # Low half: claims, those beyond `groups` unsuccessful. High half: programs that left without claiming.
    if group - groups + 1 + (claims >> 16) == helpers:
        reset(counter)
    return tl.minimum(group, groups)


@triton.jit
def reset(counter):
    tl.store(counter, 0)
    tl.store(counter + 1, 0)

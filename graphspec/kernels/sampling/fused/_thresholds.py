"""Thresholds of top-k, top-p and min-p, one per row, without a sort.

There are four launches, each finished by the last program of a row:

1. the largest logit;
2. a histogram of counts and integer masses over the distance from it, in bins of equal *relative* width: fine where the likely tokens
   are, and independent of the temperature. It gives the bin of the k-th largest logit;
3. the values in that bin are collected in any order, and the k-th largest is found by radix select: three passes, each a histogram of
   the next eleven bits of the remaining values. That gives the mass that top-k keeps, and the bin where ``top_p`` of it is reached;
4. the same in that bin, by mass.

Sums are of integers, so results depend neither on the order of atomics nor on the order of a list.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...fused.launch import Launch, launch, semaphores
from ...fused.work import Situation, Work, works
from ..filter_logits import MASS_BITS
from ._vocabulary import arrive, exp_exact, is_finite, log_exact, ordered, unordered, vocabulary_work

BLOCK = 1024
BINS = 4096
SUB_BITS = 11
"""Bits of a logit that one pass over a list decides; 32 bits take three passes."""
_MASS_UNIT = tl.constexpr(2.0**MASS_BITS)
# Bins split distances of 2^-8 to 2^8, sixteen octaves, into 256 parts each: the exponent and the leading 8 bits of the mantissa.
_MANTISSA_REST = tl.constexpr(15)
_FIRST_BIN = tl.constexpr((127 - 8) << 8)
_LIST_BLOCK = tl.constexpr(2048)


@triton.jit
def _mass(x, peak, temperature):
    """Unnormalised probability of a token, in units of 2^-40 of the largest."""
    return (exp_exact(tl.div_rn(x - peak, temperature)) * _MASS_UNIT).to(tl.int64)


@triton.jit
def _bin(x, peak, BINS: tl.constexpr):
    """Histogram bin, 0 for the largest logits. Monotone in x, so equal logits share a bin and bins do not overlap."""
    distance = (peak - x).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum((distance >> _MANTISSA_REST) - _FIRST_BIN, 0), BINS - 1)


def _searched_work(launch: Launch, at: Situation) -> Work:
    """The last program of a row reads a list once for every 11 bits, and once more for the probability mass within top-k."""
    found = vocabulary_work(launch, at)
    passes = 4 if launch.kernel is _kth_largest else 3
    return Work(found.bytes, found.programs, found.in_flight, found.memory, found.cache + 2 * passes)


@works(vocabulary_work)
@triton.jit
def _peaks(
    logits, part_peak, part_flag, peak, sound, count, mass, length, counters, vocab, parts,
    STRICT: tl.constexpr, STEPS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The largest finite logit of a row, and whether the row is sound; clears the row's histogram."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    flag = tl.zeros([BLOCK], tl.int32)
    for step in tl.static_range(STEPS):
        column = (part * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * vocab + column, mask=column < vocab, other=0.0)
        finite = is_finite(x)
        largest = tl.maximum(largest, tl.where(finite & (column < vocab), x, float("-inf")))
        flag = tl.maximum(flag, tl.where(finite, 0, tl.where(x == float("-inf"), 1, 2)))
    tl.store(part_peak + row * parts + part, tl.max(largest))
    tl.store(part_flag + row * parts + part, tl.max(flag))
    if part == 0:
        bins = row * BINS + tl.arange(0, BINS)
        tl.store(count + bins, tl.zeros([BINS], tl.int32))
        tl.store(mass + bins, tl.zeros([BINS], tl.int64))
        tl.store(length + row * 2 + tl.arange(0, 2), tl.zeros([2], tl.int32))
    if arrive(counters + row, parts):
        slot = tl.arange(0, PARTS)
        top = tl.max(tl.load(part_peak + row * parts + slot, mask=slot < parts, other=float("-inf")))
        worst = tl.max(tl.load(part_flag + row * parts + slot, mask=slot < parts, other=0))
        tl.store(peak + row, top)
        if STRICT:
            tl.store(sound + row, worst == 0)
        else:
            tl.store(sound + row, (worst < 2) & (top > float("-inf")))


@works(vocabulary_work)
@triton.jit
def _histogram(
    logits, temperature, top_k, peak, count, mass, threshold, chosen, counters, vocab, parts, rows_per_lane,
    STEPS: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Counts and masses per bin; the last program finds the bin of the k-th largest logit and its rank within it (bin BINS: no top-k)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    row_temperature = tl.load(temperature + row // rows_per_lane)
    top = tl.load(peak + row)
    sampled = (row_temperature > 0) & (top > float("-inf"))
    if sampled:
        for step in tl.static_range(STEPS):
            column = (part * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(logits + row * vocab + column, mask=column < vocab, other=float("-inf"))
            finite = is_finite(x)
            x = tl.where(finite, x, top)
            bins = row * BINS + _bin(x, top, BINS)
            weight = _mass(x, top, row_temperature)
            tl.atomic_add(count + bins, 1, mask=finite, sem="relaxed")
            tl.atomic_add(mass + bins, weight, mask=finite & (weight > 0), sem="relaxed")
    if arrive(counters + row, parts):
        bins = tl.arange(0, BINS)
        limit = tl.load(top_k + row // rows_per_lane)
        bin_counts = tl.load(count + row * BINS + bins)
        cumulative = tl.cumsum(bin_counts, 0)
        limited = sampled & (limit > 0) & (limit < vocab)
        wanted = tl.minimum(limit, vocab).to(tl.int32)
        found = tl.where(limited, tl.sum((cumulative < wanted).to(tl.int32)), BINS)
        before = tl.sum(tl.where(bins < found, bin_counts, 0))
        tl.store(chosen + row * 4, found.to(tl.int64))
        tl.store(chosen + row * 4 + 1, (wanted - before).to(tl.int64))
        tl.store(threshold + row, float("-inf"))


@triton.jit
def _collect(x, selected, values, length, BLOCK: tl.constexpr):
    """Append the selected entries of x to a list."""
    is_selected = selected.to(tl.int32)
    place = tl.cumsum(is_selected, 0) - is_selected
    selected_count = tl.sum(is_selected)
    if selected_count > 0:
        begin = tl.atomic_add(length, selected_count, sem="relaxed")
        tl.store(values + begin + place, x, mask=selected)


@triton.jit
def _key(x):
    """A non-negative int64 below 2^32 with the order of x."""
    return ordered(x).to(tl.int64) + (1 << 31)


@triton.jit
def _value(key):
    return unordered((key - (1 << 31)).to(tl.int32))


@triton.jit
def _sub_bin(key, prefix, HIGH: tl.constexpr, SUB_BITS: tl.constexpr):
    """The ``SUB_BITS`` bits of a key below bit ``HIGH``, and whether the bits from ``HIGH`` on equal ``prefix``."""
    LOW: tl.constexpr = HIGH - SUB_BITS if HIGH > SUB_BITS else 0
    return ((key >> LOW) & ((1 << (HIGH - LOW)) - 1)).to(tl.int32), (key >> HIGH) == prefix


@triton.jit
def _extended(prefix, found, HIGH: tl.constexpr, SUB_BITS: tl.constexpr):
    LOW: tl.constexpr = HIGH - SUB_BITS if HIGH > SUB_BITS else 0
    return (prefix << (HIGH - LOW)) | found


@triton.jit
def _list_kth(values, size, rank, SUB_BITS: tl.constexpr):
    """Key of the ``rank``-th largest entry of a list, by radix select with ``SUB_BITS`` bits per pass."""
    sub_bins = tl.arange(0, 1 << SUB_BITS)
    key = tl.zeros([], tl.int64)
    for level in tl.static_range((32 + SUB_BITS - 1) // SUB_BITS):
        counts = tl.zeros([1 << SUB_BITS], tl.int32)
        begin = 0
        while begin < size:
            place = begin + tl.arange(0, _LIST_BLOCK)
            entry = _key(tl.load(values + place, mask=place < size, other=0.0))
            sub, left = _sub_bin(entry, key, 32 - level * SUB_BITS, SUB_BITS)
            counts += tl.histogram(sub, 1 << SUB_BITS, mask=left & (place < size))
            begin += _LIST_BLOCK
        reach = tl.sum(counts) - tl.cumsum(counts, 0) + counts
        found = tl.sum((reach >= rank).to(tl.int32)) - 1
        rank -= tl.sum(tl.where(sub_bins > found, counts, 0))
        key = _extended(key, found, 32 - level * SUB_BITS, SUB_BITS)
    return key


@triton.jit
def _list_share(values, size, before, wanted, masses, peak, temperature, SUB_BITS: tl.constexpr):
    """Key of the smallest entry of a list for which ``before`` plus the mass of all larger entries is below ``wanted``.

    ``masses`` is scratch for ``2 ** SUB_BITS`` sums, shared by the threads of the program.
    """
    sub_bins = tl.arange(0, 1 << SUB_BITS)
    key = tl.zeros([], tl.int64)
    for level in tl.static_range((32 + SUB_BITS - 1) // SUB_BITS):
        tl.debug_barrier()
        tl.store(masses + sub_bins, tl.zeros([1 << SUB_BITS], tl.int64))
        tl.debug_barrier()
        minimum = tl.full([_LIST_BLOCK], (1 << SUB_BITS) - 1, tl.int32)
        maximum = tl.zeros([_LIST_BLOCK], tl.int32)
        begin = 0
        while begin < size:
            place = begin + tl.arange(0, _LIST_BLOCK)
            x = tl.load(values + place, mask=place < size, other=0.0)
            sub, left = _sub_bin(_key(x), key, 32 - level * SUB_BITS, SUB_BITS)
            left = left & (place < size)
            minimum = tl.where(left, tl.minimum(minimum, sub), minimum)
            maximum = tl.where(left, tl.maximum(maximum, sub), maximum)
            weight = _mass(tl.where(left, x, peak), peak, temperature)
            tl.atomic_add(masses + sub, weight, mask=left & (weight > 0), sem="relaxed")
            begin += _LIST_BLOCK
        tl.debug_barrier()
        bin_mass = tl.load(masses + sub_bins, cache_modifier=".cg")
        above = before + tl.sum(bin_mass) - tl.cumsum(bin_mass, 0)
        found = (1 << SUB_BITS) - tl.sum((above.to(tl.float64) < wanted).to(tl.int32))
        # Clamped to the list: its smallest entry if all are kept, its largest if none would be.
        found = tl.minimum(tl.maximum(found, tl.min(minimum)), tl.max(maximum))
        before = tl.sum(tl.where(sub_bins == found, above, 0))
        key = _extended(key, found, 32 - level * SUB_BITS, SUB_BITS)
    return key


@triton.jit
def _list_mass(values, size, key, peak, temperature):
    """Mass of the list's entries whose key is at least ``key``."""
    total = tl.zeros([_LIST_BLOCK], tl.int64)
    begin = 0
    while begin < size:
        place = begin + tl.arange(0, _LIST_BLOCK)
        x = tl.load(values + place, mask=place < size, other=0.0)
        counted = (place < size) & (_key(x) >= key)
        total += tl.where(counted, _mass(tl.where(counted, x, peak), peak, temperature), 0)
        begin += _LIST_BLOCK
    return tl.sum(total)


@works(_searched_work)
@triton.jit
def _kth_largest(
    logits, temperature, top_p, peak, count, mass, threshold, chosen, share, values, length, counters, vocab, parts, rows_per_lane,
    STEPS: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, SUB_BITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The top-k threshold, then the bin in which top-p is reached among the tokens that top-k keeps."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    lane = row // rows_per_lane
    row_temperature = tl.load(temperature + lane)
    top = tl.load(peak + row)
    sampled = (row_temperature > 0) & (top > float("-inf"))
    bin_k = tl.load(chosen + row * 4).to(tl.int32)
    if sampled & (bin_k < BINS):
        for step in tl.static_range(STEPS):
            column = (part * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(logits + row * vocab + column, mask=column < vocab, other=float("-inf"))
            finite = is_finite(x)
            x = tl.where(finite, x, top)
            _collect(x, finite & (_bin(x, top, BINS) == bin_k), values + row * vocab, length + row * 2, BLOCK)
    last = arrive(counters + row, parts)
    if last & sampled:
        kept = tl.zeros([], tl.int64)
        if bin_k < BINS:
            rank = tl.load(chosen + row * 4 + 1)
            size = tl.load(length + row * 2)
            key = _list_kth(values + row * vocab, size, rank, SUB_BITS)
            kept = _list_mass(values + row * vocab, size, key, top, row_temperature)
            tl.store(threshold + row, _value(key))
        bins = tl.arange(0, BINS)
        bin_mass = tl.load(mass + row * BINS + bins)
        bin_mass = tl.where(bins < bin_k, bin_mass, tl.where(bins == bin_k, kept, 0))
        before = tl.cumsum(bin_mass, 0) - bin_mass
        wanted = tl.load(top_p + lane).to(tl.float64) * tl.sum(bin_mass).to(tl.float64)
        occupied = (tl.load(count + row * BINS + bins) > 0) & (bins <= bin_k)
        bin_p = tl.max(tl.where(occupied & (before.to(tl.float64) < wanted), bins, 0))
        tl.store(chosen + row * 4 + 2, bin_p.to(tl.int64))
        tl.store(chosen + row * 4 + 3, tl.sum(tl.where(bins == bin_p, before, 0)))
        tl.store(share + row, wanted)


@works(_searched_work)
@triton.jit
def _least(
    logits, temperature, top_p, min_p, peak, mass, threshold, chosen, share, values, length, counters, vocab, parts, rows_per_lane,
    STEPS: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, SUB_BITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The top-p threshold, then the largest of the thresholds of top-k, top-p and min-p."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    lane = row // rows_per_lane
    row_temperature = tl.load(temperature + lane)
    top = tl.load(peak + row)
    sampled = (row_temperature > 0) & (top > float("-inf"))
    nucleus = tl.load(top_p + lane) < 1
    # Rewritten only by the last program, after every other has arrived.
    top_k_threshold = tl.load(threshold + row)
    if sampled & nucleus:
        bin_p = tl.load(chosen + row * 4 + 2).to(tl.int32)
        for step in tl.static_range(STEPS):
            column = (part * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(logits + row * vocab + column, mask=column < vocab, other=float("-inf"))
            kept = is_finite(x) & (x >= top_k_threshold)
            x = tl.where(kept, x, top)
            _collect(x, kept & (_bin(x, top, BINS) == bin_p), values + row * vocab, length + row * 2 + 1, BLOCK)
    last = arrive(counters + row, parts)
    if last & sampled:
        top_p_threshold = tl.full([], float("-inf"), tl.float32)
        if nucleus:
            wanted = tl.load(share + row)
            before = tl.load(chosen + row * 4 + 3)
            size = tl.load(length + row * 2 + 1)
            key = _list_share(values + row * vocab, size, before, wanted, mass + row * BINS, top, row_temperature, SUB_BITS)
            top_p_threshold = _value(key)
        # log(0) is -inf: a min_p of 0 keeps everything.
        minimum = tl.load(min_p + lane)
        min_p_threshold = tl.where(minimum > 0, top + row_temperature * log_exact(tl.where(minimum > 0, minimum, 1.0)), float("-inf"))
        tl.store(threshold + row, tl.maximum(tl.maximum(top_k_threshold, top_p_threshold), min_p_threshold))


@dataclass(frozen=True, slots=True)
class Split:
    """How a row of logits is split among programs: ``parts`` programs of ``steps`` blocks. Results do not depend on it."""

    rows: int
    parts: int
    steps: int

    @classmethod
    def of(cls, rows: int, vocab: int) -> Split:
        """Few rows get small parts, so that their programs fill the device; many rows get larger ones."""
        steps = 1 if rows <= 4 else 4
        return cls(rows, triton.cdiv(vocab, steps * BLOCK), steps)


def thresholds(
    logits_BTV: Tensor, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor, strict: bool
) -> tuple[Tensor, Tensor]:
    """The smallest logit kept in each row, float32 ``[B, T]`` (undefined for greedy rows), and which rows are sound, bool ``[B, T]``."""
    lanes, rows_per_lane, vocab = logits_BTV.shape
    rows, device = lanes * rows_per_lane, logits_BTV.device
    split, counters = Split.of(rows, vocab), semaphores(device, rows)
    part_peak = torch.empty(rows, split.parts, dtype=torch.float32, device=device)
    peak, threshold = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    part_flag = torch.empty(rows, split.parts, dtype=torch.int32, device=device)
    sound = torch.empty(rows, dtype=torch.bool, device=device)
    count = torch.empty(rows, BINS, dtype=torch.int32, device=device)
    mass = torch.empty(rows, BINS, dtype=torch.int64, device=device)
    length = torch.empty(rows, 2, dtype=torch.int32, device=device)
    chosen = torch.empty(rows, 4, dtype=torch.int64, device=device)
    share = torch.empty(rows, dtype=torch.float64, device=device)
    found = torch.empty(rows, vocab, dtype=torch.float32, device=device)
    grid, sizes = (split.parts, rows), {"STEPS": split.steps, "BLOCK": BLOCK, "BINS": BINS}
    launch(
        _peaks, grid, logits_BTV, part_peak, part_flag, peak, sound, count, mass, length, counters, vocab, split.parts,
        STRICT=strict, PARTS=triton.next_power_of_2(split.parts), **sizes,
    )  # fmt: skip
    launch(
        _histogram, grid, logits_BTV, temperature_B, top_k_B, peak, count, mass, threshold, chosen, counters,
        vocab, split.parts, rows_per_lane, **sizes,
    )  # fmt: skip
    launch(
        _kth_largest, grid, logits_BTV, temperature_B, top_p_B, peak, count, mass, threshold, chosen, share, found, length, counters,
        vocab, split.parts, rows_per_lane, SUB_BITS=SUB_BITS, **sizes,
    )  # fmt: skip
    launch(
        _least, grid, logits_BTV, temperature_B, top_p_B, min_p_B, peak, mass, threshold, chosen, share, found, length, counters,
        vocab, split.parts, rows_per_lane, SUB_BITS=SUB_BITS, **sizes,
    )  # fmt: skip
    return threshold.view(lanes, rows_per_lane), sound.view(lanes, rows_per_lane)

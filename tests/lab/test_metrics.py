"""Figures of the lab on timelines made by hand: every definition, and what is excluded."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphspec.lab.measure.metrics import (
    CycleCount,
    Round,
    Timeline,
    acceptance,
    acceptance_within,
    closed_loop_arrivals,
    downsampled,
    figures,
    first_request,
    latency,
    percentile,
    ratio,
)

BURSTY = Timeline(
    arrived=10.0,
    bursts=[(10.5, 1), (10.7, 3), (10.8, 1), (11.1, 4)],
    finished=11.1,
    reason="length",
    cycles=[CycleCount(3, 3, 3), CycleCount(1, 3, 3), CycleCount(4, 3, 3)],
)
"""One token by the prefill, then three cycles of depth 3."""


def thousandths(minimum: int, maximum: int) -> st.SearchStrategy[float]:
    """Floats without denormals, which an engine of the same process may have switched off."""
    return st.integers(minimum, maximum).map(lambda number: number / 1000)


def test_a_burst_is_one_event_and_time_per_token_divides_by_tokens() -> None:
    assert BURSTY.tokens == 9
    assert BURSTY.ttft == pytest.approx(0.5) and BURSTY.e2e == pytest.approx(1.1)
    assert BURSTY.tpot == pytest.approx((1.1 - 0.5) / 8)
    assert BURSTY.itl == pytest.approx([0.2, 0.1, 0.3])
    found = figures([Round([BURSTY])])
    assert found["itl_ms"]["mean"] == pytest.approx(200) and found["itl_ms"]["p50"] == pytest.approx(200)
    assert found["itl_samples_ms"] == pytest.approx([100, 200, 300])
    assert found["burst_tokens"] == {"1": 1, "3": 1, "4": 1}
    assert found["tokens_per_second"]["median"] == pytest.approx(9 / 1.1)
    assert found["drafted_per_second"] == pytest.approx(9 / 1.1) and found["accepted_per_second"] == pytest.approx(5 / 1.1)


def test_acceptance_counts_the_bonus_and_conditions_on_what_came_before() -> None:
    found = figures([Round([BURSTY])])
    assert found["acceptance_length"] == pytest.approx((3 + 1 + 4) / 3)
    assert found["acceptance_unconditional"] == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert found["acceptance_conditional"] == pytest.approx([2 / 3, 1, 1 / 2])
    never = acceptance([CycleCount(1, 2, 2)])
    assert never["acceptance_unconditional"] == [0, 0] and never["acceptance_conditional"] == [0, None]


def test_a_request_that_ends_inside_a_run_keeps_its_tokens_and_loses_its_last_cycle() -> None:
    cut = replace(
        BURSTY, bursts=[*BURSTY.bursts[:-1], (11.1, 2)], cycles=[*BURSTY.cycles[:-1], CycleCount(2, 3, 3)], cut=True, reason="stop"
    )
    found = figures([Round([cut])])
    assert cut.tokens == 7 and found["tokens_per_second"]["median"] == pytest.approx(7 / 1.1)
    assert found["acceptance_length"] == pytest.approx(2) and found["acceptance_unconditional"] == pytest.approx([0.5, 0.5, 0])
    only = replace(cut, cycles=cut.cycles[-1:])
    assert figures([Round([only])])["acceptance_length"] is None


def test_depths_that_change_are_counted_where_they_reach() -> None:
    found = acceptance([CycleCount(1, 0, 0), CycleCount(2, 1, 1), CycleCount(3, 2, 2), CycleCount(1, 2, 2)])
    assert found["acceptance_length"] == pytest.approx(6 / 3)
    assert found["acceptance_unconditional"] == pytest.approx([2 / 3, 1 / 2]) and found["acceptance_conditional"] == pytest.approx(
        [2 / 3, 1]
    )


def test_acceptance_is_followed_along_the_text_and_by_request() -> None:
    """A cycle counts where it began; plain cycles, cut ones and requests that were not served count nowhere, but their tokens do."""
    long = replace(BURSTY, bursts=[(10.5, 1), (11.0, 32)], cycles=[CycleCount(4, 3, 3), *[CycleCount(1, 0, 0)] * 20, CycleCount(2, 3, 3)])
    lost = replace(BURSTY, reason="abort")
    found = acceptance_within([Round([long, lost, BURSTY]), Round([long, BURSTY, replace(BURSTY, cut=True)])])
    assert found["acceptance_by_request"] == {"0": 3.0, "1": pytest.approx(8 / 3), "2": pytest.approx((3 + 1 + 4 + 3 + 1) / 5)}
    assert found["stretch_tokens"] == 3, "33 tokens in at most 16 parts"
    # Cycles began at 1 (all requests), 4 and 5 (the short ones) and, after 20 plain ones, 25.
    expected = [(4 + 4 + 3 + 3 + 3) / 5, (1 + 4 + 1 + 4 + 1) / 5, *[None] * 6, 2.0, None, None]
    assert found["acceptance_along_text"] == pytest.approx(expected)
    plain = replace(BURSTY, cycles=[CycleCount(1, 0, 0)] * 8)
    assert acceptance_within([Round([plain])]) == {"acceptance_by_request": {}, "acceptance_along_text": [], "stretch_tokens": 0}


def test_the_first_request_is_that_of_the_round_of_median_speed() -> None:
    def slowed(factor: float) -> Round:
        bursts = [(10 + factor * (time - 10), tokens) for time, tokens in BURSTY.bursts]
        return Round([replace(BURSTY, bursts=bursts, finished=bursts[-1][0])])

    found = first_request([slowed(9.0), slowed(1.0), slowed(2.0)])
    assert [moment for moment, _ in found] == pytest.approx([1000, 1400, 1600, 2200]) and [tokens for _, tokens in found] == [1, 3, 1, 4]
    assert first_request([Round([replace(BURSTY, reason="abort"), BURSTY])]) == []
    endless = replace(BURSTY, bursts=[(10.0 + n, 3) for n in range(1000)])
    assert sum(tokens for _, tokens in first_request([Round([endless])])) == 258


def test_a_single_token_has_no_time_per_output_token() -> None:
    one = Timeline(0.0, [(0.25, 1)], 0.25, "length")
    assert one.tpot is None and one.itl == []
    found = figures([Round([one])])
    assert found["tpot_ms"] is None and found["itl_ms"] is None and found["ttft_ms"]["p99"] == pytest.approx(250)
    assert found["acceptance_length"] is None and found["drafted_per_second"] is None and found["burst_tokens"] == {}


def test_aborted_requests_are_counted_and_nothing_else() -> None:
    lost = Timeline(10.0, [(10.1, 1), (10.2, 50)], 10.9, "abort", [CycleCount(50, 3, 3)])
    failed = Timeline(10.0, [], 10.1, "error")
    with_them, without = figures([Round([BURSTY, lost, failed])]), figures([Round([BURSTY])])
    assert with_them["aborted"] == 2 and without["aborted"] == 0
    assert {**with_them, "aborted": 0} == without
    none_served = figures([Round([failed])])
    assert none_served["tokens_per_second"]["median"] == 0 and none_served["ttft_ms"] is None


def test_requests_that_overlap_share_the_clock() -> None:
    first = Timeline(0.0, [(1.0, 1), (2.0, 3)], 2.0, "length")
    second = Timeline(0.5, [(2.0, 1), (4.0, 5)], 4.0, "length")
    both = Round([first, second])
    assert both.seconds == pytest.approx(4) and both.tokens_per_second == pytest.approx(10 / 4)
    assert both.tokens_per_second_per_user == pytest.approx((4 / 2 + 6 / 3.5) / 2)


def test_a_user_sends_the_next_request_after_an_answer() -> None:
    assert closed_loop_arrivals(1.0, [5.0, 3.0, 9.0, 7.0], users=2) == [1.0, 1.0, 3.0, 5.0]
    assert closed_loop_arrivals(1.0, [2.0], users=8) == [1.0]


def test_a_ratio_is_taken_within_rounds() -> None:
    def took(seconds: float) -> Round:
        return Round([Timeline(0.0, [(seconds, 10)], seconds, "length")])

    # The machine was slow in the second round; both sides were hit and the ratio was not.
    found = ratio([took(1.0), took(4.0), took(1.0)], [took(2.0), took(8.0), took(3.0)])
    assert found["rounds"] == pytest.approx([2, 2, 3]) and found["median"] == pytest.approx(2)


@given(st.lists(thousandths(-(10**6), 10**6), min_size=1, max_size=40), thousandths(0, 10**5))
def test_percentiles_are_those_of_numpy(values: list[float], share: float) -> None:
    assert percentile(values, share) == pytest.approx(np.percentile(values, share), abs=1e-9)


@given(st.lists(thousandths(0, 10**4), min_size=1, max_size=200), st.integers(2, 50))
def test_thinning_keeps_the_ends_and_the_order(values: list[float], maximum: int) -> None:
    kept = downsampled(values, maximum)
    assert len(kept) == min(len(values), maximum) and kept == sorted(kept)
    assert (kept[0], kept[-1]) == (min(values), max(values))


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 7)), max_size=30))
def test_shares_multiply_up_to_the_length(runs: list[tuple[int, int]]) -> None:
    """With one depth for all, 1 + the sum of unconditional shares is the acceptance length, and the conditional ones multiply to them."""
    cycles = [CycleCount(min(tokens, 7), 6, 6) for _, tokens in runs]
    found = acceptance(cycles)
    if cycles:
        assert 1 + sum(found["acceptance_unconditional"]) == pytest.approx(found["acceptance_length"])
        product = itertools.accumulate((share or 0.0 for share in found["acceptance_conditional"]), lambda a, b: a * b)
        assert list(product) == pytest.approx(found["acceptance_unconditional"])


def test_timelines_survive_json() -> None:
    assert Timeline.from_json(json.loads(json.dumps(BURSTY.to_json()))) == BURSTY
    assert latency([]) is None

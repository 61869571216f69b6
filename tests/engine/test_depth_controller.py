"""The depth controller against simulated engines: it finds and follows the best depth, probes at low cost, and does not oscillate."""

from __future__ import annotations

import random
import statistics
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphspec.engine.depth import MARGIN, MEMORY, Acceptance, AdaptiveDepth
from graphspec.errors import ConfigError


def expected_length(shares, depth):
    total = reach = 1.0
    for share in shares[:depth]:
        reach *= share
        total += reach
    return total


@dataclass
class Run:
    """What an engine did under a policy: tokens are counted by their expectation, so that luck is the drafts' alone."""

    time: float = 0.0
    tokens: float = 0.0
    depths: list[int] = field(default_factory=list)

    def loss_to(self, times, shares):
        """Share of the speed of the best fixed depth that was lost."""
        best = max(expected_length(shares, depth) / time for depth, time in times.items())
        return 1 - self.tokens / self.time / best

    @property
    def changes(self):
        return sum(a != b for a, b in zip(self.depths, self.depths[1:], strict=False))


def simulate(policy, times, shares_at, *, cycles, bucket=1, seed=0, in_flight=1, catch_up=None, run=None):
    """An engine of ``bucket`` lanes: results come ``in_flight`` cycles late, and the cycle that leaves depth 0 only lets the drafter catch
    up (time ``catch_up``, default that of the shallowest depth above 0).
    """
    draw, run, queued, lag = random.Random(seed), run or Run(), deque(), 0
    catch_up = catch_up or max(times[min(times)], min((time for depth, time in times.items() if depth), default=0.0))
    for cycle in range(cycles):
        depth, shares = policy.choose(bucket, bucket), shares_at(cycle)
        assert depth in times
        if depth and lag > 1:
            depth, cost, lag = 0, catch_up, 0
        else:
            cost, lag = times[depth], 0 if depth else lag + 1
        accepted = []
        for _ in range(bucket):
            length = 0
            while length < depth and draw.random() < shares[length]:
                length += 1
            accepted.append(length)
        run.time, run.tokens = run.time + cost, run.tokens + expected_length(shares, depth)
        run.depths.append(depth)
        queued.append((depth, accepted))
        if len(queued) >= in_flight:
            policy.observe(bucket, *queued.popleft())
    return run


def linear(depths, base, step):
    """A plain cycle takes 1, a draft pass ``base``, every depth ``step`` more."""
    return {depth: 1 + (base + step * depth if depth else 0) for depth in depths}


@st.composite
def time_tables(draw):
    """Times of 0 and some greater depths: rising, up to six plain cycles."""
    depths = sorted(draw(st.sets(st.integers(1, 8), min_size=1, max_size=4)))
    rises = [draw(st.floats(0, 1.2, allow_subnormal=False)) for _ in depths]
    times, time = {0: 1.0}, 1.0 + draw(st.sampled_from([0.0, 0.02, 0.2]))
    for depth, rise in zip(depths, rises, strict=True):
        time += rise
        times[depth] = time
    scale = draw(st.sampled_from([1e-3, 1.0]))
    return {depth: time * scale for depth, time in times.items()}


@settings(max_examples=150, deadline=None)
@given(time_tables(), st.sampled_from([1, 3, 32]), st.integers(1, 3))
def test_drafts_that_are_never_accepted_cost_less_than_3_percent(times, lanes, in_flight):
    run = simulate(
        AdaptiveDepth({lanes: list(times)}, {lanes: times}), times, lambda _: [0.0] * 8, cycles=512, bucket=lanes, in_flight=in_flight
    )
    assert run.time < 1.03 * 512 * times[0]
    assert max(run.depths) > 0, "drafting is tried first"


@pytest.mark.parametrize("lanes", [1, 4, 32])
@pytest.mark.parametrize("depths", [(0, 1, 2, 4), (0, 4), (1, 3, 7)])
def test_high_acceptance_reaches_the_best_depth_and_stays(depths, lanes):
    times = linear(depths, 0.1, 0.08)
    for rates in ((), [0.1] * depths[-1]):
        policy = AdaptiveDepth({lanes: depths}, {lanes: times}, rates)
        run = simulate(policy, times, lambda _: [0.93] * 8, cycles=1400, bucket=lanes, seed=3)
        assert set(run.depths[700:]) == {depths[-1]}
        assert rates or set(run.depths) == {depths[-1]}


@pytest.mark.parametrize("lanes", [1, 8])
@pytest.mark.parametrize("seed", range(3))
def test_acceptance_that_changes_is_followed(lanes, seed):
    times = linear((0, 1, 2, 4), 0.1, 0.08)
    policy = AdaptiveDepth({lanes: list(times)}, {lanes: times})
    good, bad = [0.85] * 4, [0.05] * 4
    run = simulate(policy, times, lambda cycle: bad if 600 <= cycle < 1400 else good, cycles=3000, bucket=lanes, seed=seed)
    assert statistics.mode(run.depths[400:600]) == 4
    assert run.depths[800:1400].count(0) > 500
    assert run.depths[2300:].count(4) > 650


def test_shares_of_middling_drafts_choose_a_middling_depth():
    times = linear((0, 1, 2, 4, 8), 0.05, 0.15)
    shares = [0.8, 0.7, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2]
    speeds = {depth: expected_length(shares, depth) / time for depth, time in times.items()}
    assert max(speeds, key=speeds.get) == 2
    run = simulate(AdaptiveDepth({4: list(times)}, {4: times}), times, lambda _: shares, cycles=800, bucket=4)
    assert run.depths[200:].count(2) > 0.95 * 600


@pytest.mark.parametrize("lanes", [1, 4, 32])
def test_stationary_streams_lose_little_and_noise_does_not_make_it_flap(lanes):
    losses, changes = [], []
    for seed in range(30):
        draw = random.Random(seed)
        first, fall = draw.uniform(0, 0.95), draw.uniform(0.85, 1)
        shares = [first * fall**position for position in range(8)]
        depths = draw.choice([(0, 1, 2, 4), (0, 2, 5), (0, 4), (0, 1, 3, 5, 8), (1, 3, 7)])
        times = linear(depths, draw.choice([0.02, 0.1, 0.3, 0.8]), draw.choice([0.02, 0.05, 0.1, 0.2, 0.4]))
        run = simulate(AdaptiveDepth({lanes: depths}, {lanes: times}), times, lambda _, s=shares: s, cycles=1500, bucket=lanes, seed=seed)
        losses.append(run.loss_to(times, shares))
        changes.append(1000 * run.changes / 1500)
    assert max(losses) < 0.03
    assert statistics.mean(losses) < 0.01
    # A probe is two changes, and there is one in MEMORY at most.
    assert max(changes) < 2 * 1000 / MEMORY + 5
    assert statistics.mean(changes) < 10


def ages(acceptance):
    return [acceptance.age(position) for position in range(1, len(acceptance.shares()) + 1)]


def test_probes_take_their_share_of_the_time_and_become_rarer():
    times = linear((0, 2, 4), 0.3, 0.1)
    policy = AdaptiveDepth({1: list(times)}, {1: times})
    run = simulate(policy, times, lambda _: [0.0] * 4, cycles=512)
    settled = [simulate(policy, times, lambda _: [0.0] * 4, cycles=2048) for _ in range(2)]
    for part in settled:
        assert 0 < part.time / 2048 - 1 < MARGIN
    assert settled[1].time < run.time / 512 * 2048
    assert 0 < sum(depth > 0 for depth in settled[1].depths) <= 40


def test_every_bucket_decides_by_its_own_times():
    depths, shares = (0, 2, 4), [0.6] * 4
    cheap, dear = linear(depths, 0.05, 0.02), linear(depths, 0.9, 0.5)
    policy = AdaptiveDepth({1: depths, 8: depths}, {1: cheap, 8: dear})
    small, large = Run(), Run()
    for turn in range(20):
        simulate(policy, cheap, lambda _: shares, cycles=30, bucket=1, seed=turn, run=small)
        simulate(policy, dear, lambda _: shares, cycles=30, bucket=8, seed=turn, run=large)
    assert set(small.depths) == {4}
    assert large.depths[60:].count(0) > 0.97 * 540
    # What bucket 8 has seen is known in bucket 1 too, the other way round as well: nothing is stale, so there is nothing to look for.
    assert max(ages(policy.acceptance)) <= 30


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_depth_is_one_there_is_and_asking_changes_nothing(data):
    depths = {bucket: sorted(data.draw(st.sets(st.integers(0, 6), min_size=1, max_size=4))) for bucket in (1, 4)}
    times = {bucket: {depth: data.draw(st.floats(1e-4, 10)) for depth in some} for bucket, some in depths.items()}
    known = times if data.draw(st.booleans()) else {}
    first, second = (AdaptiveDepth(depths, known, [0.5]) for _ in range(2))
    draw = random.Random(data.draw(st.integers(0, 99)))
    for _ in range(60):
        bucket = draw.choice([1, 4])
        depth = first.choose(bucket, bucket)
        assert depth in depths[bucket]
        assert depth == first.choose(bucket, bucket) == second.choose(bucket, bucket)
        ran = draw.choice([depth, depth, 0])
        accepted = [draw.randint(0, ran) for _ in range(draw.randint(0, bucket))]
        first.observe(bucket, ran, accepted)
        second.observe(bucket, ran, accepted)


def test_without_times_the_deepest_runs_until_they_are_learned():
    policy = AdaptiveDepth({1: (0, 2, 4), 2: (0, 2, 4)}, {2: {0: 1, 2: 1.1, 4: 1.2}}, [0.05] * 4)
    assert (policy.unknown(), policy.choose(1, 1), policy.choose(2, 2)) == ((1,), 4, 0)
    policy.observe(1, 4, [4])
    policy.learn_times(1, {0: 1.0, 2: 3.0, 4: 4.0, 6: 9.0})
    assert (policy.unknown(), policy.choose(1, 1)) == ((), 0)
    assert policy.times == {1: {0: 1.0, 2: 3.0, 4: 4.0}, 2: {0: 1.0, 2: 1.1, 4: 1.2}}


def test_a_bucket_starts_at_its_configured_depth():
    times = {depth: 1 + depth / 10 for depth in (0, 2, 4)}
    policy = AdaptiveDepth({1: (0, 2, 4)}, {1: times}, [0.9] * 4, start={1: 2})
    assert policy.choose(1, 1) == 2
    assert AdaptiveDepth({1: (0, 2, 4)}, {}, start={1: 0}).choose(1, 1) == 0


def test_running_shares_are_those_of_the_drafts():
    seen = Acceptance(3, [0.5, 0.5, 0.5])
    for _ in range(400):
        # Of four drafts at depth 1 three are accepted, of those two, of those one.
        seen.observe(3, [0, 1, 2, 3])
    assert seen.shares() == pytest.approx([3 / 4, 2 / 3, 1 / 2], abs=0.02)
    assert seen.lengths() == pytest.approx([1, 1.75, 2.25, 2.5], abs=0.05)
    shares = seen.shares()
    for _ in range(50):
        seen.observe(0, [0, 0])
    assert seen.shares() == shares, "what is not drafted is not forgotten"
    assert ages(seen) == [50, 50, 50]
    for _ in range(400):
        seen.observe(1, [0, 0])
    assert seen.shares()[0] < 0.01
    assert seen.shares()[1:] == pytest.approx(shares[1:], abs=0.1)
    assert ages(seen) == [0, 450, 450]


def test_an_unseen_position_leans_on_the_one_before():
    seen = Acceptance(4)
    assert seen.shares() == pytest.approx([0.8] * 4)
    for _ in range(300):
        seen.observe(1, [0, 1])
    assert seen.shares() == pytest.approx([0.5] * 4, abs=0.02)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (({1: ()}, {}), "at least one depth"),
        (({1: (-1, 2)}, {}), "none below 0"),
        (({1: (0, 2)}, {1: {0: 1.0}}), "0, 2"),
        (({1: (0, 2)}, {1: {0: 1.0, 2: 0.0}}), "above 0"),
        (({1: (0, 2)}, {1: {0: 1.0, 2: float("nan")}}), "above 0"),
        (({1: (0, 2)}, {}, (), {1: 1}), "depths of adaptive.depths"),
        (({1: (0, 2)}, {}, (), {4: 0}), "buckets there are"),
    ],
)
def test_wrong_tables_are_refused(arguments, part):
    with pytest.raises(ConfigError, match=part):
        AdaptiveDepth(*arguments)

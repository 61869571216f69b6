"""The draft depth of the next cycle: fixed, or chosen from acceptance and from the cost of cycles. Host side; no torch.

A cycle of depth d commits ``length(d) = 1 + c_1 + c_1 c_2 + ... + c_1 ... c_d`` tokens of a row on average, where ``c_j`` is the share of
drafts at depth j that are accepted, given that the ones before were. Its throughput is ``length(d) / time(bucket, d)``;
:class:`AdaptiveDepth` runs the depth where that is highest. The depth changes no token of the output: the acceptance rule emits the
target's own tokens whatever was drafted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import ConfigError
from ..plan.plan import Plan

MEMORY = 64
"""Drafts over which a share is remembered, or over half as many cycles if those have more drafts; cycles without a position after which a
probe may observe it again."""
PRIOR_SHARE, PRIOR_WEIGHT = 0.8, 3.0
"""Share expected at depth 1 before anything was seen, and the drafts that a prior, or a share a probe looks at again, counts for."""
NEIGHBOUR_WEIGHT = 2.0
"""Drafts that "the same share as one position before" counts for."""
OPTIMISTIC_SHARE = 0.9
"""Share assumed past the current depth; a depth that would not be better even then is not probed."""
PATIENCE = 1.5
"""Tokens that another depth must be estimated to have gained before it is taken."""
MARGIN = 0.01
"""Share of a cycle's tokens by which another depth must be better, and share of the time that probes may take."""
PROBE_DRAFTS = 8
"""Drafts a probe looks at, and its most cycles; half as many misses from its start end it."""
MAX_BACKOFF = 4
"""A probe that finds nothing halves the time for later ones, down to this fraction."""


class DepthPolicy(Protocol):
    """Chooses a depth before each launch and observes each result; used by the scheduler."""

    def choose(self, bucket: int, lanes: int, drafts: int | None) -> int:
        """Depth of the next cycle of ``bucket`` with ``lanes`` requests. Changes no state.

        Args:
            bucket, lanes: the program's lanes, and those in use.
            drafts: the most tokens that any lane can draft; None: not known before the launch, as with a draft network.
        """
        ...

    def observe(self, bucket: int, depth: int, accepted: Sequence[int]) -> None:
        """Record one cycle: drafted tokens accepted in each lane that could draft ``depth`` tokens and whose run was not cut by a stop id
        or the budget.

        Cycles of depth 0 are reported too, with a 0 for each such lane, unless there was nothing to draft; ``accepted`` may be empty.
        """
        ...


class Acceptance:
    """Running share of drafts accepted at each position, given that the ones before were.

    Old drafts decay as new ones are seen, not with time: a position that is not drafted keeps its share. The estimate of a position with
    few drafts leans on the position before it.

    Args:
        depth: S, the deepest there is.
        rates: shares expected until they are seen; where there are none, depth 1 expects ``PRIOR_SHARE``.
    """

    def __init__(self, depth: int, rates: Sequence[float] = ()) -> None:
        first = [*rates[:depth], *([PRIOR_SHARE] if not rates else [])][:depth]
        self._trials = [PRIOR_WEIGHT if position < len(first) else 0.0 for position in range(depth)]
        self._hits = [PRIOR_WEIGHT * share for share in first] + [0.0] * (depth - len(first))
        self._lengths: list[float] | None = None
        self.version = 0
        """Changes when :meth:`lengths` does."""
        self._cycles, self._seen = 0, [0] * depth
        """Cycles so far, and their number when one last reached position 1, 2, ... S."""

    def observe(self, depth: int, accepted: Sequence[int]) -> None:
        """Count the drafts of one cycle of ``depth``: ``accepted`` of each lane."""
        if not accepted:
            return
        self._cycles += 1
        if not depth:
            return
        self._seen[:depth] = [self._cycles] * depth
        self._forget_lengths()
        memory = max(MEMORY, MEMORY // 2 * len(accepted))
        for position in range(depth):
            trials = sum(run >= position for run in accepted)
            if not trials:
                return
            kept = (1 - 1 / memory) ** trials
            self._trials[position] = self._trials[position] * kept + trials
            self._hits[position] = self._hits[position] * kept + sum(run > position for run in accepted)

    def age(self, position: int) -> int:
        """Cycles since one last reached ``position``, counted from 1."""
        return self._cycles - self._seen[position - 1]

    def discount(self, beyond: int) -> None:
        """Scale what is known of positions past ``beyond`` down to the weight of a prior: it is old."""
        self._forget_lengths()
        for position in range(beyond, len(self._trials)):
            scale = min(1.0, PRIOR_WEIGHT / self._trials[position]) if self._trials[position] else 1.0
            self._trials[position] *= scale
            self._hits[position] *= scale

    def shares(self) -> list[float]:
        """``c_1 ... c_S``."""
        shares: list[float] = []
        for position, (trials, hits) in enumerate(zip(self._trials, self._hits, strict=True)):
            weight = NEIGHBOUR_WEIGHT if position else 0.0
            before = shares[-1] if shares else 0.0
            shares.append((hits + weight * before) / (trials + weight))
        return shares

    def lengths(self) -> list[float]:
        """Tokens that a cycle of depth 0, 1, ... S is expected to commit in one row."""
        if self._lengths is None:
            self._lengths, reach = [1.0], 1.0
            for share in self.shares():
                reach *= share
                self._lengths.append(self._lengths[-1] + reach)
        return self._lengths

    def _forget_lengths(self) -> None:
        self._lengths, self.version = None, self.version + 1


@dataclass(slots=True)
class _Probe:
    """A few cycles at a greater depth, which measure whether it pays."""

    depth: int
    cycles: int
    trials: int = 0
    hits: int = 0


@dataclass(slots=True)
class _Bucket:
    """The state of one bucket; acceptance is shared by all buckets."""

    depths: tuple[int, ...]
    times: dict[int, float]
    depth: int | None = None
    """The depth estimated to be best; None: not decided yet."""
    regret: float = 0.0
    """Tokens that another depth would have gained since this one was last estimated to be best."""
    probe_budget: float = 0.0
    """Time that may be spent on probes."""
    backoff: int = 1
    """Probes take ``MARGIN / backoff`` of the time."""
    probe: _Probe | None = None
    assessment: _Assessment | None = None
    """Cached: cycles of depth 0 change no estimate, and there are many of them."""


@dataclass(slots=True)
class _Assessment:
    """What the estimates imply for a bucket.

    Attributes:
        known: the acceptance's version, the current depth, and the lanes that it was computed for.
        best: the depth with the highest throughput.
        gain: tokens per cycle that it would gain, less ``MARGIN``.
        probe: depth and cycles of a worthwhile probe, its cost in time, and how much of that is catching up; None: there is none.
    """

    known: tuple[int, int, int]
    best: int
    gain: float
    probe: tuple[int, int, float, float] | None = None


class AdaptiveDepth:
    """The depth with the most tokens per second, by bucket and by running acceptance.

    Deterministic: it reads no clock and draws no random numbers. Its rules:

    * Another depth is taken once it is estimated to have gained ``PATIENCE`` tokens over the current one, not counting ``MARGIN`` of each
      cycle's tokens. A large loss ends after a cycle or two, a small one takes longer, noise cancels out.
    * Positions past the current depth are not observed. *Probes* observe them: a few cycles at a greater depth. Their budget grows by
      ``MARGIN`` of all time. A probe costs the time of its cycles less that of the tokens they commit, and the pass in which the drafter
      catches up after depth 0. Each probe that finds nothing halves the budget's growth, down to ``MARGIN / MAX_BACKOFF``.
    * Without ``rates`` drafting is tried first, at any cost; if nothing is accepted the first rule ends it.
    * Where it is known how many tokens can be drafted, the cycle is the shallowest that has room for them. Shares then are those of drafts
      that were found.

    Args:
        depths: bucket to the depths it has cycles of.
        times: bucket to depth to the time of a cycle, in any unit. All depths of a bucket, or none: see :meth:`learn_times`.
        rates: expected shares of drafts accepted at depth 1, 2, ..., given the ones before.
        start: depth of a bucket's first cycles; default the best under ``rates``.

    Raises:
        ConfigError: a bucket without depths, a depth below 0, a start that is none of them, times that are not above 0, or times for some
            of a bucket's depths only.
    """

    def __init__(
        self,
        depths: Mapping[int, Sequence[int]],
        times: Mapping[int, Mapping[int, float]],
        rates: Sequence[float] = (),
        start: Mapping[int, int] | None = None,
    ) -> None:
        for bucket, some in depths.items():
            if not some or min(some) < 0:
                raise ConfigError(f"adaptive.depths[{bucket}]", "at least one depth, none below 0", list(some))
        self.acceptance = Acceptance(max(max(some) for some in depths.values()), rates)
        self._tries_first = not rates
        self._start = dict(start or {})
        self._buckets = {bucket: _Bucket(tuple(sorted(set(some))), {}) for bucket, some in depths.items()}
        for bucket, depth in self._start.items():
            if bucket not in self._buckets or depth not in self._buckets[bucket].depths:
                expected = "depths of adaptive.depths, for buckets there are"
                raise ConfigError("runtime.depth_per_bucket", expected, self._start)
        for bucket, known in times.items():
            if bucket in self._buckets and known:
                self.learn_times(bucket, known)

    def unknown(self) -> tuple[int, ...]:
        """Buckets whose times are still to be learned. Until then they run their deepest cycle."""
        return tuple(bucket for bucket, state in self._buckets.items() if not state.times)

    @property
    def times(self) -> dict[int, dict[int, float]]:
        """Bucket to depth to time, of the buckets whose times are known."""
        return {bucket: dict(state.times) for bucket, state in self._buckets.items() if state.times}

    def learn_times(self, bucket: int, times: Mapping[int, float]) -> None:
        """Times of a bucket's cycles by depth, all in one unit; they replace what was known of it.

        Raises:
            ConfigError: a depth without a time, or a time that is not above 0.
        """
        state = self._buckets[bucket]
        missing = [depth for depth in state.depths if depth not in times]
        if missing:
            key, expected = f"adaptive.times[{bucket}]", "a time for each of the depths " + ", ".join(map(str, state.depths))
            raise ConfigError(key, expected, dict(times), "leave the bucket out to have all of them measured")
        if not all(0 < times[depth] < math.inf for depth in state.depths):
            raise ConfigError(f"adaptive.times[{bucket}]", "finite times above 0", dict(times))
        state.times = {depth: float(times[depth]) for depth in state.depths}
        state.regret, state.probe_budget, state.probe, state.backoff, state.assessment = 0.0, 0.0, None, 1, None
        if state.depth is None:
            state.depth = self._first_depth(bucket, state)

    def choose(self, bucket: int, lanes: int, drafts: int | None = None) -> int:
        state = self._buckets[bucket]
        if state.depth is None:
            depth = self._start.get(bucket, state.depths[-1])
        else:
            depth = state.probe.depth if state.probe is not None else state.depth
        return depth if drafts is None or drafts >= depth else next(enough for enough in state.depths if enough >= drafts)

    def observe(self, bucket: int, depth: int, accepted: Sequence[int]) -> None:
        self.acceptance.observe(depth, accepted)
        state = self._buckets[bucket]
        if state.depth is None:
            return
        lengths = self.acceptance.lengths()
        state.probe_budget += MARGIN / state.backoff * state.times.get(depth, state.times[state.depth])
        if depth > state.depth:
            state.probe_budget -= max(0.0, self._extra(state, depth, lengths))
        if state.probe is not None:
            self._follow(state, depth, accepted, lengths)
        else:
            assessment = self._assess(state, max(1, len(accepted)), lengths)
            if not self._reconsider(state, assessment) and self._unseen(state):
                self._consider_probe(state, assessment)

    def _first_depth(self, bucket: int, state: _Bucket) -> int:
        if bucket in self._start:
            return self._start[bucket]
        drafting = tuple(depth for depth in state.depths if depth) if self._tries_first else ()
        return self._best(state, self.acceptance.lengths(), drafting or state.depths)

    @staticmethod
    def _best(state: _Bucket, lengths: list[float], among: tuple[int, ...]) -> int:
        """The fastest of some depths; of equal ones the shallowest."""
        return max(among, key=lambda depth: (lengths[depth] / state.times[depth], -depth))

    @staticmethod
    def _extra(state: _Bucket, depth: int, lengths: list[float]) -> float:
        """Time of a cycle of ``depth`` less the time of its tokens at the current depth."""
        assert state.depth is not None
        return state.times[depth] - lengths[depth] * state.times[state.depth] / lengths[state.depth]

    def _assess(self, state: _Bucket, lanes: int, lengths: list[float]) -> _Assessment:
        """What the present estimates imply."""
        assert state.depth is not None
        known = (self.acceptance.version, state.depth, lanes)
        if state.assessment is None or state.assessment.known != known:
            best, here = self._best(state, lengths, state.depths), lengths[state.depth]
            gain = state.times[state.depth] * lengths[best] / state.times[best] - here - MARGIN * here
            state.assessment = _Assessment(known, best, gain, self._worthwhile_probe(state, lanes, lengths))
        return state.assessment

    @staticmethod
    def _reconsider(state: _Bucket, assessment: _Assessment) -> bool:
        """Add what the best depth would have gained in this cycle; returns whether it was taken."""
        state.regret = max(0.0, state.regret + assessment.gain)
        if assessment.best == state.depth or state.regret < PATIENCE:
            return False
        state.depth, state.regret = assessment.best, 0.0
        return True

    def _unseen(self, state: _Bucket) -> bool:
        """A greater depth exists, was not run lately, and no other depth is about to be taken."""
        assert state.depth is not None
        return state.regret == 0 and state.depth < state.depths[-1] and self.acceptance.age(state.depth + 1) > MEMORY

    def _consider_probe(self, state: _Bucket, assessment: _Assessment) -> None:
        """Begin a worthwhile probe that the budget covers."""
        assert state.depth is not None
        if assessment.probe is None:
            return
        depth, cycles, cost, catch_up = assessment.probe
        if state.probe_budget >= cost:
            state.probe_budget = min(state.probe_budget, cost) - catch_up
            state.probe = _Probe(depth, cycles)
            self.acceptance.discount(state.depth)

    def _worthwhile_probe(self, state: _Bucket, lanes: int, lengths: list[float]) -> tuple[int, int, float, float] | None:
        """Depth, cycles and cost of a probe, and its share of catching up; None: no greater depth could be better."""
        assert state.depth is not None
        here, deeper = lengths[state.depth], tuple(depth for depth in state.depths if depth > state.depth)
        if not deeper:
            return None
        # Optimistic shares past the current depth: only a depth that would then be better is worth a probe.
        arriving = max(1e-9, here - lengths[state.depth - 1]) if state.depth else 1.0
        optimistic, reach = lengths[: state.depth + 1], arriving
        for _ in range(state.depth, deeper[-1]):
            reach *= OPTIMISTIC_SHARE
            optimistic.append(optimistic[-1] + reach)
        depth = self._best(state, optimistic, deeper)
        if optimistic[depth] / state.times[depth] <= (1 + MARGIN) * here / state.times[state.depth]:
            return None
        cycles, enough = (min(PROBE_DRAFTS, max(2, math.ceil(drafts / (lanes * arriving)))) for drafts in (PROBE_DRAFTS, PROBE_DRAFTS // 2))
        # Catching up costs about as much as the draft work of the shallowest drafting cycle.
        catch_up = max(0.0, state.times[deeper[0]] - state.times[0]) if state.depth == 0 else 0.0
        # A useless probe ends at its first misses; one that goes on pays for itself.
        return depth, cycles, enough * self._extra(state, depth, lengths) + catch_up, catch_up

    def _follow(self, state: _Bucket, depth: int, accepted: Sequence[int], lengths: list[float]) -> None:
        """Count a cycle read during a probe: one of the probe, or one launched before it began."""
        probe = state.probe
        assert probe is not None and state.depth is not None
        if depth < probe.depth:
            return
        probe.cycles -= 1
        probe.trials += sum(run >= state.depth for run in accepted)
        probe.hits += sum(run > state.depth for run in accepted)
        if probe.cycles > 0 and (probe.hits or probe.trials < PROBE_DRAFTS // 2):
            return
        best = self._best(state, lengths, state.depths)
        found = best > state.depth and lengths[best] / state.times[best] > (1 + MARGIN) * lengths[state.depth] / state.times[state.depth]
        state.probe, state.regret = None, 0.0
        state.backoff = 1 if found else min(MAX_BACKOFF, 2 * state.backoff)
        if found:
            state.depth, state.probe_budget = best, 0.0


class DeepestCycles:
    """A policy that always asks for the deepest cycle a bucket has."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def choose(self, bucket: int, lanes: int, drafts: int | None) -> int:
        return self._plan.depths_of(bucket)[-1]

    def observe(self, bucket: int, depth: int, accepted: Sequence[int]) -> None:
        pass

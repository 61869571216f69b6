"""Which draft depth the next cycle has: fixed, or chosen by what was accepted and by what cycles cost. Host side; no torch.

A cycle of depth d commits ``length(d) = 1 + c_1 + c_1 c_2 + ... + c_1 ... c_d`` tokens of a row on average, where ``c_j`` is the share of
drafts at depth j that are accepted, given that the ones before were. With the cycle's time it makes ``length(d) / time(bucket, d)`` tokens
per second; :class:`AdaptiveDepth` runs the depth where that is highest. Depth costs time and not one token of the output: the acceptance
rule emits the target's own tokens whatever was drafted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import ConfigError

MEMORY_TRIALS = 64
"""A share is remembered over so many drafts, or ..."""
MEMORY_CYCLES = 32
"""... over so many cycles, whichever is more drafts."""
FIRST_SHARE, FIRST_WEIGHT = 0.8, 3.0
"""What is expected at depth 1 before anything was seen, and how many drafts that counts for."""
NEIGHBOUR_WEIGHT = 2.0
"""How many drafts "the same share as one position before" counts for."""
STALE_WEIGHT = 3.0
"""How many drafts a share counts for when a probe looks at it again."""
PATIENCE = 1.5
"""Tokens that another depth must be believed to have gained before it is taken."""
MARGIN = 0.01
"""Share of a cycle's tokens by which another depth must be better; less is noise."""
PROBE_TRIALS, PROBE_MISSES, PROBE_CYCLES = 8, 4, (2, 8)
"""Drafts a probe looks at, how many misses from its start end it, and its fewest and most cycles."""
HOPE = 0.9
"""Share that positions past what runs may have; a depth that would not be better even then is not probed."""
PROBE_SHARE = 0.01
"""Share of the time that probes may take."""
PROBE_RARER = 4
"""Probes that find nothing make the next ones rarer by a factor of two, up to this one."""
FRESH_CYCLES = 64
"""A position tried within so many cycles needs no probe."""


class DepthPolicy(Protocol):
    """What the scheduler asks before a cycle is launched, and tells after it was read."""

    def choose(self, bucket: int, lanes: int) -> int:
        """Depth of the next cycle of ``bucket``, of whose lanes so many hold a request. Asking changes nothing."""
        ...

    def observe(self, bucket: int, depth: int, accepted: Sequence[int]) -> None:
        """A cycle was read: drafted tokens accepted in each lane whose run was not cut by a stop id or the budget.

        Cycles of depth 0 are reported too, with a 0 for each such lane; ``accepted`` may be empty.
        """
        ...


class Acceptance:
    """Running share of drafts accepted at each position, given that the ones before were.

    Old drafts are forgotten as new ones are seen, not as time passes: what is not drafted is not forgotten. A position that was hardly
    seen leans on the one before it.

    Args:
        depth: S, the deepest there is.
        rates: shares expected until they are seen; where there are none, depth 1 expects ``FIRST_SHARE``.
    """

    def __init__(self, depth: int, rates: Sequence[float] = ()) -> None:
        first = [*rates[:depth], *([FIRST_SHARE] if not rates else [])][:depth]
        self._trials = [FIRST_WEIGHT if position < len(first) else 0.0 for position in range(depth)]
        self._hits = [FIRST_WEIGHT * share for share in first] + [0.0] * (depth - len(first))
        self._lengths: list[float] | None = None
        self.version = 0
        """Changes when :meth:`lengths` does."""
        self._cycles, self._seen = 0, [0] * depth
        """Cycles so far, and how many there were when one was last as deep as position 1, 2, ... S."""

    def observe(self, depth: int, accepted: Sequence[int]) -> None:
        """Count the drafts of one cycle of ``depth``: ``accepted`` of each lane."""
        if not accepted:
            return
        self._cycles += 1
        if not depth:
            return
        self._seen[:depth] = [self._cycles] * depth
        self._forget_lengths()
        memory = max(MEMORY_TRIALS, MEMORY_CYCLES * len(accepted))
        for position in range(depth):
            trials = sum(run >= position for run in accepted)
            if not trials:
                return
            kept = (1 - 1 / memory) ** trials
            self._trials[position] = self._trials[position] * kept + trials
            self._hits[position] = self._hits[position] * kept + sum(run > position for run in accepted)

    def age(self, position: int) -> int:
        """Cycles since one was as deep as ``position``, from 1."""
        return self._cycles - self._seen[position - 1]

    def doubt(self, beyond: int) -> None:
        """What is known of positions past ``beyond`` is old: a few new drafts shall outweigh it."""
        self._forget_lengths()
        for position in range(beyond, len(self._trials)):
            scale = min(1.0, STALE_WEIGHT / self._trials[position]) if self._trials[position] else 1.0
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
        """Tokens a cycle of depth 0, 1, ... S is expected to commit in a row."""
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
    """Some cycles at a greater depth, to see whether it would pay by now."""

    depth: int
    cycles: int
    trials: int = 0
    hits: int = 0


@dataclass(slots=True)
class _Bucket:
    """What is decided for one bucket; what is accepted is known for all of them together."""

    depths: tuple[int, ...]
    times: dict[int, float]
    depth: int | None = None
    """The depth that is held to be best; None: not decided yet."""
    lost: float = 0.0
    """Tokens that another depth would have gained since this one was last held to be best."""
    credit: float = 0.0
    """Time that may be spent on probes."""
    rarer: int = 1
    """Probes are so much rarer than ``PROBE_SHARE`` allows."""
    probe: _Probe | None = None
    standing: _Standing | None = None
    """Cycles of depth 0 teach nothing, and there are many: what follows from what is known is worked out once."""


@dataclass(slots=True)
class _Standing:
    """What follows for a bucket from what is known at one time.

    Attributes:
        known: the acceptance's version, the depth that runs, and the lanes it follows from.
        best: the depth that is then the fastest.
        gain: tokens that it would gain in a cycle, what doesn't count taken off.
        probe: depth and cycles of a probe worth making, and the time it may take, catching up apart; None: there is none.
    """

    known: tuple[int, int, int]
    best: int
    gain: float
    probe: tuple[int, int, float, float] | None = None


class AdaptiveDepth:
    """The depth that makes the most tokens per second, by bucket and by running acceptance.

    Deterministic: it knows no clock and draws nothing. Its rules:

    * Another depth is taken once it is believed to have gained ``PATIENCE`` tokens over the one that runs, of which ``MARGIN`` of each
      cycle's tokens don't count. A great loss ends after a cycle or two, a small one takes long to be believed, noise adds up to nothing.
    * Positions deeper than what runs are not seen. *Probes* look at them: a few cycles at a greater depth. They are paid from an account
      that gets ``PROBE_SHARE`` of all time. A probe costs the time of its cycles over that of the tokens they made, and the pass by which
      the drafter catches up after depth 0. Probes that find nothing become rarer, down to a share of ``PROBE_SHARE / PROBE_RARER``.
    * Without ``rates`` drafting is tried first, whatever it costs; where nothing is accepted it ends as the first rule says.

    Args:
        depths: bucket to the depths it has cycles of.
        times: bucket to depth to the time of a cycle, in any unit. All depths of a bucket, or none: see :meth:`learn_times`.
        rates: shares of drafts accepted at depth 1, 2, ..., given the ones before, expected until they are seen.
        start: depth of a bucket's first cycles; default what ``rates`` make best.

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
        state.lost, state.credit, state.probe, state.rarer, state.standing = 0.0, 0.0, None, 1, None
        if state.depth is None:
            state.depth = self._first_depth(bucket, state)

    def choose(self, bucket: int, lanes: int) -> int:
        state = self._buckets[bucket]
        if state.depth is None:
            return self._start.get(bucket, state.depths[-1])
        return state.probe.depth if state.probe is not None else state.depth

    def observe(self, bucket: int, depth: int, accepted: Sequence[int]) -> None:
        self.acceptance.observe(depth, accepted)
        state = self._buckets[bucket]
        if state.depth is None:
            return
        lengths = self.acceptance.lengths()
        state.credit += PROBE_SHARE / state.rarer * state.times.get(depth, state.times[state.depth])
        if depth > state.depth:
            state.credit -= max(0.0, self._extra(state, depth, lengths))
        if state.probe is not None:
            self._follow(state, depth, accepted, lengths)
        else:
            standing = self._standing(state, max(1, len(accepted)), lengths)
            if not self._reconsider(state, standing) and self._unseen(state):
                self._consider_probe(state, standing)

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
        """Time that a cycle of ``depth`` takes over what its tokens take at the depth held to be best."""
        assert state.depth is not None
        return state.times[depth] - lengths[depth] * state.times[state.depth] / lengths[state.depth]

    def _standing(self, state: _Bucket, lanes: int, lengths: list[float]) -> _Standing:
        """What follows from what is known now."""
        assert state.depth is not None
        known = (self.acceptance.version, state.depth, lanes)
        if state.standing is None or state.standing.known != known:
            best, here = self._best(state, lengths, state.depths), lengths[state.depth]
            gain = state.times[state.depth] * lengths[best] / state.times[best] - here - MARGIN * here
            state.standing = _Standing(known, best, gain, self._worthwhile_probe(state, lanes, lengths))
        return state.standing

    @staticmethod
    def _reconsider(state: _Bucket, standing: _Standing) -> bool:
        """Add up what the best depth would have gained in this cycle; True when it was taken."""
        state.lost = max(0.0, state.lost + standing.gain)
        if standing.best == state.depth or state.lost < PATIENCE:
            return False
        state.depth, state.lost = standing.best, 0.0
        return True

    def _unseen(self, state: _Bucket) -> bool:
        """There is something deeper than what runs, it was not looked at lately, and nothing shallower is about to be taken."""
        assert state.depth is not None
        return state.lost == 0 and state.depth < state.depths[-1] and self.acceptance.age(state.depth + 1) > FRESH_CYCLES

    def _consider_probe(self, state: _Bucket, standing: _Standing) -> None:
        """Begin one when there is one that is worth it and the account can pay for it."""
        assert state.depth is not None
        if standing.probe is None:
            return
        depth, cycles, cost, catch_up = standing.probe
        if state.credit >= cost:
            state.credit = min(state.credit, cost) - catch_up
            state.probe = _Probe(depth, cycles)
            self.acceptance.doubt(state.depth)

    def _worthwhile_probe(self, state: _Bucket, lanes: int, lengths: list[float]) -> tuple[int, int, float, float] | None:
        """Depth, cycles and cost of a probe, and how much of that is catching up; None: nothing deeper could be better."""
        assert state.depth is not None
        here, deeper = lengths[state.depth], tuple(depth for depth in state.depths if depth > state.depth)
        if not deeper:
            return None
        # Good drafts everywhere past what runs: only a depth that would then be better is worth a look.
        arriving = max(1e-9, here - lengths[state.depth - 1]) if state.depth else 1.0
        hopeful, reach = lengths[: state.depth + 1], arriving
        for _ in range(state.depth, deeper[-1]):
            reach *= HOPE
            hopeful.append(hopeful[-1] + reach)
        depth = self._best(state, hopeful, deeper)
        if hopeful[depth] / state.times[depth] <= (1 + MARGIN) * here / state.times[state.depth]:
            return None
        fewest, most = PROBE_CYCLES
        cycles, enough = (min(most, max(fewest, math.ceil(drafts / (lanes * arriving)))) for drafts in (PROBE_TRIALS, PROBE_MISSES))
        # The drafter catches up in a cycle that costs about as much as the shallowest that drafts.
        catch_up = max(0.0, state.times[deeper[0]] - state.times[0]) if state.depth == 0 else 0.0
        # A probe that is worth nothing ends at its first misses; one that goes on earns what it takes.
        return depth, cycles, enough * self._extra(state, depth, lengths) + catch_up, catch_up

    def _follow(self, state: _Bucket, depth: int, accepted: Sequence[int], lengths: list[float]) -> None:
        """One more cycle was read while a probe is on: its own, or one that was launched before it began."""
        probe = state.probe
        assert probe is not None and state.depth is not None
        if depth < probe.depth:
            return
        probe.cycles -= 1
        probe.trials += sum(run >= state.depth for run in accepted)
        probe.hits += sum(run > state.depth for run in accepted)
        if probe.cycles > 0 and (probe.hits or probe.trials < PROBE_MISSES):
            return
        best = self._best(state, lengths, state.depths)
        found = best > state.depth and lengths[best] / state.times[best] > (1 + MARGIN) * lengths[state.depth] / state.times[state.depth]
        state.probe, state.lost = None, 0.0
        state.rarer = 1 if found else min(PROBE_RARER, 2 * state.rarer)
        if found:
            state.depth, state.credit = best, 0.0

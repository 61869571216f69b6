"""Which programs a launch may use: the sampling classes whose programs exist, and the smallest of them that serves some rows."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ResourceError
from ..graphs.programs import PrefillKey, prefill_keys
from ..plan import Plan
from ..shapes import GraphKey, SamplingClass


@dataclass(frozen=True, slots=True)
class Offer:
    """The programs of one sampling class.

    Attributes:
        sampling: the class.
        buckets: ascending lane counts whose cycles exist; more rows take turns.
        first: each bucket's cycle of the plan's depth.
        cycles: cycles by bucket and depth.
        catch_ups: cycles in which the drafter catches up, by bucket; empty where no drafter has to.
        prefills: prefill programs that exist.
    """

    sampling: SamplingClass
    buckets: tuple[int, ...]
    first: dict[int, GraphKey]
    cycles: dict[tuple[int, int], GraphKey]
    catch_ups: dict[int, GraphKey]
    prefills: tuple[PrefillKey, ...]

    @classmethod
    def of(cls, plan: Plan, sampling: SamplingClass, buckets: tuple[int, ...], prefills: tuple[PrefillKey, ...] | None = None) -> Offer:
        """What ``plan`` has of this class for these buckets, with these prefill programs, default all."""
        return cls(
            sampling,
            buckets,
            {bucket: plan.key(bucket, sampling) for bucket in buckets},
            {(bucket, depth): plan.key(bucket, sampling, depth) for bucket in buckets for depth in plan.depths_of(bucket)},
            {bucket: plan.key(bucket, sampling, catch_up=True) for bucket in buckets if plan.catches_up},
            prefills if prefills is not None else prefill_keys(plan, sampling),
        )


class Offers:
    """Every offer so far."""

    def __init__(self) -> None:
        self._offers: dict[SamplingClass, Offer] = {}
        self._chosen: dict[tuple[SamplingClass, int], Offer] = {}

    def add(self, offer: Offer) -> None:
        """One more class, or other buckets of one that is known."""
        self._offers[offer.sampling] = offer
        self._chosen = {}

    def choose(self, need: SamplingClass, lanes: int) -> Offer:
        """The offer for ``lanes`` rows that together ask for ``need``: with room for as many of them as any has, and of those the smallest.

        Raises:
            ResourceError: no class covers ``need``.
        """
        found = self._chosen.get((need, lanes))
        if found is None:
            covering = [offer for offer in self._offers.values() if offer.sampling | need == offer.sampling]
            if not covering:
                raise ResourceError("sampling class", f"programs for {need}, prepared before the launch", list(self._offers))
            found = min(covering, key=lambda offer: (-min(offer.buckets[-1], lanes), size(offer.sampling)))
            self._chosen[need, lanes] = found
        return found


def size(sampling: SamplingClass) -> tuple[bool, int, int]:
    """What classes are ordered by: whether their programs wait for the host, then how much they compute."""
    return sampling.grammar, sum(getattr(sampling, name) is True for name in sampling.__slots__), sampling.logprobs

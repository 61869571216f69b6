"""The programs that exist, by sampling class, and the smallest class that can serve a set of rows."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ResourceError
from ..graphs.programs import PrefillKey, prefill_keys
from ..plan.plan import Plan
from ..shapes import GraphKey, SamplingClass


@dataclass(frozen=True, slots=True)
class ClassPrograms:
    """The programs of one sampling class.

    Attributes:
        sampling: the class.
        buckets: ascending lane counts whose cycles exist; more rows take turns.
        first: each bucket's cycle of the plan's depth.
        cycles: cycles by bucket and depth.
        catch_ups: by bucket, the cycle in which the drafter catches up; empty if it never has to.
        prefills: prefill programs that exist.
    """

    sampling: SamplingClass
    buckets: tuple[int, ...]
    first: dict[int, GraphKey]
    cycles: dict[tuple[int, int], GraphKey]
    catch_ups: dict[int, GraphKey]
    prefills: tuple[PrefillKey, ...]

    @classmethod
    def of(
        cls, plan: Plan, sampling: SamplingClass, buckets: tuple[int, ...], prefills: tuple[PrefillKey, ...] | None = None
    ) -> ClassPrograms:
        """The plan's programs of this class for these buckets, with these prefill programs (default: all)."""
        return cls(
            sampling,
            buckets,
            {bucket: plan.key(bucket, sampling) for bucket in buckets},
            {(bucket, depth): plan.key(bucket, sampling, depth) for bucket in buckets for depth in plan.depths_of(bucket)},
            {bucket: plan.key(bucket, sampling, catch_up=True) for bucket in buckets if plan.catches_up},
            prefills if prefills is not None else prefill_keys(plan, sampling),
        )


class PreparedPrograms:
    """The programs of every class prepared so far."""

    def __init__(self) -> None:
        self._classes: dict[SamplingClass, ClassPrograms] = {}
        self._chosen: dict[tuple[SamplingClass, int], ClassPrograms] = {}

    def add(self, programs: ClassPrograms) -> None:
        """Add a class, or replace the programs of one that is here."""
        self._classes[programs.sampling] = programs
        self._chosen = {}

    def choose(self, need: SamplingClass, lanes: int) -> ClassPrograms:
        """The class to run for ``lanes`` rows that together ask for ``need``: of those with the largest bucket, the cheapest.

        Raises:
            ResourceError: no class covers ``need``.
        """
        found = self._chosen.get((need, lanes))
        if found is None:
            covering = [programs for programs in self._classes.values() if programs.sampling | need == programs.sampling]
            if not covering:
                raise ResourceError("sampling class", f"programs for {need}, prepared before the launch", list(self._classes))
            found = min(covering, key=lambda programs: (-min(programs.buckets[-1], lanes), class_cost(programs.sampling)))
            self._chosen[need, lanes] = found
        return found


def class_cost(sampling: SamplingClass) -> tuple[bool, int, int]:
    """Sort key of classes, cheapest first: those whose programs wait for the host come last, then by how much they compute."""
    return sampling.grammar, sum(getattr(sampling, name) is True for name in sampling.__slots__), sampling.logprobs

"""The host's part of a cycle alone: the engine's scheduler, launch and read with a device that computes nothing.

``python -m perf.host_path --scenario NAME --cycles N`` runs one scenario and prints nothing; it is the process whose machine instructions
:mod:`perf.instructions` counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from graphspec.config.catalog import load_object, resolve_variant
from graphspec.config.schema import Config, ModelConfig, RuntimeConfig, VariantConfig
from graphspec.engine.request import Request, SamplingParams
from graphspec.engine.scheduler import Scheduler
from graphspec.facts import read_model_facts
from graphspec.facts.folders import model_folder
from graphspec.graphs.cycle import Cycle
from graphspec.graphs.programs import Key, PrefillKey
from graphspec.graphs.stages.mailbox import MailLayout
from graphspec.graphs.stages.stage import Stage
from graphspec.kernels import select_kernels
from graphspec.plan.buffers import RING_FIELDS, Arena, Status, Views
from graphspec.plan.plan import Plan, make_plan
from graphspec.shapes import GREEDY
from perf.bytecodes import count_bytecodes

WARM_CYCLES, COUNTED_CYCLES = 16, 48
STEADY_BUDGET = 900
"""New tokens of a request that does not end during a count."""
CHUNKS = (16, 64)


@dataclass(frozen=True)
class Scenario:
    """A workload of the host.

    Attributes:
        name: in the guard file.
        variant: of the catalog; the plan has the sizes of its demo draft.
        shape: ``(S, K, N)``; None: plain decoding.
        rows: concurrent requests.
        cycles_in_flight: launches before the host waits.
        budget: new tokens of each request; with a small one, requests end and others join.
    """

    name: str
    variant: str
    shape: tuple[int, int, int] | None
    rows: int
    cycles_in_flight: int
    budget: int = STEADY_BUDGET


KINDS = (("plain", "none", None), ("chain", "eagle3", (4, 1, 5)), ("tree", "eagle3", (5, 4, 16)))
SCENARIOS = (
    *(
        Scenario(f"{kind}, batch {rows}, {in_flight} in flight", variant, shape, rows, in_flight)
        for kind, variant, shape in KINDS
        for rows in (1, 8)
        for in_flight in (1, 2)
    ),
    Scenario("chain, batch 4, 2 in flight, rows leave and join", "eagle3", (4, 1, 5), 4, 2, budget=12),
)


def host_plan(scenario: Scenario) -> Plan:
    """The scenario's plan from the facts of the demo checkpoints; no weights are read."""
    steps, topk, nodes = scenario.shape or (None, None, None)
    config = Config(
        variant=VariantConfig(name=scenario.variant, num_steps=steps, topk=topk, num_draft_tokens=nodes),
        model=ModelConfig(),
        runtime=RuntimeConfig(
            name="eager", max_rows=scenario.rows, buckets=[scenario.rows], cycles_in_flight=scenario.cycles_in_flight,
            prefill_chunks=list(CHUNKS), prefill_tokens_per_cycle=2**16,
        ),
    )  # fmt: skip
    variant, folder = resolve_variant(scenario.variant), model_folder(config.model.path)
    target = read_model_facts(folder)
    draft = load_object(variant.facts)(folder.parent / variant.demo_draft, target) if variant.demo_draft is not None else None
    return make_plan(config, target, draft, device="cpu")


class SimulatedDevice:
    """Replaces all stages of a program: reads the message and writes the ring as they would, without a network.

    A live row commits 1, 2, ... A tokens in turn until its budget is used up. All tokens are 7.
    """

    name = "simulated device"

    def __init__(self, plan: Plan, arena: Arena, key: Key) -> None:
        self.plan, self.key, self.layout = plan, key, MailLayout.of(plan)
        self.words: np.ndarray[Any, Any] = arena["mail"].numpy()
        self.status, self.budget, self.launch, self.ring = (arena[name].numpy() for name in ("status_R", "budget_R", "cycle_1", "ring_ZBJ"))

    def __call__(self, views: Views) -> None:
        at, words = self.layout, self.words
        self.status[words[at.aborts : at.pages]] = Status.FREE
        entry = self.ring[self.launch[0] % self.plan.ring_depth]
        if isinstance(self.key, PrefillKey):
            for place in range(at.joins, at.joins + self.key.lanes * at.join_words, at.join_words):
                if (row := words[place]) != at.dummy_row:
                    self.budget[row], self.status[row] = words[place + 1], Status.FREE
            for lane in range(self.key.lanes):
                start, length, total, known_root = words[at.chunks + at.CHUNK_WORDS * lane :][:4].tolist()
                row, ends = int(words[at.lanes + lane]), 0 < length == total - start
                if ends:
                    self.status[row] = Status.LIVE
                self._emit(entry[lane], row, int(ends and known_root < 0))
        else:
            for lane, row in enumerate(words[at.lanes : at.lanes + self.key.bucket].tolist()):
                self._emit(entry[lane], row, 1 + (int(self.launch[0]) + row) % self.plan.accept_width)
        self.launch[0] += 1

    def _emit(self, lane: np.ndarray[Any, Any], row: int, run: int) -> None:
        count = min(run, int(self.budget[row])) if self.status[row] == Status.LIVE else 0
        self.budget[row] -= count
        if count and not self.budget[row]:
            self.status[row] = Status.LENGTH
        lane[0], lane[1] = count, self.status[row]
        lane[RING_FIELDS : RING_FIELDS + count] = 7


class HostCycle(Cycle):
    """The engine's cycle with its message buffers, launches and reads, over programs of one simulated stage."""

    def __init__(self, plan: Plan) -> None:
        nothing = cast("Any", None)  # Only stages need networks, and none are built here.
        super().__init__(plan, nothing, None, select_kernels(plan.kernels, plan.attention, plan.device))
        self.cycles_launched = 0

    def stages(self, key: Key) -> list[Stage]:
        return [cast("Stage", SimulatedDevice(self.plan, self.arena, key))]

    def launch(self, key: Key, message: Any) -> int:
        self.cycles_launched += not isinstance(key, PrefillKey)
        return super().launch(key, message)


class HostPath:
    """A running scenario: as many requests as rows, and a new one for each that ends."""

    def __init__(self, scenario: Scenario) -> None:
        self.plan = host_plan(scenario)
        self.cycle = HostCycle(self.plan)
        self.cycle.prepare([*self.plan.graph_keys(GREEDY), *self.cycle.prefills(GREEDY)])
        self.scheduler = Scheduler(self.plan, self.cycle, GREEDY)
        self.requests: list[Request] = []
        params = SamplingParams(max_tokens=scenario.budget, seed=0).resolve()
        self._next = Request(index=0, prompt=[5] * 24, params=params, stop_ids=(), budget=scenario.budget)
        for _ in range(scenario.rows):
            self._add()

    def _add(self) -> None:
        prototype = self._next
        fresh = replace(prototype, index=len(self.requests), prompt=list(prototype.prompt), output=[], logprobs=[], page_keys=[])
        fresh.metrics = type(prototype.metrics)()
        self.requests.append(fresh)
        self.scheduler.add(fresh)

    def run(self, cycles: int) -> None:
        """Step until ``cycles`` more cycles are launched."""
        goal = self.cycle.cycles_launched + cycles
        while self.cycle.cycles_launched < goal:
            for request in self.scheduler.step():
                if request.finish_reason is not None:
                    self._add()


def bytecodes_per_cycle(scenario: Scenario) -> float:
    """Bytecodes of :mod:`graphspec` per cycle in the steady state of the scenario, to a tenth."""
    path = HostPath(scenario)
    with torch.no_grad():
        path.run(WARM_CYCLES)
        return round(count_bytecodes(lambda: path.run(COUNTED_CYCLES), "graphspec") / COUNTED_CYCLES, 1)


def scenario_named(name: str) -> Scenario:
    """The scenario called ``name``.

    Raises:
        SystemExit: there is none.
    """
    for scenario in SCENARIOS:
        if scenario.name == name:
            return scenario
    raise SystemExit(f"--scenario: expected one of {', '.join(repr(s.name) for s in SCENARIOS)}, found {name!r}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one scenario for this many cycles."""
    parser = argparse.ArgumentParser(prog=f"python -m perf.{Path(__file__).stem}", description=__doc__)
    parser.add_argument("--scenario", required=True)
    parser.add_argument("--cycles", type=int, required=True)
    args = parser.parse_args(argv)
    HostPath(scenario_named(args.scenario)).run(args.cycles)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

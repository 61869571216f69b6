"""Programs captured whole, on a CPU: recorded operations replayed over the same buffers (:mod:`tests.support.tape`).

Replays equal direct launches to the bit for every structure, bucket and order; memory that runs out costs buckets and no tokens; what moves
or compiles after the warm-up is an error.
"""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch

from graphspec.drafters.ngram_trie.proposer import TrieProposer
from graphspec.engine.request import Request, SamplingParams, sampling_class
from graphspec.engine.scheduler import Scheduler
from graphspec.errors import CaptureError, ResourceError
from graphspec.graphs.capture import ran_out_of_memory
from graphspec.graphs.compile import compile_stages
from graphspec.graphs.cycle import Cycle
from graphspec.graphs.programs import Key, PrefillKey, describe, prefill_keys, tokens_of
from graphspec.graphs.stages.mailbox import Message
from graphspec.graphs.stages.stage import Stage
from graphspec.kernels import select_kernels
from graphspec.plan.buffers import Status
from graphspec.plan.plan import Plan
from graphspec.shapes import GREEDY, SAMPLED, GraphKey, SamplingClass
from tests.support.tape import Tape, TapeCapturer
from tests.support.tiny import STRUCTURES, assert_same_state, structure_plan, tiny_networks

EVERYTHING = SamplingClass(True, True, True, True, 2, True, True, True)


def make_plan(structure: str, **keys: Any) -> Plan:
    return structure_plan(structure, device="cpu", **{"runtime": "eager", "buckets": [1, 2, 4], "max_rows": 4, **keys})


def make_cycle(plan: Plan, capturer: Callable[..., Any] | None = TapeCapturer) -> Cycle:
    networks = tiny_networks(plan)
    return Cycle(plan, networks.target, networks.draft, select_kernels("reference", "auto", "cpu"), capturer=capturer)


def keys_of(plan: Plan, sampling: SamplingClass) -> list[Key]:
    """Smallest first: the cycle must find the order itself."""
    return [*prefill_keys(plan, sampling), *reversed(plan.graph_keys(sampling))]


def run(cycle: Cycle, count: int, *, seed: int = 0, length: int = 5, sampling: SamplingClass = SAMPLED) -> list[list[int]]:
    """Outputs of ``count`` requests; each depends on its number and the seed alone."""
    requests = []
    for index in range(count):
        rng = random.Random(97 * seed + index)
        prompt = [rng.randrange(3, 61) for _ in range(rng.choice((1, 3, 8, 9, 21)))]
        params = SamplingParams(max_tokens=length, temperature=(0.8, 0.0)[index % 2], seed=seed + index)
        requests.append(Request(index=index, prompt=prompt, params=params, stop_ids=(2,), budget=length))
    proposer = TrieProposer(cycle.plan) if cycle.plan.variant.drafter == "host" else None
    scheduler = Scheduler(cycle.plan, cycle, sampling, proposer, cycle.buckets(sampling))
    for request in requests:
        scheduler.add(request)
    while scheduler.busy:
        scheduler.step()
    assert all(r.finish_reason in ("stop", "length") for r in requests)
    return [r.output for r in requests]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_replays_equal_direct_launches(structure: str) -> None:
    plan = make_plan(structure, cycles_in_flight=1 if structure == "host-tree" else 2)
    captured, direct = make_cycle(plan), make_cycle(plan, None)
    for cycle in (captured, direct):
        cycle.prepare(keys_of(plan, SAMPLED))
    assert all(isinstance(program.replay, Tape) for program in captured.programs.values())
    assert not any(program.replay for program in direct.programs.values())
    for seed, count in enumerate(random.Random(structure).sample((1, 2, 4), 3)):
        assert run(captured, count, seed=seed) == run(direct, count, seed=seed)
    assert_same_state(captured, direct)
    assert min(program.replay.replays for program in captured.programs.values()) > 0, "every program ran"  # type: ignore[union-attr]


def test_everything_a_request_may_ask_is_captured_too() -> None:
    plan = make_plan("tree")
    captured, direct = make_cycle(plan), make_cycle(plan, None)
    for cycle in (captured, direct):
        cycle.prepare(keys_of(plan, EVERYTHING))
    assert run(captured, 3, sampling=EVERYTHING) == run(direct, 3, sampling=EVERYTHING)


def test_what_sampling_classes_have_in_common_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The networks over a tree, and over a chunk: most of what there is to compile."""
    monkeypatch.setattr("graphspec.graphs.compile.lookup_backend", lambda name: lambda module, inputs: module)
    sizes: dict[str, Any] = {"buckets": [1], "max_rows": 1, "prefill_chunks": [8]}
    plan = make_plan("none", runtime="compiled", mode="compiled", **sizes)
    compiled, direct = make_cycle(plan), make_cycle(make_plan("none", **sizes), None)
    counts = []
    for sampling in (GREEDY, SAMPLED):
        before = compiled.compilations.graphs
        for cycle in (compiled, direct):
            cycle.prepare(keys_of(plan, sampling))
        counts.append(compiled.compilations.graphs - before)
    programs = len(keys_of(plan, SAMPLED))
    assert counts[0] - counts[1] == programs, "a part of every program is there"
    assert run(compiled, 1) == run(direct, 1)


def test_programs_wait_for_kernels_that_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """After all of a program is compiled, and before any of it runs."""
    events: list[Any] = []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        events.append("compile")

        def code(*tensors: Any) -> Any:
            events.append("run")
            return module(*tensors)

        return code

    @contextmanager
    def ahead(engines: int) -> Iterator[Callable[[], None]]:
        events.append(engines)
        yield lambda: events.append("wait")
        events.append("end")

    monkeypatch.setattr("graphspec.graphs.compile.lookup_backend", lambda name: backend)
    plan = make_plan("chain", runtime="compiled", mode="compiled", buckets=[1, 2], max_rows=2)
    networks = tiny_networks(plan)
    kernels = replace(select_kernels("reference", "auto", "cpu"), compiling_ahead=ahead)
    cycle = Cycle(plan, networks.target, networks.draft, kernels, capturer=TapeCapturer)
    keys = keys_of(plan, GREEDY)
    cycle.prepare(keys)
    assert events[0] == 1, "one engine on this machine"
    built = events[1 : events.index("end")]
    assert [event for event, _ in groupby(built)] == ["compile", "wait", "run"] * len(keys)
    events.clear()
    cycle.prepare(keys)
    assert not events, "nothing is missing"


@pytest.mark.parametrize(
    ("structure", "depths"),
    [("chain", {1: 4, 2: 2, 4: 1}), ("tree", {4: 1, 1: 3}), ("hidden-feature", {1: 1}), ("own-history", {4: 2})],
)
def test_depth_per_bucket_changes_no_token(structure: str, depths: dict[int, int]) -> None:
    """Greedy and sampled rows; they end and join, so the bucket, and with it the depth, changes under a request's feet."""
    plans = [make_plan(structure, depth_per_bucket=d, cycles_in_flight=2) for d in ({}, depths)]
    cycles = [make_cycle(plans[0], None), make_cycle(plans[1])]
    outputs = []
    for cycle in cycles:
        cycle.prepare(keys_of(cycle.plan, SAMPLED))
        outputs.append([run(cycle, count, seed=count, length=9) for count in (5, 1)])
    assert outputs[0] == outputs[1]
    shapes = {key.bucket: key.shape for key in cycles[1].programs if isinstance(key, GraphKey)}
    assert {bucket: shape.num_steps for bucket, shape in shapes.items()} == {b: depths.get(b, plans[0].shape.num_steps) for b in (1, 2, 4)}
    assert plans[1].shapes[0] == max(shapes.values()), "deepest first"


def test_a_shallower_cycle_verifies_fewer_nodes_over_the_same_memory() -> None:
    plan = make_plan("tree", depth_per_bucket={1: 1, 2: 2})
    cycle = make_cycle(plan, None)
    views = {bucket: cycle.views(plan.key(bucket, GREEDY)) for bucket in plan.buckets}
    topk, nodes = plan.shape.topk, plan.shape.num_draft_tokens
    assert [v.node_token_BN.shape for v in views.values()] == [(1, 1 + topk), (2, nodes), (4, nodes)]
    assert [v.candidate_token_BM.shape[1] for v in views.values()] == [topk, topk + topk**2, plan.shape.num_candidates]
    assert {v.logits_BNV.data_ptr() for v in views.values()} == {cycle.arena["logits_BNV"].data_ptr()}
    assert all(v.logits_BNV.is_contiguous() and v.path_BA.shape[1] == plan.accept_width for v in views.values())


def test_the_largest_program_is_captured_first_and_prefill_as_well() -> None:
    plan, made = make_plan("tree"), []

    def capturer(arena: Any) -> TapeCapturer:
        made.append(TapeCapturer(arena))
        return made[0]

    cycle, phases = make_cycle(plan, capturer), []
    keys = keys_of(plan, GREEDY)
    cycle.prepare(keys, lambda phase, done, total, note: phases.append((phase, done, total)))
    order = [next(key for key, program in cycle.programs.items() if program is owner) for owner in made[0].order]
    assert order == sorted(keys, key=tokens_of, reverse=True) and isinstance(order[-1], PrefillKey)
    assert phases == [(phase, done, 6) for phase in ("build", "capture") for done in range(7)]
    report = cycle.capture_report()
    assert [record.name for record in report] == [describe(key) for key in order]
    assert report[0].name == "cycle of 4 lanes, depth 5, greedy" and report[-1].name == "prefill of 8 tokens, greedy"
    for record in report:
        assert record.warm_up_seconds > 0 and record.capture_seconds is not None and record.capture_seconds > 0
    assert report[0].pool_bytes is not None and report[-2].pool_bytes is not None and report[0].pool_bytes > report[-2].pool_bytes > 0
    cycle.prepare(keys)
    assert len(made[0].order) == 6, "what exists is not captured again"


def lanes_above(maximum: int, program: Any) -> bool:
    return bool(not program.prefills and program.views.lane_row_B.shape[0] > maximum)


class Widths:
    """A launcher that notes how many lanes a launch had."""

    def __init__(self, cycle: Cycle) -> None:
        self.cycle, self.seen = cycle, set[tuple[int, int]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cycle, name)

    def launch(self, key: Key, message: Message) -> int:
        if isinstance(key, GraphKey):
            self.seen.add((key.bucket, len(message.lanes)))
        return self.cycle.launch(key, message)


@pytest.mark.parametrize("phase", ["capture", "build"])
def test_buckets_without_memory_are_left_out(phase: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan("chain", cycles_in_flight=2)
    expected = make_cycle(plan, None)
    expected.prepare(keys_of(plan, SAMPLED))
    refuse = functools.partial(lanes_above, 2) if phase == "capture" else lambda program: False
    cycle = make_cycle(plan, lambda arena: TapeCapturer(arena, refuse))
    if phase == "build":
        honest = cycle._build

        def build(key: Key) -> None:
            if isinstance(key, GraphKey) and key.bucket > 2:
                raise RuntimeError("capture failed") from torch.OutOfMemoryError("CUDA out of memory")
            honest(key)

        monkeypatch.setattr(cycle, "_build", build)
    with caplog.at_level(logging.WARNING):
        cycle.prepare(keys_of(plan, SAMPLED))
    assert "no program for cycle of 4 lanes, depth 4, noise; at most 2 rows share a launch" in caplog.text
    assert cycle.buckets(SAMPLED) == (1, 2) and cycle.buckets(GREEDY) == (1, 2, 4)
    assert len(cycle.capture_report()) == 5
    launcher = Widths(cycle)
    assert run(launcher, 6) == run(expected, 6)  # type: ignore[arg-type]
    assert max(launcher.seen) == (2, 2), "four rows are held, two share a launch"
    cycle.prepare(keys_of(plan, SAMPLED))
    assert plan.key(4, SAMPLED) not in cycle.programs, "what did not fit is not tried again"


def test_rows_beyond_the_largest_bucket_take_turns() -> None:
    # All prompts are read before the first cycle.
    plan = replace(make_plan("none"), prefill_tokens_per_cycle=4096)
    cycle = make_cycle(plan, lambda arena: TapeCapturer(arena, functools.partial(lanes_above, 1)))
    cycle.prepare(keys_of(plan, GREEDY))
    requests = [Request(index=i, prompt=[5 + i], params=SamplingParams(), stop_ids=(), budget=12) for i in range(4)]
    scheduler = Scheduler(plan, cycle, GREEDY, None, cycle.buckets(GREEDY))
    for request in requests:
        scheduler.add(request)
    while scheduler.busy:
        scheduler.step()
        lengths = [len(r.output) for r in requests if r.output]
        assert max(lengths, default=0) - min(lengths, default=0) <= 1, "no caller starves"
    assert [len(r.output) for r in requests] == [12] * 4


@pytest.mark.parametrize("which", ["every cycle", "a prefill"])
def test_no_memory_for_what_is_needed(which: str) -> None:
    plan = make_plan("chain")

    def refuse(program: Any) -> bool:
        return lanes_above(0, program) if which == "every cycle" else program.prefills

    cycle = make_cycle(plan, lambda arena: TapeCapturer(arena, refuse))
    with pytest.raises(ResourceError, match="room for the program of a " + ("cycle of 1 lanes" if which == "every cycle" else "prefill")):
        cycle.prepare(keys_of(plan, GREEDY))
    assert cycle.arena["cycle_1"].item() == 0, "a failed build leaves the state as it was"


def test_out_of_memory_by_any_name() -> None:
    def chained(error: BaseException, cause: BaseException) -> BaseException:
        error.__context__ = cause
        return error

    assert ran_out_of_memory(torch.OutOfMemoryError("x"))
    assert ran_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert ran_out_of_memory(chained(RuntimeError("capture was invalidated"), torch.OutOfMemoryError("x")))
    assert not ran_out_of_memory(RuntimeError("capture was invalidated"))
    assert not ran_out_of_memory(chained(ValueError("out of memory"), KeyError("x")))


def test_other_failures_are_not_taken_for_missing_memory() -> None:
    class Broken(TapeCapturer):
        def capture(self, program: Any) -> Tape:
            raise RuntimeError("operation not permitted when stream is capturing")

    cycle = make_cycle(make_plan("none"), Broken)
    with pytest.raises(CaptureError, match=r"prefill of 16 tokens.*CUDA graph.*RuntimeError: operation not permitted") as caught:
        cycle.prepare(keys_of(make_plan("none"), GREEDY))
    assert caught.value.hint == "runtime=compiled runs it without a graph"
    assert not cycle.dropped, "nothing is left out that memory did not run out for"


@pytest.mark.parametrize("structure", ["chain", "head-per-step", "own-history"])
def test_debug_mode_changes_no_token(structure: str) -> None:
    plan = make_plan(structure, cycles_in_flight=2)
    cycles = [make_cycle(plan, None), make_cycle(replace(plan, debug=True), None), make_cycle(replace(plan, debug=True))]
    for cycle in cycles:
        cycle.prepare(keys_of(plan, SAMPLED))
    first, second, third = (run(cycle, 3) for cycle in cycles)
    assert first == second == third


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.clone(), r"seq_len_R: expected address 0x"),
        (lambda t: t.view(torch.float64), r"seq_len_R: expected torch.int64 \[5\], found torch.float64 \[5\]"),
        (lambda t: t[:3], r"seq_len_R: expected torch.int64 \[5\], found torch.int64 \[3\]"),
    ],
)
@pytest.mark.parametrize("where", ["arena", "views"])
def test_debug_mode_names_a_slot_that_is_not_what_it_was(change: Callable[[torch.Tensor], torch.Tensor], message: str, where: str) -> None:
    plan = replace(make_plan("none"), debug=True)
    cycle = make_cycle(plan)
    key = plan.key(2, GREEDY)
    cycle.prepare([key])
    cycle.read(cycle.launch(key, Message(lanes=())))
    if where == "arena":
        cycle.arena._tensors["seq_len_R"] = change(cycle.arena["seq_len_R"])
    else:
        views, message = cycle.views(key), r"seq_len_R: expected torch.int64 \[5\] strides \[1\] at 0x[0-9a-f]+, as captured"
        views.seq_len_R = change(views.seq_len_R)
    with pytest.raises(CaptureError, match=message):
        cycle.launch(key, Message(lanes=()))
    assert cycle.in_flight == 0


def test_debug_mode_poisons_what_lives_for_one_cycle() -> None:
    plan = replace(make_plan("none"), debug=True)
    cycle = make_cycle(plan, None)
    key = plan.key(2, GREEDY)
    cycle.prepare([key])
    seen: list[bool] = []

    class Nosy(Stage):
        name = "nosy"

        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

        def forward(self, v: Any) -> None:
            seen.append(bool(v.logits_BNV.isnan().all()) and int(v.path_BA.max()) < -(2**30))

    program = cycle.programs[key]
    program.steps.insert(0, functools.partial(Nosy(), program.views))
    cycle.read(cycle.launch(key, Message(lanes=())))
    assert seen == [True]


def test_a_compilation_after_the_warm_up_is_an_error() -> None:
    plan = make_plan("none")
    cycle = make_cycle(plan)
    key = plan.key(1, GREEDY)
    cycle.prepare([key])
    replay = cycle.programs[key].replay
    assert replay is not None
    region = compile_stages(cycle.programs[key].stages, cycle.programs[key].views, compilations=cycle.compilations)

    def late() -> None:
        replay()
        region()

    cycle.programs[key].replay = late
    with pytest.raises(CaptureError, match="cycle of 1 lanes, depth 0, greedy: expected no compilation after the warm-up, found 1 graphs"):
        cycle.launch(key, Message(lanes=()))


def test_the_tape_itself_would_show_a_number_python_looked_at() -> None:
    """A planted stage that fixes a Python number at capture time makes replays differ from direct launches."""
    plan = make_plan("none")
    outputs = []
    for capturer in (None, TapeCapturer):
        cycle = make_cycle(plan, capturer)
        calls = [0]

        class Counting(Stage):
            name = "counting"
            writes = ("temperature_R",)

            def __init__(self) -> None:
                torch.nn.Module.__init__(self)

            def forward(self, v: Any, calls: list[int] = calls) -> None:
                calls[0] += 1
                v.temperature_R.fill_(float(calls[0]))

        honest = cycle.stages
        cycle.stages = lambda key, honest=honest: [*honest(key), Counting()]  # type: ignore[method-assign, misc]
        key = plan.key(1, GREEDY)
        cycle.prepare([key])
        for _ in range(3):
            cycle.read(cycle.launch(key, Message(lanes=())))
        outputs.append(cycle.arena["temperature_R"][0].item() - calls[0])
    assert outputs[0] == 0 and calls[0] == 2 and outputs[1] == 0
    assert cycle.arena["temperature_R"][0].item() == 2.0, "frozen at what it was while recording"


def test_sampling_class_decides_which_programs_exist() -> None:
    plan = make_plan("chain")
    cycle = make_cycle(plan)
    cycle.prepare(keys_of(plan, GREEDY))
    with pytest.raises(ResourceError, match="a program prepared before the run"):
        cycle.launch(plan.key(1, SAMPLED), Message(lanes=()))
    assert sampling_class([SamplingParams(temperature=0.5)]) == SAMPLED
    assert Status.LIVE == 1

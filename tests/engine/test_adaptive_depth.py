"""Draft depth that changes between cycles, 0 included: no token changes, and the drafter catches up in time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphspec.api.llm import LLM, SamplingParams, generate_through
from graphspec.api.outputs import summarise
from graphspec.config.schema import AdaptiveConfig
from graphspec.engine.depth import AdaptiveDepth
from graphspec.engine.meter import AcceptanceTest
from graphspec.engine.request import Request, RequestMetrics
from graphspec.engine.scheduler import Scheduler
from graphspec.errors import ConfigError, ResourceError
from graphspec.graphs.cycle import Cycle
from graphspec.graphs.programs import PrefillKey, describe, tokens_of
from graphspec.graphs.stages.mailbox import Message
from graphspec.kernels import select_kernels
from graphspec.plan.buffers import Status
from graphspec.plan.plan import Plan
from graphspec.shapes import GREEDY, PLAIN, SAMPLED, GraphKey, SamplingClass
from tests.graphs.test_inert import Poisoner
from tests.support.depths import Launches, RandomDepth, ScriptedDepth
from tests.support.engines import CHAIN, TREE, Pair, ids, mirror_pair, prompts, watch_schedulers
from tests.support.tape import TapeCapturer
from tests.support.tiny import assert_same_state, same_bits, structure_plan, tiny_networks
from tests.support.variants import Family

from .test_scheduler import Case, Device, Row

LENGTH = 26
ONE_HEAD = {"num_steps": 3, "topk": 2, "num_draft_tokens": 6}
PATHS = {"num_steps": 4, "topk": 2, "num_draft_tokens": 7}
NETWORKS = ("chain", "tree", "hidden-feature", "no-feature", "one-head", "latent-experts")
"""Structures whose drafter is one network."""


@pytest.fixture(scope="module")
def misses(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A draft that is right most of the time."""
    return mirror_pair(tmp_path_factory.mktemp("misses"), noise=0.8)


@pytest.fixture(scope="module")
def plain(misses: Pair, family: Family) -> dict[str, list[list[int]]]:
    """Plain decoding of :func:`workload`, by target."""
    engines = {"misses": misses.llm(variant="none"), "family": family.llm("none")}
    return {name: ids(llm.generate(*workload())) for name, llm in engines.items()}


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and parameters of greedy and sampled rows of several lengths; one row uses all sampling parameters."""
    params = [SamplingParams(max_tokens=LENGTH - 3 * i, temperature=(0.0, 0.8)[i % 2], seed=7 + i, ignore_eos=i < 4) for i in range(6)]
    params[3] = SamplingParams(max_tokens=LENGTH, temperature=0.8, seed=3, top_k=20, presence_penalty=0.4, min_tokens=9, logprobs=1)
    return prompts(6, vocab=40), params


# draft, its shape, depths besides the widest, backlog, page size, rows, cycles in flight, pages
CASES: list[tuple[str, dict[str, Any], list[int], int, int, int, int, int | None]] = [
    ("eagle3", CHAIN, [0, 1, 2], 7, 1, 1, 1, None),
    ("eagle3", CHAIN, [0, 2], 16, 16, 3, 3, None),
    ("eagle3", CHAIN, [0], 2, 4, 3, 3, 24),
    ("eagle3", TREE, [0, 1, 2], 6, 16, 3, 1, None),
    ("eagle3", TREE, [0, 2], 9, 1, 3, 3, 70),
    ("eagle", TREE, [0, 1], 8, 1, 3, 3, None),
    ("standalone", CHAIN, [0, 1, 2], 6, 16, 3, 1, None),
    ("mtp-1", ONE_HEAD, [0, 1], 5, 1, 3, 3, None),
    ("ngram", PATHS, [0, 1, 2], 5, 16, 3, 3, None),
]


def engine(misses: Pair, family: Family, name: str, **keys: Any) -> LLM:
    return misses.llm(**keys) if name == "eagle3" else family.llm(name, **keys)


@pytest.mark.parametrize(("name", "shape", "depths", "backlog", "page_size", "rows", "in_flight", "pages"), CASES)
def test_no_depth_changes_a_token(
    misses: Pair, family: Family, plain: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch, name: str, shape: dict[str, Any],
    depths: list[int], backlog: int, page_size: int, rows: int, in_flight: int, pages: int | None,
) -> None:  # fmt: skip
    """Rows end, join, are sent back and move between buckets while the depth changes at random."""
    made = watch_schedulers(monkeypatch)
    keys = {**shape, "depths": depths, "backlog": backlog, "page_size": page_size, "num_pages": pages, "cycles_in_flight": in_flight}
    llm = engine(misses, family, name, **keys, max_rows=rows, buckets=[1, 2, 3][:rows])
    (prompt, params), launcher = workload(), Launches(llm.cycle)
    for seed in range(2):
        policy = llm.depth_policy = RandomDepth(llm.plan, seed)
        before = len(launcher.keys)
        outputs = generate_through(llm, launcher, prompt, params)
        assert ids(outputs) == plain["misses" if name == "eagle3" else "family"]
        assert [depth for _, depth, _ in policy.reported] == [key.shape.num_steps for key in launcher.keys[before:]], (
            "in the order of launch"
        )
        assert max(max(run, default=0) for _, depth, run in policy.reported if depth) >= 1
    assert launcher.depths == {*depths, shape["num_steps"], *([] if name == "ngram" else [-1])}, "every depth had its turn"
    assert (made[-1].preempted > 0) == (pages is not None), "pages are short where they should be"
    assert made[-1].allocator.num_used == 0


@pytest.mark.parametrize("what", ["lanes", "free_pages", "unwritten_slots", "windows", "rows"])
def test_poison_in_what_no_cycle_may_read(
    misses: Pair, plain: dict[str, list[list[int]]], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Window entries past a row's length among it, wherever a wide window has them."""
    poisoner = Poisoner(watch_schedulers(monkeypatch))
    poisoner.before_launches(monkeypatch, what)
    llm = misses.llm(**CHAIN, depths=[0, 1], backlog=9, max_rows=4, buckets=[3, 4], cycles_in_flight=2, debug=True)
    llm.depth_policy = RandomDepth(llm.plan, 5)
    assert ids(llm.generate(*workload())) == plain["misses"]
    assert poisoner.done > 20


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("pause", [1, 4, 5, 6, 13, 30])
def test_after_any_pause_the_drafter_is_as_right_as_before(twin: Pair, shape: dict[str, Any], pause: int) -> None:
    """A draft that is always right is so in the first cycle after the pause, however often the window ran full in it."""
    llm, steps = twin.llm(**shape, depths=[0], backlog=6, max_rows=2, buckets=[1, 2], cycles_in_flight=2), shape["num_steps"]
    llm.depth_policy = ScriptedDepth([steps, steps, *[0] * pause, steps])
    launcher = Launches(llm.cycle)
    prompt_ids = prompts(2, lengths=(5, 11))
    outputs = generate_through(llm, launcher, prompt_ids, SamplingParams(max_tokens=55, ignore_eos=True))
    assert ids(outputs) == [twin.greedy(prompt, 55, ignore_eos=True) for prompt in prompt_ids]
    capacity, accept = llm.plan.window_capacity, llm.plan.accept_width
    # Plain cycles on top of the last run fill the window; from a caught-up one there is room for one less than it holds.
    bound, expected = accept, 0
    for _ in range(pause):
        bound, expected = (1, expected + 1) if bound == capacity else (bound + 1, expected)
    expected += bound > accept
    assert sum(key.catch_up for key in launcher.keys) == expected
    for output in outputs:
        timing = output.timing
        assert set(timing.cycle_depths) == {0, steps}
        assert {tokens for tokens, _ in timing.drafted_cycles()} == {steps + 1}
        assert all(tokens == 1 for tokens, depth in zip(timing.cycle_tokens, timing.cycle_depths, strict=True) if depth == 0)
    assert llm.metrics is not None
    assert llm.metrics.acceptance_length == steps + 1 and llm.metrics.accepted_per_position == [1.0] * steps


def tiny(structure: str, depths: list[int], backlog: int = 9, **keys: Any) -> Plan:
    values = {"device": "cpu", "runtime": "eager", "buckets": [1, 2, 4], "max_rows": 4, **keys}
    return structure_plan(structure, adaptive=AdaptiveConfig(depths=depths, backlog=backlog), **values)


def tiny_cycle(plan: Plan, sampling: SamplingClass, capturer: Any = None) -> Cycle:
    networks = tiny_networks(plan)
    cycle = Cycle(plan, networks.target, networks.draft, select_kernels("reference", "auto", "cpu"), capturer=capturer)
    cycle.prepare([*cycle.prefills(sampling), *plan.graph_keys(sampling)])
    return cycle


def tiny_run(cycle: Cycle, policy: Any, count: int = 3, length: int = 22, sampling: SamplingClass = SAMPLED) -> list[list[int]]:
    requests = []
    for index in range(count):
        params = SamplingParams(max_tokens=length - index, temperature=(0.8, 0.0)[index % 2], seed=index)
        prompt = [(11 * index + 5 * i) % 58 + 3 for i in range(4 + 7 * index)]
        requests.append(Request(index=index, prompt=prompt, params=params, stop_ids=(), budget=params.max_tokens))
    scheduler = Scheduler(cycle.plan, cycle, sampling, None, cycle.buckets(sampling), policy)
    for request in requests:
        scheduler.add(request)
    while scheduler.busy:
        scheduler.step()
    return [request.output for request in requests]


@pytest.mark.parametrize("structure", NETWORKS)
def test_the_drafters_cache_is_that_of_a_run_that_never_paused(structure: str) -> None:
    """Draft KV of every committed token but the last window, through each row's own page table."""
    plan = tiny(structure, [0], backlog=11)
    steps = plan.shape.num_steps
    pools = []
    for script in ([steps], [steps, *[0] * 7, steps, *[0] * 30]):
        cycle = tiny_cycle(plan, GREEDY)
        # Between the tokens that are needed and the end lies a pass over a full window, whatever is accepted.
        prompt, needed = [(5 * i) % 58 + 3 for i in range(13)], 32
        length = needed + 16
        request = Request(index=0, prompt=prompt, params=SamplingParams(max_tokens=length), stop_ids=(), budget=length)
        launches = Launches(cycle)
        scheduler = Scheduler(plan, launches, GREEDY, None, None, ScriptedDepth(script))
        scheduler.add(request)
        # The paused run ends right after its last pass over a full window.
        while len(request.output) < needed or (len(script) > 1 and not launches.keys[-1].catch_up):
            scheduler.step()
        row = request.row.index
        seen = int(cycle.arena["seq_len_R"][row]) - int(cycle.arena["window_len_R"][row])
        slot = torch.arange(plan.variant.shift, seen + 1)
        page = cycle.arena["page_table_RP"][row].long()[slot // plan.page_size]
        pools.append((request.output, cycle.arena["draft_kv"][:, :, page, slot % plan.page_size], launches.depths))
    (output, never, _), (again, paused, depths) = pools
    assert depths == {-1, 0, steps}
    common, known = min(len(output), len(again)), min(never.shape[2], paused.shape[2])
    assert output[:common] == again[:common] and known >= len(prompt) + 25
    # Rows are computed together with other rows, so products may round differently.
    torch.testing.assert_close(paused[:, :, :known], never[:, :, :known], rtol=2e-5, atol=2e-5)
    assert never[:, :, :known].abs().mean() > 0.1


@pytest.mark.parametrize(
    "structure", ["tree", *(pytest.param(name, marks=pytest.mark.full) for name in (*NETWORKS, "own-history") if name != "tree")]
)
def test_captured_programs_equal_direct_ones(structure: str) -> None:
    plan = tiny(structure, [0, 1], 7, cycles_in_flight=2, buckets=[1, 2], max_rows=2)
    captured, direct = tiny_cycle(plan, SAMPLED, TapeCapturer), tiny_cycle(plan, SAMPLED)
    fixed = tiny_cycle(tiny(structure, [], buckets=[1, 2], max_rows=2), SAMPLED)
    for seed, count in enumerate((2, 1, 3)):
        outputs = [tiny_run(cycle, RandomDepth(plan, seed), count) for cycle in (captured, direct)]
        assert outputs[0] == outputs[1] == tiny_run(fixed, None, count)
    assert_same_state(captured, direct)
    idle = [describe(key) for key, program in captured.programs.items() if not program.replay.replays]  # type: ignore[union-attr]
    assert idle == []


@pytest.mark.parametrize("rule", ["target_only", "rejection"])
def test_other_rules_decode_plainly_too(rule: str) -> None:
    plan = tiny("chain", [0, 2], rule=rule)
    cycle, alone = tiny_cycle(plan, SAMPLED), tiny_cycle(tiny("none", [], rule=rule), SAMPLED)
    greedy = tiny_run(alone, None)[1]
    for seed in range(3):
        outputs = tiny_run(cycle, RandomDepth(plan, seed))
        assert outputs[1] == greedy and [len(output) for output in outputs] == [22, 21, 20]
    # Plain cycles of either engine sample alike.
    assert tiny_run(cycle, ScriptedDepth([0])) == tiny_run(alone, None)


class WindowDevice(Device):
    """A simulated device that keeps each row's window, and knows what a program may find in it."""

    def __init__(self, device: Device) -> None:
        self.__dict__.update(device.__dict__)
        self.window: dict[int, int] = {}
        self.launches: list[GraphKey] = []

    def _prefill(self, key: PrefillKey, message: Message) -> Any:
        self.window |= dict.fromkeys(message.lanes, 1)
        return super()._prefill(key, message)

    def _cycle(self, key: GraphKey, message: Message) -> Any:
        plan, depth = self.plan, key.shape.num_steps
        self.launches.append(key)
        before = [self.rows[index].emitted for index in message.lanes]
        live = [index for index in message.lanes if self.rows[index].status == Status.LIVE]
        if depth:
            assert all(self.window[index] <= plan.accept_width for index in live), "the drafter reads no more of the window"
        result = super()._cycle(key, message)
        for index, emitted in zip(message.lanes, before, strict=True):
            run = self.rows[index].emitted - emitted
            if run:
                self.window[index] = run + (self.window[index] if depth == 0 and not key.catch_up else 0)
            assert self.window[index] <= plan.window_capacity, "the window runs over"
        return result


@st.composite
def simulated(draw: st.DrawFn) -> tuple[Case, WindowDevice]:
    rows, page_size = draw(st.integers(1, 4)), draw(st.sampled_from([1, 3, 16]))
    in_flight, backlog = draw(st.integers(1, 4)), draw(st.integers(2, 12))
    runtime: dict[str, Any] = {"page_size": page_size, "max_rows": rows, "cycles_in_flight": in_flight}
    depths = draw(st.sampled_from([[0], [0, 1], [0, 1, 2, 3]]))
    if draw(st.booleans()):
        roomy = tiny("chain", depths, backlog, **runtime)
        runtime["num_pages"] = roomy.pages_for(4 + roomy.tokens_in_flight) + draw(st.integers(0, roomy.pages_for(40)))
    plan = tiny("chain", depths, backlog, **runtime)
    case = Case(
        plan, draw(st.integers(0, 2**16)), draw(st.integers(1, 6)), draw(st.integers(1, 20)), draw(st.integers(1, 40)), draw(st.booleans())
    )
    device = WindowDevice(case.device)
    case.device = case.scheduler.launcher = device
    case.scheduler.policy = RandomDepth(plan, draw(st.integers(0, 99)))
    return case, device


def test_the_host_knows_in_time_when_the_drafter_must_catch_up() -> None:
    """With results unread, rows sent back, ended, aborted and joining: no window is ever wider than what the next program reads."""
    caught_up = 0

    @settings(max_examples=120, deadline=None)
    @given(simulated(), st.sampled_from([0.0, 0.0, 0.1]))
    def run(made: tuple[Case, WindowDevice], aborts: float) -> None:
        nonlocal caught_up
        case, device = made
        case.run(aborts)
        caught_up += sum(key.catch_up for key in device.launches)

    run()
    assert caught_up > 100


def test_no_cycle_is_spent_on_catching_up_without_need() -> None:
    """Windows no wider than a run need none; a full one needs it at depth 0 too."""
    plan = tiny("chain", [0], backlog=8)
    for script, expected in (
        ([4, 4, 4, 4, 4], "44444"),
        ([0, 4, 0, 4, 4], "040c4"),
        ([0, 0, 0, 0, 4], "00004"),
        ([0, 0, 0, 0, 0, 4, 4], "00000c4"),
        ([4, 0, 4, 4], "40c4"),
        ([0] * 20, "0000000c0000000c0000"),
    ):
        row = Row(owner=0)
        requests = [Request(index=0, prompt=[3], params=SamplingParams(seed=0), stop_ids=(), budget=60)]
        device = WindowDevice(Device(plan, [[3]], [[5] * 96], SimpleNamespace(randint=lambda low, high: high)))  # type: ignore[arg-type]
        device.rows[0] = row
        scheduler = Scheduler(plan, device, GREEDY, policy=ScriptedDepth(script))
        scheduler.add(requests[0])
        while len(device.launches) < len(expected):
            scheduler.step()
        assert "".join("c" if key.catch_up else str(key.shape.num_steps) for key in device.launches) == expected


def test_programs_of_a_plan_whose_depths_change() -> None:
    plan = tiny("tree", [0, 2], backlog=20, depth_per_bucket={4: 3}, buckets=[2, 4])
    assert plan.window_capacity == 20 and plan.accept_width == 6 and plan.catches_up
    assert plan.depths_of(4) == (0, 2, 3, 5) and plan.depths_of(2) == (0, 2, 5)
    assert plan.key(4, GREEDY).shape.num_steps == 3 and plan.key(2, GREEDY).shape == plan.shape, "where a bucket starts"
    keys = plan.graph_keys(GREEDY)
    assert [(key.bucket, key.shape.num_steps, key.catch_up) for key in keys] == [
        (4, 5, False), (4, 3, False), (4, 2, False), (4, 0, False), (4, 0, True), (2, 5, False), (2, 2, False), (2, 0, False), (2, 0, True),
    ]  # fmt: skip
    assert plan.key(2, GREEDY, 0).shape == plan.key(2, GREEDY, catch_up=True).shape == PLAIN
    assert [shape.num_steps for shape in plan.shapes] == [5, 3, 2, 0]
    assert describe(keys[4]) == "cycle of 4 lanes, depth 0, catching up, greedy"
    assert [tokens_of(key, plan.window_capacity) for key in keys[:5]] == [64, 64, 64, 4, 80]
    cycle = tiny_cycle(plan, GREEDY)
    assert [stage.name for stage in cycle.stages(keys[4])] == ["mailbox", "catch_up", "chain_layout", "verify", "accept", "commit"]
    assert [stage.name for stage in cycle.stages(keys[3])] == ["mailbox", "chain_layout", "verify", "accept", "commit"]
    assert cycle.arena["window_token_RAc"].shape[1] == cycle.arena["window_feature_RAcF"].shape[1] == 20
    assert cycle.buckets(GREEDY) == (2, 4)
    cycle.dropped.add(keys[3])
    assert cycle.buckets(GREEDY) == (2,), "a bucket that lacks one of its programs is left out"


@pytest.mark.parametrize("structure", ["chain", "tree", "own-history", "static-tree", "head-per-step", "none"])
def test_a_plan_whose_depths_never_change_is_what_it_was(structure: str) -> None:
    plan = structure_plan(structure, device="cpu", runtime="eager", buckets=[2, 4], max_rows=4, adaptive=AdaptiveConfig(backlog=90))
    assert plan.window_capacity == plan.accept_width and not plan.catches_up
    assert plan.graph_keys(SAMPLED) == (GraphKey(4, plan.shape, SAMPLED), GraphKey(2, plan.shape, SAMPLED))
    assert plan.depths_of(2) == (plan.shape.num_steps,) and plan.shapes == (plan.shape,)


def test_a_bucket_may_decode_plainly_for_good() -> None:
    plan = tiny("chain", [], depth_per_bucket={4: 0, 1: 2})
    assert [plan.depths_of(bucket) for bucket in (1, 2, 4)] == [(2,), (4,), (0,)]
    assert plan.catches_up and plan.window_capacity == 9
    assert sum(key.catch_up for key in plan.graph_keys(GREEDY)) == 3, "rows may go to any other bucket"
    cycle, expected = tiny_cycle(plan, SAMPLED), tiny_cycle(tiny("chain", []), SAMPLED)
    launcher = Launches(cycle)
    assert tiny_run(launcher, None) == tiny_run(expected, None)  # type: ignore[arg-type]
    assert launcher.depths == {0, -1, 4, 2}
    history = tiny("own-history", [], depth_per_bucket={4: 0})
    assert not history.catches_up and history.window_capacity == history.accept_width, "nothing is kept for a drafter without a network"


@pytest.mark.parametrize("structure", ["static-tree", "head-per-step", "none"])
def test_drafters_of_a_fixed_depth_refuse(structure: str) -> None:
    what = r"or a drafter that is one network or matches n-grams, no static tree, and a rule that forces no length, found"
    with pytest.raises(ConfigError, match=rf"adaptive\.depths: expected \[\], {what} \[0\]"):
        tiny(structure, [0])
    with pytest.raises(ConfigError, match=rf"runtime\.depth_per_bucket: expected {{}}, {what} {{4: 0}}"):
        tiny(structure, [], depth_per_bucket={4: 0})


def test_contradicting_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"adaptive\.depths: expected \[\], or a drafter .* forces no length, found \[0, 2\]"):
        tiny("chain", [0, 2], rule="synthetic")
    with pytest.raises(ConfigError, match=r"adaptive\.depths: expected at most num_steps = 4, found 6"):
        tiny("chain", [0, 6])
    with pytest.raises(ConfigError, match=r"adaptive\.backlog: expected at most the draft's sliding window of 24, found 25"):
        tiny("chain", [0], backlog=25)
    with pytest.raises(ConfigError, match=r"adaptive\.backlog: expected at most 128, found 129"):
        tiny("latent-experts", [0], backlog=129)
    with pytest.raises(ConfigError, match=r"runtime\.depth_per_bucket\[4\]: expected an integer >= 0, .* found -1"):
        tiny("chain", [], depth_per_bucket={4: -1})
    assert tiny("chain", [1, 2], backlog=99).window_capacity == 5, "without depth 0 there is no backlog"
    with pytest.raises(ConfigError, match=r"draft depth of 1 lanes: expected one of 0, 4, found 3"):
        tiny_run(tiny_cycle(tiny("chain", [0]), SAMPLED), ScriptedDepth([3]), 1)


def test_times_are_measured_and_leave_no_trace() -> None:
    plan = tiny("tree", [0, 2])
    cycle = tiny_cycle(plan, SAMPLED)
    tiny_run(cycle, RandomDepth(plan))
    before = cycle.arena.snapshot(("mail", "state", "ring"))
    times = cycle.time_depths((1, 4), SAMPLED, runs=3)
    assert {bucket: list(some) for bucket, some in times.items()} == {1: [0, 2, 5], 4: [0, 2, 5]}
    assert all(0 < some[0] < some[2] < some[5] for some in times.values()), "deeper cycles cost more"
    after = cycle.arena.snapshot(("mail", "state", "ring"))
    assert [name for name in before if not same_bits(before[name], after[name])] == []
    with pytest.raises(ResourceError, match="programs prepared before they are timed, found cycle of 1 lanes, depth 0, greedy; "):
        cycle.time_depths((1,), GREEDY)
    cycle.launch(plan.key(1, SAMPLED), Message(lanes=()))
    with pytest.raises(ResourceError, match="no cycle in flight while programs are timed, found 1 in flight"):
        cycle.time_depths((1,), SAMPLED)


def test_an_engine_adapts_by_itself(misses: Pair, plain: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = misses.llm(**TREE, depths=[0, 1], backlog=8, max_rows=3, buckets=[1, 2, 3])
    policy = llm.depth_policy
    assert isinstance(policy, AdaptiveDepth) and policy.unknown() == (1, 2, 3)
    llm.warm_up(2)
    assert policy.unknown() == (3,), "what a run of two may need was timed"
    assert ids(llm.generate(*workload())) == plain["misses"]
    assert policy.unknown() == () and llm.depth_policy is policy
    # A plain cycle that costs next to nothing is what there is to be had; the configured times are not measured again.
    monkeypatch.setattr(Cycle, "time_depths", lambda *args: pytest.fail("measured"))
    cheap = {bucket: {0: 0.01, 1: 1.0, 3: 1.0} for bucket in (1, 2, 3)}
    llm = misses.llm(**TREE, depths=[0, 1], backlog=8, max_rows=3, buckets=[1, 2, 3], times=cheap, rates=[0.5])
    launcher = Launches(llm.cycle)
    assert ids(generate_through(llm, launcher, *workload())) == plain["misses"]
    assert sum(key.shape.num_steps == 0 for key in launcher.keys) > 0.9 * len(launcher.keys)
    tree = llm.draft_tree(prompts(1)[0], cycles=2)
    assert max(tree.depth_N) == 3 and len(tree.token_N) == 10, "a tree is shown whatever pays"


def test_figures_count_what_was_drafted() -> None:
    metrics = RequestMetrics(cycles=6, cycle_tokens=[1, 3, 1, 2, 5, 1], cycle_depths=[0, 2, 4, 2, 4, 4], cut=True)
    assert metrics.whole_cycles() == [1, 3, 1, 2, 5]
    assert metrics.drafted_cycles() == [(3, 2), (1, 4), (2, 2), (5, 4)]
    accept = SimpleNamespace(lossy=False, synthetic=False)
    plan: Any = SimpleNamespace(shape=SimpleNamespace(num_steps=4), accept=accept, numerics="fast", activations="full")
    request = Request(index=0, prompt=[1], params=SamplingParams(), stop_ids=(), budget=9, metrics=metrics)
    found = summarise([request], plan)
    assert found.acceptance_length == 11 / 4 and found.accepted_per_position == [3 / 4, 2 / 4, 1 / 2, 1 / 2]
    metrics.cycle_depths[:] = [0] * 6
    assert summarise([request], plan).acceptance_length == 12 / 5 and summarise([request], plan).accepted_per_position == [0.0] * 4
    test = AcceptanceTest(SimpleNamespace(variant=SimpleNamespace(has_network=True)))  # type: ignore[arg-type]
    metrics.cycle_tokens[:], metrics.cycle_depths[:] = [1] * 6, [0] * 6
    for _ in range(30):
        test.observe([request])
    assert not test.done, "cycles that draft nothing say nothing about the draft"


@pytest.mark.full
def test_compiled_depths_change_no_token(misses: Pair) -> None:
    llm = misses.llm(num_steps=2, topk=1, num_draft_tokens=3, depths=[0], backlog=6, max_rows=2, buckets=[2], runtime="compiled")
    llm.warm_up(2)
    compiled = llm.cycle.compilations.graphs
    llm.depth_policy = RandomDepth(llm.plan)
    prompt_ids, launcher = prompts(3), Launches(llm.cycle)
    assert ids(generate_through(llm, launcher, prompt_ids, SamplingParams(max_tokens=LENGTH))) == [
        misses.greedy(p, LENGTH) for p in prompt_ids
    ]
    assert launcher.depths == {-1, 0, 2} and llm.cycle.compilations.graphs == compiled

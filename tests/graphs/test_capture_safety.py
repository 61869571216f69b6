"""Proof without a GPU that every program can be captured, and that stages touch what they declare and nothing else.

The whole cycle and the prefill run on fake ``cuda`` tensors: a value needed on the host, a shape that depends on data, a copy to or from
the CPU raises. ``torch.compile(fullgraph=True)`` would not show these; it compiles ``.item()`` and boolean masks without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphspec.config.schema import AdaptiveConfig
from graphspec.graphs.capture import Capturer
from graphspec.graphs.cycle import Cycle
from graphspec.graphs.programs import Key, PrefillKey, prefill_keys, program_stages
from graphspec.graphs.stages.mailbox import Chunk, Join, MailLayout, Message
from graphspec.graphs.stages.stage import HostStage, Stage
from graphspec.kernels import select_kernels
from graphspec.models.layers import use_kernels
from graphspec.plan.buffers import Arena, Views
from graphspec.plan.plan import Plan
from graphspec.shapes import GREEDY, SAMPLED, GraphKey, SamplingClass
from tests.support.fake_cuda import FixedOrder, HostTrafficError, NoHostTraffic, UnorderedSumError, load_cuda_guard, tensors
from tests.support.tiny import HYBRIDS, OTHERS, SHAPES, STRUCTURES, Networks, move, same_bits, structure_plan, tiny_networks, tiny_plan

ALL_KINDS = ("mail", "state", "lane", "ring", "kv")
CLASSES = {"greedy": GREEDY, "sampling": SAMPLED, "all": SamplingClass(True, True, True, True, 2, True, True, True, True)}
ADAPTIVE = AdaptiveConfig(depths=[0, 2], backlog=9)
CAUGHT = (DataDependentOutputException, DynamicOutputShapeException, HostTrafficError)


@pytest.fixture(scope="session", autouse=True)
def cuda_guard() -> None:
    load_cuda_guard()


class FakeProgram:
    """The stages of one program over fake buffers on a GPU that doesn't exist."""

    def __init__(self, plan: Plan, networks: Networks | None = None) -> None:
        self.plan, self.arena, self.networks = plan, Arena(plan, MailLayout.of(plan).size), networks or tiny_networks(plan)
        move(self.networks.target, "cuda")
        move(self.networks.draft, "cuda")

    def build(self, key: Key, mode: str = "reference") -> FakeProgram:
        self.arena.allocate(key.sampling)
        kernels = select_kernels(mode, "auto", "cuda")
        use_kernels(kernels, self.networks.target, self.networks.draft)
        self.stages = program_stages(self.plan, kernels, self.networks.target, self.networks.draft, key)
        self.views = self.arena.views(key.lanes) if isinstance(key, PrefillKey) else self.arena.views(key.bucket, key.shape)
        return self

    def run(self) -> int:
        """Run every stage; returns how many operations that took. None adds floats in an order that a GPU may change."""
        with torch.no_grad(), FixedOrder(), NoHostTraffic() as traffic:
            for stage in self.stages:
                try:
                    stage(self.views)
                except Exception as error:
                    error.add_note(f"in stage {stage.name}")
                    raise
        assert {slot.name for slot in self.arena.slots if self.arena[slot.name].device.type != "cuda"} == set()
        return traffic.ops


def fake_plan(shape: str, rule: str = "match") -> Plan:
    return structure_plan(shape, device="cuda", runtime="captured", rule=rule)


def widest_and_narrowest(plan: Plan, sampling: SamplingClass) -> list[GraphKey]:
    """Cycles of the largest bucket and of the smallest, of one lane: those between differ in sizes alone, and are in the full tier."""
    return [key for key in plan.graph_keys(sampling) if key.bucket in (plan.buckets[0], plan.buckets[-1])]


RULES = [("none", "rejection"), ("chain", "rejection"), ("chain", "target_only"), ("tree", "target_only"), ("two-words", "target_only"),
         ("chain", "synthetic"), ("tree", "synthetic")]  # fmt: skip


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampling"])
@pytest.mark.parametrize(("shape", "rule"), RULES)
def test_no_acceptance_rule_needs_the_host(shape: str, rule: str, sampling: SamplingClass) -> None:
    plan = fake_plan(shape, rule)
    with FakeTensorMode():
        assert FakeProgram(plan).build(plan.graph_keys(sampling)[1]).run() > 100


@pytest.mark.parametrize("sampling", CLASSES.values(), ids=CLASSES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_whole_cycle_needs_no_host(shape: str, sampling: SamplingClass) -> None:
    plan = fake_plan(shape)
    assert plan.runtime.captured and plan.buckets == (1, 2, 4, 8)
    assert (plan.num_words > 1) == (shape == "two-words")
    with FakeTensorMode():
        program = FakeProgram(plan)
        counts = [program.build(key).run() for key in widest_and_narrowest(plan, sampling)[: 1 if sampling.bias else None]]
    assert min(counts) > 100


@pytest.mark.parametrize("structure", [*OTHERS, *HYBRIDS])
def test_no_drafter_needs_the_host(structure: str) -> None:
    plan = fake_plan(structure)
    with FakeTensorMode():
        program = FakeProgram(plan)
        counts = [program.build(key).run() for key in (*widest_and_narrowest(plan, SAMPLED), PrefillKey(16, SAMPLED))]
    assert min(counts) > 50


@pytest.mark.full
@pytest.mark.parametrize("mode", ["reference", "fused"])
@pytest.mark.parametrize("structure", [*STRUCTURES, *HYBRIDS])
def test_no_bucket_needs_the_host(structure: str, mode: str) -> None:
    plan = structure_plan(structure, device="cuda", runtime="captured", mode=mode)
    with FakeTensorMode():
        program = FakeProgram(plan)
        assert min(program.build(key, mode).run() for key in plan.graph_keys(SAMPLED)) > 10


@pytest.mark.parametrize("mode", ["reference", "fused"])
@pytest.mark.parametrize("structure", ["tree", "no-feature", "own-history"])
def test_no_depth_needs_the_host(structure: str, mode: str) -> None:
    plan = structure_plan(structure, device="cuda", runtime="captured", mode=mode, buckets=[8], adaptive=ADAPTIVE)
    with FakeTensorMode():
        program = FakeProgram(plan)
        counts = {key: program.build(key, mode).run() for key in (*plan.graph_keys(SAMPLED), PrefillKey(16, SAMPLED))}
    assert len(counts) == (4 if plan.draft is None else 5) and min(counts.values()) > 10


@pytest.mark.parametrize("structure", [*STRUCTURES, *HYBRIDS])
def test_fused_kernels_need_no_host(structure: str) -> None:
    """Cycles and the prefill; what runs between the operators, and the operators' own promises of shape, dtype and device."""
    plan = structure_plan(structure, device="cuda", runtime="captured", mode="fused")
    with FakeTensorMode():
        program = FakeProgram(plan)
        keys = (*widest_and_narrowest(plan, SAMPLED), plan.graph_keys(CLASSES["all"])[0], PrefillKey(16, SAMPLED))
        counts = [program.build(key, "fused").run() for key in keys]
    assert min(counts) > 10


@pytest.mark.parametrize("sampling", CLASSES.values(), ids=CLASSES)
@pytest.mark.parametrize("shape", ["none", "tree"])
def test_the_prefill_needs_no_host(shape: str, sampling: SamplingClass) -> None:
    plan = fake_plan(shape)
    with FakeTensorMode():
        program = FakeProgram(plan)
        assert min(program.build(key).run() for key in prefill_keys(plan, sampling)) > 50


UNORDERED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "cumsum": lambda x, i: x.cumsum(-1),
    "scatter_add": lambda x, i: x.scatter_add(0, i, x),
    "index_add": lambda x, i: x.index_add(0, i, x),
    "index_put": lambda x, i: x.index_put_((i,), x.clone(), accumulate=True),
    "scatter reduce": lambda x, i: torch.ops.aten.scatter_.reduce(x, 0, i, x.clone(), reduce="add"),
    "scatter_reduce": lambda x, i: x.scatter_reduce(0, i, x, "sum"),
    "bincount": lambda x, i: torch.bincount(i, x, minlength=3),
}


@pytest.mark.parametrize("name", UNORDERED)
def test_sums_of_floats_in_no_fixed_order_are_refused(name: str) -> None:
    index = torch.tensor([0, 2, 1])
    with FixedOrder():
        with pytest.raises(UnorderedSumError):
            UNORDERED[name](torch.rand(3), index)
        if name != "bincount":
            UNORDERED[name](torch.tensor([4, 5, 6]), index)
        torch.rand(3).index_put_((index,), torch.rand(3))


def test_a_stage_that_adds_floats_in_no_fixed_order_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-p by a sum of probabilities, as it is usually written."""
    plan = fake_plan("chain")
    with FakeTensorMode():
        program = FakeProgram(plan).build(plan.graph_keys(CLASSES["all"])[-1])
        accept = next(stage for stage in program.stages if stage.name == "accept")
        usual = accept.forward

        def summed(v: Views) -> None:
            v.top_p_R.softmax(-1).cumsum(-1)
            usual(v)

        monkeypatch.setattr(accept, "forward", summed)
        with pytest.raises(UnorderedSumError, match="cumsum") as caught:
            program.run()
    assert caught.value.__notes__ == ["in stage accept"]


def _item(v: Views) -> None:
    v.seq_len_R.add_(v.accept_len_B.sum().item())


def _branch(v: Views) -> None:
    if (v.accept_len_B > 0).any():
        v.seq_len_R.add_(1)


def _slice(v: Views) -> None:
    v.seq_len_R[: v.accept_len_B[0]].add_(1)


def _mask(v: Views) -> None:
    v.sample_BN.copy_(v.node_token_BN[v.node_token_BN >= 0].sum())


def _masked_assignment(v: Views) -> None:
    v.sample_BN[v.node_token_BN >= 0] = v.accept_len_B[0]


def _nonzero(v: Views) -> None:
    v.sample_BN.add_(torch.nonzero(v.node_token_BN).shape[0])


def _tolist(v: Views) -> None:
    v.sample_BN.add_(len(v.accept_len_B.tolist()))


def _to_cpu(v: Views) -> None:
    v.sample_BN.add_(v.accept_len_B.cpu().shape[0])


def _from_cpu(v: Views) -> None:
    v.accept_len_B.copy_(torch.zeros(v.accept_len_B.shape[0], dtype=torch.int64))


def _from_list(v: Views) -> None:
    v.seq_len_R.index_fill_(0, torch.tensor([0, 1], device="cuda"), 0)


@pytest.mark.parametrize(
    "planted",
    [_item, _branch, _slice, _mask, _masked_assignment, _nonzero, _tolist, _to_cpu, _from_cpu, _from_list],
    ids=lambda f: f.__name__,
)
def test_a_planted_host_read_is_caught(planted: Callable[[Views], None]) -> None:
    """In the middle of the cycle, inside a stage that is otherwise the real one."""
    plan = fake_plan("tree")
    key = plan.graph_keys(GREEDY)[-1]
    with FakeTensorMode():
        program = FakeProgram(plan).build(key)
        place = [stage.name for stage in program.stages].index("accept")
        honest = type(program.stages[place])

        class Planted(honest):  # type: ignore[misc, valid-type]
            def forward(self, v: Views) -> None:
                super().forward(v)
                planted(v)

        program.stages[place].__class__ = Planted
        with pytest.raises(CAUGHT) as caught:
            program.run()
    assert caught.value.__notes__ == ["in stage accept"]


def test_a_number_as_an_argument_is_no_host_traffic() -> None:
    """What torch wraps into a CPU scalar reaches the kernel as an argument."""
    with FakeTensorMode(), NoHostTraffic():
        x = torch.zeros(3, device="cuda")
        x[:2] = 1.0
        x[x > 0] = 0.0
        torch.where(x > 0, x, -1.0).masked_fill(x > 0, 2.0).mul_(3)


def test_capture_needs_a_gpu() -> None:
    plan = tiny_plan(SHAPES["none"], device="cpu", runtime="eager")
    with pytest.raises(RuntimeError, match="device: expected cuda, found cpu"):
        Capturer(Arena(plan, 1))


class Touched(TorchDispatchMode):
    """Names of the slots that operations read and write, known by their storage, so views count as what they look at."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.owner = {arena[slot.name].untyped_storage().data_ptr(): slot.name for slot in arena.slots}
        self.read: set[str] = set()
        self.written: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                written = argument.alias_info is not None and argument.alias_info.is_write
                names = {self.owner.get(t.untyped_storage().data_ptr()) for t in tensors(value)} - {None}
                (self.written if written else self.read).update(names)  # type: ignore[arg-type]
        return func(*args, **(kwargs or {}))


def warm_cycle(
    shape: str, sampling: SamplingClass = SAMPLED, rule: str = "match", adaptive: AdaptiveConfig | None = None, **runtime: Any
) -> tuple[Cycle, GraphKey, Message]:
    """A cycle on the CPU in the middle of three requests (one greedy), a key with one padded lane, and the next message."""
    plan = structure_plan(shape, device="cpu", runtime="eager", rule=rule, adaptive=adaptive, **runtime)
    networks = tiny_networks(plan)
    cycle = Cycle(plan, networks.target, networks.draft, select_kernels("reference", "auto", "cpu"))
    key = GraphKey(4, plan.shape, sampling)
    cycle.prepare([key, PrefillKey(16, sampling)])
    for row, temperature in enumerate((0.9, 0.0, 0.6)):
        tokens = [(7 * row + 3 * i) % 61 for i in range(9 + row)]
        join = Join(
            row=row, budget=60, seed=row, temperature=temperature, draft_len=plan.shape.num_steps, stop_ids=(4,) if sampling.bias else (),
            top_k=30, top_p=0.9, min_p=0.01, repetition=1.2, presence=0.3, frequency=0.1,
        )  # fmt: skip
        if sampling.bias:
            ids, added = torch.full((2, plan.max_logit_bias), -1).numpy()
            ids[:2], added[:2] = (5, 6), (1, -2)
            cycle.write_row(row, {"bias_id_RI": ids, "bias_value_RI": added, "stop_from_R": np.asarray(70)})
        pages = [(row, column, 1 + row * plan.table_width + column) for column in range(plan.table_width)]
        while pages:
            part, pages = pages[: plan.page_updates], pages[plan.page_updates :]
            message = Message(lanes=(row,), pages=part, joins=[join], chunks=[Chunk(tokens, 0, len(tokens))])
            cycle.read(cycle.launch(PrefillKey(16, sampling), message))
    message = Message(lanes=(2, 0, 1))
    for _ in range(2):
        cycle.read(cycle.launch(key, message))
    cycle.layout.encode(message, cycle.arena["mail"])
    return cycle, key, message


def stages_of(cycle: Cycle, key: Key) -> Iterator[Stage]:
    yield from cycle.stages(key)


@pytest.mark.parametrize(
    ("shape", "sampling", "rule"),
    [*((shape, "sampling", "match") for shape in (*STRUCTURES, *HYBRIDS)), ("tree", "greedy", "match"), ("tree", "all", "match"),
     ("chain", "all", "match"), ("own-history", "all", "match"), ("tree", "greedy", "synthetic"), ("chain", "all", "rejection"),
     *((shape, "sampling", rule) for shape, rule in RULES)],
)  # fmt: skip
def test_stages_touch_exactly_what_they_declare(shape: str, sampling: str, rule: str) -> None:
    cycle, key, _ = warm_cycle(shape, CLASSES[sampling], rule)
    check_what_stages_touch(cycle, key)


@pytest.mark.parametrize(("shape", "rule"), [("chain", "match"), ("chain", "rejection"), ("no-feature", "match")])
def test_stages_of_plain_cycles_touch_exactly_what_they_declare(shape: str, rule: str) -> None:
    """Of a row whose drafter reads its tokens later: two plain cycles pile them up, a third catches up."""
    cycle, key, message = warm_cycle(shape, CLASSES["all"], rule, ADAPTIVE)
    plain, catch_up = (cycle.plan.key(4, key.sampling, 0, catch_up=which) for which in (False, True))
    cycle.prepare([plain, catch_up])
    before = cycle.arena["window_len_R"].clone()
    for _ in range(2):
        cycle.read(cycle.launch(plain, message))
    assert torch.equal(cycle.arena["window_len_R"][:3], before[:3] + 2)
    for which in (plain, catch_up):
        cycle.layout.encode(message, cycle.arena["mail"])
        check_what_stages_touch(cycle, which)
    assert cycle.arena["window_len_R"][:3].tolist() == [1, 1, 1]


def check_what_stages_touch(cycle: Cycle, key: Key) -> None:
    """Run the program stage by stage; nothing is read, written or changed but what each one declares."""
    arena, views = cycle.arena, cycle.views(key)
    with torch.no_grad():
        for stage in stages_of(cycle, key):
            before = arena.snapshot(ALL_KINDS)
            with Touched(arena) as touched:
                stage(views)
            assert touched.written == set(stage.writes), stage.name
            # The host reads for lanes with a grammar, and here are none.
            assert isinstance(stage, HostStage) or set(stage.reads) <= touched.read, stage.name
            assert touched.read <= {*stage.reads, *stage.writes}, stage.name
            after = arena.snapshot(ALL_KINDS)
            changed = {name for name in after if not same_bits(before[name], after[name])}
            assert changed <= set(stage.writes), stage.name

            # The same from buffers in which everything undeclared is NaN or an index out of any range.
            arena.restore(before)
            others = [slot.name for slot in arena.slots if slot.name not in {*stage.reads, *stage.writes}]
            poisoned = Arena(cycle.plan, cycle.layout.size)
            poisoned.allocate(replace(key.sampling, prompt_logprobs=True))
            poisoned.poison(ALL_KINDS)
            arena.restore({name: poisoned[name] for name in others})
            stage(views)
            assert [name for name in stage.writes if not same_bits(arena[name], after[name])] == [], stage.name
            arena.restore(after)


@pytest.mark.parametrize(
    ("shape", "sampling"), [*(("tree", name) for name in CLASSES), *((shape, "sampling") for shape in (*OTHERS, "hybrid-tree"))]
)
def test_prefill_touches_exactly_what_it_declares(shape: str, sampling: str) -> None:
    prefill_touches_what_it_declares(warm_cycle(shape, CLASSES[sampling])[0], CLASSES[sampling])


def test_a_chunk_with_more_pages_than_a_cycle_changes_writes_the_page_table() -> None:
    cycle, _, _ = warm_cycle("tree", prefill_chunks=[16, 256])
    assert cycle.layout.max_chunk_pages > 0
    prefill_touches_what_it_declares(cycle, SAMPLED)


def prefill_touches_what_it_declares(cycle: Cycle, sampling: SamplingClass) -> None:
    key = PrefillKey(16, sampling)
    message = Message(lanes=(3,), pages=[(3, c, 70 + c) for c in range(2)], chunks=[Chunk([5, 6, 7], 0, 3)])
    message.joins = [Join(row=3, budget=9, seed=1, temperature=1.0, draft_len=5, stop_ids=(2,))]
    cycle.layout.encode(message, cycle.arena["mail"])
    with torch.no_grad():
        for stage in stages_of(cycle, key):
            with Touched(cycle.arena) as touched:
                stage(cycle.views(key))
            assert touched.written == set(stage.writes), stage.name
            assert set(stage.reads) <= touched.read <= {*stage.reads, *stage.writes}, stage.name


@pytest.mark.parametrize("shape", [*STRUCTURES, *HYBRIDS])
def test_nothing_but_slots_of_state_crosses_from_cycle_to_cycle(shape: str) -> None:
    cycle, key, _ = warm_cycle(shape)
    arena = cycle.arena
    before, results = arena.snapshot(ALL_KINDS), []
    with torch.no_grad():
        for poison in (False, True):
            arena.restore(before)
            if poison:
                arena.poison(("lane",))
            cycle.programs[key]()
            results.append(arena.snapshot(("state", "ring", "kv")))
    assert not same_bits(before["seq_len_R"], results[0]["seq_len_R"]), "the rows did not move"
    for name, left in results[0].items():
        right = results[1][name]
        if name.endswith("_kv"):  # page 0 is where suppressed writes go
            left, right = left[:, :, 1:], right[:, :, 1:]
        assert same_bits(left, right), name


def test_an_undeclared_write_would_show() -> None:
    cycle, key, _ = warm_cycle("chain")
    with torch.no_grad(), Touched(cycle.arena) as touched:
        view = cycle.views(key).window_token_RAc[:, 1:]
        view[0] = cycle.views(key).path_BA[0, 1:]
    assert touched.written == {"window_token_RAc"} and touched.read == {"path_BA"}


def test_a_failed_build_leaves_the_ring_where_it_was() -> None:
    cycle, key, message = warm_cycle("chain")

    def fail(phase: str, done: int, total: int, note: str) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cycle.prepare([GraphKey(1, cycle.plan.shape, SAMPLED), GraphKey(2, cycle.plan.shape, SAMPLED)], fail)
    before = [cycle.arena["seq_len_R"][row].item() for row in message.lanes]
    entry = cycle.read(cycle.launch(key, message))
    after = [cycle.arena["seq_len_R"][row].item() for row in message.lanes]
    assert [b - a for a, b in zip(before, after, strict=True)] == [len(tokens) for tokens in entry.tokens[: len(message.lanes)]]
    assert min(map(len, entry.tokens[: len(message.lanes)])) >= 1

"""Capture on a real GPU: prefill programs, depths side by side, debug mode, what graphs weigh, and memory that runs out.

Run by ``make gpu-check``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphspec.api.llm import LLM
from graphspec.engine.request import SamplingParams
from graphspec.errors import CaptureError, ConfigError
from graphspec.graphs.capture import Captured, Capturer
from graphspec.graphs.cycle import Cycle
from graphspec.graphs.graph_launch import graph_launch
from graphspec.graphs.programs import Key, PrefillKey
from graphspec.graphs.stages.mailbox import Chunk, Join, Message
from graphspec.kernels import select_kernels
from graphspec.models.layers import use_kernels
from graphspec.shapes import GREEDY, SAMPLED, GraphKey
from tests.gpu.limits import seconds
from tests.support.depths import RandomDepth
from tests.support.tiny import move, same_bits, structure_plan, tiny_networks

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

PROMPTS = ["def fibonacci(n):\n    ", "import os\nimport sys\n", "class Stack:\n    def __init__(self):\n", "for i in range("]
KINDS = ("mail", "state", "lane", "ring", "kv")


def tiny(structure: str, mode: str = "reference", **keys: Any) -> Cycle:
    plan = structure_plan(structure, device="cuda", runtime="captured", mode=mode, buckets=[1, 2, 4], max_rows=4, **keys)
    networks = tiny_networks(plan)
    move(networks.target, "cuda")
    move(networks.draft, "cuda")
    kernels = select_kernels(plan.kernels, plan.attention, "cuda", linear=plan.linear)
    use_kernels(kernels, networks.target, networks.draft)
    return Cycle(plan, networks.target, networks.draft, kernels)


def keys_of(cycle: Cycle, sampling: Any = SAMPLED) -> list[Key]:
    return [*cycle.plan.graph_keys(sampling), *cycle.prefills(sampling)]


@pytest.mark.parametrize(
    ("structure", "mode"),
    [(structure, mode) for mode in ("reference", "compiled") for structure in ("none", "tree", "head-per-step")]
    + [pytest.param("tree", "fused", marks=pytest.mark.core)],
)
def test_a_captured_prefill_equals_a_direct_one_bitwise(structure: str, mode: str) -> None:
    cycle = tiny(structure, mode)
    cycle.prepare([PrefillKey(16, SAMPLED), PrefillKey(8, SAMPLED)])
    join = Join(row=1, budget=9, seed=3, temperature=0.7, draft_len=cycle.plan.shape.num_steps, stop_ids=())
    tokens = [(5 * i) % 61 for i in range(21)]
    for start, size in ((0, 16), (16, 8)):
        part = tokens[start : start + size]
        pages = [(1, column, 7 + column) for column in range(cycle.plan.pages_for(start + len(part)))]
        message = Message(lanes=(1,), pages=pages, joins=[join] if start == 0 else (), chunks=[Chunk(part, start, len(tokens))])
        key = PrefillKey(size, SAMPLED)
        before = cycle.arena.snapshot(KINDS)
        mail = torch.zeros(cycle.layout.size, dtype=torch.int64)
        cycle.layout.encode(message, mail)
        cycle.arena["mail"].copy_(mail)
        with torch.no_grad():
            cycle.programs[key].direct()
        direct = cycle.arena.snapshot(("state", "ring", "kv"))
        cycle.arena.restore(before)
        assert isinstance(cycle.programs[key].replay, Captured)
        cycle.read(cycle.launch(key, message))
        for name, tensor in cycle.arena.snapshot(("state", "ring", "kv")).items():
            left, right = (t[:, :, 1:] if name.endswith("_kv") else t for t in (tensor, direct[name]))
            assert same_bits(left, right), name


def test_the_report_has_the_memory_of_graphs() -> None:
    cycle = tiny("tree")
    cycle.prepare(keys_of(cycle))
    report = cycle.capture_report()
    assert len(report) == len(keys_of(cycle))
    assert all(r.capture_seconds is not None and r.capture_seconds > 0 and r.pool_bytes is not None for r in report)
    assert report[0].pool_bytes == max(r.pool_bytes or 0 for r in report) > 0, "the smaller graphs fit into the largest one's memory"


def test_launches_leave_torchs_generator_alone() -> None:
    assert graph_launch() is not None, "torch's runtime offers the launch"
    cycle = tiny("none")
    key = cycle.plan.key(1, SAMPLED)
    cycle.prepare([key])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        cycle.read(cycle.launch(key, Message(lanes=())))
    kernels = [event.name for event in profile.events() if "FillFunctor<long>" in event.name]
    assert not kernels
    numbers = torch.zeros(8, device="cuda")
    with pytest.raises(CaptureError, match="random numbers"):
        Capturer(cycle.arena).capture(numbers.uniform_)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_depths_side_by_side_change_no_token(temperature: float) -> None:
    params = [SamplingParams(max_tokens=12 + 9 * i, temperature=temperature, seed=i, ignore_eos=True) for i in range(4)]
    found = []
    for depths in ({}, {1: 5, 2: 3, 4: 1}):
        llm = LLM(
            variant="eagle3", device="cuda", dtype="float32", runtime="captured", mode="reference", num_steps=5, topk=4,
            num_draft_tokens=16, buckets=[1, 2, 4], max_rows=4, depth_per_bucket=depths, cycles_in_flight=2, sampling_classes=[],
        )  # fmt: skip
        found.append([out.token_ids for out in llm.generate(PROMPTS, params)])
    assert found[0] == found[1]


def changing_depths(mode: str) -> list[dict[str, Any]]:
    """An engine that decodes plainly, and two whose depths change."""
    keys = {"device": "cuda", "dtype": "float32", "runtime": "captured", "mode": mode, "buckets": [1, 2, 4], "max_rows": 4}
    keys["sampling_classes"] = []
    drafting = {"variant": "eagle3", "num_steps": 4, "depths": [0, 2], "backlog": 6, "cycles_in_flight": 3, **keys}
    shapes = ({"topk": 1, "num_draft_tokens": 5}, {"topk": 4, "num_draft_tokens": 12})
    return [{"variant": "none", **keys}, *({**drafting, **shape} for shape in shapes)]


@pytest.mark.seconds(lambda temperature, mode: seconds(changing_depths(mode)))
@pytest.mark.parametrize("mode", ["reference", "fused"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_depths_that_change_while_it_runs_change_no_token(temperature: float, mode: str) -> None:
    """Depth 0, its backlog and the program that catches up are captured like all others."""
    params = [SamplingParams(max_tokens=24 + 9 * i, temperature=temperature, seed=i, ignore_eos=True) for i in range(4)]
    plainly, *drafting = changing_depths(mode)
    plain = LLM(**plainly)
    for keys in drafting:
        llm = LLM(**keys)
        llm.depth_policy = RandomDepth(llm.plan)
        assert [out.token_ids for out in llm.generate(PROMPTS, params)] == [out.token_ids for out in plain.generate(PROMPTS, params)]
        assert {depth for _, depth, _ in llm.depth_policy.reported} == {0, 2, 4}


def around(compiled: bool) -> dict[str, Any]:
    """An engine whose surroundings of kernels are compiled, or run as they stand."""
    return {"variant": "eagle3", "device": "cuda", "dtype": "float32", "runtime": "captured", "mode": "fused", "buckets": [1, 4],
            "max_rows": 4, "sampling_classes": [], "compile_around": compiled}  # fmt: skip


@pytest.mark.seconds(lambda: seconds([around(True), around(False)]))
def test_what_lies_between_kernels_need_not_be_compiled() -> None:
    params = [SamplingParams(max_tokens=24 + 9 * i, temperature=0.8 * (i % 2), seed=i, ignore_eos=True) for i in range(4)]
    compiled, direct = LLM(**around(True)), LLM(**around(False))
    assert [out.token_ids for out in direct.generate(PROMPTS, params)] == [out.token_ids for out in compiled.generate(PROMPTS, params)]
    assert direct.cycle.compilations.graphs == 0 < compiled.cycle.compilations.graphs
    assert all(isinstance(program.replay, Captured) for program in direct.cycle.programs.values())


def test_debug_mode_runs_and_notices() -> None:
    llm = LLM(
        variant="eagle3", device="cuda", dtype="float32", runtime="captured", mode="reference", buckets=[4], max_rows=4, debug=True,
        sampling_classes=[],
    )  # fmt: skip
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=24, ignore_eos=True))
    assert [len(out.token_ids) for out in outputs] == [24] * 4
    assert torch.cuda.get_sync_debug_mode() == 0
    llm.cycle.arena._tensors["seq_len_R"] = llm.cycle.arena["seq_len_R"].clone()
    with pytest.raises(CaptureError, match="seq_len_R"):
        llm.cycle.launch(llm.plan.key(4, GREEDY), Message(lanes=()))


def test_memory_that_runs_out_while_capturing_costs_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real allocation fails inside the capture; the pool must still serve the smaller graphs."""
    cycle = tiny("chain")
    honest = Capturer.capture

    def capture(self: Capturer, program: Any) -> Captured:
        wide = program.__self__.views.lane_row_B.shape[0] == 4

        def greedy() -> None:
            program()
            if wide and torch.cuda.is_current_stream_capturing():
                torch.empty(2**50, dtype=torch.uint8, device="cuda")

        return honest(self, greedy)

    monkeypatch.setattr(Capturer, "capture", capture)
    cycle.prepare(keys_of(cycle))
    assert cycle.buckets(SAMPLED) == (1, 2)
    key = GraphKey(2, cycle.plan.shape, SAMPLED)
    cycle.read(cycle.launch(key, Message(lanes=())))
    torch.cuda.synchronize()


@pytest.mark.seconds(150)
def test_pages_that_do_not_fit_are_refused_with_the_number_that_does() -> None:
    with pytest.raises(ConfigError, match=r"runtime\.num_pages: expected at most \d+"):
        LLM(variant="none", device="cuda", runtime="captured", num_pages=10**9, sampling_classes=[])
    fits = LLM(variant="none", device="cuda", dtype="float32", runtime="captured", num_pages=1000, sampling_classes=[])
    assert fits.memory.largest_num_pages > 1000

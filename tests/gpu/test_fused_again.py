"""Many launches on a GPU: the same bits every time, counters back at zero, kernels that start before others have ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from graphspec.kernels import OPS, KernelOp
from graphspec.kernels.fused.launch import LaunchState, launching, semaphores
from tests.gpu._merging import Merging, merging_calls
from tests.kernels.cases import cases_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DEVICE = torch.device("cuda", 0)
KERNELS = [(op, name) for op in OPS for name in op.fused_names]
BY_KERNEL = [pytest.param(op, name, id=f"{op.name}-{name}") for op, name in KERNELS]
LAUNCHES = 200
LANES = (1, 8)
MERGING = [pytest.param(call, id=f"b{lanes}-{call.name}") for lanes in LANES for call in merging_calls(lanes)]

Case = dict[str, Any]


def on_gpu(case: Case) -> Case:
    return {key: value.to(DEVICE, copy=True) if isinstance(value, Tensor) else value for key, value in case.items()}


def bits(tensor: Tensor) -> Tensor:
    """NaN is equal to itself here. The dummy page, which every invalid token writes, is left out of a pool."""
    tensor = tensor[:, :, 1:] if tensor.dim() == 6 else tensor
    words = {4: torch.int32, 2: torch.int16, 8: torch.int64}
    return tensor.contiguous().view(words[tensor.element_size()]) if tensor.is_floating_point() else tensor


def outputs(op: KernelOp, name: str, case: Case) -> list[Tensor]:
    """Results of an implementation, and what it has written."""
    result = op.call(op.implementation(name), case)
    results = () if result is None else result if isinstance(result, tuple) else (result,)
    return [*results, *(case[name] for name in op.mutates if case[name] is not None)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for f, e in zip(found, expected, strict=True):
        assert torch.equal(bits(f), bits(e))


@pytest.mark.parametrize(("op", "name"), BY_KERNEL)
def test_the_same_bits_every_time(op: KernelOp, name: str) -> None:
    for case in cases_of(op, torch.Generator().manual_seed(5)):
        expected = outputs(op, name, on_gpu(case))
        for _ in range(LAUNCHES):
            assert_same(outputs(op, name, on_gpu(case)), expected)
    assert not semaphores(DEVICE, 1).any()


@pytest.mark.parametrize("call", MERGING)
def test_a_merge_of_parts_gives_the_same_bits_every_time(call: Merging) -> None:
    """In shapes of real models: the last program to arrive, whichever it is, adds the same parts in the same order."""
    torch.manual_seed(0)
    case = call.make("cuda")
    expected = call.outputs(case)
    for _ in range(LAUNCHES):
        assert_same(call.outputs(case), expected)
    assert not semaphores(DEVICE, 1).any()


@pytest.fixture(params=[False, True], ids=["in-turn", "programmatic"])
def programmatic(request: pytest.FixtureRequest) -> Iterator[bool]:
    if request.param and torch.cuda.get_device_capability(DEVICE) < (9, 0):
        pytest.skip("programmatic launch needs sm_90")
    with launching(LaunchState(request.param)):
        yield request.param


def assert_replays(everything: Callable[[], list[list[Tensor]]], expected: list[list[Tensor]], launches: int) -> None:
    """Captured into one graph, the calls give the same at every launch, and give their counters back."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        everything()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = everything()
    for _ in range(launches):
        graph.replay()
        for f, e in zip(found, expected, strict=True):
            assert_same(f, e)
    assert not semaphores(DEVICE, 1).any()


def test_all_of_them_in_sequence_in_one_graph(programmatic: bool) -> None:
    """They share counters, and with programmatic launch each begins while the one before it still runs."""
    cases = [(op, name, case) for op, name in KERNELS for case in cases_of(op, torch.Generator().manual_seed(6))]
    with launching(LaunchState()):
        expected = [outputs(op, name, on_gpu(case)) for op, name, case in cases]
    fresh, used = ([on_gpu(case) for _, _, case in cases] for _ in range(2))

    def everything() -> list[list[Tensor]]:
        for source, target in zip(fresh, used, strict=True):
            for key, value in source.items():
                if isinstance(value, Tensor):
                    target[key].copy_(value)
        return [outputs(op, name, case) for (op, name, _), case in zip(cases, used, strict=True)]

    assert_replays(everything, expected, LAUNCHES // 4)


@pytest.mark.seconds(240)
@pytest.mark.parametrize("lanes", LANES)
def test_merges_after_each_other_in_one_graph(lanes: int, programmatic: bool) -> None:
    """Shapes of real models keep all multiprocessors busy: kernels that start early overlap predecessors that still use parts and counters.

    All calls of a batch size are on the device at once, which is less than ``MAX_BYTES``.
    """
    torch.manual_seed(0)
    calls = merging_calls(lanes)
    cases = [call.make("cuda") for call in calls]
    with launching(LaunchState()):
        expected = [call.outputs(case) for call, case in zip(calls, cases, strict=True)]

    def everything() -> list[list[Tensor]]:
        return [call.outputs(case) for call, case in zip(calls, cases, strict=True)]

    assert_replays(everything, expected, LAUNCHES)

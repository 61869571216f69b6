"""Deleted engines free slots, weights and compiled code, without affecting other engines."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from graphspec.api.llm import LLM
from graphspec.engine.request import SamplingParams
from graphspec.graphs.compile import Region
from graphspec.graphs.cycle import Cycle
from graphspec.graphs.stages.stage import Stage
from graphspec.kernels import select_kernels
from graphspec.kernels.native.call import Tape
from graphspec.plan.buffers import Arena
from graphspec.shapes import GREEDY
from tests.support.engines import Pair, ids, mirror_pair, prompts
from tests.support.tape import TapeCapturer
from tests.support.tiny import structure_plan, tiny_networks

ONE = {"variant": "none", "buckets": [1], "max_rows": 1, "prefill_chunks": [16]}
"""One program to compile."""
LAUNCHES: dict[str, dict[str, Any]] = {
    "eager": {"runtime": "eager"},
    "compiled": {"runtime": "compiled", "attention": "reference", "linear": "reference"},
    "native": {"runtime": "compiled", "attention": "native", "linear": "native"},
    "tape": {"runtime": "compiled"},
}
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return mirror_pair(tmp_path_factory.mktemp("mirror"))


@pytest.fixture
def arenas(monkeypatch: pytest.MonkeyPatch) -> Iterator[weakref.WeakSet[Arena]]:
    """Every arena made in the test that is still alive."""
    alive: weakref.WeakSet[Arena] = weakref.WeakSet()
    make = Arena.__init__

    def noted(self: Arena, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        alive.add(self)

    monkeypatch.setattr(Arena, "__init__", noted)
    yield alive


def parts(cycle: Cycle) -> dict[str, weakref.ref[Any]]:
    """Weak references to every slot and weight, and to all that runs them."""
    found: dict[str, Any] = {f"slot {name}": cycle.arena[name] for name, *_ in cycle.arena.describe()}
    for network in (cycle.target, cycle.draft):
        if isinstance(network, torch.nn.Module):
            found |= {f"{type(network).__name__} {name}": tensor for name, tensor in network.named_parameters()}
    for number, program in enumerate(cycle.programs.values()):
        found[f"program {number}"] = program
        found |= {f"region {number}": program.direct} if isinstance(program.direct, Region | Tape) else {}
        found |= {f"replay {number}": program.replay} if program.replay is not None else {}
    return {name: weakref.ref(value) for name, value in found.items()}


def alive(found: dict[str, weakref.ref[Any]], thread: threading.Thread | None = None) -> list[str]:
    gc.collect()
    if thread is not None:
        # It may have held the engine at the first collection.
        thread.join(60)
        assert not thread.is_alive()
        gc.collect()
    return [name for name, reference in found.items() if reference() is not None]


def storages() -> int:
    """Bytes of all tensors that own memory, each counted once."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, torch.nn.Parameter) and thing.device.type == "cpu"]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@pytest.mark.parametrize("launch", LAUNCHES)
def test_an_engine_dies(pair: Pair, launch: str, arenas: weakref.WeakSet[Arena]) -> None:
    before = storages()
    for _ in range(2):
        llm = pair.llm(**ONE, **LAUNCHES[launch])
        assert ids(llm.generate(prompts(1), PARAMS)) == [pair.greedy(prompts(1)[0], 6, ignore_eos=True)]
        found = parts(llm.cycle)
        assert {"slot target_kv", "program 0"} <= set(found)
        assert ("region 0" in found or "region 1" in found) == (launch != "eager")
        thread = llm._engine._driver.thread
        del llm
        assert alive(found, thread) == []
        assert len(arenas) == 0
    assert storages() <= before + 4096, "what transformers and torch keep for themselves is smaller than any pool"


@pytest.mark.parametrize("launch", ["compiled", "native"])
def test_what_another_engine_compiled_stays(pair: Pair, launch: str) -> None:
    """The first of two engines of the same shape is deleted, Dynamo is reset, and the second continues without compiling again."""
    first, second = (pair.llm(**ONE, **LAUNCHES[launch]) for _ in range(2))
    prompt_ids = prompts(2)
    expected = [pair.greedy(prompt, 6, ignore_eos=True) for prompt in prompt_ids]
    assert ids(first.generate(prompt_ids, PARAMS)) == ids(second.generate(prompt_ids, PARAMS)) == expected
    compiled, found, thread = second.cycle.compilations.graphs, parts(first.cycle), first._engine._driver.thread
    del first
    assert alive(found, thread) == []
    assert ids(second.generate(prompt_ids, PARAMS)) == expected
    torch._dynamo.reset()
    assert ids(second.generate(prompt_ids, PARAMS)) == expected
    assert second.cycle.compilations.graphs == compiled


def test_a_captured_cycle_dies() -> None:
    plan = structure_plan("tree", device="cpu", runtime="eager", buckets=[1, 2], max_rows=2)
    networks = tiny_networks(plan)
    cycle = Cycle(plan, networks.target, networks.draft, select_kernels("reference", "auto", "cpu"), capturer=TapeCapturer)
    cycle.prepare([*plan.graph_keys(GREEDY), *cycle.prefills(GREEDY)])
    found = parts(cycle)
    assert "replay 0" in found and "slot draft_kv" in found
    del cycle, networks
    assert alive(found) == []


def test_an_engine_dies_whose_run_was_left_halfway(pair: Pair) -> None:
    llm = pair.llm(**ONE, runtime="eager")
    events = llm.stream(prompts(1), PARAMS)
    next(events)
    found = parts(llm.cycle)
    thread = llm._engine._driver.thread
    events.close()
    del llm, events
    assert alive(found, thread) == []


def test_an_engine_dies_whose_compilation_failed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the error was handled, nothing of Dynamo's holds the engine either."""
    llm: LLM | None = pair.llm(**ONE, **LAUNCHES["compiled"])
    assert llm is not None
    found = parts(llm.cycle)

    def broken(self: Stage, *_: Any) -> None:
        raise RuntimeError("a stage that can't be compiled")

    monkeypatch.setattr("graphspec.graphs.stages.commit.Commit.forward", broken)
    with pytest.raises(Exception, match="can't be compiled") as caught:
        llm.generate(prompts(1), PARAMS)
    thread = llm._engine._driver.thread
    llm = None
    del caught
    assert alive(found, thread) == []

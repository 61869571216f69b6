"""One set of buffers, many runs: no run affects a later one, and nothing is compiled after the warm-up."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from graphspec.api.llm import LLM, SamplingParams
from graphspec.errors import ResourceError
from graphspec.graphs.compile import Region
from graphspec.graphs.programs import PrefillKey
from graphspec.graphs.stages.mailbox import Message
from graphspec.kernels.native.call import Tape
from graphspec.shapes import GREEDY
from tests.support.engines import CHAIN, TREE, WIDE, Pair, ids, prompts
from tests.support.lockstep import Lockstep

PLAIN: dict[str, Any] = {"variant": "none"}


def some_params(index: int) -> SamplingParams:
    return SamplingParams(max_tokens=4 + 5 * index % 17, temperature=(0.0, 1.0, 0.7)[index % 3], seed=index, ignore_eos=index % 2 == 0)


@pytest.mark.parametrize("shape", [PLAIN, CHAIN, WIDE], ids=["none", "chain", "tree"])
def test_many_runs_over_one_engine(pair: Pair, shape: dict[str, Any]) -> None:
    rng = random.Random(7)
    prompt_ids = prompts(5)
    fresh = [pair.llm(**shape, max_rows=4).generate(p, some_params(i))[0].token_ids for i, p in enumerate(prompt_ids)]
    llm = pair.llm(**shape, max_rows=4, cycles_in_flight=2)
    for count in (5, 1, 3, 2, 5):
        order = rng.sample(range(5), count)
        outputs = llm.generate([prompt_ids[i] for i in order], [some_params(i) for i in order])
        assert ids(outputs) == [fresh[i] for i in order]


def test_runs_are_deterministic(pair: Pair) -> None:
    prompt_ids, params = prompts(6), [some_params(i) for i in range(6)]
    first, second = (pair.llm(**TREE) for _ in range(2))
    runs = [llm.generate(prompt_ids, params) for llm in (first, first, second)]
    assert ids(runs[0]) == ids(runs[1]) == ids(runs[2])
    figures = [[(o.metrics.cycles, o.metrics.acceptance_length, o.metrics.accepted_per_position) for o in outputs] for outputs in runs]
    assert figures[0] == figures[1] == figures[2]


def test_an_aborted_run_leaves_no_state(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    Lockstep(monkeypatch)
    llm = pair.llm(**CHAIN, cycles_in_flight=3, max_rows=2)
    prompt_ids = prompts(4)
    expected = [pair.greedy(p, 9, ignore_eos=True) for p in prompt_ids]
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    for events in (1, 3, 9):
        stream = llm.stream(prompt_ids, params)
        for _ in range(events):
            next(stream)
        stream.close()
        llm.warm_up()  # ends when nothing is in flight any more
        assert llm.cycle.in_flight == 0
        assert ids(llm.generate(prompt_ids, params)) == expected


def buffers(llm: LLM) -> dict[str, int]:
    return {name: llm.cycle.arena[name].data_ptr() for name, *_ in llm.slots()}


def test_compiled_chain_equals_transformers_and_compiles_nothing_later(pair: Pair) -> None:
    llm = pair.llm(num_steps=2, topk=1, num_draft_tokens=3, runtime="compiled", linear="native", buckets=[3], max_rows=3)
    prompt_ids, before = prompts(5), llm.cycle.compilations.graphs
    warm = llm.generate(prompt_ids[:1], SamplingParams(max_tokens=3))
    assert ids(warm) == [pair.greedy(prompt_ids[0], 3)]
    graphs, places = llm.cycle.compilations.graphs, buffers(llm)

    def through_dynamo() -> None:
        raise AssertionError("the compiled code is called by itself")

    for key in llm.plan.graph_keys(GREEDY):
        region = llm.cycle.programs[key].direct
        assert isinstance(region, Region)
        region._first = through_dynamo
    assert graphs == before + 1, "the whole cycle is one graph"
    with torch.compiler.set_stance("fail_on_recompile"):
        for count in (5, 1, 2, 3):
            outputs = llm.generate(prompt_ids[:count], [SamplingParams(max_tokens=5 + 6 * i) for i in range(count)])
            assert ids(outputs) == [pair.greedy(p, 5 + 6 * i) for i, p in enumerate(prompt_ids[:count])]
    assert llm.cycle.compilations.graphs == graphs
    assert buffers(llm) == places
    llm.cycle.arena.check_addresses()


@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize(("temperature", "prefix_cache"), [(0.0, False), (0.8, True)])
def test_a_cycle_of_native_ops_is_one_tape_and_needs_no_compiler(pair: Pair, topk: int, temperature: float, prefix_cache: bool) -> None:
    shape = {"num_steps": 2, "topk": topk, "num_draft_tokens": 3 if topk == 1 else 5}
    llm = pair.llm(**shape, runtime="compiled", buckets=[3], max_rows=3, prefix_cache=prefix_cache)
    prompt_ids, before = prompts(4), llm.cycle.compilations.graphs
    params = [SamplingParams(max_tokens=5 + 4 * i, temperature=temperature, seed=i) for i in range(4)]
    plain = pair.llm(**PLAIN).generate(prompt_ids, params)
    for _ in range(2):
        assert ids(llm.generate(prompt_ids, params)) == ids(plain)
    assert llm.cycle.compilations.graphs == before
    assert {type(program.direct) for key, program in llm.cycle.programs.items() if not isinstance(key, PrefillKey)} == {Tape}


def test_launches_the_cycle_refuses(pair: Pair) -> None:
    cycle = pair.llm(**PLAIN).cycle
    prefill = PrefillKey(8, GREEDY)
    with pytest.raises(ResourceError, match="a program prepared before the run"):
        cycle.launch(prefill, Message(lanes=()))
    cycle.prepare([prefill])
    ticket = cycle.launch(prefill, Message(lanes=()))
    with pytest.raises(ResourceError, match="at most 1 unread launches, found 1"):
        cycle.launch(prefill, Message(lanes=()))
    with pytest.raises(ResourceError, match="no cycle in flight while programs are built"):
        cycle.prepare([PrefillKey(16, GREEDY)])
    with pytest.raises(ResourceError, match=f"the oldest unread ticket {ticket}"):
        cycle.read(ticket + 1)
    cycle.read(ticket)
    with pytest.raises(ResourceError, match="the oldest unread ticket None"):
        cycle.read(ticket)

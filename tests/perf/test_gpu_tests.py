"""The tests that need a GPU, run here as far as that goes, so that none of them fails there for a mistake of its own.

Graphs are tapes (:mod:`tests.support.tape`), the device is this CPU, and kernels are references: it is the tests that are tested, not
what they test.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._device import _device_constructors

from graphspec.api import llm as llm_module
from graphspec.api.llm import LLM
from graphspec.config.schema import Config
from graphspec.engine import kernel_choice
from graphspec.engine.request import SamplingParams
from graphspec.graphs import cycle as cycle_module
from graphspec.plan.plan import Plan, make_plan
from graphspec.plan.runtime import Runtime, resolve_runtime
from tests.gpu import test_gpu, test_gpu_capture
from tests.support import tiny
from tests.support.tape import Recorder, Tape, TapeCapturer


class Tapes(TapeCapturer):
    """Tapes of any callable."""

    def capture(self, program: Any) -> Tape:
        with Recorder() as recorder:
            program()
        return Tape(recorder.steps, self.arena)


def plan_here(config: Config, *arguments: Any, device: str, **options: Any) -> Plan:
    """The plan of a GPU's engine on this CPU: reference kernels, captured if the plan is."""
    name = config.runtime.name
    runtime = resolve_runtime(name, device) if name == "auto" else Runtime(name)
    mode = "reference" if config.kernels.mode == "fused" else config.kernels.mode
    here = replace(config, runtime=replace(config.runtime, name="eager"), kernels=replace(config.kernels, mode=mode, attention="auto"))
    return replace(make_plan(here, *arguments, device="cpu", **options), runtime=runtime)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    to, empty = torch.Tensor.to, torch.empty
    # torch keeps the first answer: made later, it would have the replaced functions, and `with torch.device` ignore the real ones after.
    _device_constructors()

    def moved(self: torch.Tensor, *arguments: Any, **keys: Any) -> torch.Tensor:
        return to(self, *("cpu" if a == "cuda" else a for a in arguments), **keys)

    def allocated(*size: Any, device: Any = None, **keys: Any) -> torch.Tensor:
        if size == (2**50,):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1048576.00 GiB")
        return empty(*size, device=device, **keys)

    for module in (tiny, llm_module):
        monkeypatch.setattr(module, "make_plan", plan_here)
    monkeypatch.setattr(test_gpu, "DEVICE", "cpu")
    # A tape spoils what lives for one cycle before it is replayed, in other buckets too.
    monkeypatch.setattr(test_gpu, "KINDS", ("mail", "state", "ring", "kv"))
    monkeypatch.setattr(torch.Tensor, "to", moved)
    monkeypatch.setattr(torch, "empty", allocated)
    for module in (test_gpu, test_gpu_capture):
        monkeypatch.setattr(module, "Captured", Tape)
        monkeypatch.setattr(module, "select_kernels", lambda *_, **__: _kernels())
    monkeypatch.setattr(test_gpu_capture, "Capturer", Tapes)
    monkeypatch.setattr(cycle_module, "Capturer", Tapes)
    monkeypatch.setattr(kernel_choice, "select_kernels", lambda *_, **__: _kernels())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)


def _kernels() -> Any:
    from graphspec.kernels import select_kernels

    return select_kernels("reference", "reference", "cpu")


@pytest.fixture
def expected() -> list[list[int]]:
    tokens: list[list[int]] = test_gpu.greedy_by_transformers()
    return tokens


@pytest.mark.parametrize("shape", ["chain", "host-tree", pytest.param("latent-experts", marks=pytest.mark.full)])
def test_captured_equals_direct(shape: str) -> None:
    test_gpu.test_captured_equals_direct_bitwise(shape, "reference")


@pytest.mark.full
def test_captured_equals_eager() -> None:
    test_gpu.test_captured_equals_eager_tokens("chain")
    test_gpu.test_a_moved_buffer_is_noticed()


def test_queued() -> None:
    test_gpu.test_cycles_queued_ahead_read_in_order("none", 2)


def test_an_engine_that_names_no_runtime_is_captured() -> None:
    keys: dict[str, Any] = {"max_rows": 1, "buckets": [1], "max_context": 128, "num_steps": 3, "topk": 1, "num_draft_tokens": 4}
    engines = [LLM(mode="reference", **keys), LLM(runtime="eager", **keys)]
    tokens = [llm.generate("def fib(n):", SamplingParams(max_tokens=12))[0].token_ids for llm in engines]
    assert tokens[0] == tokens[1] and engines[0].plan.describe()["runtime"] == "captured (runtime=auto on cuda)"
    records = engines[0].capture_report()
    assert records and all(record.capture_seconds is not None for record in records)


@pytest.mark.full
def test_engines(expected: list[list[int]]) -> None:
    test_gpu.test_greedy_tokens_equal_transformers("chain", "captured", "reference", expected)
    test_gpu.test_run_ahead_changes_no_token(0.8)


@pytest.mark.full
@pytest.mark.parametrize(("variant", "keys"), [p for p in test_gpu.VARIANTS if p[0] != "eagle"])
def test_variants(variant: str, keys: dict[str, object], expected: list[list[int]]) -> None:
    test_gpu.test_every_variant_gives_the_targets_own_tokens("reference", variant, keys, expected)


@pytest.mark.full
def test_poison(expected: list[list[int]]) -> None:
    test_gpu.test_poison_between_launches_changes_no_token("chain", expected)


def test_prefill_and_report() -> None:
    test_gpu_capture.test_a_captured_prefill_equals_a_direct_one_bitwise("head-per-step", "reference")
    test_gpu_capture.test_the_report_has_the_memory_of_graphs()


@pytest.mark.full
def test_depths() -> None:
    test_gpu_capture.test_depths_side_by_side_change_no_token(0.8)
    test_gpu_capture.test_depths_that_change_while_it_runs_change_no_token(0.0, "reference")


@pytest.mark.full
def test_debug_mode_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    test_gpu_capture.test_debug_mode_runs_and_notices()
    test_gpu_capture.test_pages_that_do_not_fit_are_refused_with_the_number_that_does()
    # A tape calls the program once, and that is the capture.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    test_gpu_capture.test_memory_that_runs_out_while_capturing_costs_a_bucket(monkeypatch)

"""The runtime that ``auto`` means: by the device, once, in the plan; what is asked for stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rich.console import Console

from graphspec.api import llm as llm_module
from graphspec.api.llm import LLM
from graphspec.cli.inspect import plan_table
from graphspec.config.command_options import LaunchConfig
from graphspec.config.compose import load_config
from graphspec.config.schema import Config, KernelsConfig, RuntimeConfig
from graphspec.errors import ConfigError
from graphspec.lab.predict.capacity import engine_plan
from graphspec.lab.predict.model_pair import read_model_pair
from graphspec.plan.plan import Plan, make_plan
from graphspec.plan.runtime import Runtime, resolve_runtime
from tests.support.plans import draft_facts, model_facts


def plan_on(device: str, kernels: KernelsConfig | None = None, **runtime: Any) -> Plan:
    config = Config(runtime=RuntimeConfig(**runtime), kernels=kernels or KernelsConfig())
    return make_plan(config, model_facts(), draft_facts(), device=device)


@pytest.mark.parametrize(("device", "name", "kernels"), [("cuda", "captured", "fused"), ("cpu", "compiled", "compiled")])
def test_auto_is_the_default_and_means_what_the_device_does_best(device: str, name: str, kernels: str) -> None:
    plan = plan_on(device)
    assert (plan.runtime.name, plan.runtime.captured, plan.kernels) == (name, device == "cuda", kernels)
    assert plan == plan_on(device, name="auto") and plan.describe()["runtime"] == f"{name} (runtime=auto on {device})"


@pytest.mark.parametrize("name", ["eager", "compiled", "captured"])
def test_what_is_asked_for_stays(name: str) -> None:
    assert resolve_runtime(name, "cuda") == Runtime(name)
    plan = plan_on("cuda", name=name)
    assert (plan.runtime, plan.describe()["runtime"]) == (Runtime(name), name)


@pytest.mark.parametrize(
    ("keys", "debug"),
    [({"mode": "reference"}, False), ({"mode": "compiled"}, True), ({"attention": "flashinfer"}, False),
     ({"numerics": "batch_invariant"}, False), ({}, True)],
)  # fmt: skip
def test_whatever_can_be_captured_is(keys: dict[str, Any], debug: bool) -> None:
    plan = plan_on("cuda", KernelsConfig(**keys), debug=debug)
    assert plan.runtime.captured and plan.kernels == keys.get("mode", "fused")


def test_a_runtime_that_the_device_lacks_or_that_does_not_exist_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError) as found:
        plan_on("cpu", name="captured")
    assert str(found.value).startswith("runtime: expected auto, eager or compiled on this machine")
    with pytest.raises(
        ConfigError, match=r"^runtime\.name: found 'capture' \(did you mean captured\?\), expected one of auto, eager, compiled, captured$"
    ):
        RuntimeConfig(name="capture")
    with pytest.raises(ConfigError, match=r"^runtime\.name: expected one of auto, eager, compiled, captured, found 'graphs'"):
        LLM(runtime="graphs")
    with pytest.raises(ConfigError, match=r"^runtime: expected .*auto.*captured.*compiled.*eager"):
        load_config("runtime=graphs")


class PlannedError(Exception):
    """An engine that went as far as its plan."""


@pytest.mark.parametrize(("has_gpu", "keys", "name"), [
    (True, {}, "captured"), (True, {"device": "cpu"}, "compiled"), (True, {"runtime": "compiled"}, "compiled"), (False, {}, "compiled"),
])  # fmt: skip
def test_an_engine_resolves_it_from_the_device_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, keys: dict[str, Any], name: str
) -> None:
    def stop(plan: Plan, config: Config) -> None:
        raise PlannedError(plan.runtime.name)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(llm_module, "fit_memory", stop)
    with pytest.raises(PlannedError, match=f"^{name}$"):
        LLM(**keys)


def test_inspect_shows_the_choice_and_why() -> None:
    console = Console(record=True, width=160)
    console.print(plan_table(plan_on("cuda").describe()))
    [line] = [line for line in console.export_text().splitlines() if " runtime " in line]
    assert "captured (runtime=auto on cuda)" in line


@pytest.mark.parametrize(("word", "name"), [("runtime=auto", "captured"), ("runtime=compiled", "compiled")])
def test_a_gpu_is_planned_as_it_would_run(word: str, name: str) -> None:
    config = load_config("model=llama-3.1-8b", "hardware=h200", word)
    assert isinstance(config, LaunchConfig)
    pair = read_model_pair(config.model.path, config.variant, plan_on("cuda").variant, None)
    shape = plan_on("cuda").shape
    _, plan = engine_plan(config, pair, shape, 1, 2048, device="cuda", dtype="bfloat16", memory=None)
    assert plan.runtime.name == name

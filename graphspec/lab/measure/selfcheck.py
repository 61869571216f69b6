"""Checks that a runtime equals its stages: the configured one against another, on the same launches and from the same state.

It takes the place of comparing tokens where acceptance is forced, for then there are no right tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...api.diff import comparable, diff, difference
from ...api.llm import LLM, generate_through
from ...config.command_options import LaunchConfig
from ...engine.device import resolve_device
from ...engine.launcher import Forwarding
from ...engine.request import measured_params
from ...facts import read_model_facts
from ...facts.folders import model_folder
from ...graphs.cycle import Cycle
from ...graphs.programs import Key
from ...graphs.stages.mailbox import Message
from ...plan.runtime import resolve_runtime
from ...text.tokenizer import Tokenizer
from .workload import make_workload

MAX_TOKENS = 32
SPARE_CONTEXT = 256
"""Positions past prompt and output: windows, and rounding to pages."""


def check_runtime(config: LaunchConfig) -> dict[str, Any]:
    """Compare the configured runtime with its stages run one by one, on the first request of the workload.

    A captured program is compared with a direct launch of the same program, on one engine, and every slot it writes must be equal bit for
    bit. Any other runtime is compared with ``eager`` (:func:`graphspec.api.diff.diff`). Engines have one row and a short context, so
    that two fit into the memory of one.

    Returns:
        ``equal``, and a ``sentence`` that says what was compared.
    """
    folder = model_folder(config.model.path, config.model.revision)
    prompt = make_workload(config, lambda text: Tokenizer(folder).encode(text), read_model_facts(folder).vocab_size).requests[0].prompt
    tokens = min(config.workload.output_tokens, MAX_TOKENS)
    context = min(config.model.max_context or len(prompt) + tokens + SPARE_CONTEXT, len(prompt) + tokens + SPARE_CONTEXT)
    runtime = replace(config.runtime, max_rows=1, buckets=[1], depth_per_bucket={}, num_pages=None)
    small = replace(config, runtime=runtime, model=replace(config.model, max_context=context))
    name = resolve_runtime(config.runtime.name, resolve_device(config.hardware.device)).name
    if name == "captured":
        return _captured_against_direct(small, prompt, tokens)
    if name == "eager":
        return {"equal": True, "sentence": "eager runs its stages one by one; there is nothing to compare it with"}
    report = diff(small, "eager", name, prompt, tokens)
    if report.equal:
        return {"equal": True, "sentence": f"{name} against eager: no slot differs in {report.launches} launches"}
    where = f"slot {report.slot} differs after stage {report.stage} of launch {report.cycle}"
    return {"equal": False, "sentence": f"{name} against eager: {where}: {report.detail}"}


def _captured_against_direct(config: LaunchConfig, prompt: list[int], tokens: int) -> dict[str, Any]:
    llm = LLM.from_config(config)
    params = measured_params(config.sampling, max_tokens=tokens, stop_token_ids=(), ignore_eos=True)
    llm.warm_up(sampling=params.sampling_class)
    comparing = ComparingReplay(llm.cycle)
    generate_through(llm, comparing, prompt, params)
    if comparing.difference:
        return {"equal": False, "sentence": f"captured against direct: launch {comparing.launches}: {comparing.difference}"}
    return {"equal": True, "sentence": f"captured against direct: every slot equal to the bit in {comparing.launches} launches"}


class ComparingReplay(Forwarding):
    """A launcher that runs every captured program twice before it launches it: directly and as a replay, from the same state.

    Attributes:
        difference: the first difference; empty while there is none.
    """

    def __init__(self, cycle: Cycle) -> None:
        super().__init__(cycle)
        self.launches = 0
        self.difference = ""

    def launch(self, key: Key, message: Message) -> int:
        if self.cycle.programs[key].replay is not None and not self.difference:
            self._compare(key, message)
        return super().launch(key, message)

    def _compare(self, key: Key, message: Message) -> None:
        program, arena = self.cycle.programs[key], self.cycle.arena
        assert program.replay is not None
        self.cycle.ready(key, message)
        names = sorted({name for stage in program.stages for name in stage.writes})
        found = []
        with torch.no_grad(), self.rewinding(message, "state", "lane", "ring", "kv") as rewind:
            for run in (program.direct, program.replay):
                rewind()
                run()
                found.append({name: comparable(arena, name).clone() for name in names})
        self.launches += 1
        details = ((name, difference(found[0][name], found[1][name], exact=True)) for name in names)
        self.difference = next((f"slot {name} {detail}" for name, detail in details if detail), "")

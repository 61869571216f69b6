"""An engine of this package as a measured side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ...api.events import Stream
from ...api.llm import LLM, generate_through
from ...api.outputs import Output
from ...config.command_options import LaunchConfig
from ...engine.depth import AdaptiveDepth
from ...engine.launcher import Launcher
from ...engine.request import RequestMetrics, ResolvedParams, measured_params, sampling_class
from ...errors import ResourceError
from ...kernels import resolve
from ...plan.plan import Plan
from .generations import record_generation
from .metrics import CycleCount, Timeline, closed_loop_arrivals
from .open_loop import play
from .recorder import Recorder, chrome_trace, stage_timer
from .sides import for_workload
from .stages import profile_cycles
from .workload import Workload, WorkloadRequest, make_workload


class EngineSide:
    """One engine and its workload.

    Args:
        config: of the engine and the workload; the engine holds ``workload.batch`` rows.

    Raises:
        ResourceError: a request that can't be served; nothing was compiled.
    """

    def __init__(self, config: LaunchConfig, progress: Callable[[str, int, int], None] | None = None) -> None:
        self.config = for_workload(config)
        self.llm = LLM.from_config(self.config, progress)
        self.workload: Workload = make_workload(config, self._encode, self.llm.plan.target.vocab_size)
        self.params = [self.params_of(request) for request in self.workload.requests]
        self.prompts = [request.prompt for request in self.workload.requests]
        self.check(self.prompts, self.params)
        self.llm.warm_up(self.workload.batch, sampling=sampling_class(self.params))

    def check(self, prompts: list[list[int]], params: Sequence[ResolvedParams]) -> None:
        """Raise :class:`ResourceError` for the first request that can't be served."""
        for index, error in enumerate(self.llm.check(prompts, params)):
            if error is not None:
                raise ResourceError(f"request {index}", "one that can be served", error)

    def _encode(self, text: str) -> list[int]:
        return self.llm.tokenizer.encode(text)

    def params_of(self, request: WorkloadRequest) -> ResolvedParams:
        """Sampling parameters of one request."""
        workload = self.workload
        return measured_params(
            workload.sampling, max_tokens=request.output_tokens or workload.output_tokens, ignore_eos=workload.ignore_eos, seed=request.seed
        )

    @property
    def plan(self) -> Plan:
        return self.llm.plan

    def describe(self) -> dict[str, Any]:
        """See :class:`graphspec.lab.measure.worker.Runner`."""
        plan, shape = self.plan, self.plan.shape
        rule = plan.accept.rule
        return {
            "label": label(plan),
            "variant": plan.variant.name,
            "shape": shape.numbers if shape.num_steps else None,
            "runtime": plan.runtime.name,
            "attention": resolve("kernels.attention", plan.attention, plan.kernels, plan.device, plan.dtype),
            "dtype": plan.weight_dtype,
            "device": plan.device,
            "digest": self.workload.digest,
            "long_prompts": list(self.workload.long),
            "input_tokens": self.workload.input_tokens,
            "temperature": self.config.sampling.stated_temperature,
            "synthetic": plan.accept.synthetic,
            "lossy": plan.accept.lossy,
            "rule": rule,
            "plan": plan.describe(),
            "build": [
                {"program": r.name, "warm_up_s": r.warm_up_seconds, "capture_s": r.capture_seconds, "bytes": r.pool_bytes}
                for r in self.llm.capture_report()
            ],
            "memory": [{"name": line.name, "bytes": line.size, "estimate": line.estimate} for line in self.llm.memory.lines],
        }

    def run_with(self, launcher: Launcher) -> list[Output]:
        """Run the workload once, launched by ``launcher``."""
        return generate_through(self.llm, launcher, self.prompts, self.params)

    def round(self) -> dict[str, Any]:
        """See :class:`graphspec.lab.measure.worker.Runner`."""
        if self.workload.arrivals is not None:
            return self._open_round(self.workload.arrivals)
        began = time.perf_counter()
        outputs = self.llm.generate(self.prompts, self.params)
        for output in outputs:
            if output.finish_reason == "error":
                raise ResourceError(f"request {output.index}", "an output", output.error)
        return {
            "timelines": [timeline.to_json() for timeline in timelines(outputs, began, self.workload.batch, self.plan)],
            "tokens": [output.token_ids for output in outputs],
            "texts": [output.text for output in outputs],
        }

    def _open_round(self, arrivals: Sequence[float]) -> dict[str, Any]:
        """Submit each request when it is due; the engine's thread records when its tokens come."""
        streams: list[Stream] = []

        def submit(number: int) -> None:
            streams.append(self.llm.submit([self.workload.requests[number].prompt], self.params[number]))

        due = play(arrivals, submit)
        for stream in streams:
            while not stream.ended:
                stream.wait()
        requests = [request for stream in streams for request in stream.requests]
        for number, request in enumerate(requests):
            if request.finish_reason == "error":
                raise ResourceError(f"request {number}", "an output", request.error)
        return {
            "timelines": [
                timeline_of(request.metrics, request.finish_reason or "", arrived, self.plan).to_json()
                for request, arrived in zip(requests, due, strict=True)
            ],
            "tokens": [request.output for request in requests],
            "texts": [None] * len(requests),
        }

    def profile(self, bandwidth: float | None = None) -> dict[str, Any]:
        """Times inside the cycle (:func:`graphspec.lab.measure.stages.profile_cycles`)."""
        context = round(self.workload.input_tokens + self.workload.output_tokens / 2)
        options = self.config.profile
        return profile_cycles(self.llm, self.run_with, context, self.config.variant.token_map, stages=options.stages, bandwidth=bandwidth)

    def depth_times(self) -> list[tuple[int, int, float]]:
        """``(bucket, depth, seconds)`` of every cycle of an engine whose depth adapts; empty for others."""
        policy = self.llm.depth_policy
        if not isinstance(policy, AdaptiveDepth):
            return []
        return [(bucket, depth, time) for bucket, times in policy.times.items() for depth, time in times.items()]

    def trace(self) -> list[dict[str, Any]]:
        """Chrome trace events of one run of the workload."""
        cycle = self.llm.cycle
        first = Recorder(cycle)
        self.run_with(first)
        key = first.most_common()
        timers = {key: stage_timer(cycle, key)} if key is not None and self.config.profile.stages else {}
        recorder = Recorder(cycle, wait=True, timers=timers)
        self.run_with(recorder)
        return chrome_trace(recorder.launches, f"graphspec, {label(self.plan)}")

    def generations(self, count: int) -> list[dict[str, Any]]:
        """The first ``count`` requests, each by itself, cycle by cycle."""
        pairs = list(zip(self.workload.requests, self.params, strict=True))[:count]
        return [record_generation(self.llm, request.prompt, params) for request, params in pairs]


def label(plan: Plan) -> str:
    """``eagle3 tree (5,4,16)``; plain decoding is its variant's name."""
    shape = plan.shape
    if shape.num_steps == 0:
        return plan.variant.name
    numbers = f"({shape.num_steps},{shape.topk},{shape.num_draft_tokens})"
    return f"{plan.variant.name} {'chain' if shape.is_chain else 'tree'} {numbers}"


def timelines(outputs: list[Output], began: float, users: int, plan: Plan) -> list[Timeline]:
    """Timelines of the requests of one call, as seen by users who each send the next request when the last one ends."""
    finished = [output.timing.finished or began for output in outputs]
    arrived = closed_loop_arrivals(began, finished, users)
    return [timeline_of(output.timing, output.finish_reason, start, plan) for output, start in zip(outputs, arrived, strict=True)]


def timeline_of(timing: RequestMetrics, reason: str, arrived: float, plan: Plan) -> Timeline:
    """A request that arrived at ``arrived``, as its caller saw it."""
    return Timeline(arrived, list(timing.bursts), timing.finished or arrived, reason, cycle_counts(timing, plan), timing.cut)


def cycle_counts(timing: RequestMetrics, plan: Plan) -> list[CycleCount]:
    """Tokens and drafts of each cycle of a request."""
    drafted = {depth: plan.shape.shortened(depth).num_draft_tokens - 1 if depth else 0 for depth in set(timing.cycle_depths)}
    return [CycleCount(tokens, depth, drafted[depth]) for tokens, depth in zip(timing.cycle_tokens, timing.cycle_depths, strict=True)]

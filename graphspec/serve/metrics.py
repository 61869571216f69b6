"""Metrics for Prometheus: under vLLM's names where it has them, since ``vllm bench serve`` and aiperf read these, otherwise ``graphspec:``.

Every family has the label ``model_name``. Counters of tokens and cycles grow while requests run, the others when a request ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from ..engine.meter import Load
from ..engine.request import Request
from ..graphs.capture import CaptureRecord
from ..plan.plan import Plan

STAGES = ("reading", "encoding", "compiling")
"""What is done to a request before the engine has it: its body is read, its texts are encoded, its grammar is compiled."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABEL = ("model_name",)
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Bounds of times between tokens, seconds."""
LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Bounds of times of a request, seconds."""


class Metrics:
    """The metrics of one server.

    Args:
        model: value of the label.
        plan: of the engine.
        load: returns the engine's current load.
        programs: returns the programs that it has built.
    """

    def __init__(self, model: str, plan: Plan, load: Callable[[], Load], programs: Callable[[], Sequence[CaptureRecord]]) -> None:
        self.registry = CollectorRegistry()
        self._model, self._plan, self._load, self._programs = model, plan, load, programs
        self._seen: dict[Request, _Seen] = {}
        self._preparing = dict.fromkeys(STAGES, 0)
        self.registry.register(self)
        self._prompt = self._counter("vllm:prompt_tokens", "Tokens of prompts.")
        self._generated = self._counter("vllm:generation_tokens", "Tokens that were generated.")
        self._success = Counter(
            "vllm:request_success", "Requests that ended, by reason.", (*LABEL, "finished_reason"), registry=self.registry
        )
        self._preempted = self._counter("vllm:num_preemptions", "Times that a request gave up its row for want of pages.")
        self._queries = self._counter("vllm:prefix_cache_queries", "Tokens of prompts that were looked for in pages of other requests.")
        self._hits = self._counter("vllm:prefix_cache_hits", "Tokens of prompts that were found there.")
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Cycles that drafted, one for each request in them.")
        self._drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens that were verified: nodes but the root.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        self._positions = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that were accepted, by depth.",
            (*LABEL, "position"),
            registry=self.registry,
        )
        for depth in range(plan.shape.num_steps):
            self._positions.labels(model, depth)
        self._refused = Counter(
            "graphspec:requests_refused", "Answers that were errors, by status.", (*LABEL, "status"), registry=self.registry
        )
        self._first = self._histogram("vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", LONG)
        self._between = self._histogram(
            "vllm:inter_token_latency_seconds", "Time since a request's last tokens, divided by how many came, for each token.", SHORT
        )
        self._per_token = self._histogram("vllm:request_time_per_output_token_seconds", "A request's mean of it.", SHORT)
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", LONG)
        self._queued = self._histogram("vllm:request_queue_time_seconds", "From arrival to a row.", LONG)
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", "From a row to the first token.", LONG)
        self._decode = self._histogram("vllm:request_decode_time_seconds", "From the first token to the end.", LONG)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def refuse(self, status: int) -> None:
        """Count an error response."""
        self._refused.labels(self._model, status).inc()

    @contextmanager
    def preparing(self, stage: str) -> Iterator[None]:
        """A context of a request that is not in the engine yet; ``stage`` is one of :data:`STAGES`."""
        self._preparing[stage] += 1
        try:
            yield
        finally:
            self._preparing[stage] -= 1

    def observe(self, request: Request) -> None:
        """Count the progress of a request since its last call."""
        metrics = request.metrics
        if request not in self._seen:
            self._seen[request] = _Seen()
            self._prompt.inc(len(request.prompt))
            if self._plan.prefix_cache:
                self._queries.inc(len(request.prompt))
                self._hits.inc(metrics.cached_tokens)
        seen = self._seen[request]
        # The engine's thread may append to both lists at the same time.
        bursts, cycles = metrics.bursts[seen.bursts :], metrics.cycle_tokens[seen.cycles :]
        for moment, tokens in bursts:
            self._generated.inc(tokens)
            if seen.last is None:
                self._first.observe(moment - metrics.arrived)
            else:
                for _ in range(tokens):
                    self._between.observe((moment - seen.last) / tokens)
            seen.last = moment
        for tokens, depth in zip(cycles, metrics.cycle_depths[seen.cycles :], strict=False):
            self._count_cycle(tokens, depth)
            seen.cycles += 1
        seen.bursts += len(bursts)

    def _count_cycle(self, tokens: int, depth: int) -> None:
        if depth == 0:
            return
        self._drafts.inc()
        self._drafted.inc(draft_tokens(self._plan, depth))
        self._accepted.inc(tokens - 1)
        for position in range(tokens - 1):
            self._positions.labels(self._model, position).inc()

    def leave(self, request: Request) -> None:
        """Count a request whose response has ended, or whose client has disconnected."""
        self.observe(request)
        metrics, seen = request.metrics, self._seen.pop(request)
        self._preempted.inc(request.preempted)
        self._success.labels(self._model, request.finish_reason or "abort").inc()
        if metrics.admitted is not None:
            self._queued.observe(max(0.0, metrics.admitted - metrics.arrived))
        if metrics.first_token is None or metrics.finished is None or seen.last is None:
            return
        self._whole.observe(metrics.finished - metrics.arrived)
        self._decode.observe(metrics.finished - metrics.first_token)
        if metrics.admitted is not None:
            self._prefill.observe(metrics.first_token - metrics.admitted)
        if len(request.output) > 1:
            self._per_token.observe((seen.last - metrics.first_token) / (len(request.output) - 1))

    def collect(self) -> Iterable[Metric]:
        """Current values, and those of cycles and programs; called by the registry."""
        load, model = self._load(), [self._model]

        def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
            family = GaugeMetricFamily(name, text, labels=LABEL)
            family.add_metric(model, value)
            return family

        yield gauge("vllm:num_requests_running", "Requests that have rows.", load.running)
        yield gauge("vllm:num_requests_waiting", "Requests without a row.", load.waiting)
        stages = GaugeMetricFamily("graphspec:requests_preparing", "Requests not in the engine yet, by stage.", labels=(*LABEL, "stage"))
        for stage, count in self._preparing.items():
            stages.add_metric([*model, stage], count)
        yield stages
        yield gauge("vllm:kv_cache_usage_perc", "Share of the pages that requests hold, 0 to 1.", load.pages_used / load.pages)
        yield gauge("graphspec:programs", "Programs that were built.", len(self._programs()))
        built = CounterMetricFamily("graphspec:build_seconds", "Time that building and capturing them took.", labels=LABEL)
        built.add_metric(model, sum(record.warm_up_seconds + (record.capture_seconds or 0.0) for record in self._programs()))
        yield built
        cycles = SummaryMetricFamily(
            "graphspec:cycle_seconds", "Cycles from launch, or the result before, to result.", labels=(*LABEL, "bucket", "depth")
        )
        for (bucket, depth), times in sorted(load.cycles.items()):
            cycles.add_metric([*model, str(bucket), str(depth)], times.count, times.seconds)
        yield cycles

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, LABEL, registry=self.registry).labels(self._model)

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        return Histogram(name, text, LABEL, buckets=bounds, registry=self.registry).labels(self._model)


def draft_tokens(plan: Plan, depth: int) -> int:
    """Draft tokens that a cycle of this depth verifies for a request: the nodes of the tree but the root."""
    return plan.shape.shortened(depth).num_draft_tokens - 1


class _Seen:
    """What has been counted of a request."""

    def __init__(self) -> None:
        self.bursts = self.cycles = 0
        self.last: float | None = None

"""One request of a client while the engine serves it: its events, its usage, and its metrics."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ..api.async_llm import AsyncLLM, AsyncStream
from ..api.outputs import StreamEvent, summarise
from ..api.prompts import Prompt
from ..engine.request import Request, SamplingParams
from ..errors import GraphspecError
from ..plan.plan import Plan
from .errors import ApiError, from_engine, internal, stopping
from .metrics import Metrics, draft_tokens

logger = logging.getLogger(__name__)
FINISHED = {"stop": "stop", "length": "length", "memory": "length", "deadline": "length"}
"""The engine's finish reasons as OpenAI's. ``stop_reason`` has those that OpenAI's can't express."""
UNSAID = ("memory", "deadline")


class Generation:
    """The engine requests of one client request. Made by :meth:`begin`.

    Attributes:
        requests: ``n`` for each prompt, in the order of the prompts.
    """

    def __init__(self, stream: AsyncStream, metrics: Metrics, samples: int, plan: Plan) -> None:
        self._stream, self._metrics, self._samples, self._plan = stream, metrics, samples, plan
        self.requests = stream.stream.requests
        self._by_choice = {(request.index, request.sample): request for request in self.requests}
        self._tokens = 0

    @classmethod
    async def begin(cls, llm: AsyncLLM, metrics: Metrics, prompts: list[Prompt], params: SamplingParams, **options: Any) -> Generation:
        """Submit the requests to the engine, all of them or none.

        Args:
            llm: the engine.
            metrics: of the server.
            prompts: of the request.
            params: for all of them.
            options: of :meth:`~graphspec.api.async_llm.AsyncLLM.submit`.

        Raises:
            ApiError: one of them can't be served.
        """
        try:
            stream = await llm.submit(prompts, params, **options)
        except GraphspecError as error:
            raise from_engine(error) from error
        refused = next((request for request in stream.stream.requests if request.error is not None), None)
        if refused is not None:
            stream.abort()
            raise from_engine(refused.refusal) if refused.refusal is not None else internal()
        return cls(stream, metrics, params.n, llm.llm.plan)

    def choice(self, event: StreamEvent) -> int:
        """Index of the event's choice in the response."""
        return event.index * self._samples + event.sample

    def request(self, event: StreamEvent) -> Request:
        """The request that the event belongs to."""
        return self._by_choice[event.index, event.sample]

    async def events(self) -> AsyncGenerator[StreamEvent, None]:
        """Events as they come; closing the generator aborts the requests that have not ended.

        Raises:
            ApiError: the engine failed, or was closed.
        """
        try:
            async with aclosing(self._stream.events()) as events:
                async for event in events:
                    self._tokens += len(event.token_ids)
                    self._metrics.observe(self.request(event))
                    if event.finish_reason == "error":
                        logger.error("a request failed: %s", event.error)
                        raise ApiError(500, "the model's output is not finite", code="not_finite")
                    if event.finish_reason == "abort":
                        raise stopping()
                    yield event
        except GraphspecError as error:
            raise from_engine(error) from error
        finally:
            for request in self.requests:
                self._metrics.leave(request)

    def usage(self) -> dict[str, Any]:
        """Usage so far. A prompt counts once, however many outputs it has."""
        prompts = [request for request in self.requests if request.sample == 0]
        read = sum(len(request.prompt) for request in prompts)
        cached = sum(request.metrics.cached_tokens for request in prompts)
        return {
            "prompt_tokens": read,
            "completion_tokens": self._tokens,
            "total_tokens": read + self._tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    @property
    def first_token(self) -> float | None:
        """When the first token of any of its requests came, in seconds of :func:`time.perf_counter`; None: none has come."""
        return min((moment for request in self.requests if (moment := request.metrics.first_token) is not None), default=None)

    @property
    def acceptance_length(self) -> float:
        """New tokens per cycle, as :class:`graphspec.api.outputs.Metrics` counts them."""
        return summarise(self.requests, self._plan).acceptance_length

    def speculation(self) -> dict[str, Any] | None:
        """Acceptance of a request with one output; None: it has several, or nothing drafts.

        The fields are those of vLLM's ``metrics.speculative_decoding`` (vllm-project/vllm, ``docs/features/speculative_decoding/
        acceptance_metrics.md``). They count as the counters in ``/metrics`` do: a draft token is a node of the tree other than its root, a
        draft length the depth of a cycle.
        """
        depth = self._plan.shape.num_steps
        if len(self.requests) != 1 or depth == 0:
            return None
        [request] = self.requests
        cycles = [
            (tokens - 1, deep) for tokens, deep in zip(request.metrics.cycle_tokens, request.metrics.cycle_depths, strict=False) if deep
        ]
        histogram = [0] * (depth + 1)
        by_depth: dict[int, list[int]] = {}
        for accepted, deep in cycles:
            histogram[accepted] += 1
            by_depth.setdefault(deep, [0] * (deep + 1))[accepted] += 1
        accepted, drafted = sum(each for each, _ in cycles), sum(draft_tokens(self._plan, deep) for _, deep in cycles)
        return {
            "mean_acceptance_length": 1 + accepted / len(cycles) if cycles else 1.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": histogram,
            "acceptance_histogram_by_draft_length": {str(deep): by_depth[deep] for deep in sorted(by_depth)},
            "num_spec_steps": len(cycles),
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": depth,
        }


def reasons(event: StreamEvent) -> dict[str, Any]:
    """``finish_reason`` and ``stop_reason`` of a choice."""
    if event.finish_reason is None:
        return {"finish_reason": None, "stop_reason": None}
    stop = event.finish_reason if event.finish_reason in UNSAID else event.stop_reason
    return {"finish_reason": FINISHED[event.finish_reason], "stop_reason": stop}

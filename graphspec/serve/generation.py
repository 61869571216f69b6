"""One request of a client while the engine serves it: its events, its usage, and its metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ..engine.async_llm import AsyncLLM, AsyncStream
from ..engine.outputs import StreamEvent
from ..engine.prompts import Prompt
from ..engine.request import Request, SamplingParams
from ..errors import GraphspecError
from .errors import ApiError, from_engine, internal, stopping
from .metrics import Metrics

logger = logging.getLogger(__name__)
FINISHED = {"stop": "stop", "length": "length", "memory": "length", "deadline": "length"}
"""The engine's finish reasons as OpenAI's. ``stop_reason`` has those that OpenAI's can't express."""
UNSAID = ("memory", "deadline")


class Generation:
    """The engine requests of one client request. Made by :meth:`begin`.

    Attributes:
        requests: ``n`` for each prompt, in the order of the prompts.
    """

    def __init__(self, stream: AsyncStream, metrics: Metrics, samples: int) -> None:
        self._stream, self._metrics, self._samples = stream, metrics, samples
        self.requests = stream.stream.requests
        self._by_choice = {(request.index, request.sample): request for request in self.requests}
        self._tokens = 0

    @classmethod
    async def begin(
        cls, llm: AsyncLLM, metrics: Metrics, prompts: list[Prompt], params: SamplingParams, *, priority: int, deadline: float
    ) -> Generation:
        """Submit the requests to the engine, all of them or none.

        Raises:
            ApiError: one of them can't be served.
        """
        try:
            stream = await llm.submit(prompts, params, priority=priority, deadline=deadline)
        except GraphspecError as error:
            raise from_engine(error) from error
        refused = next((request for request in stream.stream.requests if request.error is not None), None)
        if refused is not None:
            stream.abort()
            raise await _why(llm, prompts[refused.index], params)
        return cls(stream, metrics, params.n)

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


async def _why(llm: AsyncLLM, prompt: Prompt, params: SamplingParams) -> ApiError:
    """The error for a prompt that was refused.

    Among several prompts, the engine's error is only text. Checking the prompt alone raises one with fields, so that those which clients
    must not see can be left out.
    """
    alone: Prompt = {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt
    try:
        await asyncio.to_thread(llm.llm.check, alone, params)
    except GraphspecError as error:
        return from_engine(error)
    return internal()


def reasons(event: StreamEvent) -> dict[str, Any]:
    """``finish_reason`` and ``stop_reason`` of a choice."""
    if event.finish_reason is None:
        return {"finish_reason": None, "stop_reason": None}
    stop = event.finish_reason if event.finish_reason in UNSAID else event.stop_reason
    return {"finish_reason": FINISHED[event.finish_reason], "stop_reason": stop}

"""The engine for asyncio: ``async for event in AsyncLLM(...).generate(...)``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Self

from ..shapes import GREEDY
from .llm import LLM
from .outputs import StreamEvent
from .prompts import Params, Prompt, one_of_params
from .text import conversations
from .urgency import Deadline, Priority


class AsyncLLM:
    """Callers of one engine in an event loop, any number at a time; the engine has a thread of its own, so that the loop is never held up.

    Loading blocks, as that of :class:`~graphspec.engine.llm.LLM` does: make it before the loop, or with ``asyncio.to_thread``. Programs for
    greedy requests are built then as well, for every bucket, so that no caller waits while another's are compiled.

    Args:
        llm: an engine that is there, whose other callers go on; None: one is made.
        arguments: of :class:`~graphspec.engine.llm.LLM`, where there is none.

    Raises:
        GraphspecError: as :class:`~graphspec.engine.llm.LLM`.
    """

    def __init__(self, llm: LLM | None = None, **arguments: Any) -> None:
        self.llm = llm if llm is not None else LLM(**arguments)
        """The same engine for callers that wait."""
        self.llm.warm_up(self.llm.plan.max_rows, sampling=GREEDY)

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        sampling_params: Params = None,
        priority: Priority = 0,
        deadline: Deadline = None,
    ) -> AsyncGenerator[StreamEvent, None]:
        """Yields the tokens of every prompt as they are accepted, as :meth:`graphspec.engine.llm.LLM.stream` does.

        Cancelling the task that waits, or closing the generator, aborts what is left.

        Raises:
            RequestError: the single prompt of the call can't be served, or there is not one params object per prompt.
            ResourceError: the engine is closed, or memory ran out.
        """
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            # The engine takes the error of a loop that was closed as leaving.
            loop.call_soon_threadsafe(changed.set)

        # Long texts take long to encode.
        chosen = one_of_params(params, sampling_params)
        stream = await asyncio.to_thread(self.llm.submit, prompts, chosen, wake, priority=priority, deadline=deadline)
        try:
            while not stream.ended:
                changed.clear()
                for event in stream.take():
                    yield event
                if not stream.ended:
                    await changed.wait()
        finally:
            stream.abort()

    def chat(
        self,
        messages: Any,
        params: Params = None,
        *,
        sampling_params: Params = None,
        priority: Priority = 0,
        deadline: Deadline = None,
    ) -> AsyncGenerator[StreamEvent, None]:
        """Like :meth:`generate`, for conversations as :meth:`graphspec.engine.llm.LLM.chat` takes them."""
        chosen = one_of_params(params, sampling_params)
        return self.generate(conversations(messages), chosen, priority=priority, deadline=deadline)

    async def close(self) -> None:
        """End the engine's thread; open calls, of :attr:`llm` too, end with an error, later ones are refused."""
        await asyncio.to_thread(self.llm.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

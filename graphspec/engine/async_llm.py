"""The engine for asyncio: ``async for event in AsyncLLM(...).generate(...)``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Self, TypeGuard, TypeVar

from ..shapes import GREEDY
from .events import Stream
from .llm import LLM
from .outputs import StreamEvent
from .priority import CacheSalt, Deadline, Priority
from .prompts import Params, Prompt, one_of_params
from .request import SamplingParams
from .text import Conversation, conversations
from .workers import Workers

Result = TypeVar("Result")
LONG_TEXT = 65536
"""Characters or token ids from which a call counts as long."""
THREADS = 2
"""Of each kind of work."""


class AsyncStream:
    """Events of requests that were submitted together, for one coroutine, which calls :meth:`abort` if it stops waiting.

    Attributes:
        stream: the engine's own, with its requests.
    """

    def __init__(self, stream: Stream, changed: asyncio.Event) -> None:
        self.stream, self._changed = stream, changed

    async def events(self) -> AsyncGenerator[StreamEvent, None]:
        """Yields what is new as it comes, to the end; closing the generator aborts what is left.

        Raises:
            ResourceError: the queue is full, the engine was closed, or memory ran out.
        """
        try:
            while not self.stream.ended:
                self._changed.clear()
                for event in self.stream.take():
                    yield event
                if not self.stream.ended:
                    await self._changed.wait()
        finally:
            self.abort()

    def abort(self) -> None:
        """End what is left, and return at once."""
        self.stream.abort()


class AsyncLLM:
    """Callers of one engine in an event loop, any number at a time; the engine has a thread of its own, so that the loop is never held up.

    Loading blocks, as that of :class:`~graphspec.engine.llm.LLM` does: make it before the loop, or with ``asyncio.to_thread``. Programs for
    greedy requests, and for requests that say nothing, are built then as well, for every bucket, so that no caller waits while another's
    are compiled.

    Args:
        llm: an existing engine, whose other callers go on; None: one is made.
        arguments: of :class:`~graphspec.engine.llm.LLM`, to make one.

    Raises:
        GraphspecError: as :class:`~graphspec.engine.llm.LLM`.
    """

    def __init__(self, llm: LLM | None = None, **arguments: Any) -> None:
        self.llm = llm if llm is not None else LLM(**arguments)
        """The same engine for callers that wait."""
        for sampling in {GREEDY: None, self.llm.plan.sampling_defaults.sampling_class: None}:
            self.llm.warm_up(self.llm.plan.max_rows, sampling=sampling)
        # Apart, so that short texts wait neither for long ones nor for grammars.
        self._short, self._long, self._grammars = (Workers(name, THREADS) for name in ("texts", "long texts", "grammars"))

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        sampling_params: Params = None,
        priority: Priority = 0,
        deadline: Deadline = None,
        cache_salt: CacheSalt = None,
    ) -> AsyncGenerator[StreamEvent, None]:
        """Yields the tokens of every prompt as they are accepted, as :meth:`graphspec.engine.llm.LLM.stream` does.

        Cancelling the task that waits, or closing the generator, aborts what is left.

        Raises:
            RequestError: the single prompt of the call can't be served, or there is not one params object per prompt.
            ResourceError: the engine is closed, or memory ran out.
        """
        chosen = one_of_params(params, sampling_params)
        stream = await self.submit(prompts, chosen, priority=priority, deadline=deadline, cache_salt=cache_salt)
        async with aclosing(stream.events()) as events:
            async for event in events:
                yield event

    async def submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        priority: Priority = 0,
        deadline: Deadline = None,
        cache_salt: CacheSalt = None,
    ) -> AsyncStream:
        """Queue every prompt, and return as soon as they are checked; :meth:`AsyncStream.events` has the tokens.

        Raises:
            RequestError: as for :meth:`generate`.
            ResourceError: the engine is closed.
        """
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            # The engine takes the error of a loop that was closed as leaving.
            loop.call_soon_threadsafe(changed.set)

        submit = partial(self.llm.submit, prompts, params, wake, priority=priority, deadline=deadline, cache_salt=cache_salt)
        compiles = any(isinstance(each, SamplingParams) and each.structured for each in (params if _is_list(params) else [params]))
        return AsyncStream(await (self._grammars.run(submit) if compiles else self.work(submit, length_of(prompts))), changed)

    async def work(self, job: Callable[[], Result], length: int = 0) -> Result:
        """The result of ``job``, called by a thread for work with texts.

        Args:
            job: the work.
            length: of the texts, in characters; those of :data:`LONG_TEXT` or more have threads of their own.

        Raises:
            Exception: what the job raises.
        """
        return await (self._long if length >= LONG_TEXT else self._short).run(job)

    @property
    def stuck_seconds(self) -> float:
        """How long all threads for texts of one kind have been at their present work; 0 while one is free."""
        return max(self._short.stuck_seconds, self._long.stuck_seconds)

    def chat(
        self,
        messages: Any,
        params: Params = None,
        *,
        sampling_params: Params = None,
        priority: Priority = 0,
        deadline: Deadline = None,
        cache_salt: CacheSalt = None,
    ) -> AsyncGenerator[StreamEvent, None]:
        """Like :meth:`generate`, for conversations as :meth:`graphspec.engine.llm.LLM.chat` takes them."""
        chosen = one_of_params(params, sampling_params)
        return self.generate(conversations(messages), chosen, priority=priority, deadline=deadline, cache_salt=cache_salt)

    async def ping(self) -> None:
        """Wait until the engine's thread answers, which it does between two steps. An engine that is broken tries to recover first.

        Raises:
            ResourceError: the engine is closed.
            Exception: the one that recovery raised.
        """
        loop, answered = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(answered.set)

        handle = self.llm.ping(wake)
        await answered.wait()
        handle.take()

    async def close(self) -> None:
        """End the engine's thread; open calls, of :attr:`llm` too, end with an error, later ones are refused."""
        await asyncio.to_thread(self.llm.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def length_of(prompts: object) -> int:
    """Characters and token ids of prompts that are not checked yet."""
    if isinstance(prompts, str):
        return len(prompts)
    if isinstance(prompts, Conversation):
        return length_of(prompts.messages)
    if isinstance(prompts, Mapping):
        return sum(length_of(value) for value in prompts.values())
    if not _is_list(prompts):
        return 0
    if prompts and isinstance(prompts[0], int):
        return len(prompts)
    return sum(length_of(entry) for entry in prompts)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple)

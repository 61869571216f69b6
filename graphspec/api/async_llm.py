"""The engine for asyncio: ``async for event in llm.generate(...)``, or ``outputs = await llm.generate(...)``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Self, TypeGuard, TypeVar, Unpack
from weakref import WeakValueDictionary

from ..config.checks import typed
from ..engine.request import SamplingParams
from ..errors import RequestError, ResourceError
from ..shapes import GREEDY
from ..text.conversation import Conversation, conversations
from .events import Stream
from .llm import LLM
from .outputs import Output, RequestOutput, StreamEvent, cumulative
from .overrides import Arguments
from .prompts import CacheSalt, Deadline, Params, Priority, Prompt, one_of_params
from .workers import Workers

Result = TypeVar("Result")
LONG_TEXT = 65536
"""Characters or token ids from which a call counts as long."""
THREADS = 2
"""Threads for each kind of work."""


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


@dataclass(slots=True)
class _Call:
    """The arguments of :meth:`AsyncLLM.generate`, and the requests that became of them.

    Attributes:
        options: priority, deadline and cache salt.
        open: calls that have begun and not ended, by their names.
        stream: None until the call has begun.
    """

    face: AsyncLLM
    open: WeakValueDictionary[str, AsyncStream]
    request_id: str
    prompts: Prompt | Sequence[Prompt]
    params: Params
    options: dict[str, Any]
    stream: AsyncStream | None = None

    async def events(self) -> AsyncGenerator[RequestOutput, None]:
        self.stream = await self.face.submit(self.prompts, self.params, **self.options)
        try:
            if self.open.setdefault(self.request_id, self.stream) is not self.stream:
                raise RequestError("request_id", "one that no open call has", repr(self.request_id))
            add = cumulative(self.request_id, self.stream.stream.requests)
            async with aclosing(self.stream.events()) as events:
                async for event in events:
                    yield add(event)
        finally:
            self.stream.abort()
            if self.open.get(self.request_id) is self.stream:
                del self.open[self.request_id]


class Generation(AsyncGenerator[RequestOutput, None]):
    """What a call returns: events for ``async for``, or outputs for ``await``. It begins with the first of the two.

    Leaving the loop and dropping this, :meth:`aclose`, and cancelling the task that waits abort what is left.

    Args:
        call: has not begun.
    """

    def __init__(self, call: _Call) -> None:
        self.request_id = call.request_id
        # The events know the call and not this object, so that it goes when the last reference does.
        self._call, self._events = call, call.events()

    async def asend(self, value: None) -> RequestOutput:
        return await self._events.asend(value)

    async def athrow(self, *error: Any) -> RequestOutput:
        return await self._events.athrow(*error)

    async def aclose(self) -> None:
        await self._events.aclose()

    def __await__(self) -> Generator[Any, None, list[Output]]:
        """Wait for the end; the outputs are those of :meth:`graphspec.api.llm.LLM.generate`."""
        return self._wait().__await__()

    async def _wait(self) -> list[Output]:
        async for _ in self._events:
            pass
        stream = self._call.stream
        if stream is None or not stream.stream.ended:
            raise ResourceError(f"request {self.request_id}", "one that runs to its end", "one that was closed before")
        # Long texts take long to decode.
        return await self._call.face.work(partial(self._call.face.llm.outputs, stream.stream.requests), LONG_TEXT)


class AsyncLLM:
    """An engine for callers in an event loop. It runs in a thread of its own and never blocks the loop.

    Construction blocks while the model loads: create it before the loop starts, or with ``asyncio.to_thread``. It also builds the programs
    for greedy requests and for requests with default parameters, in every bucket, so that no caller waits for another's compilation.

    Args:
        llm: an existing engine, which keeps its other callers; None: create one.
        arguments: arguments of :class:`~graphspec.api.llm.LLM` for a new one.

    Raises:
        GraphspecError: as :class:`~graphspec.api.llm.LLM`.
    """

    def __init__(self, llm: LLM | None = None, **arguments: Unpack[Arguments]) -> None:
        self.llm = llm if llm is not None else LLM(**arguments)
        """The same engine for blocking callers."""
        for sampling in {GREEDY: None, self.llm.plan.sampling_defaults.sampling_class: None}:
            self.llm.warm_up(self.llm.plan.max_rows, sampling=sampling)
        # Apart, so that short texts wait neither for long ones nor for grammars.
        self._short, self._long, self._grammars = (Workers(name, THREADS) for name in ("texts", "long texts", "grammars"))
        self._open: WeakValueDictionary[str, AsyncStream] = WeakValueDictionary()
        self._numbers = count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        params: Params = None,
        request_id: str | None = None,
        *,
        prompt: Prompt | None = None,
        sampling_params: Params = None,
        priority: Priority = 0,
        deadline: Deadline = None,
        cache_salt: CacheSalt = None,
    ) -> Generation:
        """Generate for every prompt: ``async for event in llm.generate(...)``, or ``outputs = await llm.generate(...)``.

        An event has the new tokens, as in :meth:`graphspec.api.llm.LLM.stream`, and in ``event.outputs[0]`` everything so far, like vLLM's
        ``RequestOutput``. Leaving the loop, cancelling the awaiting task and :meth:`abort` end unfinished requests.

        Args:
            prompts: as for :meth:`graphspec.api.llm.LLM.generate`.
            params: as for :meth:`graphspec.api.llm.LLM.generate`.
            request_id: name of the call for :meth:`abort`; None: a new one.
            prompt: alias of ``prompts``.
            sampling_params: alias of ``params``.
            priority, deadline, cache_salt: as for :meth:`graphspec.api.llm.LLM.generate`.

        Raises:
            RequestError: the single prompt of the call can't be served, there is not one params object per prompt, or an open call has
                this ``request_id``.
            ResourceError: the engine is closed, or memory ran out.
        """
        if (prompts is None) == (prompt is None):
            raise RequestError("prompts", "prompts, or prompt as another name of it", "neither" if prompts is None else "both")
        given = prompts if prompts is not None else prompt
        assert given is not None
        if request_id is not None and not isinstance(request_id, str):
            raise RequestError("request_id", "text, or None", typed(request_id))
        name = request_id if request_id is not None else f"request-{next(self._numbers)}"
        options = {"priority": priority, "deadline": deadline, "cache_salt": cache_salt}
        return Generation(_Call(self, self._open, name, given, one_of_params(params, sampling_params), options))

    stream = generate
    """Alias of :meth:`generate`."""

    async def abort(self, request_id: str) -> None:
        """Abort the unfinished requests of a call. Unknown ids are ignored."""
        stream = self._open.get(request_id)
        if stream is not None:
            stream.abort()

    async def submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        priority: Priority = 0,
        deadline: Deadline = None,
        cache_salt: CacheSalt = None,
    ) -> AsyncStream:
        """Check and queue every prompt, then return; :meth:`AsyncStream.events` yields the tokens.

        Raises:
            RequestError: as for :meth:`generate`.
            ResourceError: the engine is closed.
        """
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            # The engine takes the error of a loop that was closed as leaving.
            loop.call_soon_threadsafe(changed.set)

        submit = partial(self.llm.submit, prompts, params, wake, priority=priority, deadline=deadline, cache_salt=cache_salt)
        compiles = any(_has_grammar(each) for each in (params if _is_list(params) else [params]))
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
    def busy(self) -> bool:
        """Whether a thread is at work with texts or grammars, for a caller that may have left."""
        return self._short.busy or self._long.busy or self._grammars.busy

    @property
    def stuck_seconds(self) -> float:
        """How long all threads for texts of one kind have been at their present work; 0 while one is free."""
        return max(self._short.stuck_seconds, self._long.stuck_seconds)

    def chat(
        self,
        messages: Any,
        params: Params = None,
        request_id: str | None = None,
        *,
        sampling_params: Params = None,
        priority: Priority = 0,
        deadline: Deadline = None,
        cache_salt: CacheSalt = None,
    ) -> Generation:
        """Like :meth:`generate`, for conversations as :meth:`graphspec.api.llm.LLM.chat` takes them."""
        chosen = one_of_params(params, sampling_params)
        return self.generate(conversations(messages), chosen, request_id, priority=priority, deadline=deadline, cache_salt=cache_salt)

    stream_chat = chat
    """Alias of :meth:`chat`."""

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


def _has_grammar(params: object) -> bool:
    return bool(params.get("structured") if isinstance(params, Mapping) else isinstance(params, SamplingParams) and params.structured)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple)

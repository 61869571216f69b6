"""What streaming callers get: each request's new tokens and their text, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..engine.driver import Handle
from ..engine.request import Request
from .outputs import OutputText, StreamEvent


@dataclass(slots=True)
class _Sent:
    """What has been returned of a request: ``tokens`` of its output, at least one in every event but the last."""

    text: OutputText | None
    tokens: int = 0


class Stream:
    """Events of requests that were submitted together. Dropping the last reference aborts what is left of them.

    Args:
        requests: all of the call, those that were refused among them.
        handle: of the others; None: there are none.
        text: a request's text from its beginning; None: it has none.
        done: called once with the requests when all have ended.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        handle: Handle | None,
        text: Callable[[Request], OutputText | None],
        done: Callable[[Sequence[Request]], None],
    ) -> None:
        self.requests, self._handle, self._done = requests, handle, done
        self.ended = False
        """Every event has been returned."""
        self._sent = {request: _Sent(text(request)) for request in requests}
        self._refused = [request for request in requests if request.finish_reason is not None]

    def wait(self) -> list[StreamEvent]:
        """The next events; waits until there is one. Empty: all requests have ended.

        Raises:
            ResourceError: the engine was closed, or memory ran out.
            Exception: one raised by a step that had one of these requests.
        """
        found: list[StreamEvent] = []
        while not found and not self.ended:
            found = self._next([] if self._handle is None or self._refused else self._handle.wait())
        return found

    def take(self) -> list[StreamEvent]:
        """Like :meth:`wait`, but returns at once, possibly with an empty list."""
        return self._next(self._handle.take() if self._handle is not None else [])

    def abort(self) -> None:
        """End what is left, and return at once. Any thread may do so, more than once."""
        if self._handle is not None:
            self._handle.abort()

    def _next(self, changed: list[Request]) -> list[StreamEvent]:
        refused, self._refused = self._refused, []
        found = [event for request in (*refused, *changed) if (event := self._event(request)) is not None]
        if not self.ended and (self._handle is None or self._handle.ended):
            self.ended = True
            self._done(self.requests)
        return found

    def _event(self, request: Request) -> StreamEvent | None:
        """What is new of a request since its last event; None: nothing, or its last event was returned."""
        # Another thread may append to the output meanwhile; once the request has ended, none does.
        finished = request.finish_reason is not None
        sent = self._sent.get(request)
        if sent is None or not (finished or len(request.output) > sent.tokens):
            return None
        begin, text = sent.tokens, sent.text
        fresh = request.output[begin:]
        sent.tokens = begin + len(fresh)
        if finished:
            del self._sent[request]
        return StreamEvent(
            index=request.index,
            text=text.push(fresh, last=finished) if text is not None else "",
            token_ids=fresh,
            finished=finished,
            finish_reason=request.finish_reason if finished else None,
            logprobs=request.logprobs[begin : sent.tokens] if request.params.logprobs is not None else None,
            error=request.error,
            seed=request.seed,
            sample=request.sample,
            stop_reason=request.stop_reason(text.stop if text is not None else None) if finished else None,
            prompt_logprobs=request.scored_prompt if begin == 0 else None,
        )

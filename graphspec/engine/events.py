"""What streaming callers get: each request's new tokens and their text, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .calls import Handle
from .outputs import Detokenizer, StreamEvent
from .request import Request


class Stream:
    """Events of requests that were submitted together. Dropping the last reference aborts what is left of them.

    Args:
        requests: all of the call, those that were refused among them.
        handle: of the others; None: there are none.
        decode: text of tokens.
        done: called once with the requests when all have ended.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        handle: Handle | None,
        decode: Callable[[list[int]], str],
        done: Callable[[Sequence[Request]], None],
    ) -> None:
        self.requests, self._handle, self._done = requests, handle, done
        self.ended = False
        """Every event has been returned."""
        self._texts = {request: Detokenizer(decode) for request in requests}
        self._sent: dict[Request, int] = dict.fromkeys(requests, 0)
        self._refused = [request for request in requests if request.finish_reason is not None]

    def wait(self) -> list[StreamEvent]:
        """The next events; waits until there is one. Empty: all requests have ended.

        Raises:
            ResourceError: the engine was closed, or memory ran out.
            Exception: one raised by a step that had one of these requests.
        """
        found: list[StreamEvent] = []
        while not found and not self.ended:
            found = self._events([] if self._handle is None or self._refused else self._handle.wait())
        return found

    def take(self) -> list[StreamEvent]:
        """What :meth:`wait` returns, as far as it is there; does not wait."""
        return self._events(self._handle.take() if self._handle is not None else [])

    def abort(self) -> None:
        """End what is left, and return at once. Any thread may do so, more than once."""
        if self._handle is not None:
            self._handle.abort()

    def _events(self, changed: list[Request]) -> list[StreamEvent]:
        refused, self._refused = self._refused, []
        found = [event for request in (*refused, *changed) if (event := self._event(request)) is not None]
        if not self.ended and (self._handle is None or self._handle.ended):
            self.ended = True
            self._done(self.requests)
        return found

    def _event(self, request: Request) -> StreamEvent | None:
        """What is new of a request since its last event; None: nothing."""
        if request not in self._sent:
            # Its last event was returned.
            return None
        # The engine may add to the output meanwhile; once the request has ended, nothing does.
        finished = request.finish_reason is not None
        begin = self._sent[request]
        fresh = request.output[begin:]
        if not fresh and not finished:
            return None
        end = self._sent[request] = begin + len(fresh)
        if finished:
            del self._sent[request]
        text = self._texts[request].push(fresh, last=finished)
        logprobs = request.logprobs[begin:end] if request.params.logprobs is not None else None
        reason = request.finish_reason if finished else None
        return StreamEvent(request.index, text, fresh, finished, reason, logprobs, request.error, request.seed)

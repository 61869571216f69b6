"""The engine: one scheduler over one cycle, shared by every open call, whichever thread each comes from.

The engine has no thread of its own: a caller that waits for results runs it. One caller at a time takes the *turn* and makes a step, which
advances the requests of all calls and puts the changed ones into each call's inbox. The others wait for their inbox and for the turn.

A step may be interrupted anywhere: Ctrl-C, a signal handler that raises, a device error. Nothing is repaired on the way out. The next step
finds that the last one did not end, drops what is in flight, and prefills the rows again from the requests' own tokens.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from ..errors import ResourceError
from ..graphs.cycle import Cycle, Progress
from ..graphs.programs import Key, PrefillKey
from ..shapes import GREEDY, GraphKey, SamplingClass, pick_bucket
from .depth import AdaptiveDepth, DepthPolicy
from .proposer import Proposer
from .request import Request
from .scheduler import Launcher, Scheduler

PATIENCE = 0.05
"""Seconds after which a waiting caller checks for itself, if it was not woken."""


@dataclass(eq=False, slots=True)
class Call:
    """Requests that came together."""

    requests: Sequence[Request]
    inbox: SimpleQueue[Request | None] = field(default_factory=SimpleQueue)
    """Requests whose output or state changed; None: check again, the turn may be free."""
    failure: Exception | None = None
    """Why its requests were never queued."""

    def changed(self, timeout: float | None = None) -> list[Request]:
        """Empty the inbox; waits up to ``timeout`` seconds for a first entry, None: not at all."""
        found: dict[Request, None] = {}
        try:
            request = self.inbox.get(timeout=timeout) if timeout is not None else None
            if request is not None:
                found[request] = None
            while not self.inbox.empty():
                request = self.inbox.get_nowait()
                if request is not None:
                    found[request] = None
        except Empty:
            pass
        return list(found)


@dataclass(eq=False, slots=True)
class Turn:
    """The right to touch scheduler and cycle."""

    thread: int


class Engine:
    """Serves requests of any number of callers over one cycle.

    Args:
        cycle: what launches.
        proposer: the drafter on the host, where there is one.
        policy: chooses the draft depth of every cycle; None: each bucket keeps the plan's.
        progress: called while programs are built. It may not call the engine.
    """

    def __init__(
        self,
        cycle: Cycle,
        proposer: Proposer | None = None,
        policy: DepthPolicy | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.cycle, self.plan, self.progress = cycle, cycle.plan, progress
        self.scheduler = Scheduler(self.plan, cycle, None, proposer, None, policy, cycle.clear_row, cycle.write_row)
        self._turn: dict[str, Turn] = {}
        """At most one entry. ``setdefault`` takes the turn in one step, so that an interrupt finds it either taken or not."""
        self._whole = True
        """The last step, or other work in a turn, ended normally."""
        self._arriving: deque[Call] = deque()
        self._leaving: deque[Call] = deque()
        self._waiting: dict[Call, None] = {}
        """Calls whose caller waits for the inbox."""
        self._calls: dict[Request, Call] = {}
        """Call of every request that was queued, has not ended, and whose call is open."""

    def serve(self, requests: Sequence[Request]) -> Generator[Request, None, None]:
        """Run checked requests to their end; yields each one when its output has grown or it has ended.

        Closing the generator aborts what is left. Any number of these may be open, in any threads.

        Raises:
            ResourceError: called from inside a step (a progress callback, a signal handler), or programs could not be built.
            Exception: one raised by a step of this caller; other calls continue.
        """
        call = Call(requests)
        unfinished = dict.fromkeys(requests)
        try:
            self._arriving.append(call)
            while unfinished:
                for request in self._changed(call):
                    # A change may be reported twice.
                    if request in unfinished:
                        if request.finish_reason is not None:
                            del unfinished[request]
                        yield request
            self._leave(call)
        except BaseException:
            self._leave(call, quietly=True)
            raise

    def serve_alone(
        self, requests: Sequence[Request], *, launcher: Launcher | None = None, policy: DepthPolicy | None = None
    ) -> Generator[Request, None, None]:
        """Like :meth:`serve`, with exclusive use of the engine to the end; other threads wait.

        Args:
            requests: checked.
            launcher: used in place of the cycle.
            policy: used in place of the engine's.

        Raises:
            ResourceError: another call is open.
        """
        call = Call(requests)
        with self._taken(wait=True):
            self._recover()
            self._remove_left_calls()
            others = len(self._calls) + sum(len(other.requests) for other in self._arriving)
            if others:
                raise ResourceError("engine", "no other open call during an exclusive one", f"{others} requests of other calls")
            scheduler, usual = self.scheduler, self.scheduler.policy
            scheduler.launcher, scheduler.policy = launcher or self.cycle, policy or usual
            try:
                self._whole = False
                self._enter(call)
                self._whole = True
                unfinished = dict.fromkeys(requests)
                while unfinished:
                    self._step()
                    for request in call.changed():
                        if request.finish_reason is not None:
                            unfinished.pop(request, None)
                        yield request
            finally:
                self._leaving.append(call)
                try:
                    while self._whole and (self._leaving or scheduler.busy):
                        self._step()
                finally:
                    scheduler.launcher, scheduler.policy = self.cycle, usual

    def prepare(self, requests: int, sampling: SamplingClass = GREEDY) -> None:
        """Build the programs that this many requests of a class can need, and time depths that were not timed yet.

        Raises:
            ResourceError: called from inside a step, or memory ran out.
        """
        with self._taken(wait=True):
            self._recover()
            self._whole = False
            self._prepare(requests, sampling)
            self._whole = True

    def keys(self, requests: int, sampling: SamplingClass) -> list[Key]:
        """Programs that this many requests can need: every bucket up to theirs, every chunk size."""
        widest = pick_bucket(self.plan.buckets, min(requests, self.plan.max_rows))
        cycles = [key for key in self.plan.graph_keys(sampling) if key.bucket <= widest]
        return [*cycles, *(PrefillKey(chunk, sampling) for chunk in self.plan.prefill_chunks)]

    def _changed(self, call: Call) -> list[Request]:
        """The call's changed requests; runs steps until there is at least one."""
        while True:
            if call.failure is not None:
                raise call.failure
            found = call.changed()
            if found:
                return found
            if not self._try_step():
                self._waiting[call] = None
                found = call.changed(PATIENCE)
                self._waiting.pop(call, None)
                if found:
                    return found

    def _leave(self, call: Call, *, quietly: bool = False) -> None:
        """Abort what is left of a call, and step until nothing of it is in flight.

        Args:
            call: no longer awaited.
            quietly: another exception is being raised already; an error here is left to the next step.
        """
        self._leaving.append(call)
        try:
            while True:
                with self._taken(wait=False) as mine:
                    if not mine:
                        # The holder of the turn does it.
                        return
                    self._recover()
                    self._whole = False
                    self._remove_left_calls()
                    if not self._calls and self.scheduler.busy:
                        self.scheduler.step()
                    self._whole = True
                    if self._calls or not self.scheduler.busy:
                        return
        except Exception:
            if not quietly:
                raise

    def _try_step(self) -> bool:
        """Make one step, unless another thread has the turn. The hot path: every cycle goes through here."""
        mine = Turn(threading.get_ident())
        try:
            if not self._take(mine):
                return False
            self._step()
            return True
        finally:
            # Twice, so that an interrupt inside the first still gives the turn back.
            try:
                self._give_back(mine)
            finally:
                self._give_back(mine)

    @contextmanager
    def _taken(self, *, wait: bool) -> Iterator[bool]:
        """Take the turn for the body; yields False where another thread has it.

        Raises:
            ResourceError: this thread has it: it is inside a step.
        """
        mine = Turn(threading.get_ident())
        try:
            while not (took := self._take(mine)) and wait:
                time.sleep(PATIENCE / 10)
            yield took
        finally:
            try:
                self._give_back(mine)
            finally:
                self._give_back(mine)

    def _take(self, turn: Turn) -> bool:
        holder = self._turn.setdefault("turn", turn)
        if holder is turn:
            return True
        if holder.thread != turn.thread:
            return False
        del holder
        if _is_held(self._turn):
            raise ResourceError("engine", "a call from outside its own steps", "one from a callback or a signal handler in a step")
        # An interrupt came before any finally had begun: only the table still refers to that turn.
        self._turn["turn"] = turn
        return True

    def _give_back(self, turn: Turn) -> None:
        if self._turn.get("turn") is turn:
            del self._turn["turn"]
            for call in tuple(self._waiting):
                call.inbox.put(None)

    def _step(self) -> None:
        """One turn: calls that left, calls that arrived, one step of the scheduler, and its changes into the inboxes."""
        self._recover()
        self._whole = False
        self._remove_left_calls()
        while self._arriving:
            self._admit(self._arriving[0])
            self._arriving.popleft()
        for request in self.scheduler.step():
            call = self._calls.get(request)
            if call is not None:
                call.inbox.put(request)
                if request.finish_reason is not None:
                    del self._calls[request]
        self._whole = True

    def _recover(self) -> None:
        """After a turn that did not end: drop what is in flight, and restart every live request from its tokens."""
        if self._whole:
            return
        self.cycle.reset()
        self.scheduler.recover()
        for request, call in self._calls.items():
            call.inbox.put(request)
        self._calls = {request: call for request, call in self._calls.items() if request.finish_reason is None}
        self._whole = True

    def _remove_left_calls(self) -> None:
        while self._leaving:
            call = self._leaving[0]
            for request in call.requests:
                self.scheduler.abort(request)
                self._calls.pop(request, None)
            if call in self._arriving:
                self._arriving.remove(call)
            self._leaving.popleft()

    def _admit(self, call: Call) -> None:
        try:
            self._enter(call)
        except Exception as error:  # noqa: BLE001  it belongs to that call, which need not be the running one
            call.failure = error
            call.inbox.put(None)
            for request in call.requests:
                self._calls.pop(request, None)
                self.scheduler.abort(request)
            self._whole = False
            self._recover()
            self._whole = False

    def _enter(self, call: Call) -> None:
        """Queue a call's requests, after building the programs that all live requests together need."""
        fresh = [request for request in call.requests if request not in self._calls]
        need = GREEDY
        for request in fresh:
            need |= request.params.sampling_class
        live = self.scheduler.live
        for request in live:
            need |= request.sampling
        self._prepare(len(fresh) + len(live), need)
        now = time.perf_counter()
        for request in fresh:
            request.metrics.arrived = now
            self.scheduler.add(request)
            self._calls[request] = call

    def _prepare(self, requests: int, sampling: SamplingClass) -> None:
        keys = self.keys(requests, sampling)
        if any(not self.cycle.prepared(key) and key not in self.cycle.dropped for key in keys):
            self.scheduler.drain()
        self.cycle.prepare(keys, self.progress)
        buckets = self.cycle.buckets(sampling)
        ready = tuple(bucket for bucket in buckets if self.cycle.prepared(self.plan.key(bucket, sampling)))
        self.scheduler.offer(sampling, ready, self.cycle.chunks(sampling))
        policy = self.scheduler.policy
        if isinstance(policy, AdaptiveDepth):
            wanted = {key.bucket for key in keys if isinstance(key, GraphKey)} & set(buckets)
            missing = sorted(wanted.intersection(policy.unknown()))
            if missing:
                self.scheduler.drain()
                for bucket, times in self.cycle.time_depths(missing, sampling).items():
                    policy.learn_times(bucket, times)


def _is_held(table: dict[str, Turn]) -> bool:
    """Whether its turn is still in use: by a running step, or by a suspended generator."""
    turn, other = table["turn"], {"turn": Turn(0)}
    unheld = other["turn"]
    return sys.getrefcount(turn) > sys.getrefcount(unheld)

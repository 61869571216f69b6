"""The engine: one scheduler over one cycle, driven by one thread, for any number of callers.

Callers submit and abort. The driving thread takes their commands between two steps and sends each caller what changed. Only this thread
touches scheduler and cycle, so an interrupt of a caller (Ctrl-C, or an exception from a signal handler) never lands inside a step.

A step may raise anywhere. There is no repair: everything in flight is dropped, and rows are prefilled again from their requests' tokens.
The error goes to the callers whose requests were being launched or read; the other calls continue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from functools import partial, reduce
from operator import or_
from typing import TypeVar

from ..errors import ResourceError
from ..graphs.cycle import Cycle
from ..graphs.programs import Key, class_cost, describe_class, prefill_keys
from ..host.progress import Calls, Display, Progress
from ..shapes import GREEDY, GraphKey, SamplingClass, pick_bucket
from .depth import AdaptiveDepth, DepthPolicy
from .driver import Call, CallerLeft, Driver, Exclusive, Handle, Outbox, closed
from .meter import Load
from .proposer import Proposer
from .request import Request, check_covered
from .scheduler import Scheduler

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class Engine:
    """Serves requests of any number of callers over one cycle.

    Args:
        cycle: what launches.
        proposer: the drafter on the host, if there is one.
        policy: chooses the draft depth of every cycle; None: each bucket keeps the plan's.
        progress: called while programs are built, in the thread of the caller that waits for them.
        new_display: makes what shows that in the driving thread.

    Its thread ends with :meth:`close`, when the engine is collected, or with the interpreter.
    """

    def __init__(
        self,
        cycle: Cycle,
        proposer: Proposer | None = None,
        policy: DepthPolicy | None = None,
        progress: Progress | None = None,
        new_display: Callable[[], Display] = Calls,
    ) -> None:
        self.cycle, self.plan, self.progress, self.policy = cycle, cycle.plan, progress, policy
        self._new_display = Calls if progress is not None else new_display
        self.scheduler = Scheduler(self.plan, cycle, None, proposer, None, policy, cycle.clear_row, cycle.write_row)
        self._calls: dict[Request, Call] = {}
        """The open call of every request that has not ended."""
        self._open: dict[Call, None] = {}
        """Calls with at least one such request."""
        self._ending: list[Call] = []
        """Calls that have ended but whose callers have not been notified yet."""
        self._exclusive: Call | None = None
        self._deferred: list[Call] = []
        """Calls that arrived while an exclusive call runs."""
        self._starting: Call | None = None
        self._outbox: Outbox = []
        self._sealed: SamplingClass | None = None
        """The class that covers all that are built; no other will be. None: a call that needs another one has it built."""
        self._broken = False
        """Recovery failed, so the state of the device is unknown. The next call tries to recover again."""
        self._driver = Driver(self, self.plan.device)

    def submit(
        self,
        requests: Sequence[Request],
        *,
        streaming: bool = True,
        exclusive: Exclusive | None = None,
        notify: Callable[[], None] | None = None,
    ) -> Handle:
        """Queue checked requests, and return at once.

        Args:
            requests: not ended.
            streaming: report each request whenever its output has grown; otherwise only when all have ended.
            exclusive: run with no other call open; calls that arrive meanwhile wait.
            notify: called by the driving thread whenever there is something to receive; it must not block.

        Raises:
            RequestError: the engine is sealed, and has no programs for one of them.
            ResourceError: the engine is closed, or belongs to another process, or this is its own thread.
        """
        for request in requests:
            self.check_class(request.params.sampling_class)
        now = time.perf_counter()
        for request in requests:
            request.metrics.arrived = now
        return self._submit(Call(requests, streaming, exclusive, None, notify))

    def _submit(self, call: Call) -> Handle:
        handle = Handle(call, self._driver.commands, self, self.progress)
        self._driver.send(call)
        return handle

    def run(self, requests: Sequence[Request], *, exclusive: Exclusive | None = None, changed: Callable[[], None] | None = None) -> None:
        """Run checked requests to their end; an error or interrupt of the caller aborts what is left. Any number of threads may do so.

        Args:
            requests, exclusive: as for :meth:`submit`.
            changed: called whenever outputs have grown; None: the caller sleeps until all have ended.

        Raises:
            ResourceError: as for :meth:`submit`; programs could not be built; or this call is exclusive and another one is open.
            Exception: one raised by a step that had one of these requests.
        """
        handle = self.submit(requests, streaming=changed is not None, exclusive=exclusive)
        try:
            while not handle.ended:
                if handle.wait() and changed is not None:
                    changed()
        finally:
            handle.abort()

    def between_steps(self, work: Callable[[], Result]) -> Result:
        """Have the driving thread call ``work`` between two steps; returns its result.

        Raises:
            ResourceError: as for :meth:`submit`.
            Exception: the one that ``work`` raised.
        """
        results: list[Result] = []
        handle = self._submit(Call(work=lambda: results.append(work())))
        handle.wait()
        return results[0]

    def ping(self, notify: Callable[[], None]) -> Handle:
        """Have the driving thread answer between two steps, and return at once. An engine that is broken tries to recover first.

        Args:
            notify: called by the driving thread when it answers; it must not block.

        Raises:
            ResourceError: as for :meth:`submit`.
        """
        return self._submit(Call(work=lambda: None, notify=notify))

    def prepare(self, requests: int, *classes: SamplingClass) -> None:
        """Build the programs that this many requests of each class can need, and time the draft depths that have no times yet.

        Raises:
            ResourceError: as for :meth:`submit`, or memory ran out.
        """
        self.between_steps(lambda: self._prepare(requests, *classes))

    def seal(self, *classes: SamplingClass) -> None:
        """Build the programs of these classes for every row, and none after that: a call is served by the smallest of them that covers it.

        What rows of different classes need together is built too.

        Raises:
            ResourceError: as for :meth:`prepare`.
        """
        whole = reduce(or_, classes, GREEDY)
        free = reduce(or_, (each for each in classes if not each.grammar), GREEDY)
        self.prepare(self.plan.max_rows, *dict.fromkeys((*classes, free, whole)))
        self._sealed = whole

    def check_class(self, sampling: SamplingClass) -> None:
        """Check that a request of this class can be served. Thread-safe.

        Raises:
            RequestError: the engine is sealed, and nothing that it has built covers the class.
        """
        if self._sealed is not None:
            check_covered(sampling, self._sealed)

    def set_policy(self, policy: DepthPolicy | None) -> None:
        """Use ``policy`` to choose the draft depth from the next cycle on."""

        def take() -> None:
            self.policy = policy
            self.scheduler.use_policy(policy)

        self.between_steps(take)

    def keys(self, requests: int, sampling: SamplingClass, tokens: int | None = None) -> list[Key]:
        """Programs that this many requests can need: every bucket up to the one they fill, every chunk size, several prompts too.

        Args:
            requests: at a time.
            sampling: their class.
            tokens: most that one of them has, output included, since a preempted row reads it again; None: chunks of every size.
        """
        widest = pick_bucket(self.plan.buckets, min(requests, self.plan.max_rows))
        cycles = [key for key in self.plan.graph_keys(sampling) if key.bucket <= widest]
        return [*cycles, *(key for key in prefill_keys(self.plan, sampling, tokens) if key.lanes == 1 or requests > 1)]

    def load(self) -> Load:
        """Requests, pages and cycle times at this moment. Thread-safe."""
        scheduler = self.scheduler
        pages = scheduler.allocator.num_used, self.plan.num_pages - 1
        answers, meter = self._driver.runs and not self._broken, scheduler.meter
        return Load(len(scheduler.running), len(scheduler.waiting.requests), *pages, meter.times(), meter.times(grammar=True), answers)

    def close(self) -> None:
        """End the driving thread after its step. Open calls end with an error, later ones are refused. May be called again."""
        self._driver.close()

    # What follows runs in the driving thread.

    def turn(self, command: Call | CallerLeft | None) -> tuple[Outbox, bool]:
        """Handle every command, then make one step; returns what to send to callers, and whether there is more to do."""
        commands = self._driver.commands
        try:
            while True:
                if command is not None:
                    self._handle_command(command)
                    command = None
                if commands.empty():
                    break
                command = commands.get_nowait()
            if self.scheduler.busy and not self._broken:
                self._step()
            if self._exclusive is not None and self._exclusive not in self._open:
                self._end_exclusive()
            busy = self.scheduler.busy
        except BaseException as error:  # noqa: BLE001  whatever it is, a thread that ends would leave its callers waiting
            if isinstance(command, CallerLeft):
                commands.put(command)
            elif command is not None and command not in self._ending:
                self._end_call(command, error)
            self._handle_failure(error)
            # The next turn finds out.
            busy = True
        busy = busy and not self._broken
        if self._ending and (self._open or not busy):
            # Callers of the last open calls are notified only once nothing is in flight.
            self._outbox += [(call, None) for call in self._ending]
            self._ending = []
        outbox, self._outbox = self._outbox, []
        return outbox, busy

    def shut_down(self) -> Outbox:
        """End every open call and wait for the device; returns what to send to callers."""
        for call in (*self._open, *self._deferred):
            self._end_call(call, closed())
        self._deferred = []
        with suppress(Exception):
            # Its weights and buffers may be freed next.
            self.cycle.reset()
        ending, self._ending = self._ending, []
        return [(call, None) for call in ending]

    def _handle_command(self, command: Call | CallerLeft) -> None:
        if isinstance(command, CallerLeft):
            if command.call in self._open or command.call in self._deferred:
                self._end_call(command.call)
        elif self._exclusive is not None:
            self._deferred.append(command)
        else:
            self._start_call(command)

    def _start_call(self, call: Call) -> None:
        self._starting = call
        try:
            if self._broken:
                self._recover()
            if call.work is not None:
                call.work()
                self._end_call(call)
            elif (full := self.scheduler.why_full(len(call.requests))) is not None:
                self._end_call(call, full)
            else:
                self._admit(call)
        except BaseException as error:  # noqa: BLE001  it belongs to that call
            self._end_call(call, error)
            self._recover()
        finally:
            self._starting = None

    def _end_call(self, call: Call, failure: BaseException | None = None) -> None:
        """End a call; its unfinished requests are aborted."""
        if call in self._deferred:
            self._deferred.remove(call)
        for request in call.requests:
            self.scheduler.abort(request)
            self._calls.pop(request, None)
        # The call outlives the engine where its caller holds it.
        call.failure, call.work, call.exclusive = failure, None, None
        self._ending.append(call)
        self._open.pop(call, None)

    def _admit(self, call: Call) -> None:
        """Queue a call's requests, after building the programs that all live requests together need, unless the engine is sealed."""
        live = self.scheduler.live
        if call.exclusive is not None:
            if live:
                raise ResourceError("engine", "no other open call during an exclusive one", f"{len(live)} requests of other calls")
            self._finish_launches()
            self._exclusive = call
            self.scheduler.launcher = call.exclusive.launcher or self.cycle
            self.scheduler.use_policy(call.exclusive.policy or self.policy)
        built = len(self.cycle.programs)
        if self._sealed is None:
            self._prepare_for(call)
        now = time.perf_counter() if len(self.cycle.programs) > built else None
        self._open[call] = None
        for request in call.requests:
            # Building programs does not count as time to the first token.
            request.metrics.arrived = now or request.metrics.arrived
            self._calls[request] = call
            self.scheduler.add(request)
        call.unfinished = len(call.requests)
        if not call.requests:
            self._end_call(call)

    def _prepare_for(self, call: Call) -> None:
        live = self.scheduler.live
        classes = [*(request.params.sampling_class for request in call.requests), *(request.sampling for request in live)]
        needs = [reduce(or_, classes, GREEDY)]
        if needs[0].grammar and (others := [each for each in classes if not each.grammar]):
            # Used again as soon as no row with a grammar is left.
            needs.append(reduce(or_, others))
        count = len(call.requests) + len(live)
        tokens = max((len(request.prompt) + request.budget for request in (*call.requests, *live)), default=0)
        self._prepare(count, *(self._cover(count, need, tokens) for need in needs), tokens=tokens)

    def _cover(self, requests: int, need: SamplingClass, tokens: int) -> SamplingClass:
        """The cheapest class that covers ``need`` and has programs; ``need`` itself if it is configured, or if no class qualifies.

        A class with a grammar is never used for requests without one: its cycles wait for the host.
        """
        if need in self.plan.sampling_classes:
            return need

        def ready(sampling: SamplingClass) -> bool:
            return all(self.cycle.prepared(key) or key in self.cycle.dropped for key in self.keys(requests, sampling, tokens))

        classes = {key.sampling for key in self.cycle.programs}
        covering = (each for each in classes if each | need == each and each.grammar == need.grammar)
        return min(filter(ready, covering), key=class_cost, default=need)

    def _prepare(self, requests: int, *classes: SamplingClass, tokens: int | None = None) -> None:
        keys = [key for sampling in classes for key in self.keys(requests, sampling, tokens)]
        if any(not self.cycle.prepared(key) and key not in self.cycle.dropped for key in keys):
            if self._open:
                named = "; ".join(map(describe_class, classes))
                logger.warning("%d requests wait while programs are built for other requests: %s", len(self._calls), named)
            self.scheduler.drain()
            with closing(self._new_display()) as display:
                self.cycle.prepare(keys, partial(self._report_building, display))
        else:
            # Builds nothing, but checks that no buffer of a captured program has moved.
            self.cycle.prepare(keys)
        policy = self.scheduler.policy
        for sampling in classes:
            buckets = self.cycle.buckets(sampling)
            ready = tuple(bucket for bucket in buckets if self.cycle.prepared(self.plan.key(bucket, sampling)))
            self.scheduler.add_programs(sampling, ready, tuple(key for key in self.cycle.prefills(sampling) if self.cycle.prepared(key)))
            if isinstance(policy, AdaptiveDepth):
                wanted = {key.bucket for key in keys if isinstance(key, GraphKey)} & set(buckets)
                missing = sorted(wanted.intersection(policy.unknown()))
                if missing:
                    self.scheduler.drain()
                    for bucket, times in self.cycle.time_depths(missing, sampling).items():
                        policy.learn_times(bucket, times)

    def _report_building(self, display: Display, phase: str, done: int, total: int, note: str) -> None:
        """Show progress, or report it to the caller that waits for the programs."""
        if self._driver.stopping:
            raise closed()
        display(phase, done, total, note)
        if self._starting is not None and self.progress is not None:
            self._starting.send((phase, done, total))

    def _step(self) -> None:
        self._report(self.scheduler.step())
        call = self._exclusive
        if call is not None and call.exclusive is not None and call.exclusive.until is not None and call.exclusive.until():
            self._end_call(call)

    def _report(self, changed: Iterable[Request]) -> None:
        calls = self._calls
        for request in changed:
            call = calls.get(request)
            if call is None:
                continue
            if call.streaming:
                self._outbox.append((call, request))
            if request.finish_reason is not None:
                del calls[request]
                call.unfinished -= 1
                if not call.unfinished:
                    self._end_call(call)

    def _finish_launches(self) -> None:
        """Step until nothing is in flight; no request is live."""
        while self.scheduler.busy:
            self.scheduler.step()

    def _end_exclusive(self) -> None:
        """After an exclusive call: restore launcher and policy, and start the deferred calls."""
        self._finish_launches()
        self.scheduler.launcher, self._exclusive = self.cycle, None
        self.scheduler.use_policy(self.policy)
        while self._deferred and self._exclusive is None:
            self._start_call(self._deferred.pop(0))

    def _handle_failure(self, error: BaseException) -> None:
        """After an error in a step: end the calls whose requests were in it, and restart every other request from its tokens."""
        step_requests = self.scheduler.step_requests
        concerned = {self._calls[request] for request in step_requests if request in self._calls} or {*self._open}
        last: list[Call] = []
        if not concerned:
            # The error came while the last launches of calls that have ended were read: it goes to those.
            last += [call for call in self._ending if call.requests]
            for call in last:
                call.failure = call.failure or error
        if not concerned and not last:
            logger.error("error in a step without requests of an open call: %s", error, exc_info=error)
        for call in concerned:
            self._end_call(call, error)
        try:
            self._recover()
        except BaseException as again:  # noqa: BLE001  the device is lost: every call gets the error, now and later
            for call in tuple(self._open):
                self._end_call(call, again)

    def _recover(self) -> None:
        """Drop everything in flight, and restart every live request from its tokens."""
        self._broken = True
        self.cycle.reset()
        self.scheduler.recover()
        # Recomputed: the error may have struck after a request ended and before that was counted.
        self._calls = {request: call for call in self._open for request in call.requests if request.finish_reason is None}
        for call in tuple(self._open):
            call.unfinished = sum(request.finish_reason is None for request in call.requests)
            self._outbox += [(call, request) for request in call.requests if call.streaming]
            if not call.unfinished:
                self._end_call(call)
        self._broken = False
        if self._exclusive is not None and self._exclusive not in self._open:
            self._end_exclusive()

"""Scheduler: admits requests to rows, reserves pages, launches programs and applies their results. Host side; touches no tensor."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import reduce
from operator import or_

from ..errors import ConfigError, ResourceError
from ..graphs.programs import ClassPrograms, Key, PrefillKey, PreparedPrograms, tokens_of
from ..graphs.stages.mailbox import Message
from ..plan.buffers import Status
from ..plan.plan import Plan
from ..shapes import MAX_PADDING, GraphKey, SamplingClass, pick_bucket
from .admission import Deadlines, Queue, RowParameters, Table, choose_prefill, prompt_message
from .depth import DepthPolicy
from .launcher import Launcher, Ticket
from .lookup import RepeatIndex
from .meter import Meter
from .pages import PageAllocator, PrefixCache
from .proposer import Proposer, with_forced
from .request import NO_ROW, Request

FINISH_REASONS = {Status.STOPPED: "stop", Status.LENGTH: "length", Status.FAILED: "error"}


class Scheduler:
    """Requests in, tokens out.

    Args:
        plan: every static number.
        launcher: runs programs; results are read in the order of launch.
        sampling: a class whose programs exist; None: :meth:`add_programs` is called before the first launch.
        proposer: the drafter on the host, if there is one.
        buckets: ascending lane counts whose cycles exist, default the plan's; rows beyond the largest take turns.
        policy: chooses the draft depth of every cycle and observes the result; None: each bucket keeps the plan's.
        clear_row: resets a row's parameters in some groups of slots (:meth:`graphspec.graphs.cycle.Cycle.clear_row`).
        write_row: writes slots of a row that no message has room for (:meth:`graphspec.graphs.cycle.Cycle.write_row`).
        clock: returns seconds, for deadlines.

    The host's view is up to ``run_ahead`` cycles old. So pages are reserved for the longest run that every unread cycle may commit, and
    released when the last launch that contains the row has been read.

    Prompts are read between cycles: while any row decodes, at most ``plan.prefill_tokens_per_cycle`` tokens before each cycle.

    Each launch runs the cheapest sampling class that covers its rows. A join writes the parameters its class has room for, and the other
    parameters of the row's last request are cleared first, so that a row may later run in any class that covers it.

    After plain cycles a row's window holds tokens that the draft network has not read. A bound on their number follows from the launches
    alone, without waiting for results. Before a depth that needs a short window, and before the window is full, one cycle is launched in
    which the network catches up.
    """

    def __init__(
        self,
        plan: Plan,
        launcher: Launcher,
        sampling: SamplingClass | None,
        proposer: Proposer | None = None,
        buckets: tuple[int, ...] | None = None,
        policy: DepthPolicy | None = None,
        clear_row: Callable[[int, AbstractSet[str]], None] | None = None,
        write_row: Callable[[int, Mapping[str, Table]], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.plan, self.launcher, self.proposer, self.policy = plan, launcher, proposer, policy
        self._rows = RowParameters(plan, clear_row, write_row)
        self._prepared = PreparedPrograms()
        if sampling is not None:
            self.add_programs(sampling, buckets or plan.buckets)
        self._reset_pages()
        self.waiting, self.meter = Queue(), Meter()
        self._deadlines = Deadlines(clock)
        self._arrivals = itertools.count()
        self.running: list[Request] = []
        self._leaving: list[Request] = []
        self._classes: dict[SamplingClass, SamplingClass] = {}
        """One object per distinct class, so that comparing lanes is fast."""
        self._live: dict[Request, None] = {}
        """Requests that have not ended, in order of arrival."""
        self._free_rows = list(range(plan.max_rows - 1, -1, -1))
        self._programs: ClassPrograms | None = None
        """Programs of the class that the running rows launch; None: choose again, because the rows changed."""
        self._ready: list[Request] | None = None
        """Running requests whose prompts are read; None: find them again."""
        self._tickets: deque[Ticket] = deque()
        self._found: tuple[int, ...] | None = None
        """What :meth:`_drafts` said of the last cycle whose depth a policy chose."""
        self.step_requests: tuple[Request, ...] = ()
        """Requests of the current step's last launch or read: an error in the step goes to these."""
        self._aborts: list[int] = []
        self._updated: dict[Request, None] = {}

    def use_policy(self, policy: DepthPolicy | None) -> None:
        """Choose depths by ``policy`` from the next cycle on; what is unread keeps what was found for it."""
        self.policy, self._found = policy, None

    def add_programs(self, sampling: SamplingClass, buckets: tuple[int, ...], prefills: tuple[PrefillKey, ...] | None = None) -> None:
        """Use programs of this class from now on: cycles of these buckets, and these prefill programs (default: all of the plan's)."""
        self._prepared.add(ClassPrograms.of(self.plan, sampling, buckets, prefills))
        self._programs = None

    @property
    def live(self) -> tuple[Request, ...]:
        """Requests that have not ended, in order of arrival."""
        return tuple(self._live)

    def why_full(self, count: int) -> ResourceError | None:
        """The error if the queue has no room for ``count`` more requests; None: it has room."""
        maximum = self.plan.max_queued
        if maximum is None or count + len(self._live) <= self.plan.max_rows + maximum:
            return None
        expected = f"room for {count} more: at most {maximum} requests wait, in addition to the {self.plan.max_rows} that have rows"
        return ResourceError("runtime.max_queued", expected, f"{len(self._live)} requests that have not ended")

    def add(self, request: Request) -> None:
        """Queue a checked request; no-op if it is queued or running."""
        if request in self._live:
            return
        request.arrival = next(self._arrivals)
        self._deadlines.add(request)
        sampling = request.params.sampling_class
        request.sampling = self._classes.setdefault(sampling, sampling)
        self._live[request] = None
        self.waiting.add(request)

    def abort(self, request: Request) -> None:
        """End a request now; its pages are released once no unread launch contains it."""
        if request.finish_reason is None:
            self._finish(request, "abort")

    @property
    def busy(self) -> bool:
        """There is something to launch or to read."""
        return bool(self.running or self._tickets or self.waiting.requests or self._leaving)

    def drain(self) -> None:
        """Read everything that is in flight; the next :meth:`step` returns what changed."""
        while self._tickets:
            self._read_oldest()

    def recover(self) -> None:
        """Continue after an interrupted step, when the launcher has dropped everything in flight.

        Only the tokens of each request are kept: all live requests queue again in order of arrival, and prefilling their rows again changes
        no token. The content of pages is unknown, so no page can be found any more. Every request that was live counts as changed.
        """
        held = {*self.running, *self._leaving, *self._live}
        self._tickets.clear()
        self.running, self._leaving, self.waiting = [], [], Queue()
        self._programs = self._ready = None
        self._reset_pages()
        self._free_rows = list(range(self.plan.max_rows - 1, -1, -1))
        self._aborts = list(range(self.plan.max_rows))
        self._rows.forget()
        for request in held:
            request.row = NO_ROW
            del request.logprobs[len(request.output) :]
            self._report(request)
        for request in tuple(self._live):
            pending_end, request.pending_end = request.pending_end, None
            if request.finish_reason is None and pending_end is not None and pending_end[0] == len(request.output):
                # Its last tokens were appended before the error, but its end was not recorded.
                self._end(request, pending_end[1])
            if request.finish_reason is None:
                self.waiting.add(request)
            else:
                self._live.pop(request, None)

    def _reset_pages(self) -> None:
        self.allocator = PageAllocator(self.plan.num_pages)
        self.prefix = PrefixCache(self.plan, self.allocator)

    def step(self) -> list[Request]:
        """Launch and read what is due; returns the requests whose output or state changed since the last step."""
        self.step_requests = ()
        # This runs every cycle, so each part is skipped when decoding rows do not need it.
        if self._deadlines.due:
            for request in self._deadlines.overdue():
                self._finish(request, "deadline")
        if self._free_rows and self.waiting.requests:
            self.waiting.admit(self._place)
        launched = self._ready is None or len(self._ready) < len(self.running)
        if launched and (launched := self._prefill()):
            # Before lanes are chosen: a row that has ended gets none.
            self._make_room()
        if self.proposer is not None or self._programs is None or self._programs.sampling.grammar:
            while self._tickets and self._host_needs_roots():
                self._read_oldest()
        if (lanes := self._ready) is None:
            lanes = self._ready = [r for r in self.running if r.row.ready]
        launched = (bool(lanes) and self._launch_cycle(lanes)) or launched
        while self._tickets and (len(self._tickets) > self.plan.run_ahead or not launched):
            self._read_oldest()
            if not launched:
                break
        updated, self._updated = self._updated, {}
        return list(updated)

    def _host_needs_roots(self) -> bool:
        """Whether the host must know every token up to the roots before the next cycle, to draft or to fill masks of a grammar."""
        if self.proposer is not None:
            return True
        if self._programs is not None:
            return self._programs.sampling.grammar
        return any(request.grammar is not None and request.row.ready for request in self.running)

    def _follow(self, lanes: Sequence[Request]) -> bool:
        """Advance the grammars of these rows to the end of their outputs. False: a grammar refused a token, and its row has ended."""
        refused = [request for request in lanes if request.grammar is not None and not request.grammar.follow(request.output)]
        for request in refused:
            request.error = f"structured: expected a token that the grammar allows, found {request.output[-1]}"
            self._finish(request, "error")
        return not refused

    def _place(self, request: Request) -> bool:
        """Give a waiting request a row and pages, or end it if the pool is too small for it. False: it has to wait."""
        if not self._free_rows:
            return False
        shared = self.prefix.find(request, request.committed)
        self.allocator.retain(shared)
        needed = self.plan.pages_for(request.committed + self.plan.window_width) - len(shared)
        # Running rows reserve first; otherwise a preempted row would take its pages back for ever.
        owed = sum(self._missing(r) for r in self.running)
        pages = self.allocator.allocate(needed) if needed + owed <= self.allocator.num_free else None
        if pages is None:
            self.allocator.release(shared)
            if self.running or self._tickets:
                return False
            self._finish(request, "memory")
            return True
        self.waiting.remove(request)
        request.begin(self._free_rows.pop(), [*shared, *pages])
        self.prefix.begin_after(request, len(shared))
        self.running.append(request)
        if self.proposer is not None:
            self.proposer.admit(request)
        return True

    def _prefill(self) -> bool:
        """Launch chunks of unread prompts, as many as may run before the next cycle; returns whether there were any.

        Every launch after the first counts ``MAX_PADDING`` extra tokens, about the time it takes to read the weights once more. So all of
        them together take no longer than a single launch of the allowed number of tokens.
        """
        launched, spent = False, 0
        while reading := [request for request in self.running if not request.row.ready]:
            decoding = len(reading) < len(self.running)
            # While no row decodes, nothing waits for the prompts.
            maximum = (
                self.plan.prefill_tokens_per_cycle if decoding else max(self.plan.prefill_tokens_per_cycle, self.plan.prefill_chunks[-1])
            )
            for request in reading:
                if request.row.begins:
                    self.prefix.take_over(request)
            reading = self.prefix.leaders(sorted(reading, key=Request.precedence))
            # The class is the first request's. Requests that need more wait until they are first.
            need = {request: request.sampling if request.row.scoring else request.sampling.of_cycles for request in reading}
            programs = self._prepared.choose(need[reading[0]], 1)
            covered = [request for request in reading if need[request] | programs.sampling == programs.sampling]
            left = [(request.row.prefilled, request.committed) for request in covered]
            chosen = choose_prefill(left, programs.prefills, maximum - spent)
            if chosen is None:
                break
            key, lengths = chosen
            self._launch_prompts(key, dict(zip(covered, lengths, strict=False)))
            launched, spent = True, spent + tokens_of(key) + MAX_PADDING
        return launched

    def _launch_prompts(self, key: PrefillKey, lengths: dict[Request, int]) -> None:
        """Launch the next chunk of each of these prompts; ``lengths`` are the chunks' tokens."""
        self._make_room()
        for request, length in lengths.items():
            self._rows.prepare(request, length, key.sampling)
        message = prompt_message(self.plan, lengths)
        if key.sampling.grammar:
            self._follow(tuple(lengths))
            message.grammars = [request.grammar for request in lengths]
        number = self._launch(key, message, tuple(lengths))
        for request in lengths:
            row = request.row
            row.last_ticket = number
            self.prefix.publish_prompt(request, row.prefilled)
            if row.prefilled == request.committed:
                row.ready = True
                self._programs = self._ready = None

    def _launch_cycle(self, lanes: list[Request]) -> bool:
        programs = self._programs
        if programs is None:
            need = reduce(or_, (request.sampling for request in lanes))
            programs = self._programs = self._prepared.choose(need, len(lanes))
        widest = programs.buckets[-1]
        if len(lanes) > widest:
            # The rows that have waited longest, in their usual order.
            chosen = sorted(lanes, key=lambda request: request.row.last_ticket)[:widest]
            lanes = [request for request in lanes if request in chosen]
        if programs.sampling.grammar and not self._follow(lanes):
            return False
        message = Message(lanes=())
        for request in lanes:
            if not self._reserve(request, message):
                return False
        message.lanes = [request.row.index for request in lanes]
        if programs.sampling.grammar:
            message.grammars = [request.grammar for request in lanes]
        if self.proposer is not None:
            message.trees = with_forced(lanes, self.proposer.propose(lanes), self.plan.shape.num_steps)
        key = self._next_cycle(lanes, programs, message)
        number = self._launch(key, message, tuple(lanes))
        for request in lanes:
            row = request.row
            row.last_ticket = number
            row.queued_cycles += 1
        if programs.catch_ups:
            depth = key.shape.num_steps
            for request in lanes:
                row = request.row
                row.window_bound = row.window_bound + 1 if depth == 0 and not key.catch_up else depth + 1
        return True

    def _drafts(self, lanes: list[Request], message: Message) -> tuple[int, ...] | None:
        """The most tokens that each lane can draft; None: only the device knows."""
        maximum = self.plan.shape.num_steps
        if self.proposer is not None:
            return tuple(len(tokens) for tokens, _ in message.trees)
        if not self.plan.variant.copies_repeats or self.plan.run_ahead:
            return None
        found = []
        for request in lanes:
            row = request.row
            if row.repeats is None:
                row.repeats = RepeatIndex(self.plan.ngram.min_window)
            drafts = row.repeats.follow(request.prompt, request.output)
            if request.grammar is not None and request.grammar.forced(1):
                drafts = maximum
            found.append(min(drafts, request.depth_of(maximum)))
        return tuple(found)

    def _next_cycle(self, lanes: list[Request], programs: ClassPrograms, message: Message) -> GraphKey:
        """The cycle of the chosen depth, or the catch-up cycle that must come before it. Of a tree that the host proposes, a shallow cycle
        takes the first nodes, which are the best.

        Raises:
            ConfigError: the policy chose a depth for which the bucket has no cycle.
        """
        bucket = pick_bucket(programs.buckets, len(lanes))
        key = programs.first[bucket]
        if self.policy is not None:
            drafts = self._found = self._drafts(lanes, message)
            depth = self.policy.choose(bucket, len(lanes), None if drafts is None else max(drafts))
            if (bucket, depth) not in programs.cycles:
                raise ConfigError(f"draft depth of {bucket} lanes", "one of " + ", ".join(map(str, self.plan.depths_of(bucket))), depth)
            key = programs.cycles[bucket, depth]
        if programs.catch_ups:
            widest = max(request.row.window_bound for request in lanes)
            if widest > (self.plan.accept_width if key.shape.num_steps else self.plan.window_capacity - 1):
                return programs.catch_ups[bucket]
        return key

    def _reserve(self, request: Request, message: Message) -> bool:
        """Reserve pages for everything the next cycle may touch in this row. False: rows changed, so the launch must be composed again."""
        row = request.row
        maximum = len(request.prompt) + len(request.output) + row.queued_cycles * self.plan.accept_width + self.plan.window_width
        # A cheap upper bound first: usually the row has enough pages even for that.
        if maximum <= len(row.pages) * self.plan.page_size or (missing := self._missing(request)) == 0:
            return True
        pages = self.allocator.allocate(missing)
        if pages is not None:
            message.pages += [(row.index, len(row.pages) + i, page) for i, page in enumerate(pages)]
            row.pages += pages
            return True
        if self._tickets:
            self.drain()
        else:
            self._preempt()
        self._return_pages(message)
        return False

    def _missing(self, request: Request) -> int:
        """Pages that the row lacks for its next cycle if every unread cycle commits its longest run."""
        row = request.row
        ahead = min(request.committed + row.queued_cycles * self.plan.accept_width, len(request.prompt) + request.budget)
        end = ahead + self.plan.window_width
        return 0 if end <= len(row.pages) * self.plan.page_size else self.plan.pages_for(end) - len(row.pages)

    def _return_pages(self, message: Message) -> None:
        """Undo the page-table entries of a message that is not sent, and release their pages."""
        held = {r.row.index: r.row.pages for r in self.running}
        for row, _, page in reversed(message.pages):
            pages = held.get(row)
            if pages and pages[-1] == page:
                pages.pop()
                self.allocator.release([page])

    def _preempt(self) -> None:
        """Send the row of the lowest precedence back to the queue; if it is the only one, it ends, since the pool is too small for it."""
        last = max(self.running, key=Request.precedence)
        if len(self.running) == 1:
            self._finish(last, "memory")
            return
        self.running.remove(last)
        self._programs = self._ready = None
        self._free_row(last)
        last.preempted += 1
        self.waiting.add(last)

    def _launch(self, key: Key, message: Message, lanes: tuple[Request, ...]) -> int:
        """The launch's number, which the caller notes in the rows."""
        if self._aborts:
            rows = {r.row.index for r in self.running}
            message.aborts = [row for row in self._aborts if row not in rows][: self.plan.max_rows]
            self._aborts = []
        self.step_requests = lanes
        number = self.launcher.launch(key, message)
        self._tickets.append(Ticket(number, lanes, key, time.perf_counter(), self._found))
        return number

    def _make_room(self) -> None:
        """Read until the ring has room for one more launch. Only prompt chunks need this: a step always leaves room for the next cycle."""
        while self.launcher.in_flight >= self.plan.ring_depth - 1:
            self._read_oldest()

    def _read_oldest(self) -> None:
        ticket = self._tickets.popleft()
        self.step_requests = ticket.lanes
        entry = self.launcher.read(ticket.number)
        now = time.perf_counter()
        self.meter.note(ticket.key, ticket.launched, now)
        if entry.prompt_logprobs:
            # A prompt whose tokens are scored has a launch to itself.
            ticket.lanes[0].note_prompt_logprobs(entry.prompt_logprobs)
        depth = None
        if isinstance(ticket.key, GraphKey):
            depth = ticket.key.shape.num_steps
            if self.policy is not None and (ticket.drafts is None or any(ticket.drafts)):
                drafts = ticket.drafts or (depth,) * len(ticket.lanes)
                results = zip(ticket.lanes, drafts, entry.tokens, entry.status, strict=True)
                whole = [
                    len(tokens) - 1
                    for r, found, tokens, status in results
                    if tokens and status == Status.LIVE and min(r.depth_of(depth), found) == depth
                ]
                self.policy.observe(ticket.key.bucket, depth, whole)
        for request, tokens, status in zip(ticket.lanes, entry.tokens, entry.status, strict=True):
            request.row.queued_cycles -= depth is not None
            if request.finish_reason is None:
                if request.stops is not None:
                    tokens, status = request.stops.cut(request.output, tokens, status)
                if entry.logprobs is not None:
                    request.note_logprobs(tokens, entry.logprobs[ticket.lanes.index(request)])
                self._take(request, tokens, status, depth, now)
        if self._leaving:
            for request in [r for r in self._leaving if r.row.last_ticket <= ticket.number]:
                self._leaving.remove(request)
                self._free_row(request)

    def _take(self, request: Request, tokens: list[int], status: int, depth: int | None, now: float) -> None:
        ends = status in FINISH_REASONS
        if ends:
            request.pending_end = len(request.output) + len(tokens), status
        if tokens:
            request.output += tokens
            if len(request.output) >= request.row.publish_at:
                self.prefix.publish_output(request)
            if self.proposer is not None:
                self.proposer.observe(request, len(tokens))
            metrics = request.metrics
            metrics.first_token = metrics.first_token or now
            metrics.bursts.append((now, len(tokens)))
            if depth is not None:
                metrics.cycles += 1
                metrics.cycle_tokens.append(len(tokens))
                metrics.cycle_depths.append(request.depth_of(depth))
                metrics.cut = status != Status.LIVE
            self._report(request)
        if ends:
            self._end(request, status)

    def _end(self, request: Request, status: int) -> None:
        if status == Status.FAILED:
            expected = "a finite one that is not banned" if request.sampling.bans else "finite numbers"
            request.error = f"logits: expected {expected}, found nan or inf in the target's output"
        self._finish(request, FINISH_REASONS[status])

    def _finish(self, request: Request, reason: str) -> None:
        # The reason is written after the time: another thread that sees it may read both.
        request.metrics.finished = time.perf_counter()
        request.finish_reason = reason
        self._report(request)
        self._live.pop(request, None)
        self._deadlines.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)
            self._programs = self._ready = None
            if any(request in ticket.lanes for ticket in self._tickets):
                self._leaving.append(request)
            else:
                self._free_row(request)

    def _report(self, request: Request) -> None:
        self._updated[request] = None

    def _free_row(self, request: Request) -> None:
        row, request.row = request.row, NO_ROW
        self._aborts.append(row.index)
        self._free_rows.append(row.index)
        self.allocator.release(row.pages)

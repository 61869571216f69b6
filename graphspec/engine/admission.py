"""The way into a row: the queue of waiting requests, their deadlines, and the chunks in which launches read their prompts."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from ..graphs.programs import PrefillKey, tokens_of
from ..graphs.stages.mailbox import Chunk, Join, Mailbox, Message, SharedPages
from ..plan.buffers import slot_groups
from ..plan.plan import Plan
from ..shapes import MAX_PADDING, WORD_BITS, SamplingClass, pick_bucket
from .request import Request

LOOK_AHEAD = 16
"""Requests that one admission tries after the first that does not fit. Bounded because the queue may be long and this runs every cycle."""
MAX_OVERTAKEN = 16
"""Later requests that may be admitted before one that does not fit. Small requests use the pages while a large one waits, but after this
many of them all others wait for it."""
MAX_OUTRANKED = 16
"""Later requests of a lower ``priority`` value that may be admitted before the oldest one that waits. Then that one goes first, and so at
least one row in seventeen is given by arrival: nobody waits for ever, and most rows go by priority however many others wait."""


class Queue:
    """Requests that wait for a row: lowest ``priority`` first, then earliest arrival.

    A request that has ``m`` older ones before it is admitted after at most ``(m + 1) * MAX_OUTRANKED`` later ones, given that it fits.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        """Waiting requests in order. The scheduler checks this list before it calls :meth:`admit`: usually it is empty."""
        self._arrivals: list[Request] = []
        """The same in order of arrival."""
        self._outranked = 0
        """Later requests that were admitted since the oldest one last was."""

    def __contains__(self, request: Request) -> bool:
        place = bisect_left(self.requests, request.precedence(), key=Request.precedence)
        return place < len(self.requests) and self.requests[place] is request

    def add(self, request: Request) -> None:
        """Queue a request; a preempted one gets its old place."""
        # What is in both may be removed, and a step may fail between any two lines.
        insort(self._arrivals, request, key=_arrival)
        insort(self.requests, request, key=Request.precedence)

    def remove(self, request: Request) -> None:
        """Remove a request, which must be in the queue."""
        del self.requests[bisect_left(self.requests, request.precedence(), key=Request.precedence)]
        del self._arrivals[bisect_left(self._arrivals, request.arrival, key=_arrival)]
        request.overtaken = 0

    def admit(self, place: Callable[[Request], bool]) -> None:
        """Try to place requests in order. One that does not fit waits, and later ones may overtake it up to :data:`MAX_OVERTAKEN` times.

        Args:
            place: removes the request from this queue and returns True, or returns False and changes nothing.
        """
        passed: list[Request] = []
        # The requests passed over are the first of the queue.
        while len(passed) <= LOOK_AHEAD and len(passed) < len(self.requests):
            if not passed and self._outranked >= MAX_OUTRANKED:
                self._promote(self._arrivals[0])
            request, oldest = self.requests[len(passed)], self._arrivals[0]
            if not place(request):
                passed.append(request)
            else:
                self._outranked = 0 if request is oldest else self._outranked + 1
                for other in passed:
                    other.overtaken += 1
            if any(other.overtaken >= MAX_OVERTAKEN for other in passed):
                return

    def _promote(self, request: Request) -> None:
        """Give the oldest request the highest priority that waits, for good: it must not be preempted for those that it now goes before."""
        first = self.requests[0]
        if request is not first:
            overtaken = request.overtaken
            self.remove(request)
            request.priority, request.overtaken = first.priority, overtaken
            self.add(request)


def _arrival(request: Request) -> int:
    return request.arrival


class Deadlines:
    """The deadlines of live requests.

    Args:
        clock: returns seconds, on the clock of :attr:`graphspec.engine.request.RequestMetrics.arrived`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.due: dict[Request, float] = {}
        """Due time of each request with a deadline. The scheduler checks this before it reads the clock."""
        self._next = math.inf

    def add(self, request: Request) -> None:
        """Note when a request is due, if it has a deadline."""
        if request.deadline is not None:
            self.due[request] = due = request.metrics.arrived + request.deadline
            self._next = min(self._next, due)

    def remove(self, request: Request) -> None:
        """Forget a request that has ended."""
        self.due.pop(request, None)

    def overdue(self) -> list[Request]:
        """Requests past their deadline."""
        if self._next == math.inf or (now := self._clock()) < self._next:
            return []
        over = [request for request, due in self.due.items() if due <= now]
        self._next = min((due for due in self.due.values() if due > now), default=math.inf)
        return over


Table = np.ndarray[tuple[int, ...], np.dtype[Any]]
TABLE_GROUPS = frozenset(("bias", "allowed", "bad_words"))
"""Fields of :class:`~graphspec.shapes.SamplingClass` whose rows the host writes, since a message has no room for them."""


def next_chunk(start: int, total: int, sizes: tuple[int, ...]) -> int:
    """Length of the chunk that begins at ``start``, in tokens.

    The whole rest, if some size holds it with less than ``MAX_PADDING`` tokens of padding; else up to the next multiple of the largest
    size that the rest reaches. So chunks end where they would in a prompt read from its beginning, unless that costs ``MAX_PADDING``
    tokens of padding.

    Args:
        start: tokens of the row that were read before.
        total: tokens of the prompt, more than ``start``.
        sizes: chunk sizes, ascending.
    """
    left = total - start
    # Tokens up to the next multiple of each size.
    room = [size - start % size for size in sizes if start % size < MAX_PADDING]
    if any(tokens >= left for tokens in room) and (left <= sizes[0] or pick_bucket(sizes, left) - left < MAX_PADDING):
        return left
    within = [tokens for tokens in room if tokens <= left] or [size for size in sizes if size <= left]
    return max(within, default=left)


def choose_prefill(prompts: Sequence[tuple[int, int]], keys: Sequence[PrefillKey], maximum: int) -> tuple[PrefillKey, list[int]] | None:
    """The program for the next launch, and how many tokens it reads of each of the first prompts.

    Chosen is the program that reads the most tokens per time. A launch is assumed to take as long as its tokens, padding included, plus
    ``MAX_PADDING`` tokens for reading the weights.

    Args:
        prompts: ``(tokens read before, tokens in all)`` of each; the first prompt is part of every launch.
        keys: programs to choose from.
        maximum: padded tokens the launch may have.

    Returns:
        None if no program is small enough.
    """
    choices: list[tuple[PrefillKey, list[int]]] = []
    alone = {key.chunk: key for key in keys if key.lanes == 1 and key.chunk <= maximum}
    if alone:
        sizes = tuple(sorted(alone))
        length = next_chunk(*prompts[0], sizes)
        choices.append((alone[pick_bucket(sizes, length)], [length]))
    shared = [key for key in keys if key.lanes > 1 and tokens_of(key) <= maximum] if len(prompts) > 1 else []
    choices += [(key, [next_chunk(*prompt, (key.chunk,)) for prompt in prompts[: key.lanes]]) for key in shared]
    return max(choices, key=lambda choice: sum(choice[1]) / (MAX_PADDING + tokens_of(choice[0])), default=None)


def prompt_message(plan: Plan, lengths: Mapping[Request, int]) -> Message:
    """The message of a launch that reads the next tokens of some rows, ``lengths`` of each; updates ``prefilled`` of the rows.

    The first message of a row also carries the request's sampling parameters.
    """
    rows, chunks, joins, pages, shared = [], [], [], [], []
    for request, length in lengths.items():
        row = request.row
        start, total = row.prefilled, request.committed
        end = start + length
        known_root = request.output[-1] if request.output else -1
        rows.append(row.index)
        chunks.append(Chunk(request.known(start, end), start, total, known_root, row.shared_tokens, len(request.prompt)))
        if row.begins:
            joins.append(_join(plan, request, row.index))
            if row.shared:
                shared.append(SharedPages(row.index, row.pages[: row.shared], request.known(0, start)))
        upto = len(row.pages) if end == total else plan.pages_for(end)
        pages += [(row.index, column, row.pages[column]) for column in range(row.mapped, upto)]
        row.prefilled, row.mapped = end, upto
    return Message(rows, pages=pages, joins=joins, chunks=chunks, shared=shared)


def _join(plan: Plan, request: Request, row: int) -> Join:
    params = request.params
    return Join(
        row=row,
        budget=request.budget - len(request.output),
        seed=request.seed,
        temperature=params.temperature,
        draft_len=request.depth_of(plan.shape.num_steps),
        stop_ids=request.stop_ids,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
    )


JOIN_GROUPS = frozenset(Mailbox.GROUPS)
"""Groups of slots that joins of some sampling classes have room for, and others not."""
ROW_GROUPS = JOIN_GROUPS | TABLE_GROUPS
"""Groups of slots in which a row may hold parameters that are not neutral."""


class RowParameters:
    """Tracks which rows may hold parameters of earlier requests, and writes those of the next one.

    Args:
        plan: every static number.
        clear: makes a row's parameters neutral in some groups of slots (:meth:`graphspec.graphs.cycle.Cycle.clear_row`).
        write: writes slots of a row (:meth:`graphspec.graphs.cycle.Cycle.write_row`).
    """

    def __init__(
        self,
        plan: Plan,
        clear: Callable[[int, AbstractSet[str]], None] | None = None,
        write: Callable[[int, Mapping[str, Table]], None] | None = None,
    ) -> None:
        self._plan, self._clear, self._write = plan, clear, write
        self._held: list[frozenset[str]] = [frozenset()] * plan.max_rows
        """Groups in which a row may hold parameters that are not neutral."""

    def forget(self) -> None:
        """Assume that every row may hold anything."""
        self._held = [ROW_GROUPS] * self._plan.max_rows

    def prepare(self, request: Request, length: int, sampling: SamplingClass) -> None:
        """Clear and write the row parameters that the next chunk, of ``length`` tokens and in a program of this class, reads."""
        row = request.row
        if row.begins:
            self._clear_leftovers(request, row.index, sampling)
        tables = row_tables(request, request.known(0, request.committed), self._plan) if row.begins else {}
        if row.scoring:
            end = row.prefilled + length
            tables["following_token_R"] = np.asarray([*request.known(end, end + 1), -1][0])
        if tables and self._write is not None:
            self._write(row.index, tables)

    def _clear_leftovers(self, request: Request, row: int, sampling: SamplingClass) -> None:
        """Clear the parameters of the row's last request that neither a join of this class nor the request's tables overwrite."""
        written = (JOIN_GROUPS & slot_groups(sampling)) | (TABLE_GROUPS & slot_groups(request.sampling))
        leftovers = self._held[row] - written
        if leftovers and self._clear is not None:
            self._clear(row, leftovers)
        # A join writes every group its class has room for. Even a value that is neutral for this request may not be for the next.
        self._held[row] = written


def row_tables(request: Request, tokens: Sequence[int], plan: Plan) -> dict[str, Table]:
    """What the slots of the request's row hold, by their names; empty if it asks for nothing of this kind.

    Args:
        request: takes the row.
        tokens: that its prefill reads.
        plan: of the engine.
    """
    tables: dict[str, Table] = {}
    if request.params.sampling_class.bias:
        bias = request.params.logit_bias or {}
        unused = plan.max_logit_bias - len(bias)
        tables["bias_id_RI"] = np.asarray([*bias, *[-1] * unused], dtype=np.int64)
        tables["bias_value_RI"] = np.asarray([*bias.values(), *[0.0] * unused], dtype=np.float32)
        # The first position at which a stop id may be sampled.
        tables["stop_from_R"] = np.asarray(len(request.prompt) + request.params.min_tokens)
    if request.params.allowed_token_ids is not None:
        words = -(-plan.target.vocab_size // WORD_BITS)
        bits = np.zeros(words * WORD_BITS, dtype=np.uint8)
        bits[list(request.params.allowed_token_ids)] = 1
        tables["allowed_RU"] = np.packbits(bits, bitorder="little").view("<i8").astype(np.int64)
    if request.bad_words:
        sequences = np.full((plan.max_bad_words, plan.max_bad_word_tokens), -1, dtype=np.int64)
        for place, sequence in enumerate(request.bad_words):
            sequences[place, -len(sequence) :] = sequence
        recent = np.full(plan.max_bad_word_tokens, -1, dtype=np.int64)
        last = tokens[-plan.max_bad_word_tokens :]
        recent[-len(last) :] = last
        tables |= {"bad_word_RBwBt": sequences, "recent_token_RBt": recent}
    return tables

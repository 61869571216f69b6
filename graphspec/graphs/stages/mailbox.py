"""Stage 0, mailbox: the host's fixed-size batch of changes for one launch, applied on the device.

The message is one vector of int64 words, so a launch costs one host-to-device copy, no matter how much changed.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ...errors import ResourceError
from ...kernels.groups import Lanes, Penalties, RowRequest, Truncation
from ...kernels.tree.mail_apply import JOIN_WORDS
from ...plan.buffers import Views
from ...plan.plan import Plan
from ..grammar import Grammar
from .stage import Build, Stage


@dataclass(frozen=True, slots=True)
class Join:
    """Parameters of a request that takes a row; its prompt follows as prefill chunks.

    What the launch's :class:`~graphspec.shapes.SamplingClass` has no room for is sent and not read.
    """

    row: int
    budget: int
    seed: int
    temperature: float
    draft_len: int
    stop_ids: Sequence[int]
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """One prefill chunk: prompt tokens ``[start, start + len(tokens))`` of a prompt of ``total`` tokens."""

    tokens: Sequence[int]
    start: int
    total: int
    known_root: int = -1
    """Resuming a preempted request: the token that follows its tokens, which was sampled before and must not be sampled again."""
    shared: int = 0
    """Tokens of the prompt that lie in pages shared with other rows, before the first chunk."""
    prompt: int | None = None
    """Tokens of the request's own prompt, ``total`` unless it resumes: length-dependent RoPE saw the others one by one."""


@dataclass(frozen=True, slots=True)
class SharedPages:
    """Pages that hold the front of a prompt already. The row reads them and never writes into them."""

    row: int
    pages: Sequence[int]
    tokens: Sequence[int]
    """Tokens in these pages, for rows that keep their tokens."""


@dataclass(slots=True)
class Message:
    """What the host says with one launch."""

    lanes: Sequence[int]
    aborts: list[int] = field(default_factory=list)
    pages: list[tuple[int, int, int]] = field(default_factory=list)
    """``(row, column, page)``"""
    joins: Sequence[Join] = ()
    """Parameters of the prompts whose first chunks these are."""
    chunks: Sequence[Chunk] = ()
    """One per lane of a prefill launch."""
    shared: Sequence[SharedPages] = ()
    """Written into the rows before the program runs: there may be as many pages as a row has, which no message has room for."""
    trees: Sequence[tuple[Sequence[int], Sequence[int]]] = ()
    """Per lane the tokens and parents of the nodes the host proposes; a parent is a place in the same list, -1 the root."""
    grammars: Sequence[Grammar | None] = ()
    """Per lane the grammar that it follows, as far as its root; stays on the host."""


@dataclass(frozen=True, slots=True)
class MailLayout:
    """Word offsets inside the message."""

    lanes: int
    aborts: int
    pages: int
    trees: int
    joins: int
    """From here on only prefill reads: a cycle's message ends here."""
    chunks: int
    tokens: int
    chunk_pages: int
    size: int
    max_lanes: int
    max_aborts: int
    max_pages: int
    """Page-table entries of any message; what a chunk needs beyond them stands in its own part."""
    max_chunk_pages: int
    max_chunks: int
    """Lanes of a prefill launch."""
    max_lane_tokens: int
    """Widest chunk of a launch of several lanes; their tokens lie this far apart."""
    max_stop_ids: int
    max_tokens: int
    max_nodes: int
    """Nodes the host may propose per lane; 0 where the device drafts."""
    dummy_row: int

    JOIN_WORDS: ClassVar[int] = JOIN_WORDS
    """The stop ids follow."""
    CHUNK_WORDS: ClassVar[int] = 6

    @classmethod
    def of(cls, plan: Plan) -> MailLayout:
        # One abort word more than rows: an unused word names the dummy row, so every launch closes it again.
        lanes, aborts, pages = max(plan.buckets), plan.max_rows + 1, plan.page_updates
        nodes = plan.shape.num_draft_tokens - 1 if plan.variant.drafter == "host" else 0
        join = cls.JOIN_WORDS + plan.max_stop_ids
        chunks = max(prefill_lanes for prefill_lanes, _ in plan.prefill_shapes)
        entries = (of * (plan.pages_for(chunk + plan.tokens_in_flight) + 1) for of, chunk in plan.prefill_shapes)
        chunk_pages = max(0, max(entries) - pages)
        wide = max((chunk for prefill_lanes, chunk in plan.prefill_shapes if prefill_lanes > 1), default=0)
        tokens = max(plan.prefill_chunks[-1], chunks * wide)
        sizes = (lanes, aborts, 3 * pages, 2 * lanes * nodes, chunks * join, chunks * cls.CHUNK_WORDS, tokens, 3 * chunk_pages)
        at = list(accumulate(sizes, initial=0))
        return cls(
            lanes=at[0],
            aborts=at[1],
            pages=at[2],
            trees=at[3],
            joins=at[4],
            chunks=at[5],
            tokens=at[6],
            chunk_pages=at[7],
            size=at[8],
            max_lanes=lanes,
            max_aborts=aborts - 1,
            max_pages=pages,
            max_chunk_pages=chunk_pages,
            max_chunks=chunks,
            max_lane_tokens=wide,
            max_stop_ids=plan.max_stop_ids,
            max_tokens=plan.prefill_chunks[-1],
            max_nodes=nodes,
            dummy_row=plan.max_rows,
        )

    @property
    def join_words(self) -> int:
        """Words of a join."""
        return self.JOIN_WORDS + self.max_stop_ids

    def prompt_parts(self, mail: Tensor, lanes: int, chunk: int) -> tuple[Tensor, Tensor]:
        """What a prefill program of this shape reads of a message.

        Returns:
            int64 ``[B, 6]``: start, tokens, total, known root, prompt tokens and shared tokens of each lane's chunk, no tokens where a lane
            is not used;
            int64 ``[B, C]``: the tokens.
        """
        apart = chunk if lanes == 1 else self.max_lane_tokens
        words_B6 = mail[self.chunks : self.chunks + lanes * self.CHUNK_WORDS].view(lanes, self.CHUNK_WORDS)
        return words_B6, mail[self.tokens : self.tokens + lanes * apart].view(lanes, apart)[:, :chunk]

    def encode(self, message: Message, out: Tensor) -> None:
        """Write ``message`` into the int64 CPU vector ``out``; what is unused addresses the dummy row and the dummy page.

        Raises:
            ResourceError: more changes than a message holds.
        """
        max_tokens = self.max_tokens if len(message.chunks) < 2 else self.max_lane_tokens
        for key, count, maximum in (
            ("lanes", len(message.lanes), self.max_lanes),
            ("aborts", len(message.aborts), self.max_aborts),
            ("prompts", max(len(message.chunks), len(message.joins)), self.max_chunks),
            ("chunk tokens", max((len(chunk.tokens) for chunk in message.chunks), default=0), max_tokens),
            ("tree nodes", max((len(tokens) for tokens, _ in message.trees), default=0), self.max_nodes),
            ("stop ids", max((len(join.stop_ids) for join in message.joins), default=0), self.max_stop_ids),
        ):
            if count > maximum:
                raise ResourceError(f"mailbox {key}", f"at most {maximum} in one launch", count)
        beyond = len(message.pages) - self.max_pages
        if beyond > (self.max_chunk_pages if message.chunks else 0):
            maximum = self.max_pages + (self.max_chunk_pages if message.chunks else 0)
            raise ResourceError("mailbox page updates", f"at most {maximum} in one launch", len(message.pages))
        words = out.numpy()
        words[:] = _empty_message(self)
        words[self.lanes : self.lanes + len(message.lanes)] = message.lanes
        words[self.aborts : self.aborts + len(message.aborts)] = message.aborts
        if message.pages:
            pages = np.asarray(message.pages, dtype=np.int64).ravel()
            if beyond > 0:
                words[self.chunk_pages : self.chunk_pages + 3 * beyond] = pages[-3 * beyond :]
                pages = pages[: -3 * beyond]
            words[self.pages : self.pages + len(pages)] = pages
        for place, join in enumerate(message.joins):
            self._encode_join(join, words[self.joins + place * self.join_words : self.joins + (place + 1) * self.join_words])
        for lane, chunk in enumerate(message.chunks):
            prompt = chunk.total if chunk.prompt is None else chunk.prompt
            at, tokens_at = self.chunks + lane * self.CHUNK_WORDS, self.tokens + lane * self.max_lane_tokens
            words[at : at + self.CHUNK_WORDS] = [chunk.start, len(chunk.tokens), chunk.total, chunk.known_root, prompt, chunk.shared]
            words[tokens_at : tokens_at + len(chunk.tokens)] = chunk.tokens
        for lane, (tokens, parents) in enumerate(message.trees):
            token_at = self.trees + lane * 2 * self.max_nodes
            words[token_at : token_at + len(tokens)] = tokens
            words[token_at + self.max_nodes : token_at + self.max_nodes + len(parents)] = parents

    def _encode_join(self, join: Join, words: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        seed = join.seed - 2**64 if join.seed >= 2**63 else join.seed
        stops = self.JOIN_WORDS
        words[:stops] = [
            join.row, join.budget, seed, _float_bits(join.temperature), join.draft_len, join.top_k, _float_bits(join.top_p),
            _float_bits(join.min_p), _float_bits(join.repetition), _float_bits(join.presence), _float_bits(join.frequency),
        ]  # fmt: skip
        words[stops : stops + len(join.stop_ids)] = join.stop_ids


def _float_bits(value: float) -> int:
    """The bits of a float32, as a word's low half."""
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits


@functools.lru_cache(maxsize=16)
def _empty_message(layout: MailLayout) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Words of a message that changes nothing: every address in it is the dummy row, every page the dummy page."""
    words = np.zeros(layout.size, dtype=np.int64)
    words[layout.lanes : layout.pages] = layout.dummy_row
    words[layout.pages : layout.trees : 3] = layout.dummy_row
    words[layout.trees : layout.joins] = -1
    joins = words[layout.joins : layout.chunks].reshape(layout.max_chunks, layout.join_words)
    joins[:, 0] = layout.dummy_row
    joins[:, layout.JOIN_WORDS :] = -1
    words[layout.joins : layout.chunks] = joins.ravel()
    words[layout.chunks + 3 : layout.tokens : layout.CHUNK_WORDS] = -1
    words[layout.chunk_pages :: 3] = layout.dummy_row
    return words


class Mailbox(Stage):
    """Applies lanes, aborts, page-table entries and joins, and gathers what the lanes read of their rows.

    Args:
        build: what every stage gets.
        joins: most joins of a message: lanes of a prefill program; 0 in a cycle, where none occur.
    """

    name = "mailbox"
    GROUPS: ClassVar[dict[str, Any]] = {"truncate": Truncation, "penalties": Penalties}
    """Slots of a join that only classes with this field have."""

    def __init__(self, build: Build, joins: int = 0) -> None:
        super().__init__(build)
        self.layout, self.joins = MailLayout.of(build.plan), joins
        self.groups = [group if joins and getattr(self.sampling, field) else None for field, group in self.GROUPS.items()]
        self.reads = ("mail", "page_table_RP", "seed_R", "temperature_R")
        groups = (Lanes, RowRequest, *(group for group in self.groups if group is not None))
        written = tuple(name for group in groups for name in group._fields)
        self.writes = written if joins else (*Lanes._fields, "status_R", "page_table_RP")

    def forward(self, v: Views) -> None:
        at = self.layout
        self.kernels.mail_apply(
            v.mail, at.lanes, at.aborts, at.pages, at.trees, at.joins, self.joins, at.join_words,
            v.take(Lanes), v.take(RowRequest), *(None if group is None else v.take(group) for group in self.groups),
        )  # fmt: skip


class MessageBuffer:
    """A host buffer that holds the last message written into it. In steady state a message has nothing but lanes, which rarely change, so
    :meth:`write` is usually a no-op.

    Args:
        layout: of a message's words.
        pinned: allocate page-locked memory, from which a GPU can copy asynchronously.
    """

    def __init__(self, layout: MailLayout, *, pinned: bool) -> None:
        self.layout = layout
        self.words = torch.zeros(layout.size, dtype=torch.int64, pin_memory=pinned)
        """int64 ``[mail_size]``, written by :meth:`write` only."""
        self._lanes_at = self.words.numpy()[layout.lanes : layout.aborts]
        self._lanes: Sequence[int] | None = None
        """Lanes of the message in the buffer, if it has nothing but lanes; None otherwise."""

    def write(self, message: Message) -> torch.Tensor:
        """Write ``message`` into the buffer, and return the buffer.

        Raises:
            ResourceError: more changes than a message holds.
        """
        lanes = message.lanes
        if message.pages or message.joins or message.chunks or message.aborts or message.trees or len(lanes) > self.layout.max_lanes:
            self._lanes = None
            self.layout.encode(message, self.words)
        elif self._lanes is None:
            self.layout.encode(message, self.words)
            self._lanes = list(lanes)
        elif self._lanes != lanes:
            # Until it is written completely, the buffer holds neither message.
            self._lanes = None
            self._lanes_at[: len(lanes)] = lanes
            self._lanes_at[len(lanes) :] = self.layout.dummy_row
            self._lanes = list(lanes)
        return self.words

    def forget(self) -> None:
        """Make the next message a complete one, regardless of what the buffer holds."""
        self._lanes = None

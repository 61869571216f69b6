"""Stage 0, mailbox: the host's fixed-size batch of changes for one launch, applied on the device.

The message is one vector of int64 words, so a launch costs one host-to-device copy whatever changed.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..buffers import Status, Views
from ..errors import ResourceError
from ..plan import Plan
from .stage import Build, Stage


@dataclass(frozen=True, slots=True)
class Join:
    """Parameters of a request that takes a row; its prompt follows as prefill chunks."""

    row: int
    budget: int
    seed: int
    temperature: float
    draft_len: int
    stop_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One prefill chunk: prompt tokens ``[start, start + len(tokens))`` of a prompt of ``total`` tokens."""

    tokens: Sequence[int]
    start: int
    total: int
    known_root: int = -1
    """Resuming a preempted request: the token that follows its tokens, which was sampled before and must not be sampled again."""
    prompt: int | None = None
    """Tokens of the request's own prompt, ``total`` unless it resumes: length-dependent RoPE saw the others one by one."""


@dataclass(slots=True)
class Message:
    """What the host says with one launch."""

    lanes: Sequence[int]
    aborts: list[int] = field(default_factory=list)
    pages: list[tuple[int, int, int]] = field(default_factory=list)
    """``(row, column, page)``"""
    join: Join | None = None
    chunk: Chunk | None = None


@dataclass(frozen=True, slots=True)
class MailLayout:
    """Word offsets inside the message."""

    lanes: int
    aborts: int
    pages: int
    join: int
    chunk: int
    tokens: int
    size: int
    max_lanes: int
    max_aborts: int
    max_pages: int
    max_stop_ids: int
    max_tokens: int
    dummy_row: int

    JOIN_WORDS: ClassVar[int] = 5
    CHUNK_WORDS: ClassVar[int] = 5

    @classmethod
    def of(cls, plan: Plan) -> MailLayout:
        # One abort word more than rows: an unused word names the dummy row, so every launch closes it again.
        lanes, aborts, pages = max(plan.buckets), plan.max_rows + 1, plan.page_updates
        sizes = (lanes, aborts, 3 * pages, cls.JOIN_WORDS + plan.max_stop_ids, cls.CHUNK_WORDS, plan.prefill_chunks[-1])
        at = list(accumulate(sizes, initial=0))
        return cls(
            lanes=at[0],
            aborts=at[1],
            pages=at[2],
            join=at[3],
            chunk=at[4],
            tokens=at[5],
            size=at[6],
            max_lanes=lanes,
            max_aborts=aborts - 1,
            max_pages=pages,
            max_stop_ids=plan.max_stop_ids,
            max_tokens=plan.prefill_chunks[-1],
            dummy_row=plan.max_rows,
        )

    def encode(self, message: Message, out: Tensor) -> None:
        """Write ``message`` into the int64 CPU vector ``out``; what is unused addresses the dummy row and the dummy page.

        Raises:
            ResourceError: more changes than a message holds.
        """
        for key, count, most in (
            ("lanes", len(message.lanes), self.max_lanes),
            ("aborts", len(message.aborts), self.max_aborts),
            ("page updates", len(message.pages), self.max_pages),
            ("chunk tokens", len(message.chunk.tokens) if message.chunk else 0, self.max_tokens),
            ("stop ids", len(message.join.stop_ids) if message.join else 0, self.max_stop_ids),
        ):
            if count > most:
                raise ResourceError(f"mailbox {key}", f"at most {most} in one launch", count)
        words = out.numpy()
        words[:] = _empty_message(self)
        words[self.lanes : self.lanes + len(message.lanes)] = message.lanes
        words[self.aborts : self.aborts + len(message.aborts)] = message.aborts
        if message.pages:
            words[self.pages : self.pages + 3 * len(message.pages)] = np.asarray(message.pages, dtype=np.int64).ravel()
        if message.join is not None:
            join = message.join
            seed = join.seed - 2**64 if join.seed >= 2**63 else join.seed
            temperature = struct.unpack("<i", struct.pack("<f", join.temperature))[0]
            values = [join.row, join.budget, seed, temperature, join.draft_len, *join.stop_ids]
            words[self.join : self.join + len(values)] = values
        if message.chunk is not None:
            chunk = message.chunk
            prompt = chunk.total if chunk.prompt is None else chunk.prompt
            words[self.chunk : self.tokens] = [chunk.start, len(chunk.tokens), chunk.total, chunk.known_root, prompt]
            words[self.tokens : self.tokens + len(chunk.tokens)] = chunk.tokens


@functools.lru_cache(maxsize=16)
def _empty_message(layout: MailLayout) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Words of a message that changes nothing: every address in it is the dummy row, every page the dummy page."""
    words = np.zeros(layout.size, dtype=np.int64)
    words[layout.lanes : layout.pages] = layout.dummy_row
    words[layout.pages : layout.join : 3] = layout.dummy_row
    words[layout.join] = layout.dummy_row
    words[layout.join + layout.JOIN_WORDS : layout.chunk] = -1
    words[layout.chunk + 3] = -1
    return words


class Mailbox(Stage):
    """Applies lanes, aborts, page-table entries and joins."""

    name = "mailbox"
    reads = ("mail",)
    writes = (
        "lane_row_B", "status_R", "budget_R", "seed_R", "temperature_R", "draft_len_R", "stop_id_RE", "page_table_RP",
    )  # fmt: skip

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.layout = MailLayout.of(build.plan)

    def forward(self, v: Views) -> None:
        at = self.layout
        lanes = v.lane_row_B.shape[0]
        v.lane_row_B.copy_(v.mail[at.lanes : at.lanes + lanes])
        v.status_R.index_fill_(0, v.mail[at.aborts : at.pages], Status.FREE)
        row, column, page = v.mail[at.pages : at.join].view(-1, 3).unbind(1)
        v.page_table_RP.index_put_((row, column), page.to(torch.int32))
        join = v.mail[at.join : at.chunk]
        to = join[0:1]
        v.budget_R.index_copy_(0, to, join[1:2])
        v.seed_R.index_copy_(0, to, join[2:3])
        v.temperature_R.index_copy_(0, to, join[3:4].to(torch.int32).view(torch.float32))
        v.draft_len_R.index_copy_(0, to, join[4:5])
        v.stop_id_RE.index_copy_(0, to, join[None, 5:])

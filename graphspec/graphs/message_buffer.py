"""The host buffer of a message. In steady state only the lane list is set; it rarely changes, so ``write`` is usually a no-op."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .stages.mailbox import MailLayout, Message


class MessageBuffer:
    """One buffer of host memory that holds the last message written into it.

    Args:
        layout: where things lie.
        pinned: allocate page-locked memory, from which a GPU copies by itself.
    """

    def __init__(self, layout: MailLayout, *, pinned: bool) -> None:
        self.layout = layout
        self.words = torch.zeros(layout.size, dtype=torch.int64, pin_memory=pinned)
        """int64 ``[mail_size]``; nobody else writes into it."""
        self._lanes_at = self.words.numpy()[layout.lanes : layout.aborts]
        self._lanes: Sequence[int] | None = None
        """Lanes of the message it holds when that says nothing else; None when it does."""

    def write(self, message: Message) -> torch.Tensor:
        """Make the buffer say ``message`` and return it.

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
            # Until all of it is written, the buffer says neither message.
            self._lanes = None
            self._lanes_at[: len(lanes)] = lanes
            self._lanes_at[len(lanes) :] = self.layout.dummy_row
            self._lanes = list(lanes)
        return self.words

    def forget(self) -> None:
        """Whatever the buffer holds: the next message is written whole."""
        self._lanes = None

"""The host buffer of a message. In steady state only the lane list is set; it rarely changes, so ``write`` is usually a no-op."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .stages.mailbox import MailLayout, Message


class MessageBuffer:
    """A host buffer that holds the last message written into it.

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

"""An engine that steps only while a caller waits, so that the launches in flight are the same every time the caller does something else."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from graphspec.engine.driver import Call, Handle, InboxItem
from graphspec.engine.engine import Engine

if TYPE_CHECKING:
    import pytest

    from graphspec.engine.request import Request

PAUSE = 0.0002
"""Seconds after which the driving thread checks again for a waiting caller."""


class Lockstep:
    """Every engine, from now on, takes a step only while :meth:`free` is on or the inbox of a waiting caller is empty.

    Commands are handled at any time.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.free = False
        self.waiting: dict[Call, Engine] = {}
        wait, send, step = Handle.wait, Call.send, Engine._step

        def noted_wait(handle: Handle) -> list[Request]:
            call, engine = handle._call, handle._engine
            assert isinstance(engine, Engine)
            while True:
                found = handle.take()
                if found or handle.ended:
                    return found
                self.waiting[call] = engine
                try:
                    if call.inbox.empty():
                        return wait(handle)
                finally:
                    self.waiting.pop(call, None)

        def noted_send(call: Call, item: InboxItem) -> None:
            # Before the caller is notified, because it may wait again at once.
            if call.streaming or item is None:
                self.waiting.pop(call, None)
            send(call, item)

        def gated_step(engine: Engine) -> None:
            if self.free or engine in tuple(self.waiting.values()):
                step(engine)
            else:
                time.sleep(PAUSE)

        patch.setattr(Handle, "wait", noted_wait)
        patch.setattr(Call, "send", noted_send)
        patch.setattr(Engine, "_step", gated_step)

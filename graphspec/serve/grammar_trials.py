"""Grammars are tried in a process of their own before the engine compiles them, so that none takes longer than the server allows.

A compilation inside this process can't be ended, and xgrammar's grammars can't be handed over in reasonable time: written as text, one that
compiles in a fraction of a second takes hundreds of megabytes. So what passes the trial is compiled again here, in about the same time.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from importlib.util import find_spec
from time import monotonic

from ..api.async_llm import LONG_TEXT, AsyncLLM
from ..api.grammar import CACHE_BYTES
from ..errors import CheckpointError, RequestError
from ..text.schema_size import compile_steps
from ..text.structured import KEY, Structured
from .errors import busy
from .grammar_process import GRAMMAR, MAX_MEMORY, QUESTION, SIZE, send
from .limits import RETRY_SECONDS

AT_ONCE = 2
"""Grammars that are tried at the same time; others wait, and their time has not begun."""
MAX_STEPS = 1_000_000
"""Maximum of :func:`~graphspec.text.schema_size.compile_steps`: several times what any time limit in use allows."""
REMEMBERED = 1024
"""Grammars that are known to pass."""


class GrammarTrials:
    """Tries the grammars of requests, each of them once.

    Args:
        llm: the engine.
        seconds: time limit of each.
    """

    def __init__(self, llm: AsyncLLM, seconds: float) -> None:
        self._llm, self._seconds = llm, seconds
        self._passed: OrderedDict[bytes, None] = OrderedDict()
        """By their digests, as below: a grammar may be long."""
        self._running: dict[bytes, asyncio.Task[bool]] = {}
        self._waiting: dict[bytes, int] = {}
        self._places = asyncio.Semaphore(AT_ONCE)
        self._starting = asyncio.Lock()
        self._process: _Process | None = None
        self._question: asyncio.Task[None] | None = None
        self._asked = 0.0

    @property
    def stuck_seconds(self) -> float:
        """For how long the process has not answered a question. Each reading asks one, if the last was answered; 0 without a process."""
        if self._question is not None and not self._question.done():
            return monotonic() - self._asked
        if self._process is not None and self._process.alive:
            self._question, self._asked = asyncio.create_task(self._ask(self._process)), monotonic()
        return 0.0

    async def _ask(self, process: _Process) -> None:
        ours, theirs = socket.socketpair()
        # A process that ends meanwhile is replaced by the next grammar.
        with ours, suppress(OSError):
            with theirs:
                process.hand_over(theirs, QUESTION)
            ours.setblocking(False)
            await asyncio.get_running_loop().sock_recv(ours, 1)

    async def check(self, structured: Structured) -> None:
        """Return if a grammar can be compiled within the limits, or is refused by the engine for another reason.

        All that ask about the same grammar wait for one trial, which ends when the last of them is cancelled.

        Raises:
            RequestError: it takes too long, or too much memory.
            ApiError: 503, the grammars that requests hold leave no room for another.
        """
        load = self._llm.llm.load()
        # The engine keeps the requests of its last step until the next one.
        if (load.running or load.waiting) and self._llm.llm.grammars.held_bytes > CACHE_BYTES:
            raise busy(RETRY_SECONDS)
        digest, steps = await self._llm.work(lambda: (sha256(repr(structured).encode()).digest(), compile_steps(structured)))
        if digest in self._passed:
            self._passed.move_to_end(digest)
            return
        key, size = f"{KEY}.{structured.kind}", structured.size
        if steps > MAX_STEPS:
            raise RequestError(key, "a schema with fewer optional properties: the work grows with the square of their number", size)
        if find_spec("xgrammar") is None:
            # The engine says so.
            return
        if digest not in self._running:
            self._running[digest] = asyncio.create_task(self._try(structured))
        self._waiting[digest] = self._waiting.get(digest, 0) + 1
        task = self._running[digest]
        try:
            passed = await asyncio.shield(task)
        finally:
            self._waiting[digest] -= 1
            if not self._waiting[digest]:
                del self._waiting[digest], self._running[digest]
                task.cancel()
        if not passed:
            limits = f"server.grammar_seconds = {self._seconds:g} and {MAX_MEMORY >> 20} MiB"
            raise RequestError(key, f"a grammar that compiles within {limits}", size)
        self._passed[digest] = None
        if len(self._passed) > REMEMBERED:
            self._passed.popitem(last=False)

    async def _try(self, structured: Structured) -> bool:
        async with self._places:
            process = await self._ready()
            if process is None:
                return True
            ours, theirs = socket.socketpair()
            with ours:
                with theirs:
                    process.hand_over(theirs, GRAMMAR)
                await self._llm.work(lambda: send(ours, (structured, self._seconds)))
                ours.setblocking(False)
                answer = b""
                loop = asyncio.get_running_loop()
                while len(answer) < SIZE.size:
                    piece = await loop.sock_recv(ours, SIZE.size - len(answer))
                    if not piece:
                        return False
                    answer += piece
        return bool(SIZE.unpack(answer)[0] <= CACHE_BYTES)

    async def _ready(self) -> _Process | None:
        """The process, which is started where there is none; None: the checkpoint has no tokenizer to compile for."""
        async with self._starting:
            if self._process is None or not self._process.alive:
                try:
                    await self._llm.work(self.start, LONG_TEXT)
                except (CheckpointError, RequestError):
                    return None
            return self._process

    def start(self) -> None:
        """Start the process, which the first grammar does otherwise, and wait until it is ready.

        Raises:
            GraphspecError: the checkpoint has no tokenizer to compile for.
        """
        engine = self._llm.llm
        self._process = _Process(engine.grammars.vocabulary(lambda: engine.tokenizer))

    def close(self) -> None:
        """End the process, and what is tried in it."""
        if self._process is not None:
            self._process.close()


class _Process:
    """The process, ready for grammars."""

    def __init__(self, vocabulary: object) -> None:
        self._sock, theirs = socket.socketpair()
        command = [sys.executable, "-m", "graphspec.serve.grammar_process", str(theirs.fileno())]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with theirs:
            # In a session of its own, so that a terminal's signals are this process's alone.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=(theirs.fileno(),), env=environment, start_new_session=True
            )
        self._process = process
        self.close: Callable[[], object] = weakref.finalize(self, _end, self._sock, process)
        send(self._sock, vocabulary)
        if self._sock.recv(1) != b"\n":
            self.close()
            raise RuntimeError("the process for grammars ended before it was ready")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def hand_over(self, sock: socket.socket, purpose: bytes) -> None:
        """Give the process the other end of a socket."""
        socket.send_fds(self._sock, [purpose], [sock.fileno()])


def _end(sock: socket.socket, process: subprocess.Popen[bytes]) -> None:
    sock.close()
    process.kill()
    process.wait()

"""The process in which grammars are tried: ``python -m graphspec.serve.grammar_process``, its socket's number as the argument.

It loads the compiler once and forks for every grammar. A fork ends by itself, in whatever code it is: by a timer at the time limit, and by
the signal of its socket when the other end is closed.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..api.grammar import Vocabulary, compile_grammar
from ..errors import RequestError

if TYPE_CHECKING:
    from xgrammar import GrammarCompiler

    from ..text.structured import Structured

GRAMMAR, QUESTION = b"g", b"q"
"""What a socket is handed over for: a grammar to try, or to learn whether the process answers."""
LENGTH, SIZE = struct.Struct("=q"), struct.Struct("=q")
MAX_MEMORY = 1 << 30
"""Bytes that compiling one grammar may take."""
NICENESS = 10
"""Others go first where processors are short."""


def send(sock: socket.socket, value: object) -> None:
    """Send an object to the other end."""
    data = pickle.dumps(value)
    sock.sendall(LENGTH.pack(len(data)) + data)


def receive(sock: socket.socket) -> Any:
    """The next object from the other end.

    Raises:
        EOFError: it was closed.
    """
    with sock.makefile("rb") as file:
        header = file.read(LENGTH.size)
        if len(header) < LENGTH.size:
            raise EOFError
        return pickle.loads(file.read(*LENGTH.unpack(header)))


def main() -> int:
    """Serve until the other end is closed."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    os.nice(NICENESS)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Forks are not waited for.
    try:
        vocabulary: Vocabulary = receive(sock)
    except EOFError:
        return 0
    compilers = {tags: vocabulary.compiler(1, tags=tags)[0] for tags in (False, True)}
    sock.sendall(b"\n")
    while True:
        data, handed, _, _ = socket.recv_fds(sock, 1, 1)
        if not data:
            return 0
        [number] = handed
        if data == QUESTION:
            os.close(number)  # Its end is the answer.
            continue
        if os.fork() == 0:
            try:
                sock.close()
                _try(socket.socket(fileno=number), compilers)
            except BaseException:  # noqa: BLE001  a fork must never go on as its parent
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(0)
        os.close(number)


def _try(sock: socket.socket, compilers: dict[bool, GrammarCompiler]) -> None:
    """Compile one grammar, and answer with the bytes it takes; 0 where it is refused, whose reason is found again by the engine."""
    structured: Structured
    try:
        structured, seconds = receive(sock)
    except EOFError:
        return  # The client left before.
    signal.setitimer(signal.ITIMER_REAL, seconds)
    fcntl.fcntl(sock, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sock, fcntl.F_SETFL, fcntl.fcntl(sock, fcntl.F_GETFL) | os.O_ASYNC)
    gone = select.poll()
    gone.register(sock, select.POLLHUP)
    if gone.poll(0):
        return
    maximum = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize() + MAX_MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (maximum, maximum))
    try:
        size = compile_grammar(compilers[structured.structural_tag is not None], structured).memory_size_bytes
    except RequestError as error:
        if isinstance(error.__cause__, MemoryError) or "bad_alloc" in str(error.found):
            return
        size = 0
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    sock.sendall(SIZE.pack(size))


if __name__ == "__main__":
    sys.exit(main())

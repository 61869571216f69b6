"""llama.cpp's server as a side of ``python -m perf.chat_race``: one process per mode, asked with token ids over loopback."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from perf.peers import PeerError

START_SECONDS = 120.0
ANSWER_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to run the server: ``name`` in tables, and options in addition to model, threads and context.

    Attributes:
        remembers: it drafts from answers to earlier requests, so that a prompt asked again is no measurement.
    """

    name: str
    options: tuple[str, ...] = ()
    remembers: bool = False


_TYPE = ("--spec-type",)
MODES = (
    Mode("llama.cpp"),
    Mode("llama.cpp, ngram-simple (3, 6)", (*_TYPE, "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "6")),
    Mode("llama.cpp, ngram-cache", (*_TYPE, "ngram-cache")),
    Mode("llama.cpp, ngram-mod", (*_TYPE, "ngram-mod"), remembers=True),
)


def eagle3(head: str) -> Mode:
    """Its EAGLE-3 with a head in GGUF: chains of at most four drafted tokens."""
    return Mode("llama.cpp, eagle3 (4)", (*_TYPE, "draft-eagle3", "-md", head, "--spec-draft-n-max", "4"))


def server_program(given: str | None) -> str:
    """Path of the server: ``given``, or ``llama-server`` on the PATH.

    Raises:
        PeerError: there is none.
    """
    found = shutil.which(given or "llama-server")
    if found is None:
        raise PeerError(f"not found: {given or 'llama-server on the PATH'}")
    return found


class LlamaServer:
    """A running server.

    Args:
        program: path of ``llama-server``.
        model: the GGUF file.
        mode: how it speculates.
        threads: CPU threads.
        context: tokens of prompt and answer.
        rows: how many prompts it answers at a time.

    Raises:
        PeerError: the program doesn't start, or ends before it answers.
    """

    def __init__(self, program: str, model: Path, mode: Mode, threads: int, context: int, rows: int = 1) -> None:
        self.mode, self._rows, self._decoding = mode, rows, 0.0
        shared = ("-c", str(rows * context), "-np", str(rows))
        self._program, self._options = program, ("-m", str(model), "-t", str(threads), "-tb", str(threads), *shared)
        self._start()
        self.version = self._version()

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._errors: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed with the process)
        # Its libraries lie next to it.
        libraries = f"{Path(self._program).resolve().parent}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        environment = {**os.environ, "LD_LIBRARY_PATH": libraries}
        command = [self._program, *self._options, "--no-webui", "--host", "127.0.0.1", "--port", str(self._port)]
        self._process = subprocess.Popen(
            [*command, *self.mode.options],
            stdin=subprocess.DEVNULL, stdout=self._errors, stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip
        try:
            self._wait()
        except PeerError:
            self.close()
            raise

    def forget(self) -> None:
        """Start anew: nothing of an earlier answer is left."""
        self.close()
        self._start()

    def answer(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """New tokens of each prompt, all prompts at a time, greedy; nothing of an earlier prompt is reused."""
        with ThreadPoolExecutor(self._rows) as pool:
            return list(pool.map(lambda prompt: self._one(prompt, max_tokens), prompts))

    def _one(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        request = {
            "prompt": list(prompt), "n_predict": max_tokens, "temperature": 0, "top_k": 1, "cache_prompt": False, "ignore_eos": True,
            "return_tokens": True,
        }  # fmt: skip
        try:
            found = self._ask("/completion", request)
        except OSError as error:
            raise PeerError(f"it doesn't answer: {error}: {self._last_words()}") from error
        tokens: list[int] = found["tokens"]
        self._decoding = 1e-3 * found.get("timings", {}).get("predicted_ms", 0.0)
        return tokens

    def decoding(self) -> float:
        """Seconds that the last answer took after its first token, by the server's clock."""
        return self._decoding

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise PeerError(f"it ended: {self._last_words()}")
            try:
                self._ask("/health", None, 5.0)
            except OSError:
                time.sleep(0.2)
            else:
                return
        raise PeerError(f"not ready after {START_SECONDS:g} s: {self._last_words()}")

    def _version(self) -> str:
        return str(self._ask("/props", None).get("build_info", "unknown"))

    def _ask(self, path: str, body: dict[str, Any] | None, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=seconds) as response:
            found: dict[str, Any] = json.load(response)
        return found

    def _last_words(self) -> str:
        self._errors.seek(0)
        return " ".join(self._errors.read().split())[-300:]

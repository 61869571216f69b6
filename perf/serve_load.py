"""Load test of ``graphspec serve``: open-loop arrivals below and above capacity, with misbehaving clients, and SIGTERM under load.

``python -m perf.serve_load`` starts a server, measures its capacity in a closed loop, then sends Poisson arrivals at 0.5, 0.9 and 1.5 times
that. Some clients disconnect, read slowly, send malformed or oversized bodies, or connect and send nothing. After each phase every row and
page must be free again. Finally SIGTERM is sent while streams are open: all of them must end complete.

A response with status 200 is a promise: its stream must end with ``[DONE]`` and all tokens. Above capacity the queue fills, and 503 is the
right response. Times are measured in this process, which shares the machine with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RATES = (0.5, 0.9, 1.5)
MIX = {"disconnect": 0.1, "slow": 0.05, "malformed": 0.03, "oversized": 0.02, "silent": 0.02}
"""Shares of clients that misbehave; the others are patient."""
NEW_TOKENS, PROMPT_TOKENS, VOCAB = 32, 32, 1000
SLOW_SECONDS = 0.05
"""Pause of a slow reader after each event."""
OVERSIZED = 5 * 2**20
PATIENCE = 120.0
"""Seconds to wait for a server that sends nothing."""


@dataclass
class Tally:
    """Results of the clients in one phase."""

    answers: Counter[str] = field(default_factory=Counter)
    """Outcomes: done, refused (503), left, and the response to each kind of misbehaviour."""
    broken: list[str] = field(default_factory=list)
    """Promises that were not kept."""
    first_token: list[float] = field(default_factory=list)
    """Seconds from sending to the first event, of patient clients."""
    tokens: int = 0
    """Tokens of responses that were read to their end."""
    seconds: float = 0.0

    def figures(self) -> dict[str, Any]:
        """The results as JSON."""
        ranked = sorted(self.first_token)
        p99 = ranked[min(len(ranked) - 1, int(0.99 * len(ranked)))] if ranked else None
        return {
            "answers": dict(self.answers),
            "broken": len(self.broken),
            "first_token_p50": statistics.median(ranked) if ranked else None,
            "first_token_p99": p99,
            "goodput_tokens_per_second": self.tokens / self.seconds if self.seconds else None,
        }


@dataclass(frozen=True)
class Target:
    """A server under load."""

    host: str
    port: int
    vocab: int = VOCAB
    new_tokens: int = NEW_TOKENS
    prompt_tokens: int = PROMPT_TOKENS
    oversized: int = OVERSIZED

    def body(self, rng: random.Random) -> bytes:
        """A request that can be served."""
        prompt = [rng.randrange(self.vocab) for _ in range(self.prompt_tokens)]
        options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "ignore_eos": True}
        return json.dumps({"prompt": prompt, "max_tokens": self.new_tokens, **options}).encode()

    async def send(self, body: bytes, declared: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Post a body on a new connection."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        headers = f"Host: {self.host}\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {declared or len(body)}"
        writer.write(f"POST /v1/completions HTTP/1.1\r\n{headers}\r\n\r\n".encode() + body)
        await writer.drain()
        return reader, writer

    async def get(self, path: str) -> str:
        """A page of the server."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {self.host}\r\nConnection: close\r\n\r\n".encode())
        text = (await reader.read()).decode()
        writer.close()
        return text

    async def metric(self, name: str) -> float:
        """A value of ``/metrics``."""
        found = re.search(rf"^{re.escape(name)}\{{[^}}]*\}} (\S+)$", await self.get("/metrics"), re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    async def idle(self) -> bool:
        """Whether every row and page is free within :data:`PATIENCE`."""
        end = time.monotonic() + PATIENCE
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        while time.monotonic() < end:
            if not any([await self.metric(name) for name in names]):
                return True
            await asyncio.sleep(0.1)
        return False


async def status_of(reader: asyncio.StreamReader) -> int:
    """The status of a response; 0: the connection ended without one."""
    line = await reader.readline()
    return int(line.split()[1]) if line else 0


async def patient(target: Target, tally: Tally, rng: random.Random, *, pause: float = 0.0, leave_after: int | None = None) -> None:
    """Read a stream to its end, or disconnect after some events."""
    began = time.perf_counter()
    reader, writer = await target.send(target.body(rng))
    try:
        status = await status_of(reader)
        if status != 200:
            tally.answers["refused" if status == 503 else f"status {status}"] += 1
            if status not in (503, 0):
                tally.broken.append(f"a good request got {status}")
            return
        events, usage, done = 0, None, False
        while line := await reader.readline():
            if not line.startswith(b"data:"):
                continue
            if events == 0 and leave_after is None and not pause:
                tally.first_token.append(time.perf_counter() - began)
            events += 1
            if leave_after is not None and events >= leave_after:
                tally.answers["left"] += 1
                return
            if line.strip() == b"data: [DONE]":
                done = True
                break
            usage = json.loads(line[5:]).get("usage") or usage
            await asyncio.sleep(pause)
        new = usage["completion_tokens"] if usage else 0
        if done and new == target.new_tokens:
            tally.answers["done"] += 1
            tally.tokens += new
        else:
            tally.broken.append(f"a stream ended after {events} events, {new} tokens{'' if done else ', without its end'}")
    finally:
        writer.close()


async def malformed(target: Target, tally: Tally, rng: random.Random) -> None:
    """Send a body that is not JSON."""
    body = target.body(rng)
    reader, writer = await target.send(body[: rng.randrange(1, len(body))])
    await _expect(400, "malformed", reader, writer, tally)


async def oversized(target: Target, tally: Tally, _: random.Random) -> None:
    """Announce a body that is too long, and send its beginning."""
    reader, writer = await target.send(b"{", declared=target.oversized)
    await _expect(413, "oversized", reader, writer, tally)


async def _expect(status: int, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tally: Tally) -> None:
    found = await status_of(reader)
    writer.close()
    tally.answers[f"{name}: {found}"] += 1
    if found != status:
        tally.broken.append(f"a {name} body got {found}")


async def silent(target: Target, tally: Tally, rng: random.Random) -> None:
    """Connect and send half a header."""
    _, writer = await asyncio.open_connection(target.host, target.port)
    writer.write(b"POST /v1/comp")
    await asyncio.sleep(rng.uniform(0.1, 1.0))
    writer.close()
    tally.answers["silent"] += 1


def client(kind: str, target: Target, tally: Tally, rng: random.Random) -> Coroutine[Any, Any, None]:
    """A client of one kind."""
    kinds: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
        "disconnect": lambda: patient(target, tally, rng, leave_after=rng.randrange(1, 4)),
        "slow": lambda: patient(target, tally, rng, pause=SLOW_SECONDS),
        "malformed": lambda: malformed(target, tally, rng),
        "oversized": lambda: oversized(target, tally, rng),
        "silent": lambda: silent(target, tally, rng),
    }
    return kinds.get(kind, lambda: patient(target, tally, rng))()


async def open_loop(target: Target, rate: float, seconds: float, seed: int) -> Tally:
    """Poisson arrivals at ``rate`` per second, independent of each other; returns when the last has its response."""
    rng, tally = random.Random(seed), Tally()
    began = due = time.perf_counter()
    tasks: list[asyncio.Task[None]] = []
    while due - began < seconds:
        kind = rng.choices([*MIX, "patient"], [*MIX.values(), 1 - sum(MIX.values())])[0]
        own = random.Random(rng.getrandbits(64))
        tasks.append(asyncio.ensure_future(asyncio.wait_for(client(kind, target, tally, own), PATIENCE)))
        due += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, BaseException):
            tally.broken.append(f"{type(result).__name__}: {result}")
    tally.seconds = time.perf_counter() - began
    return tally


async def capacity(target: Target, users: int, seconds: float) -> float:
    """Requests per second of ``users`` clients, each of whom sends the next request when the last one ends."""
    tally, end = Tally(), time.perf_counter() + seconds

    async def user(seed: int) -> None:
        rng = random.Random(seed)
        while time.perf_counter() < end:
            await patient(target, tally, rng)

    began = time.perf_counter()
    await asyncio.gather(*(user(seed) for seed in range(users)))
    return tally.answers["done"] / (time.perf_counter() - began)


async def until_the_end(target: Target, users: int, stop: Callable[[], None]) -> Tally:
    """Open streams, call ``stop`` once each has its first event, and read them to their ends."""
    tally = Tally()
    long = Target(target.host, target.port, target.vocab, 4 * target.new_tokens, target.prompt_tokens)
    tasks = [asyncio.ensure_future(patient(long, tally, random.Random(seed))) for seed in range(users)]
    while len(tally.first_token) < users and not all(task.done() for task in tasks):
        await asyncio.sleep(0.001)
    stop()
    await asyncio.gather(*tasks)
    return tally


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * 4096


async def measure(process: subprocess.Popen[str], target: Target, users: int, seconds: float) -> bool:
    """Run all phases and print a line of JSON for each. Returns whether every promise was kept."""
    await capacity(target, users, min(seconds, 10.0))
    maximum = await capacity(target, users, min(seconds, 30.0))
    print(json.dumps({"phase": "capacity", "requests_per_second": maximum, "users": users}), flush=True)
    kept = True
    for seed, share in enumerate(RATES):
        before = resident_bytes(process.pid)
        tally = await open_loop(target, share * maximum, seconds, seed)
        idle = await target.idle()
        kept &= idle and not tally.broken
        memory = {"resident_mib_before": before / 2**20, "resident_mib_after": resident_bytes(process.pid) / 2**20}
        print(json.dumps({"phase": f"{share} x capacity", **tally.figures(), "all_returned": idle, **memory}), flush=True)
        for reason, count in Counter(tally.broken).items():
            print(f"broken promise, {count} times: {reason}", file=sys.stderr)
    tally = await until_the_end(target, users, lambda: process.send_signal(signal.SIGTERM))
    code = await asyncio.to_thread(process.wait, PATIENCE)
    print(json.dumps({"phase": "SIGTERM", **tally.figures(), "exit_code": code}), flush=True)
    return kept and not tally.broken and tally.answers["done"] == users and code == 0


def main() -> None:
    """Start a server and measure it; exit code 1 where a promise was broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="of each phase")
    parser.add_argument("--users", type=int, default=8, help="requests at once when capacity is measured; the server's rows")
    parser.add_argument("words", nargs="*", help="configuration of the server: variant=eagle3 model=demo ...")
    arguments = parser.parse_args()
    words = [f"runtime.max_rows={arguments.users}", "server.max_waiting=16", "server.access_log=off", *arguments.words, "server.port=0"]
    command = [sys.executable, "-m", "graphspec", "serve", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://([\d.]+):(\d+)/v1", process.stdout.readline())
            if found is None:
                sys.exit("the server did not start")
            target = Target(found[1], int(found[2]))
            kept = asyncio.run(measure(process, target, arguments.users, arguments.seconds))
        finally:
            process.terminate()
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()

"""Soak of ``graphspec serve``: hostile and honest clients together, and what the process holds meanwhile.

``python -m perf.serve_soak`` starts a server of the demo model. Honest clients stream, complete and ask for ``/health``, at first alone;
then hostile ones, in a process of their own, send the catalogue of ``tests/support/hostile.py`` in random order, wait, leave early, or
never read, with a pause in every minute. Every minute a line of JSON has the memory, descriptors and threads of the server and its
children, its rows and its pages. When the hostile clients have left, nothing may be left of them.

A gap is the time between two events of a stream, or an answer of ``/health``. Clients share the machine with the server, so a gap may be
the machine's; the longest ones are printed with what was sent at that moment.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from .serve_load import PATIENCE, Target, resident_bytes, status_of

STREAMS, ATTACKERS = 2, 2
CALM_SECONDS = 60.0
"""Without hostile clients, at the beginning and at the end."""
SAMPLE_SECONDS, PAUSE_SECONDS, SETTLE_SECONDS = 60.0, 15.0, 3.0
"""From one line to the next; without hostile clients in each of these; until what they left has ended."""
WORST = 5
"""Longest gaps that are printed."""
DRAIN_SECONDS = 10
MORE_DESCRIPTORS = 8
"""Descriptors that the process may have at the end and had not at the beginning: connections of the honest clients that are between two
requests."""


@dataclass
class Waits:
    """What one kind of client met with.

    Attributes:
        waits: when each wait ended, by :func:`time.time`, and seconds.
        broken: promises that were not kept.
        statuses: of ``/health``.
    """

    waits: list[tuple[float, float]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)

    def note(self, seconds: float) -> None:
        self.waits.append((time.time(), seconds))

    def during(self, spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """The waits that ended within these spans of time."""
        return [wait for wait in self.waits if any(begin <= wait[0] < end for begin, end in spans)]

    def figures(self, spans: Sequence[tuple[float, float]]) -> dict[str, float]:
        """Figures of the waits that ended within these spans of time, in seconds."""
        found = sorted(seconds for _, seconds in self.during(spans))
        if not found:
            return {"count": 0}
        ranked = {f"p{rank}": round(found[int(rank / 100 * (len(found) - 1))], 4) for rank in (50, 99)}
        return {"count": len(found), **ranked, "max": round(found[-1], 4)}


async def stream(target: Target, waits: Waits, stop: asyncio.Event, rng: random.Random) -> None:
    """Read one stream after the other, each to its end."""
    while not stop.is_set():
        sent = {"prompt": "def f(x):", "max_tokens": 300, "temperature": rng.choice([0, 0.7]), "ignore_eos": True, "stream": True}
        reader, writer = await target.send(json.dumps(sent).encode())
        status, last, ended = await status_of(reader), 0.0, False
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                if last:
                    waits.note(now - last)
                last = now
            ended |= line.strip() == b"data: [DONE]"
        if status != 200 or not ended:
            waits.broken.append(f"a stream got {status}{'' if ended else ' and no end'}")
        writer.close()


async def probe(target: Target, waits: Waits, stop: asyncio.Event, _: random.Random) -> None:
    """Ask for ``/health`` again and again."""
    while not stop.is_set():
        began = time.perf_counter()
        text = await target.get("/health")
        waits.note(time.perf_counter() - began)
        # A step of a machine with other work may take longer than the second that the engine's thread has.
        waits.statuses[text[9:12]] += 1
        await asyncio.sleep(0.05)


async def complete(target: Target, waits: Waits, stop: asyncio.Event, rng: random.Random) -> None:
    """Ask for short completions of every kind; those of a full queue are no fault."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0}, {"top_p": 0.9, "logprobs": 2}, {"structured_outputs": {"regex": "[a-z]+ = [0-9]+"}}, {"prompt_logprobs": 1}
    ]  # fmt: skip
    while not stop.is_set():
        began = time.perf_counter()
        reader, writer = await target.send(json.dumps({"prompt": "x = ", "max_tokens": 8, **rng.choice(kinds)}).encode())
        status = await status_of(reader)
        await reader.read()
        writer.close()
        waits.note(time.perf_counter() - began)
        if status not in (200, 503):
            waits.broken.append(f"a completion got {status}")
        await asyncio.sleep(0.2)


def attack(host: str, port: int, seed: int, go: Event, stop: Event, log: Queue[Any]) -> None:
    """Send hostile inputs while ``go`` is set, until ``stop``; ``log`` gets the moments, the name and the status of each."""
    from tests.support.hostile import INPUTS

    def run(rng: random.Random) -> None:
        names, silent = [*INPUTS], []
        while not stop.is_set():
            go.wait()
            name, manner = rng.choice(names), rng.choice(["wait", "wait", "wait", "leave", "halve", "silent"])
            began, status = time.time(), manner
            with suppress(OSError):
                connection = socket.create_connection((host, port), timeout=PATIENCE)
                data = INPUTS[name]
                # The server may refuse before it has read everything.
                with suppress(OSError):
                    connection.sendall(data if manner != "halve" else data[: len(data) // 2])
                if manner == "wait":
                    with suppress(OSError):
                        status = connection.recv(65536)[9:12].decode("ascii", "replace") or "closed"
                elif manner == "leave":
                    time.sleep(rng.random())
                if manner == "silent":
                    silent.append(connection)
                else:
                    connection.close()
            if len(silent) > 20:
                silent.pop(0).close()
            log.put((began, time.time(), name, status))

    log.put(None)
    threads = [threading.Thread(target=run, args=(random.Random(seed + place),)) for place in range(ATTACKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def held(pid: int) -> dict[str, Any]:
    """What a process holds, and its children's memory."""
    children = [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text(encoding="ascii").split()]
    memory = [resident_bytes(pid), sum(resident_bytes(child) for child in children if Path(f"/proc/{child}").exists())]
    descriptors, threads = (len([*Path(f"/proc/{pid}/{name}").iterdir()]) for name in ("fd", "task"))
    mib, mib_children = (round(size / 2**20, 1) for size in memory)
    return {"mib": mib, "mib_of_children": mib_children, "descriptors": descriptors, "threads": threads}


async def sample(pid: int, target: Target) -> dict[str, Any]:
    """:func:`held`, and the rows and pages of the engine."""
    names = {"rows": "vllm:num_requests_running", "waiting": "vllm:num_requests_waiting", "pages": "vllm:kv_cache_usage_perc"}
    return {**held(pid), **{name: await target.metric(metric) for name, metric in names.items()}}


async def soak(process: subprocess.Popen[str], target: Target, seconds: float, seed: int) -> bool:
    """Run it and print what was found. Returns whether every promise was kept."""
    kinds = {"stream": stream, "health": probe, "completion": complete}
    waits, stop = {name: Waits() for name in kinds}, asyncio.Event()
    rng = random.Random(seed)
    begin = await sample(process.pid, target)
    print(json.dumps({"phase": "begin", **begin}), flush=True)
    callers = [("stream", stream)] * STREAMS + [("health", probe), ("completion", complete)]
    tasks = [asyncio.ensure_future(run(target, waits[name], stop, random.Random(rng.random()))) for name, run in callers]
    began = time.time()
    await asyncio.sleep(CALM_SECONDS)
    calm = {name: each.figures([(began, time.time())]) for name, each in waits.items()}
    # After the first requests of every kind.
    first = await sample(process.pid, target)
    print(json.dumps({"phase": "calm", "waits": calm, **first}), flush=True)

    context = multiprocessing.get_context("spawn")
    go, end, log = context.Event(), context.Event(), context.Queue()
    attackers = context.Process(target=attack, args=(target.host, target.port, seed, go, end, log))
    attackers.start()
    while log.empty():
        await asyncio.sleep(0.1)
    log.get()
    attacked = time.time()
    sent: list[tuple[float, float, str, str]] = []
    hostile, quiet = [], []
    while time.time() < attacked + seconds:
        began = time.time()
        go.set()
        await asyncio.sleep(SAMPLE_SECONDS - PAUSE_SECONDS)
        go.clear()
        await asyncio.sleep(SETTLE_SECONDS)
        hostile.append((began, time.time()))
        await asyncio.sleep(PAUSE_SECONDS - SETTLE_SECONDS)
        quiet.append((hostile[-1][1], time.time()))
        while not log.empty():
            sent.append(log.get())
        minute = {name: each.figures([hostile[-1]]) for name, each in waits.items()}
        line = {"phase": "attacked", "minute": round((time.time() - attacked) / 60, 1), "sent": len(sent), "waits": minute}
        print(json.dumps({**line, **await sample(process.pid, target)}), flush=True)
    end.set()
    go.set()
    while attackers.is_alive() or not log.empty():
        while not log.empty():
            sent.append(log.get())
        await asyncio.sleep(0.1)
    whole, paused = ({name: each.figures(spans) for name, each in waits.items()} for spans in (hostile, quiet))
    limits = {name: round(3 * paused[name]["p99"] + 0.05, 4) for name in ("stream", "health")}
    over = {name: sum(gap > limits[name] for _, gap in waits[name].during(hostile)) for name in limits}
    statuses = Counter(status for *_, status in sent)
    health = waits["health"].statuses
    print(
        json.dumps(
            {
                "phase": "attack",
                "waits": whole,
                "pauses": paused,
                "limits": limits,
                "over": over,
                "sent": len(sent),
                "statuses": statuses,
                "health": health,
            }
        ),
        flush=True,
    )
    for name in limits:
        for moment, gap in sorted(waits[name].during(hostile), key=lambda wait: -wait[1])[:WORST]:
            beside = sorted({what for since, until, what, _ in sent if since < moment and until > moment - gap})
            print(
                json.dumps(
                    {"phase": "worst", "kind": name, "second": round(moment - attacked, 1), "seconds": round(gap, 3), "beside": beside}
                )
            )
    await asyncio.sleep(CALM_SECONDS)
    stop.set()
    await asyncio.gather(*tasks)
    idle = await target.idle() and (await target.get("/health")).startswith("HTTP/1.1 200")
    last = await sample(process.pid, target)
    broken = Counter(reason for each in waits.values() for reason in each.broken)
    print(json.dumps({"phase": "end", "all_returned": idle, "broken": broken, **last}), flush=True)
    process.send_signal(signal.SIGTERM)
    signalled = time.monotonic()
    code = await asyncio.to_thread(process.wait, PATIENCE)
    took = time.monotonic() - signalled
    print(json.dumps({"phase": "SIGTERM", "exit_code": code, "seconds": round(took, 2)}), flush=True)
    kept = idle and not broken and last["descriptors"] <= begin["descriptors"] + MORE_DESCRIPTORS and "500" not in statuses
    return kept and code == 0 and took <= DRAIN_SECONDS + 1


def main() -> None:
    """Start a server and soak it; exit code 1 where a promise was broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="with hostile clients")
    parser.add_argument("--seed", type=int, default=0, help="of what they send")
    parser.add_argument("words", nargs="*", help="configuration of the server: runtime=compiled ...")
    arguments = parser.parse_args()
    words = ["model=demo", "variant=eagle3", "runtime=eager", "server.grammar_seconds=1", "server.access_log=off", "server.read_seconds=5"]
    words += [f"server.drain_seconds={DRAIN_SECONDS}", *arguments.words, "server.port=0"]
    command = [sys.executable, "-m", "graphspec", "serve", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://([\d.]+):(\d+)/v1", process.stdout.readline())
            if found is None:
                sys.exit("the server did not start")
            kept = asyncio.run(soak(process, Target(found[1], int(found[2])), 60 * arguments.minutes, arguments.seed))
        finally:
            process.terminate()
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()

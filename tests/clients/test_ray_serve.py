"""Replicas on Ray Serve, as ``examples/ray_serve`` starts them: real processes on one machine. ``make test-clients`` installs Ray."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from graphspec import LLM, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.clients
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_serve"
COMMAND = "graphspec_ray_serve"
PATIENCE = 540.0
"""Seconds until a test gives up waiting; nothing is measured by it."""
WORDS = ("model=demo", "variant=eagle3", "runtime=eager", "runtime.max_rows=1", "replicas.min=2", "replicas.num_cpus=0.5")
PROMPT = "def fib(n):"
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
SEEDED = {"temperature": 0.9, "top_p": 0.9, "seed": 7, "max_tokens": 24, "ignore_eos": True}
LONG = {"temperature": 0.0, "max_tokens": 400, "ignore_eos": True}
STREAMS = 6


def environment(folder: str) -> dict[str, str]:
    """Make Ray start its own cluster, with all its files in ``folder``."""
    ray = {"RAY_ADDRESS": "local", "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    return {**os.environ, **ray, "PYTHONPATH": str(EXAMPLE), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


class Service:
    """The command in a separate process, and its client."""

    def __init__(self, clients: Path, folder: str, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", log
        words = [clients / "python", "-m", COMMAND, *WORDS, f"server.port={port}", f"server.drain_seconds={PATIENCE}"]
        with log.open("w") as out:
            self.process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=environment(folder))
        try:
            wait_for(self._ready, "the replicas to start")
        except BaseException:
            self.process.kill()
            print(log.read_text()[-8000:])
            raise
        self.client = httpx2.Client(base_url=self.url, timeout=PATIENCE)

    def _ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-8000:]
        return f"graphspec-ray-serve: demo at {self.url}/v1" in self.log.read_text()

    def complete(self, fields: dict[str, Any]) -> tuple[list[int], str]:
        """New tokens, and the replica that made them."""
        with httpx2.Client(base_url=self.url, timeout=PATIENCE) as client:
            response = client.post("/v1/completions", json={"prompt": PROMPT, "return_token_ids": True, **fields})
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["token_ids"], response.headers["x-graphspec-replica"]

    def stream(self, fields: dict[str, Any], begun: Callable[[], None] = lambda: None) -> tuple[list[int], str]:
        """The same by a stream, whose end is checked; ``begun`` is called after its first event."""
        body = {"prompt": PROMPT, "return_token_ids": True, "stream": True, **fields}
        events: list[str] = []
        with (
            httpx2.Client(base_url=self.url, timeout=PATIENCE) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line:
                    events.append(line.removeprefix("data: "))
                    if len(events) == 1:
                        begun()
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event)["choices"][0] for event in events[:-1]]
        assert len(chunks) > 1
        return [token for chunk in chunks for token in chunk["token_ids"]], response.headers["x-graphspec-replica"]

    def answered_by(self, wanted: Callable[[set[str]], bool], tokens: list[int]) -> set[str]:
        """Ask until these replicas have answered; every answer has to be right."""
        seen: set[str] = set()

        def send() -> bool:
            found, replica = self.complete(GREEDY)
            assert found == tokens
            seen.add(replica)
            return wanted(seen)

        wait_for(send, "other replicas to answer")
        return seen

    def replica_processes(self) -> list[int]:
        """Processes of replicas among those that the command started."""
        parent, title = {}, {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                title[int(folder.name)] = (folder / "cmdline").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue

        def is_ours(pid: int) -> bool:
            while pid in parent and pid != self.process.pid:
                pid = parent[pid]
            return pid == self.process.pid

        return [pid for pid, name in title.items() if name.startswith("ray::ServeReplica") and is_ours(pid)]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)


def wait_for(done: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < end, f"gave up waiting for {what}"
        time.sleep(0.1)


@contextmanager
def serving(clients: Path, log: Path) -> Iterator[Service]:
    # Sockets lie in that folder: the length of their paths is limited.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        service = Service(clients, folder, log)
        try:
            yield service
        finally:
            service.client.close()
            if service.process.poll() is None:
                service.stop()
            print(log.read_text()[-8000:])


@pytest.fixture(scope="module")
def wanted() -> dict[str, list[int]]:
    """Tokens of the engine without a server and without a draft."""
    cases = {"greedy": GREEDY, "seeded": SEEDED, "long": LONG}
    with LLM(model="demo", variant="none", runtime="eager") as llm:
        return {name: llm.generate(PROMPT, SamplingParams(**params))[0].token_ids for name, params in cases.items()}


@pytest.fixture(scope="module")
def service(clients: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(clients, tmp_path_factory.mktemp("ray_serve") / "log") as service:
        yield service


def test_both_replicas_answer_with_the_engines_tokens(service: Service, wanted: dict[str, list[int]]) -> None:
    assert len(service.answered_by(lambda seen: len(seen) == 2, wanted["greedy"])) == 2
    for name, fields in (("greedy", GREEDY), ("seeded", SEEDED)):
        assert service.complete(fields)[0] == service.stream(fields)[0] == wanted[name]
    assert service.client.get("/health").status_code == 200
    assert service.client.get("/v1/models").json()["data"][0]["id"] == "demo"
    refused = service.client.post("/v1/completions", json={"prompt": PROMPT, "temperature": -1})
    assert refused.status_code == 400 and "temperature" in refused.json()["error"]["message"]


def test_a_replica_that_dies_is_replaced_while_the_other_answers(service: Service, wanted: dict[str, list[int]]) -> None:
    before = service.answered_by(lambda seen: len(seen) == 2, wanted["greedy"])
    processes = service.replica_processes()
    assert len(processes) == 2
    os.kill(processes[0], signal.SIGKILL)
    # Until there are two again, one of them new, every request is answered.
    after = service.answered_by(lambda seen: len(seen) == 2 and bool(seen - before), wanted["greedy"])
    assert len(after & before) == 1
    assert processes[1] in service.replica_processes() and processes[0] not in service.replica_processes()


def test_the_end_finishes_running_streams(clients: Path, tmp_path: Path, wanted: dict[str, list[int]]) -> None:
    """With one row per replica some of them still wait for it when the end begins."""
    with serving(clients, tmp_path / "log") as service:
        found: list[tuple[list[int], str]] = []
        begun, ended = threading.Event(), []

        def send() -> None:
            found.append(service.stream(LONG, begun.set))
            ended.append(time.monotonic())

        threads = [threading.Thread(target=send) for _ in range(STREAMS)]
        for thread in threads:
            thread.start()
        assert begun.wait(PATIENCE)
        service.process.send_signal(signal.SIGTERM)
        wait_for(lambda: service.client.get("/health").status_code == 404, "the routes to be taken away")
        refused = time.monotonic()
        for thread in threads:
            thread.join(PATIENCE)
        assert [tokens for tokens, _ in found] == [wanted["long"]] * STREAMS
        assert max(ended) > refused, "streams outlived the beginning of the end"
        assert len({replica for _, replica in found}) == 2
        assert service.process.wait(PATIENCE) == 0


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("replicas.max=0", "replicas.max: expected"),
        ("replicas.min=two", "replicas.min: expected"),
        ("replicas.some=1", "replicas.some: expected one of replicas.min, replicas.max, replicas.num_cpus, replicas.num_gpus"),
        ("server.write_seconds=1", "server.write_seconds: expected its default"),
        ("runtime.max_rowz=1", "runtime.max_rowz"),
    ],
)
def test_a_wrong_word_is_refused_before_anything_starts(clients: Path, tmp_path: Path, word: str, message: str) -> None:
    command = [clients / "python", "-m", COMMAND, "model=demo", word]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment(str(tmp_path)))
    assert done.returncode == 1 and done.stdout == ""
    assert message in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir()), "no cluster was started"

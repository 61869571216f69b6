"""A server that speaks OpenAI's protocol as a measured side, against a tiny one that streams as vLLM, SGLang and others do."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from graphspec.config.command_options import LaunchConfig, ProfileConfig, WorkloadConfig
from graphspec.config.schema import SamplingConfig
from graphspec.errors import ConfigError, ResourceError
from graphspec.lab.measure.api_side import ApiSide, Server, StreamReader
from graphspec.lab.measure.metrics import Timeline

TOKENS = [[11], [12, 13, 14], [15]]
PAUSE = 0.02


class Handler(BaseHTTPRequestHandler):
    """Answers ``/v1/models`` and ``/v1/completions``; how it streams is ``style``."""

    style: ClassVar[str] = "vllm"
    bodies: ClassVar[list[dict[str, Any]]] = []
    headers_seen: ClassVar[list[str | None]] = []
    at_once: ClassVar[list[int]] = [0, 0]
    lock: ClassVar[threading.Lock] = threading.Lock()
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Be quiet."""

    def do_GET(self) -> None:
        self.headers_seen.append(self.headers.get("Authorization"))
        body = json.dumps({"data": [{"id": "tiny"}]} if self.style != "no models" else {"detail": "none"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            self.bodies.append(body)
            self.at_once[0] += 1
            self.at_once[1] = max(self.at_once)
        if self.style == "refuses":
            words = b'{"error": {"message": "no such model"}}'
            self.send_response(404)
            self.send_header("Content-Length", str(len(words)))
            self.end_headers()
            self.wfile.write(words)
        else:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for event in self.events():
                if "[DONE]" in event:
                    # The client may send its next request as soon as it has read this.
                    with self.lock:
                        self.at_once[0] -= 1
                else:
                    time.sleep(PAUSE)
                self.chunk(event)
            self.chunk("")

    def chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def events(self) -> Iterator[str]:
        done = 0
        yield ": keep-alive\n\n"
        for place, ids in enumerate(TOKENS):
            done += len(ids)
            last = place == len(TOKENS) - 1
            choice: dict[str, Any] = {"index": 0, "text": "".join(f"<{i}>" for i in ids), "finish_reason": "length" if last else None}
            event: dict[str, Any] = {"object": "text_completion", "choices": [choice], "usage": None}
            if self.style == "vllm":
                choice["token_ids"] = ids
            if self.style in ("vllm", "sglang"):
                event["usage"] = {"prompt_tokens": 3, "completion_tokens": done, "total_tokens": 3 + done}
            if self.style == "breaks" and place == 1:
                yield 'data: {"error": {"message": "out of memory", "code": 500}}\n\n'
                return
            if self.style == "stops" and place == 1:
                return
            yield f"data: {json.dumps(event)}\n\n"
        yield f"data: {json.dumps({'choices': [], 'usage': {'prompt_tokens': 3, 'completion_tokens': done}})}\n\n"
        yield "data: [DONE]\n\n"


@pytest.fixture
def server() -> Iterator[str]:
    Handler.bodies, Handler.at_once, Handler.headers_seen, Handler.style = [], [0, 0], [], "vllm"
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}/v1/"
        running.shutdown()


def side(url: str, **changes: Any) -> ApiSide:
    settings = {"source": "random", "requests": 5, "batch": 2, "input_tokens": 4, "output_tokens": 5, **changes}
    return ApiSide(
        LaunchConfig(baseline=["openai"], url=url, workload=WorkloadConfig(**settings), profile=ProfileConfig(timeout_seconds=10))
    )


@pytest.mark.parametrize("style", ["vllm", "sglang", "plain"])
def test_times_and_sizes_come_from_the_events(server: str, style: str) -> None:
    Handler.style = style
    one = side(server)
    reported = one.round()
    lines = [Timeline.from_json(row) for row in reported["timelines"]]
    assert one.describe()["label"] == "openai tiny" and reported["texts"] == ["<11><12><13><14><15>"] * 5
    # A server that returns token ids is compared by ids.
    assert reported["tokens"] == ([[11, 12, 13, 14, 15]] * 5 if style == "vllm" else [None] * 5)
    for line in lines:
        assert line.tokens == 5 and line.reason == "length" and len(line.bursts) == 3
        assert line.ttft > 0.5 * PAUSE and all(gap > 0.5 * PAUSE for gap in line.itl)
        assert [size for _, size in line.bursts] == ([1, 1, 3] if style == "plain" else [1, 3, 1])
    assert ("burst_tokens" in reported["not_measured"]) is (style == "plain")
    assert Handler.at_once[1] == 2, "as many requests at once as the workload says"


def test_requests_are_those_of_the_workload(server: str) -> None:
    one = side(server, requests=2)
    one.config.profile.api_key = None
    one.workload = type(one.workload)(
        one.workload.requests, 2, 5, True, SamplingConfig(temperature=0.5, top_k=7, stop_token_ids=[3], logit_bias={4: -1.0}).stated()
    )
    one.round()
    body = sorted(Handler.bodies, key=lambda body: body["seed"])[1]
    assert (
        body["prompt"] == one.workload.requests[1].prompt and body["seed"] == 1 and body["max_tokens"] == 5 and body["ignore_eos"] is True
    )
    assert body["stream"] is True and body["stream_options"]["include_usage"] is True and body["model"] == "tiny"
    assert body["temperature"] == 0.5 and body["top_k"] == 7 and body["stop_token_ids"] == [3] and body["logit_bias"] == {"4": -1.0}
    assert "min_p" not in body and "repetition_penalty" not in body


def test_prompts_may_go_as_text_and_a_token_goes_along(server: str) -> None:
    workload = WorkloadConfig(requests=1, input_tokens=8, output_tokens=5)
    how = ProfileConfig(api_prompts="text", api_key="k", api_model="mine", timeout_seconds=10)
    one = ApiSide(LaunchConfig(baseline=["openai"], url=server, workload=workload, profile=how))
    one.round()
    [body] = Handler.bodies
    assert body["prompt"] == one.tokenizer.decode(one.workload.requests[0].prompt) and body["model"] == "mine"
    assert one.server.first_model() == "tiny" and Handler.headers_seen == ["Bearer k"]


@pytest.mark.parametrize(
    ("style", "message"),
    [("refuses", "status 200, found 404: .*no such model"), ("breaks", "out of memory"), ("stops", r"ends with \[DONE\]")],
)
def test_a_server_that_fails_is_an_error_in_its_own_words(server: str, style: str, message: str) -> None:
    Handler.style = style
    with pytest.raises(ResourceError, match=message):
        side(server).round()


def test_no_server_and_no_address() -> None:
    with pytest.raises(ResourceError, match="an answer"):
        Server("http://127.0.0.1:9", None, 2.0).first_model()
    with pytest.raises(ConfigError, match="url"):
        Server("localhost:8000", None, 2.0)
    with pytest.raises(ConfigError, match="url"):
        LaunchConfig(baseline=["openai"])


def test_a_server_that_lists_no_model_is_refused(server: str) -> None:
    Handler.style = "no models"
    with pytest.raises(ResourceError, match=r"profile\.api_model"):
        side(server)


def test_a_stream_with_usage_only_is_not_exact() -> None:
    reader = StreamReader()
    for moment, text in enumerate(["a", "", "bc"]):
        reader.take(float(moment), {"choices": [{"text": text, "finish_reason": None}]})
    reader.take(3.0, {"choices": [{"text": "", "finish_reason": "stop"}], "usage": {"completion_tokens": 6}})
    assert reader.reason == "stop" and reader.tokens is None and not reader.exact
    sizes = [size for _, size in reader.bursts()]
    assert sizes[0] == 1 and sum(sizes) == 6

"""Any server that speaks OpenAI's completions protocol as a measured side: vLLM, SGLang, llama.cpp. Needs no client library.

Requests are streamed (server-sent events). They use these extensions of the protocol, none of which a server needs to have:
``ignore_eos``, ``stream_options.continuous_usage_stats`` (tokens so far with every event), ``return_token_ids`` (vLLM: the tokens
themselves) and those sampling keys of ``BEYOND`` that are set, or that the checkpoint's ``generation_config.json`` sets otherwise.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cached_property
from typing import Any
from urllib.parse import SplitResult, urlsplit

from ...config.command_options import LaunchConfig
from ...config.schema import SamplingConfig
from ...errors import ConfigError, ResourceError
from ...facts import read_model_facts, read_sampling_defaults
from ...facts.folders import model_folder
from ...text.tokenizer import Tokenizer
from .metrics import Timeline
from .workload import WorkloadRequest, make_workload

NOT_REPORTED = "the server does not report it"
BEYOND = (
    "top_k", "min_p", "repetition_penalty", "stop_token_ids", "stop", "include_stop_str_in_output", "allowed_token_ids", "bad_words",
    "skip_special_tokens",
)  # fmt: skip
"""Keys of the ``sampling`` group that are sent only where they have to be; their names are vLLM's."""


def split_url(url: str) -> SplitResult:
    """The parts of a server's address.

    Raises:
        ConfigError: no http or https address of a host.
    """
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0) and url.isascii():
            return parts
    except ValueError:
        # Brackets that don't close, a port that is no number.
        pass
    raise ConfigError("url", "an address such as http://localhost:8000/v1", repr(url))


class Server:
    """An HTTP server.

    Args:
        url: base address, such as ``http://localhost:8000/v1``.
        key: bearer token.
        timeout: seconds without a byte before a request is given up.

    Raises:
        ConfigError: ``url`` is no http or https address.
    """

    def __init__(self, url: str, key: str | None, timeout: float) -> None:
        parts = split_url(url)
        self.url, self.timeout = url, timeout
        self._secure, self._host, self._port, self._path = parts.scheme == "https", parts.hostname or "", parts.port, parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        """Send one request on a new connection; reading the response to its end closes the connection.

        Raises:
            ResourceError: no response, or a status other than 200; the message quotes the server.
        """
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self.timeout)
        try:
            headers = self._headers | {"Connection": "close"}
            connection.request(method, self._path + path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
        except OSError as error:
            connection.close()
            raise ResourceError(f"{method} {self.url}{path}", "an answer", str(error) or type(error).__name__) from error
        if response.status != 200:
            words = response.read(600).decode("utf-8", "replace")
            raise ResourceError(f"{method} {self.url}{path}", "status 200", f"{response.status}: {words}")
        return response

    def first_model(self) -> str:
        """Name of the first model the server lists."""
        listed = json.loads(self.request("GET", "/models").read())
        try:
            name: str = listed["data"][0]["id"]
        except (KeyError, IndexError, TypeError) as error:
            raise ResourceError(f"GET {self.url}/models", "a list of models", str(listed)[:200], "set profile.api_model") from error
        return name

    def events(self, body: dict[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
        """Stream a completion: ``(seconds, event)`` as they arrive, to the end.

        Raises:
            ResourceError: the server reports an error, sends something other than events, or the stream breaks off.
        """
        with self.request("POST", "/completions", body) as response:
            try:
                while line := response.readline():
                    moment = time.perf_counter()
                    text = line.decode("utf-8").strip()
                    # Lines that begin with a colon keep the connection alive.
                    if not text.startswith("data:"):
                        continue
                    data = text.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    event = json.loads(data)
                    if event.get("error") or event.get("object") == "error":
                        raise ResourceError(f"POST {self.url}/completions", "a completion", data[:300])
                    yield moment, event
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
                raise ResourceError(f"POST {self.url}/completions", "a stream of events", str(error) or type(error).__name__) from error
        raise ResourceError(f"POST {self.url}/completions", "a stream that ends with [DONE]", "its end without one")


class ApiSide:
    """A server as a side: ``workload.batch`` users, each of whom sends the next request when the last one ends.

    Args:
        config: of the run; the tokenizer is that of its ``model``.
    """

    def __init__(self, config: LaunchConfig) -> None:
        assert config.url is not None
        self.config, self.server = config, Server(config.url, config.profile.api_key, config.profile.timeout_seconds)
        self.model = config.profile.api_model or self.server.first_model()
        self._folder = model_folder(config.model.path, config.model.revision)
        self.workload = make_workload(config, self._encode, read_model_facts(self._folder).vocab_size)
        self._exact_bursts = True
        self._defaults = asdict(read_sampling_defaults(self._folder))
        """What the server may apply where a request says nothing."""

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The target's; loaded at its first use."""
        return Tokenizer(self._folder)

    def describe(self) -> dict[str, Any]:
        """See :class:`graphspec.lab.measure.worker.Runner`."""
        absent = (
            "acceptance_length",
            "drafted_per_second",
            "accepted_per_second",
            "stages",
            "cycle_ms",
            "host_us",
            "nodes",
            "gap_ms",
            "memory",
        )
        return {
            "label": f"openai {self.model}",
            "variant": None,
            "shape": None,
            "runtime": self.config.url,
            "attention": None,
            "dtype": None,
            "device": None,
            "digest": self.workload.digest,
            "input_tokens": self.workload.input_tokens,
            "temperature": self.config.sampling.stated_temperature,
            "not_measured": dict.fromkeys(absent, NOT_REPORTED),
        }

    def round(self) -> dict[str, Any]:
        """See :class:`graphspec.lab.measure.worker.Runner`."""
        with ThreadPoolExecutor(self.workload.batch) as users:
            answers = list(users.map(self._complete, self.workload.requests))
        return {
            "timelines": [timeline.to_json() for timeline, _, _ in answers],
            "tokens": [tokens for _, tokens, _ in answers],
            "texts": [text for _, _, text in answers],
            "not_measured": {} if self._exact_bursts else {"burst_tokens": "the server does not say how many tokens an event brought"},
        }

    def _body(self, request: WorkloadRequest) -> dict[str, Any]:
        sampling = self.workload.sampling
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": request.prompt if self.config.profile.api_prompts == "tokens" else self.tokenizer.decode(request.prompt),
            "max_tokens": self.workload.output_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": request.seed,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "ignore_eos": self.workload.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "return_token_ids": True,
        }
        neutral = asdict(SamplingConfig().stated())
        for key in BEYOND:
            value = getattr(sampling, key)
            if value != neutral[key] or value != self._defaults.get(key, value):
                body[key] = value
        if sampling.logit_bias:
            body["logit_bias"] = {str(token): value for token, value in sampling.logit_bias.items()}
        return body

    def _complete(self, request: WorkloadRequest) -> tuple[Timeline, list[int] | None, str]:
        began = time.perf_counter()
        reader = StreamReader()
        for moment, event in self.server.events(self._body(request)):
            reader.take(moment, event)
        bursts = reader.bursts()
        self._exact_bursts &= reader.exact
        ended = bursts[-1][0] if bursts else time.perf_counter()
        return Timeline(began, bursts, ended, reader.reason), reader.tokens, "".join(reader.texts)


class StreamReader:
    """Turns the events of one completion into bursts of tokens.

    How many tokens an event brought is known if it carries token ids or the usage so far. Otherwise every event counts as one token and
    the last one as the rest of the usage's total: times and totals are then right, and the sizes of bursts unknown (``exact`` is False).
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reason = "abort"
        self.total: int | None = None
        self._events: list[tuple[float, int | None]] = []
        self._ids: list[int] = []
        self._all_ids = True
        self._counted = 0

    def take(self, moment: float, event: dict[str, Any]) -> None:
        """Add one event, which arrived at ``moment`` (seconds)."""
        usage = event.get("usage") or {}
        completed = usage.get("completion_tokens")
        choices = event.get("choices") or []
        if completed is not None:
            self.total = completed
        if not choices:
            return
        choice = choices[0]
        text, ids = choice.get("text") or "", choice.get("token_ids")
        self.reason = choice.get("finish_reason") or self.reason
        self.texts.append(text)
        fresh = len(ids) if ids is not None else completed - self._counted if completed is not None else None
        if ids is not None:
            self._ids += ids
        elif text or fresh:
            self._all_ids = False
        if fresh is not None:
            self._counted += fresh
        if fresh or (fresh is None and text):
            self._events.append((moment, fresh))

    @property
    def tokens(self) -> list[int] | None:
        """The new tokens; None unless the server reported all of them."""
        return self._ids if self._all_ids and self._ids else None

    @property
    def exact(self) -> bool:
        """Whether the size of every burst is known."""
        return all(fresh is not None for _, fresh in self._events)

    def bursts(self) -> list[tuple[float, int]]:
        """``(time, tokens)`` of each event that brought tokens."""
        sizes = [fresh or 1 for _, fresh in self._events]
        if sizes and not self.exact and self.total is not None:
            sizes[-1] = max(1, sizes[-1] + self.total - sum(sizes))
        return [(moment, size) for (moment, _), size in zip(self._events, sizes, strict=True)]

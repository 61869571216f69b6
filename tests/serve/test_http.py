"""Headers and methods: types of bodies, names of hosts, pages of other origins, HEAD and OPTIONS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from graphspec.config.server_options import ServerConfig
from graphspec.errors import ConfigError
from graphspec.serve.access import hosts_of
from graphspec.serve.http import HttpServer, abort_seconds
from tests.support.serving import MODEL, Served, serving

if TYPE_CHECKING:
    from graphspec.api.llm import LLM

COMPLETIONS = "/v1/completions"
JSON = {"Content-Type": "application/json"}
BODY = b'{"prompt": "w7", "max_tokens": 1}'


@pytest.mark.parametrize("given", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"])
def test_types_of_json(server: Served, given: str) -> None:
    assert server.client.post(COMPLETIONS, content=BODY, headers={"Content-Type": given}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "text/x+json"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_other_types_are_refused(server: Served, path: str, headers: dict[str, str]) -> None:
    """A page in a browser sends these without asking first."""
    response = server.client.post(path, content=BODY, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_type")


def test_hosts_of_a_loopback_server(server: Served) -> None:
    for host in ("localhost", "127.0.0.1", "[::1]", "LocalHost:8000", "127.0.0.1:99", "[::1]:8000"):
        assert server.client.get("/v1/models", headers={"Host": host}).status_code == 200
    for host in (
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "127.0.0.2",
        "",
        "localhost:80:80",
    ):
        response = server.client.get("/v1/models", headers={"Host": host})
        assert (response.status_code, response.json()["error"]["code"]) == (421, "misdirected_request"), host
    assert server.client.get("/health", headers={"Host": "10.0.0.7:8000"}).status_code == 200


def test_hosts_that_are_allowed(llm: LLM) -> None:
    with serving(llm, allowed_hosts=["API.example", "[fe80::1]"]) as server:
        found = [
            server.client.get("/version", headers={"Host": host}).status_code for host in ("api.example:1", "[FE80::1]:1", "localhost")
        ]
        assert found == [200, 200, 421]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"localhost", "127.0.0.1", "[::1]"}),
        ({"host": "::1"}, {"localhost", "127.0.0.1", "[::1]"}),
        ({"host": "localhost"}, {"localhost", "127.0.0.1", "[::1]"}),
        ({"host": "0.0.0.0"}, None),
        ({"host": "0.0.0.0", "allowed_hosts": ["a.example"]}, {"a.example"}),
        ({"allowed_hosts": ["a.example", "*"]}, None),
    ],
)
def test_names_by_address(options: dict[str, Any], expected: set[str] | None) -> None:
    assert hosts_of(ServerConfig(**options)) == expected


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"allowed_hosts": ["a.example:80"]}, r"server\.allowed_hosts\[0\]: expected a host without a port"),
        ({"cors_origins": ["*", "app.example"]}, r"server\.cors_origins\[1\]: expected an origin"),
        ({"cors_origins": ["https://app.example/"]}, r"server\.cors_origins\[0\]: expected an origin"),
    ],
)
def test_other_values_are_refused(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        ServerConfig(**options)


def test_pages_of_other_origins_read_nothing(server: Served) -> None:
    headers = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    for response in (server.client.options(COMPLETIONS, headers=headers), server.client.get("/v1/models", headers=headers)):
        assert not [name for name in response.headers if name.startswith("access-control")]


def test_origins_that_are_allowed(llm: LLM) -> None:
    with serving(llm, cors_origins=["https://app.example"]) as server:
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
        found = server.client.options(COMPLETIONS, headers={"Origin": "https://app.example", **asked})
        assert (found.status_code, found.headers["access-control-allow-origin"]) == (200, "https://app.example")
        assert server.client.options(COMPLETIONS, headers={"Origin": "https://evil.example", **asked}).status_code == 400
        for origin, allowed in (("https://app.example", "https://app.example"), ("https://evil.example", None)):
            response = server.client.post(COMPLETIONS, content=BODY, headers={**JSON, "Origin": origin})
            assert (response.status_code, response.headers.get("access-control-allow-origin")) == (200, allowed)
        refused = server.client.post(
            COMPLETIONS, content=b"{", headers={"Origin": "https://app.example", "Content-Type": "application/json"}
        )
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (400, "https://app.example")


@pytest.mark.parametrize("path", ["/v1/models", f"/v1/models/{MODEL}", "/health", "/version", "/metrics"])
def test_head_is_get_without_a_body(server: Served, path: str) -> None:
    head, get = server.client.head(path), server.client.get(path)
    assert (head.status_code, head.content) == (200, b"") and get.status_code == 200
    assert head.headers["content-type"] == get.headers["content-type"] if "content-type" in get.headers else True


@pytest.mark.parametrize(
    ("path", "allow"), [(COMPLETIONS, "OPTIONS, POST"), ("/health", "GET, HEAD, OPTIONS"), ("/v1/models", "GET, HEAD, OPTIONS")]
)
def test_options_lists_the_methods(server: Served, path: str, allow: str) -> None:
    response = server.client.options(path)
    assert (response.status_code, response.headers["allow"], response.content) == (204, allow, b"")
    assert server.client.options("/nothing").status_code == 404
    assert server.client.put(path).headers["allow"] == allow


def test_one_model(server: Served) -> None:
    assert server.client.get(f"/v1/models/{MODEL}").json() == server.client.get("/v1/models").json()["data"][0]
    for name in ("other", "org/other"):
        response = server.client.get(f"/v1/models/{name}")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(("drain", "abort"), [(60.0, 55.0), (25.0, 20.0), (10.0, 8.0), (1.0, 0.8)])
def test_the_process_has_time_to_end_after_its_requests(drain: float, abort: float) -> None:
    options = ServerConfig(port=0, drain_seconds=drain)
    assert HttpServer(lambda *_: None, options).config.timeout_graceful_shutdown == abort_seconds(drain) == pytest.approx(abort)

"""The catalogue of hostile inputs to a server of the demo model: requests as bytes, by name, and what each is answered."""

from __future__ import annotations

import gzip
import json
from typing import Any

from tests.support.serving import raw_post

COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
SHORT = {"max_tokens": 4, "temperature": 0}
BODY = json.dumps({"prompt": "def f(x):", **SHORT}).encode()
WORDS = "def foo(x): return x + 1 # comment \u00e9\U0001f600 \n"
TEXT = (WORDS * 90_000)[:3_600_000]


def schema(optional: int, *, letter: str = "k") -> dict[str, Any]:
    return {"type": "object", "properties": {f"{letter}{place}": {"type": "integer"} for place in range(optional)}}


LONG = {
    "type": "object",
    "properties": {
        f"{group}": {
            "type": "object",
            "properties": {f"{group}k{place}": {"type": "string", "pattern": f"^[a-z]{{1,{place + 3}}}{group}$"} for place in range(40)},
        }
        for group in range(300)
    },
}
"""More than a minute and a half of a core, with few optional properties in any object: xgrammar takes each of 12,000 patterns by itself."""


def body(grammar: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": "x = ", "max_tokens": 4, "temperature": 0, "structured_outputs": {"json": grammar}}


def numbers(count: int) -> list[str]:
    return [f"zq{number}" for number in range(count)]


CIRCLE = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}


def constrained(**structured: Any) -> dict[str, Any]:
    return {"prompt": "x", "structured_outputs": structured}


FIELDS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "a completion of 4 MB": (COMPLETIONS, {"prompt": TEXT}, "prompt"),
    "two of 2 MB": (COMPLETIONS, {"prompt": [TEXT[:1_800_000]] * 2}, "prompt"),
    "one word of 4 MB": (COMPLETIONS, {"prompt": "a" * 3_900_000}, "prompt"),
    "4 MB to encode": (TOKENIZE, {"prompt": TEXT}, "prompt"),
    "4 MB to encode and spell": (TOKENIZE, {"prompt": "a b " * 970_000, "return_token_strs": True}, "prompt"),
    "80,000 messages": (CHAT, {"messages": [{"role": "user", "content": "x"}] * 80_000}, None),
    "500,000 ids to decode": (DETOKENIZE, {"tokens": [300] * 500_000}, "tokens"),
    "800,000 ids to decode": (DETOKENIZE, {"tokens": [300] * 800_000}, None),
    "300,000 stop texts": (COMPLETIONS, {"prompt": "x", "stop": numbers(300_000)}, "stop"),
    "a stop text of 3 MB": (COMPLETIONS, {"prompt": "x", "stop": "\n" + " " * 3_000_000}, "stop"),
    "a bad word of 3 MB": (COMPLETIONS, {"prompt": "x", "bad_words": ["ab" * 1_500_000]}, "bad_words"),
    "300,000 bad words": (COMPLETIONS, {"prompt": "x", "bad_words": numbers(300_000)}, "bad_words"),
    "500,000 ids": (COMPLETIONS, {"prompt": [1] * 500_000}, "prompt"),
    "1,300,000 ids": (COMPLETIONS, {"prompt": [1] * 1_300_000}, None),
    "100,000 prompts": (COMPLETIONS, {"prompt": [[1]] * 100_000}, None),
    "deep metadata of 4 MB": (COMPLETIONS, {"prompt": "x", "metadata": [[[]] * 3] * 300_000}, None),
    "wide metadata": (COMPLETIONS, {"prompt": "x", "metadata": dict.fromkeys(numbers(100000), "v")}, "metadata"),
    "500,000 allowed ids": (COMPLETIONS, {"prompt": "x", "allowed_token_ids": [5] * 500_000}, "allowed_token_ids"),
    "100,000 biases": (COMPLETIONS, {"prompt": "x", "logit_bias": {str(key): 1 for key in range(100_000)}}, "logit_bias"),
    "a bias of 5,000 digits": (COMPLETIONS, {"prompt": "x", "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    "a reference to itself": (COMPLETIONS, constrained(json={"$ref": "#"}), "structured.json_schema.$ref"),
    "references in a circle": (COMPLETIONS, constrained(json={"$ref": "#/$defs/a", "$defs": CIRCLE}), "structured.json_schema.$ref"),
    "a schema that nothing fits": (COMPLETIONS, constrained(json=False), "structured.json_schema"),
    "an enum of nothing": (COMPLETIONS, constrained(json={"enum": []}), "structured.json_schema"),
    "rules in a circle": (COMPLETIONS, constrained(grammar="root ::= a\na ::= b\nb ::= a\n"), "structured.grammar"),
    "a rule that is itself": (COMPLETIONS, constrained(grammar="root ::= root\n"), "structured.grammar"),
    "an unknown rule": (COMPLETIONS, constrained(grammar="root ::= nothing\n"), "structured.grammar"),
    "no root": (COMPLETIONS, constrained(grammar='a ::= "x"\n'), "structured.grammar"),
    "an empty alternative": (COMPLETIONS, constrained(grammar='root ::= "a" |\n'), "structured.grammar"),
    "an empty grammar": (COMPLETIONS, constrained(grammar=""), "structured_outputs.grammar"),
    "a grammar of no known kind": (COMPLETIONS, constrained(gramar="x"), "structured_outputs"),
    "no choice": (COMPLETIONS, constrained(choice=[]), "structured_outputs.choice"),
    "half an expression": (COMPLETIONS, constrained(regex="("), "structured.regex"),
    "100,000 tools": (CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": [0] * 100_000}, "tools"),
    "a priority": (COMPLETIONS, {"prompt": "x", "priority": -(2**31)}, "priority"),
    "a salt of 1 MB": (COMPLETIONS, {"prompt": "x", "cache_salt": "a" * 2**20}, "cache_salt"),
    "100,000 samples": (COMPLETIONS, {"prompt": "x", "n": 60_000}, "n"),
}


RAW: dict[str, tuple[bytes, int]] = {
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 421),
    "another host": (b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
    "no host": (b"GET /v1/models HTTP/1.1\r\n\r\n", 400),
    "no HTTP": (b"\x00\x01\x02\x16\x03\x01\r\n\r\n", 400),
    "a parent folder": (b"GET /%2e%2e/%2e%2e/etc/passwd%00 HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    "a long path": (b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    "a slash": (b"GET /v1/models/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    "a web socket": (b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 405),
    "two lengths": (raw_post(BODY, framing="Content-Length: 3\r\nContent-Length: 5"), 400),
    "a length and chunks": (raw_post(b"0\r\n\r\n", framing="Content-Length: 5\r\nTransfer-Encoding: chunked"), 400),
    "a negative length": (raw_post(b"", framing="Content-Length: -5"), 400),
    "100 MB announced": (raw_post(b"{", length=10**8), 413),
    "a bad chunk": (raw_post(b"zz\r\n", framing="Transfer-Encoding: chunked"), 400),
    "compressed": (raw_post(gzip.compress(BODY), framing=f"Content-Encoding: gzip\r\nContent-Length: {len(gzip.compress(BODY))}"), 415),
    "a form": (raw_post(BODY).replace(b"application/json", b"application/x-www-form-urlencoded"), 415),
    "plain text": (raw_post(BODY).replace(b"application/json", b"text/plain"), 415),
    "UTF-16": (raw_post(BODY.decode().encode("utf-16")), 400),
    "a byte order mark": (raw_post(b"\xef\xbb\xbf" + BODY), 400),
    "not finite": (raw_post(b'{"prompt":"a","temperature":Infinity}'), 400),
    "too large a number": (raw_post(b'{"prompt":"a","temperature":1e400}'), 400),
    "a seed of 4,000 digits": (raw_post(b'{"prompt":"a","seed":' + b"9" * 4000 + b"}"), 400),
    "a seed of 100,000 digits": (raw_post(b'{"prompt":"a","seed":' + b"9" * 100_000 + b"}"), 400),
    "100,000 levels": (raw_post(b'{"metadata":' + b"[" * 100_000 + b"]" * 100_000 + b',"prompt":"a"}'), 400),
}


STOPS = [f"{place:04}" + "x" * 1020 for place in range(32)]
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "a grammar that takes too long": (COMPLETIONS, body(LONG)),
    "a grammar of no use": (COMPLETIONS, body(schema(1500))),
    "a large grammar": (COMPLETIONS, body({**schema(1000), "required": list(schema(1000)["properties"])})),
    "many choices": (COMPLETIONS, {"prompt": "x", "max_tokens": 2, "structured_outputs": {"choice": [f"w{n}" for n in range(20_000)]}}),
    "stop texts at their bounds": (COMPLETIONS, {"prompt": "x", "max_tokens": 2, "stop": STOPS}),
    "a chat of 2,000 messages": (CHAT, {"messages": [{"role": "user", "content": "x"}] * 2000}),
}
INPUTS: dict[str, bytes] = {
    **{
        name: raw_post(json.dumps(sent).encode()).replace(COMPLETIONS.encode(), path.encode(), 1)
        for name, (path, sent, _) in FIELDS.items()
    },
    **{name: raw_post(json.dumps(sent).encode()).replace(COMPLETIONS.encode(), path.encode(), 1) for name, (path, sent) in MORE.items()},
    **{name: sent for name, (sent, _) in RAW.items()},
}
"""A request as bytes, by its name."""

"""Structured answers: those of the engine with the same grammar, whole and in chunks, and required tool calls."""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from graphspec import LLM, SamplingParams, Structured
from graphspec.api.llm import model_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.serving import Served

QUESTION = [{"role": "user", "content": "class Stack:"}]
POINT = {
    "type": "object",
    "properties": {"x": {"enum": [1, 22, 333]}, "up": {"type": "boolean"}},
    "required": ["x", "up"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": POINT}} for name in ("move", "draw")]
LIMIT = {"max_tokens": 120, "seed": 3}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The demo model: its tokens are text, and its end is a special one."""
    folder = tmp_path_factory.mktemp("demo") / "target"
    shutil.copytree(model_folder("demo"), folder)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    with LLM(folder, variant="eagle3", draft=model_folder("demo").parent / "eagle3", runtime="eager", max_rows=2) as llm:
        yield llm


@pytest.mark.parametrize(
    ("fields", "structured"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": POINT, "strict": True}}},
            Structured(json_schema=POINT),
        ),
        ({"response_format": {"type": "json_object"}}, Structured(json_object=True)),
        ({"structured_outputs": {"json": POINT}}, Structured(json_schema=POINT)),
        ({"structured_outputs": {"regex": "a+b{2,3}"}}, Structured(regex="a+b{2,3}")),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, Structured(choice=["yes", "no"])),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9]'}}, Structured(grammar='root ::= "x" [0-9]')),
        ({"response_format": {"type": "text"}}, None),
    ],
    ids=["json_schema", "json_object", "json", "regex", "choice", "grammar", "text"],
)  # fmt: skip
def test_a_structured_completion_equals_the_engines(
    server: Served, llm: LLM, fields: dict[str, Any], structured: Structured | None
) -> None:
    # One of the answers ends where its grammar does; the others are forms of the same requests.
    length = 60 if fields.get("response_format", {}).get("type") == "json_schema" else 20
    [output] = llm.chat(QUESTION, SamplingParams(temperature=1.0, structured=structured, max_tokens=length, seed=5))
    body = {"messages": QUESTION, "max_tokens": length, "seed": 5, **fields}
    [choice] = server.chat(**body)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (output.text, output.finish_reason)
    chunks = server.chunks("/v1/chat/completions", **body)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == output.text


def test_a_structured_completion(server: Served) -> None:
    [choice] = server.complete(prompt="x = ", structured_outputs={"regex": "[0-9]{2}"}, temperature=0)["choices"]
    assert re.fullmatch("[0-9]{2}", choice["text"]) and choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"move", "draw"}),
        ({"tool_choice": {"type": "function", "function": {"name": "draw"}}}, {"draw"}),
    ],
    ids=["required", "named"],
)
def test_one_call_that_is_demanded(server: Served, fields: dict[str, Any], names: set[str]) -> None:
    body = {"messages": QUESTION, "tools": TOOLS, **LIMIT, **fields}
    [choice] = server.chat(**body)["choices"]
    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert call["function"]["name"] in names
    jsonschema.validate(json.loads(call["function"]["arguments"]), POINT)
    choices = [chunk["choices"][0] for chunk in server.chunks("/v1/chat/completions", **body)]
    [streamed] = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert streamed["function"] == call["function"] and choices[-1]["finish_reason"] == "tool_calls"


def test_one_call_at_least_where_several_may_come(server: Served) -> None:
    [choice] = server.chat(messages=QUESTION, tools=TOOLS, tool_choice="required", **LIMIT)["choices"]
    calls = choice["message"]["tool_calls"]
    assert calls
    for call in calls:
        jsonschema.validate(json.loads(call["function"]["arguments"]), POINT)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}},
        {"structured_outputs": {"regex": "(("}},
        {"structured_outputs": {"grammar": "root = "}},
        {"response_format": {"type": "json_object"}, "ignore_eos": True},
    ],
    ids=["schema", "regex", "grammar", "no end"],
)
def test_forms_that_cannot_be(server: Served, fields: dict[str, Any]) -> None:
    response = server.post("/v1/chat/completions", {"messages": QUESTION, **fields})
    assert response.status_code == 400 and response.json()["error"]["param"].startswith("structured")

"""Chats: the checkpoint's template, chunks, log-probabilities, and tools."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from graphspec import LLM, SamplingParams
from graphspec.api import outputs
from graphspec.api.llm import model_folder
from graphspec.text.tokenizer import Detokenizer
from tests.support.serving import serving

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.serving import Served

PATH = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "w7 w8"}]
GREEDY = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
TOOL = {"type": "function", "function": {"name": "w20", "description": "w21", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"word": "a<b"}}\n</tool_call>'


def prompt_of(server: Served, **body: Any) -> list[int]:
    answer = server.chat(**{"max_tokens": 1, "temperature": 0, "return_token_ids": True, **body})
    found: list[int] = answer["choices"][0]["prompt_token_ids"]
    return found


def test_a_chat_is_that_of_the_engine(server: Served, llm: LLM) -> None:
    [output] = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    [choice] = server.chat(messages=QUESTION, **GREEDY)["choices"]
    assert choice["message"] == {"role": "assistant", "content": output.text}
    chunks = server.chunks(PATH, messages=QUESTION, **GREEDY)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""} and not any("role" in delta for delta in deltas[1:])
    assert "".join(delta["content"] for delta in deltas) == output.text
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1 and {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_a_chat_without_a_length_goes_on_to_the_end_of_the_context(server: Served, llm: LLM) -> None:
    usage = server.chat(messages=QUESTION, temperature=0, ignore_eos=True)["usage"]
    assert usage["total_tokens"] == llm.plan.max_context


def test_both_names_of_the_length(server: Served) -> None:
    assert server.chat(messages=QUESTION, max_completion_tokens=3, max_tokens=9, ignore_eos=True)["usage"]["completion_tokens"] == 3


def test_logprobs(server: Served, llm: LLM) -> None:
    [output] = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=4, logprobs=3, ignore_eos=True))
    body = {**GREEDY, "messages": QUESTION, "max_tokens": 4, "logprobs": True, "top_logprobs": 3}
    [choice] = server.chat(**body)["choices"]
    assert output.logprobs is not None
    for entry, found in zip(output.logprobs, choice["logprobs"]["content"], strict=True):
        assert (found["token"], found["logprob"]) == (f" w{entry.token_id}", entry.logprob)
        assert bytes(found["bytes"]).decode() == found["token"]
        assert [(top["token"], top["logprob"]) for top in found["top_logprobs"]] == [(f" w{t}", value) for t, value in entry.top.items()]
    pieces = [chunk["choices"][0]["logprobs"] for chunk in server.chunks(PATH, **body)]
    assert [entry for piece in pieces if piece for entry in piece["content"]] == choice["logprobs"]["content"]


def test_several_answers(server: Served) -> None:
    answer = server.chat(messages=QUESTION, n=3, seed=1, max_tokens=6, ignore_eos=True)
    alone = [server.chat(messages=QUESTION, seed=1 + i, max_tokens=6, ignore_eos=True)["choices"][0]["message"] for i in range(3)]
    assert [choice["message"] for choice in answer["choices"]] == alone
    streamed: dict[int, str] = {}
    for chunk in server.chunks(PATH, messages=QUESTION, n=3, seed=1, max_tokens=6, ignore_eos=True):
        [choice] = chunk["choices"]
        streamed[choice["index"]] = streamed.get(choice["index"], "") + choice["delta"]["content"]
    assert [streamed[i] for i in range(3)] == [message["content"] for message in alone]


def test_messages_in_the_forms_that_clients_send(server: Served) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "w7 "}, {"type": "text", "text": "w8"}]}]
    assert prompt_of(server, messages=parts) == prompt_of(server, messages=QUESTION) == [5, 1, 7, 8, 4, 3]
    developer = [{"role": "developer", "content": "w9"}, *QUESTION]
    assert prompt_of(server, messages=developer) == [5, 2, 9, 4, 1, 7, 8, 4, 3]
    answered = [*QUESTION, {"role": "assistant", "content": "w9", "refusal": None, "tool_calls": []}]
    assert prompt_of(server, messages=answered) == [5, 1, 7, 8, 4, 3, 9, 4, 3]
    assert prompt_of(server, messages=answered, continue_final_message=True, add_generation_prompt=False) == [5, 1, 7, 8, 4, 3, 9]
    assert prompt_of(server, messages=QUESTION, chat_template_kwargs={"flag": True}) == [5, 1, 7, 8, 4, 6, 3]


def test_tools_and_their_results_reach_the_template(server: Served) -> None:
    assert prompt_of(server, messages=QUESTION, tools=[TOOL]) == [5, 20, 1, 7, 8, 4, 3]
    assert prompt_of(server, messages=QUESTION, tools=[TOOL], tool_choice="none") == [5, 1, 7, 8, 4, 3]
    call = {"id": "call_1", "type": "function", "function": {"name": "w20", "arguments": '{"word": "w22"}'}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "w23"}
    conversation = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    assert prompt_of(server, messages=conversation, tools=[TOOL]) == [5, 20, 1, 7, 8, 4, 3, 22, 4, 3, 23, 4, 3]


def test_calls_in_the_text_are_answered_as_calls(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model makes no calls itself: its tokens are spelled as one, in pieces."""
    pieces = [
        "so: <tool",
        '_call>{"name": "look", ',
        '"arguments": {"word": "b"}}',
        "</tool_call>",
        "<tool_call>",
        '{"name": "f"}',
        "</tool_call>END",
    ]

    class Spelled(Detokenizer):
        def __init__(self, *args: Any, **how: Any) -> None:
            super().__init__(*args, **how)
            self.left = iter(pieces)

        def push(self, token: int) -> str:
            return next(self.left)

    monkeypatch.setattr(outputs, "Detokenizer", Spelled)
    body = {**GREEDY, "messages": QUESTION, "tools": [TOOL], "stop": "END"}
    wanted = [{"name": "look", "arguments": '{"word": "b"}'}, {"name": "f", "arguments": "{}"}]
    [choice] = server.chat(**body)["choices"]
    assert [call["function"] for call in choice["message"]["tool_calls"]] == wanted
    assert (choice["message"]["content"], choice["finish_reason"]) == ("so: ", "tool_calls")
    choices = [chunk["choices"][0] for chunk in server.chunks(PATH, **body)]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert [call["function"] for call in calls] == wanted and [call["index"] for call in calls] == [0, 1]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "so: " and choices[-1]["finish_reason"] == "tool_calls"
    # Nothing is looked for where no calls were offered.
    [choice] = server.chat(**body | {"tool_choice": "none"})["choices"]
    assert choice["message"]["content"].count("<tool_call>") == 2 and choice["finish_reason"] == "stop"


def test_special_tokens_in_text_by_option(tmp_path: Path) -> None:
    """In messages, prompts and where ids are asked for; the template's own stay what they are."""
    folder = tmp_path / "demo"
    shutil.copytree(model_folder("demo"), folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}")
    [name, token], found = ["<|endoftext|>", 0], []
    bodies: list[dict[str, Any]] = [{"prompt": f"a{name}b"}, {"messages": [{"role": "user", "content": f"a{name}b"}]}]
    with LLM(folder, variant="none", runtime="eager") as llm:
        for option in ("encode", "text"):
            with serving(llm, special_tokens_in_text=option) as server:
                counts = [server.post("/tokenize", body).json()["tokens"].count(token) for body in bodies]
                routes = (server.complete, server.chat)
                ids = [route(**body, max_tokens=1, return_token_ids=True) for route, body in zip(routes, bodies, strict=True)]
                assert [each["choices"][0]["prompt_token_ids"].count(token) for each in ids] == counts
                found.append(counts)
    assert found == [[1, 2], [0, 1]]

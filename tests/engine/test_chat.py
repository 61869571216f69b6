"""Conversations: the checkpoint's own chat template, and tokenizers that are read and used safely."""

from __future__ import annotations

import io
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer

from graphspec import LLM, SamplingParams
from graphspec.cli import main as cli
from graphspec.errors import CheckpointError, RequestError
from graphspec.text.conversation import Conversation
from graphspec.text.tokenizer import Tokenizer
from tests.support.engines import SMALL, add_tokenizer, ids, mirror_pair

if TYPE_CHECKING:
    from pathlib import Path

BOS = 5
TEMPLATE = (
    "{{ bos_token }} {% for message in messages %}{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no such role') }}{% endif %}"
    "{% if message.role == 'user' %}w1{% elif message.role == 'system' %}w2{% else %}w3{% endif %} "
    "{{ message.content }} w4 {% endfor %}{% if add_generation_prompt %}w3{% endif %}"
)
QUESTION = [{"role": "user", "content": "w7 w8"}]
LONGER = [{"role": "system", "content": "w20"}, *QUESTION, {"role": "assistant", "content": "w9"}, {"role": "user", "content": "w10"}]
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = mirror_pair(tmp_path_factory.mktemp("chat")).target
    add_tokenizer(target, bos=BOS, chat_template=TEMPLATE)
    return target


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, variant="none", **SMALL)


def templated(folder: Path, messages: list[dict[str, str]]) -> list[int]:
    """As transformers has it."""
    return AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_a_conversation_has_the_ids_of_transformers_template(llm: LLM, folder: Path) -> None:
    assert templated(folder, QUESTION) == [BOS, 1, 7, 8, 4, 3]
    [one] = llm.chat(QUESTION, GREEDY)
    many = llm.chat([QUESTION, LONGER], GREEDY)
    prompts = [templated(folder, messages) for messages in (QUESTION, LONGER)]
    assert [output.prompt_token_ids for output in many] == prompts and one.prompt_token_ids == prompts[0]
    assert ids(many) == ids(llm.generate(prompts, GREEDY)) and one.token_ids == many[0].token_ids
    streamed = [token for event in llm.stream_chat(QUESTION, GREEDY) for token in event.token_ids]
    assert streamed == one.token_ids


def test_a_text_gets_the_tokens_around_it_and_a_conversation_none_in_addition(llm: LLM) -> None:
    assert llm.tokenizer.encode("w7") == [BOS, 7]
    assert llm.tokenizer.chat(Conversation(QUESTION)).count(BOS) == 1


@pytest.mark.parametrize(
    ("messages", "part"),
    [
        ([], "at least one message"),
        ("w7", "a list of messages"),
        ({"role": "user", "content": "w7"}, "a list of messages"),
        (["w7"], r"messages\[0\]: expected an object"),
        ([{"role": "user"}], r"messages\[0\].content: expected text, found nothing"),
        ([{"role": "user", "content": None}], r"messages\[0\].content: expected text"),
        ([{"role": "user", "content": [{"type": "text", "text": "w7"}]}], r"messages\[0\].content: expected text"),
        ([{"role": 3, "content": "w7"}], r"messages\[0\].role: expected text"),
        ([{"role": "user", "content": "w7", "tool_calls": []}], "tool_calls"),
        ([{"role": "user", "content": "\ud800"}], "U\\+D800"),
        ([{"role": "tool", "content": "w7"}], "no such role"),
    ],
)
def test_what_is_no_conversation_is_refused_and_alone(llm: LLM, messages: Any, part: str) -> None:
    with pytest.raises(RequestError, match=part):
        llm.chat(messages, GREEDY)
    if messages and isinstance(messages, list):
        good, bad = llm.chat([QUESTION, messages], GREEDY)
        assert good.finish_reason == "length" and bad.finish_reason == "error" and bad.error is not None


def test_a_name_reaches_the_template(tmp_path: Path) -> None:
    add_tokenizer(tmp_path, chat_template="{{ messages[0].name }} {{ messages[0].content }}")
    assert Tokenizer(tmp_path).chat(Conversation([{"role": "user", "content": "w7", "name": "w6"}])) == [6, 7]


def test_half_a_surrogate_pair_is_no_text(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"^prompt: expected text in UTF-8, found the lone surrogate U\+D800 at character 2"):
        llm.generate("w1\ud800")
    assert [output.error is None for output in llm.generate(["w1", "\ud800"], GREEDY)] == [True, False]


@pytest.mark.parametrize(
    ("template", "part"),
    [
        (None, "found none"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
    ],
)
def test_a_template_that_is_missing_or_broken(tmp_path: Path, template: str | None, part: str) -> None:
    add_tokenizer(tmp_path, chat_template=template)
    with pytest.raises(CheckpointError, match=f"chat_template.*{part}"):
        Tokenizer(tmp_path).chat(Conversation(QUESTION))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"model": {"type": "Nonsense"}}'),
        ("tokenizer_config.json", '{"tokenizer_class": "Unheard"}'),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", '{"tokenizer_class": 3}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 3}}'),
    ],
)
def test_a_damaged_tokenizer_is_one_message(tmp_path: Path, name: str, text: str) -> None:
    add_tokenizer(tmp_path)
    if name == "tokenizer_config.json":
        (tmp_path / "tokenizer.json").unlink()
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match="tokenizer files") as caught:
        Tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_code_of_a_checkpoint_never_runs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.json").unlink()
    keys = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(keys))
    mark = tmp_path / "mark"
    (tmp_path / "own.py").write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\ny\ny\n"))
    with pytest.raises(SystemExit) as exit_:
        cli.main(["generate", f"model.path={tmp_path}", "variant=none", "runtime=eager", "prompt=w1"])
    reported = capsys.readouterr().err
    assert exit_.value.code == 2 and not mark.exists()
    assert reported.count("\n") == 1 and "own.Own" in reported and "never run" in reported


def generate(folder: Path, capsys: Any, *words: str) -> tuple[Any, str]:
    overrides = [
        f"model.path={folder}",
        "variant=none",
        "runtime=eager",
        "sampling.max_tokens=4",
        "sampling.ignore_eos=true",
        "format=json",
    ]
    with pytest.raises(SystemExit) as exit_:
        cli.main(["generate", *overrides, *words])
    reported = capsys.readouterr()
    return json.loads(reported.out.splitlines()[-1]) if exit_.value.code == 0 else exit_.value.code, reported.err


def test_the_command_line_chats(folder: Path, llm: LLM, tmp_path: Path, capsys: Any) -> None:
    wanted = ids(llm.chat([QUESTION, [{"role": "system", "content": "w20"}, *QUESTION], LONGER], GREEDY))
    raw = ids(llm.generate("w7 w8", GREEDY))
    assert raw[0] != wanted[0]

    def reported(*words: str) -> list[list[int]]:
        document, _ = generate(folder, capsys, *words)
        return [row["token_ids"] for row in document["outputs"]]

    assert reported("prompt=w7 w8") == raw
    assert reported("prompt=w7 w8", "chat=true") == wanted[:1]
    assert reported("prompt=w7 w8", "chat=true", "system=w20") == wanted[1:2]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join([json.dumps({"messages": LONGER}), json.dumps({"prompt": "w7 w8"}), json.dumps("w7 w8")]))
    assert reported(f"prompt_file={file}") == [wanted[2], *raw, *raw]
    assert reported(f"prompt_file={file}", "chat=true") == [wanted[2], wanted[0], wanted[0]]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ('{"messages": []}', "at least one message"),
        ('{"messages": [{"role": "user"}]}', "messages[0].content"),
        ('{"messages": "w1"}', "list of at least one message"),
        ('{"messages": [{"role": "user", "content": "w1"}], "prompt": "w1"}', '"prompt" or "messages"'),
    ],
)
def test_a_line_whose_messages_are_none_is_named(folder: Path, tmp_path: Path, capsys: Any, line: str, part: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(line)
    code, reported = generate(folder, capsys, f"prompt_file={file}")
    assert code == 2 and reported.startswith(f"graphspec: {file}:1") and part in reported and reported.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["generate", "prompt=w1", "system=w2"], "system: expected null without chat=true"),
        (["inspect", "prompt=w1", "chat=true"], "only graphspec generate applies a chat template"),
        (["generate", "prompt=w1", "chat=maybe"], "chat: expected"),
    ],
)
def test_chat_where_it_means_nothing(words: list[str], part: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(words)
    reported = capsys.readouterr().err
    assert exit_.value.code == 2 and part in reported and reported.count("\n") == 1

"""``graphspec chat``: lines through a pipe, a terminal with colours and Ctrl-C, and the drafter that it takes by default."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from graphspec import LLM, SamplingParams
from graphspec.cli import chat, demo_chat
from graphspec.cli import main as cli
from graphspec.config.compose import load_config
from tests.engine.test_chat import BOS, TEMPLATE
from tests.support.engines import CHAIN, SMALL, add_tokenizer, mirror_pair

WORDS = ["runtime=eager", "runtime.prefill_chunks=[8,16]", "runtime.page_size=4", "sampling.max_tokens=8", "sampling.ignore_eos=true"]
PATIENCE = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = mirror_pair(tmp_path_factory.mktemp("chat"), max_positions=4096).target
    add_tokenizer(target, bos=BOS, chat_template=TEMPLATE)
    return target


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, variant="eagle3", draft=folder.parent / "eagle3", page_size=4, **SMALL, **CHAIN)


PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)


def test_an_answer_is_that_of_the_conversation_and_marks_accepted_drafts(llm: LLM) -> None:
    talk = chat.Chat(llm, PARAMS)
    pieces = list(talk.ask("w7 w8"))
    [output] = llm.chat([{"role": "user", "content": "w7 w8"}], PARAMS)
    assert "".join(piece for piece, _ in pieces) == output.text == talk.messages[-1]["content"]
    # The mirror drafts perfectly: four drafts and a bonus token a cycle, after the token of the prompt.
    ends = [sum(count for _, count in output.timing.bursts[: n + 1]) for n in range(len(output.timing.bursts))]
    assert talk.answers[0].drafted == [place + 1 not in ends for place in range(12)] and sum(talk.answers[0].drafted) >= 7
    assert "2 tokens a cycle" not in talk.stats()[0] and "12 tokens, " in talk.stats()[0]


def test_a_turn_reads_only_what_is_new(llm: LLM) -> None:
    talk = chat.Chat(llm, PARAMS, "w20 w21 w22")
    list(talk.ask("w7 w8 w9 w10"))
    list(talk.ask("w11"))
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant", "user", "assistant"]
    first, second = (answer.metrics for answer in talk.answers)
    assert first is not None and second is not None and second.cached_tokens >= 16 > first.cached_tokens
    [whole] = llm.chat(talk.messages[:-1], PARAMS)
    assert whole.text == talk.messages[-1]["content"]


def test_an_answer_that_is_stopped_stays_in_the_conversation(llm: LLM) -> None:
    talk = chat.Chat(llm, PARAMS)
    pieces = talk.ask("w7 w8")
    begin = next(pieces)[0] + next(pieces)[0]
    pieces.close()
    assert talk.messages[-1] == {"role": "assistant", "content": begin} and talk.answers[0].stopped
    assert len(list(talk.ask("w9"))) == 12 and len(talk.messages) == 4


def test_a_conversation_that_is_refused_is_as_before(llm: LLM) -> None:
    talk = chat.Chat(llm, SamplingParams(max_tokens=4, temperature=0))
    with pytest.raises(chat.GraphspecError):
        list(talk.ask(" ".join(["w7"] * 5000)))
    assert talk.messages == [] and talk.answers == []


def test_lines_break_at_words_and_keep_their_colours() -> None:
    console = Console(width=10, file=io.StringIO())
    text = Text("one two ").append("three four\n  x = 1", "green")
    found = chat.lines_of(text, console)
    assert [line.plain.rstrip() for line in found] == ["one two", "three four", "  x = 1"]
    assert [[span.style for span in line.spans] for line in found] == [[], ["green"], ["green"]]


def test_a_pipe_gives_lines_and_gets_text(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "w7 w8\n\n/stats\nw9\n/system w20\nw7\n/nothing\n/quit\nw8\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    with pytest.raises(SystemExit) as ended:
        cli.main(["chat", f"model={folder}", *WORDS])
    found = capsys.readouterr()
    assert (ended.value.code, found.err) == (0, "")
    said = found.out.splitlines()
    answers = [line for line in said if re.match(r" w\d", line)]
    assert len(answers) == 3 and "\x1b" not in found.out
    assert sum(line.startswith("last answer: 8 tokens") for line in said) == 1
    assert any("system message: w20" in line for line in said) and any("no such command: /nothing" in line for line in said)


def test_a_model_without_a_template_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(LLM, "warm_up", lambda *_, **__: pytest.fail("compiled"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["chat", "model=demo", "runtime=eager"])
    assert ended.value.code == 2 and "chat template" in capsys.readouterr().err


class Terminal:
    """``graphspec chat`` in a terminal of its own."""

    def __init__(self, *words: str) -> None:
        main, end = pty.openpty()
        command = [sys.executable, "-m", "graphspec", "chat", *words]
        env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
        # A job in the background inherits ignored interrupts.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=env, start_new_session=True)
        signal.signal(signal.SIGINT, before)
        os.close(end)
        self.main, self.text = main, ""

    def until(self, pattern: str) -> str:
        """What is shown up to ``pattern``; it is taken."""
        limit = time.monotonic() + PATIENCE
        while (found := re.search(pattern, self.text)) is None:
            assert time.monotonic() < limit, self.text
            if select.select([self.main], [], [], 1.0)[0]:
                self.text += os.read(self.main, 65536).decode(errors="replace")
        shown, self.text = self.text[: found.end()], self.text[found.end() :]
        return shown

    def type(self, text: str) -> None:
        os.write(self.main, text.encode())


def test_a_terminal_shows_drafts_in_colour_and_ctrl_c_stops_the_answer(folder: Path) -> None:
    shape = ["variant=eagle3", f"variant.draft={folder.parent / 'eagle3'}", "variant.num_steps=4", "variant.topk=1"]
    terminal = Terminal(f"model={folder}", *shape, *WORDS, "sampling.max_tokens=4000", "variant.num_draft_tokens=5")
    try:
        terminal.until(r"\n> |> $")
        terminal.type("w7 w8\n")
        terminal.until(r"\d+ tokens, \d+\.\d+ a cycle")
        # Accepted draft tokens are green.
        terminal.until(r"\x1b\[32m")
        terminal.process.send_signal(signal.SIGINT)
        terminal.until(r"(?s)tokens a cycle.*?stopped")
        terminal.type("/reset\n")
        # Only at the prompt is Ctrl-D an end of input: before it, the terminal is not in readline's mode.
        terminal.until("a new conversation[^>]*> ")
        terminal.type("\x04")
        assert terminal.process.wait(PATIENCE) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.main)


def test_a_model_without_a_head_is_drafted_by_its_own_text(folder: Path) -> None:
    completed = chat.conversation_words([f"model={folder}"])
    config = load_config(*completed)
    assert (config.variant.name, config.variant.num_steps, config.variant.num_draft_tokens) == ("ngram", 2, 3)
    assert config.adaptive.depths == [0]
    assert config.chat and config.sampling.max_tokens is None
    for given in (["variant=none"], [f"variant.draft={folder.parent / 'eagle3'}"]):
        assert chat.conversation_words([f"model={folder}", *given]) == [f"model={folder}", *given, "experiment=chat"]
    assert chat.conversation_words(["experiment=demo_chain"]) == ["experiment=demo_chain"]
    # A model that comes with a head keeps the default drafter.
    assert load_config(*chat.conversation_words(["model=demo"])).variant.name == "eagle3"


def test_the_demo_asks_a_model_that_chats(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load_config(*demo_chat.demo_words([f"model={folder}"])).chat
    assert demo_chat.demo_words(["model=demo"]) == ["model=demo"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("graphspec.facts.published._in_hub_cache", lambda _: None)
    monkeypatch.setattr("graphspec.facts.published._installed", lambda _: None)
    assert demo_chat.demo_words([]) == [demo_chat.SMALL]
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "graphspec fetch" in said


def test_the_demo_of_a_model_that_chats(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tiny model: an answer, a tree, and a table with equal tokens for every kind of prompt."""
    monkeypatch.setattr(demo_chat, "PROMPTS", {"chat": "w7 w8", "edit": "w9 w8 w9 w8 w9"})
    console, notes = (Console(file=io.StringIO(), width=100) for _ in range(2))
    words = chat.conversation_words([f"model={folder}", f"variant.draft={folder.parent / 'eagle3'}", "variant.num_steps=4",
                                     "variant.topk=1", "variant.num_draft_tokens=5", *WORDS])  # fmt: skip
    # Depths that change are the drafter's: plain decoding next to it has none.
    demo_chat.run_conversation_demo(load_config(*words, "adaptive.depths=[2]", "prompt=w7 w8"), console, notes)
    shown = console.file.getvalue()
    begin, tree, table, end = (shown.index(part) for part in ("> w7 w8", "Draft tree of cycle", "decoding speed", "Why it"))
    assert begin < tree < table < end and shown.count("8 equal") == 2 and "S, K, N = 4, 1, 5" in shown
    monkeypatch.setattr(demo_chat, "measure", lambda engines, *_: _unequal(engines))
    with pytest.raises(demo_chat.ResourceError, match="other tokens"):
        demo_chat.run_conversation_demo(load_config(*words, "prompt=w7 w8"), console, notes)


def _unequal(engines: dict[str, LLM]) -> tuple[dict[str, float], dict[str, object]]:
    outputs = {name: llm.generate([[1, 2, 3 + place]], PARAMS)[0] for place, (name, llm) in enumerate(engines.items())}
    return dict.fromkeys(engines, 1.0), outputs

"""Progress of loading and building: drawn on a terminal, logged elsewhere, switched off, and gone when it is over."""

from __future__ import annotations

import io
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from graphspec.api import llm as module
from graphspec.api.llm import LLM, SamplingParams
from graphspec.engine import kernel_choice
from graphspec.graphs.cycle import Cycle
from graphspec.host import progress
from graphspec.host.progress import Bars, Calls, LogLines, automatic, display_of
from tests.support.engines import CHAIN, Pair, mirror_pair, prompts
from tests.support.interrupts import Fault
from tests.support.plans import plan

GREEDY = SamplingParams(max_tokens=3)
NOISE = SamplingParams(max_tokens=3, temperature=1.0, top_k=4, seed=1)


class Terminal(io.StringIO):
    """A standard error that says it is a terminal."""

    def isatty(self) -> bool:
        return True

    def drawn(self) -> str:
        """What was written since the last look, without control sequences."""
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return mirror_pair(tmp_path_factory.mktemp("pair"))


@contextmanager
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    before, stderr = {*threading.enumerate()}, Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        yield stderr
        assert sys.stderr is stderr, "it is given back"
    for thread in {*threading.enumerate()} - before:
        if thread.name != "graphspec engine":
            thread.join(60)
            assert not thread.is_alive(), "nothing draws any more"


def make(pair: Pair, **arguments: Any) -> LLM:
    return LLM(pair.target, "eagle3", pair.draft, "eager", prefill_chunks=[16], **CHAIN, **arguments)


def test_a_terminal_shows_what_is_loaded_and_built(pair: Pair, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    with on_terminal(monkeypatch) as terminal:
        llm = make(pair)
        shown = terminal.drawn()
        assert "load target" in shown and "load draft" in shown
        llm.generate(prompts(1), GREEDY)
        assert re.search(r"build .* \d/\d .* cycle of 1 lanes, depth \d, greedy", terminal.drawn())
        list(llm.stream(prompts(1), NOISE))
        assert re.search(r"build .* \d/\d .* prefill of 16 tokens, noise\+truncate", terminal.drawn())
        llm.generate(prompts(1), NOISE)
        assert terminal.drawn() == "", "all of it was there"
    assert capfd.readouterr().out == ""


def test_elsewhere_one_line_says_what_was_built_and_how_long_it_took(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "graphspec"):
        llm = make(pair)
        llm.generate(prompts(1), GREEDY)
    lines = [record.getMessage() for record in caplog.records if record.name == "graphspec"]
    assert [line.partition(":")[0] for line in lines] == ["load target", "load draft", "build"]
    assert re.fullmatch(r"load target: (\d+) of \1 in [\d.]+ s", lines[0])
    assert re.fullmatch(r"build: 2 of 2 in [\d.]+ s: prefill of 16 tokens, greedy; cycle of 1 lanes, depth \d, greedy", lines[2])
    assert all(record.levelno == logging.INFO for record in caplog.records)


def test_it_can_be_switched_off_or_taken_over(pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[str, int, int]] = []
    with caplog.at_level(logging.INFO, "graphspec"), on_terminal(monkeypatch) as terminal:
        for choice in (False, lambda *words: seen.append(words)):
            make(pair, progress=choice).generate(prompts(1), GREEDY, progress=False)
        assert terminal.drawn() == ""
    assert [record for record in caplog.records if record.name == "graphspec"] == []
    assert {phase for phase, _, _ in seen} == {"load target", "load draft", "build"}
    assert [entry for entry in seen if entry[0] == "build"] == [("build", done, 2) for done in range(3)]


def test_a_failed_build_leaves_no_bar(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(pair)
    build: Callable[..., Any] = Cycle._build

    def broken(*arguments: Any) -> None:
        build(*arguments)
        raise Fault

    with on_terminal(monkeypatch) as terminal, monkeypatch.context() as patch:
        patch.setattr(Cycle, "_build", broken)
        with pytest.raises(Fault):
            llm.warm_up()
        assert "build" in terminal.drawn()
    llm.generate(prompts(1), GREEDY)


def test_compiling_the_kernels_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: the next engine finds them loaded."""
    loaded: list[str] = []

    def load(name: str) -> None:
        loaded.append(name)
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())

    monkeypatch.delitem(sys.modules, kernel_choice.NATIVE, raising=False)
    monkeypatch.setattr(kernel_choice, "import_module", load)
    plans = [plan("none", runtime={"name": name}) for name in ("eager", "compiled")]
    with on_terminal(monkeypatch) as terminal:
        kernel_choice.load_native(plans[0], automatic())
        assert (terminal.drawn(), loaded) == ("", [])
        kernel_choice.load_native(plans[1], automatic())
        assert "load C++ kernels" in (shown := terminal.drawn()) and "the first time on a machine they are compiled" in shown
        kernel_choice.load_native(plans[1], automatic())
        assert (terminal.drawn(), loaded) == ("", ["graphspec.kernels.native"])


@pytest.mark.parametrize(("rank", "kind"), [(0, LogLines), (1, Calls)])
def test_one_rank_shows_it(pair: Pair, monkeypatch: pytest.MonkeyPatch, rank: int, kind: type) -> None:
    monkeypatch.setattr(module.ranks, "existing_ranks", lambda size, device: SimpleNamespace(rank=rank))
    monkeypatch.setattr(LLM, "_plan", lambda *_: None)
    monkeypatch.setattr(LLM, "_open", lambda *_: None)
    assert isinstance(make(pair, tensor_parallel=2)._new_display(), kind)


def test_where_bars_can_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """FORCE_COLOR, which many build servers set, makes no terminal of a file; a notebook needs its widgets."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    closed = io.StringIO()
    closed.close()
    for stderr in (None, closed, io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stderr)
        assert isinstance(automatic(), LogLines)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert isinstance(automatic(), Bars) and isinstance(display_of(True)(), Bars)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    for found, kind in ((None, LogLines), (object(), Bars)):
        monkeypatch.setattr(progress, "find_spec", lambda name, found=found: found)
        assert isinstance(automatic(), kind)


def test_what_the_program_prints_meanwhile_stays_on_its_stream(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with on_terminal(monkeypatch) as terminal:
        bars = automatic()
        bars("build", 0, 2, "[bold]a cycle")
        print("an answer")
        bars("build", 2, 2)
        assert "[bold]a cycle" in (shown := terminal.drawn()) and "an answer" not in shown
    assert capsys.readouterr().out == "an answer\n"


def test_lines_of_a_log_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends of phases, and how far one is that goes on for long."""
    from rich.console import Console

    clock, written = SimpleNamespace(now=0.0), io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    with progress.progress_bars(Console(file=written, force_terminal=False), lines=True) as show:
        for done, clock.now in ((0, 0.0), (1, 10.0), (2, 29.0), (3, 31.0), (4, 50.0), (5, 62.0), (6, 63.0)):
            show("compile", done, 6)
    assert written.getvalue() == "compile 3/6\ncompile 5/6\ncompile 6/6\n"

"""``graphspec demo``: text wrapped at words, a tree, the same tokens from every engine, and what another process builds."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from graphspec.api.llm import LLM
from graphspec.cli import demo, demo_chat
from graphspec.cli.input import DEMO_PROMPT
from graphspec.config.compose import load_config
from graphspec.engine.request import SamplingParams
from perf import first_token

ROOT = Path(__file__).parents[2]
SHORT = [
    "experiment=demo_chain",
    "runtime=eager",
    "runtime.max_rows=1",
    "runtime.buckets=[1]",
    "sampling.max_tokens=12",
    "model.max_context=128",
]


def wrapped(pieces: list[str], width: int) -> str:
    wrap = demo.WordWrap(width)
    return "".join(wrap.push(piece, last=index == len(pieces) - 1) for index, piece in enumerate(pieces))


@given(st.lists(st.text(st.sampled_from("ab ç日\n\t"), max_size=12), min_size=1, max_size=20), st.integers(2, 12))
def test_wrapped_lines_fit_and_keep_every_character(pieces, width):
    found = wrapped(pieces, width)
    assert all(cell_len(line) <= width for line in found.split("\n"))
    assert "".join(found.split()) == "".join("".join(pieces).split())
    assert found == wrapped(["".join(pieces)], width), "where the stream was cut does not show"


def test_lines_break_between_words_and_short_ones_stay():
    assert wrapped(["a lo", "ng li", "ne here\n    x = 1\n"], 11) == "a long line\nhere\n    x = 1\n"
    assert wrapped(["one ", "unbreakable"], 6) == "one \nunbrea\nkable"
    assert wrapped(["  def f():\n\n"], 10) == "  def f():\n\n"


@pytest.fixture(scope="module")
def shown() -> str:
    console = Console(file=io.StringIO(), width=100)
    demo.run_demo(load_config(*SHORT), DEMO_PROMPT, console, console)
    return console.file.getvalue()


def test_demo_streams_eagerly_draws_a_tree_and_ends_in_the_table(shown):
    begin, text, tree, table = (shown.index(part) for part in ("eager program", DEMO_PROMPT, "S, K, N = 4, 4, 16", "decoding speed"))
    assert begin < text < tree < table
    assert shown.count("├── ") > 1
    assert re.search(r"│   [├└]── [+-]", shown), "branches under a branch"
    assert shown.rstrip().splitlines()[-1].split()[0] == "none", "the last row of the table"
    assert max(map(cell_len, shown.splitlines())) <= demo.DEMO_WIDTH
    llm = LLM.from_config(load_config("experiment=demo_none", *SHORT[1:]))
    [output] = llm.generate(DEMO_PROMPT, SamplingParams(max_tokens=12))
    assert f"gave the same {len(output.token_ids)} tokens" in shown
    assert "".join(output.text.split()) in "".join(shown[text:tree].split())


def test_a_text_that_ends_at_once_is_not_timed():
    console = Console(file=io.StringIO(), width=100)
    demo.run_demo(load_config(*SHORT, "sampling.max_tokens=1"), DEMO_PROMPT, console, console)
    shown = console.file.getvalue()
    assert "nothing to time" in shown and "decoding speed" not in shown and "the cycle of" not in shown


def test_a_draft_that_can_only_be_a_chain_is_drawn_as_one():
    sampled = ["sampling=sample", "accept=rejection"]
    assert demo.eager_engine(load_config(*SHORT, *sampled), DEMO_PROMPT, 1).plan.shape.is_chain
    assert not demo.eager_engine(load_config(*SHORT), DEMO_PROMPT, 1).plan.shape.is_chain


def test_the_first_token_is_detected_and_medians_are_taken():
    prompt = f"From the eager program\n{DEMO_PROMPT}"
    assert not first_token.streamed("From the eager")
    assert not first_token.streamed(prompt)
    assert first_token.streamed(f"{prompt}\ndef")
    runs = [
        {"caches": c, "first_token_seconds": t, "total_seconds": 10 * t}
        for c, t in (("cold", 3.0), ("warm", 1.0), ("cold", 5.0), ("cold", 4.0))
    ]
    cold, warm = first_token.medians(runs)
    assert (cold["first_token_seconds"], cold["total_seconds"], cold["rounds"], warm["total_seconds"]) == (4.0, 40.0, 3, 10.0)


def test_the_picture_is_small_and_shows_the_demo_of_a_model_that_chats():
    picture = ROOT / "docs" / "demo.svg"
    assert picture.stat().st_size < 200_000
    source = picture.read_text(encoding="utf-8")
    assert "http" not in source.replace("http://www.w3.org/2000/svg", ""), "it makes no network request"
    drawn = "".join("".join(ET.fromstring(source).itertext()).split())
    expected = ("graphspec demo", demo_chat.QUESTION, "Draft tree of cycle", "decoding speed", *demo_chat.PROMPTS, "equal", "Why it pays")
    assert [words for words in expected if "".join(words.split()) not in drawn] == []
    assert len(re.findall(r"[├└]──[+-]'", drawn)) >= 1
    assert "docs/demo.svg" in (ROOT / "README.md").read_text(encoding="utf-8")

"""Streams give the output of generate, in pieces; text comes in whole characters."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphspec.api.llm import SamplingParams
from graphspec.api.outputs import StreamEvent
from graphspec.errors import RequestError
from graphspec.text.tokenizer import Detokenizer, Tokenizer
from tests.support.engines import CHAIN, MIRROR_VOCAB, TREE, Pair, add_tokenizer, continued, mirror_pair, prompts, watch_schedulers, words
from tests.support.lockstep import Lockstep

PLAIN: dict[str, Any] = {"variant": "none"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    made = mirror_pair(tmp_path_factory.mktemp("pair"), noise=0.8)
    add_tokenizer(made.target)
    return made


@pytest.mark.parametrize("shape", [PLAIN, CHAIN, {**TREE, "cycles_in_flight": 3}], ids=["none", "chain", "tree-ahead"])
def test_a_stream_adds_up_to_the_output(pair: Pair, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    Lockstep(monkeypatch)
    llm = pair.llm(**shape, max_rows=3)
    prompt_ids: list[list[int]] = [*prompts(5), [MIRROR_VOCAB]]
    lengths = ((14, 0.0), (1, 0.0), (9, 1.0), (2, 0.0), (20, 0.0), (3, 0.0))
    params = [SamplingParams(max_tokens=n, temperature=t, seed=n) for n, t in lengths]
    outputs = llm.generate(prompt_ids, params)
    events: dict[int, list[StreamEvent]] = defaultdict(list)
    for event in llm.stream(prompt_ids, params):
        events[event.index].append(event)
    for output in outputs:
        mine = events[output.index]
        assert [t for e in mine for t in e.token_ids] == output.token_ids
        assert "".join(e.text for e in mine) == output.text == continued(output.token_ids)
        assert [e.finished for e in mine] == [False] * (len(mine) - 1) + [True]
        assert [e.finish_reason for e in mine] == [None] * (len(mine) - 1) + [output.finish_reason]
        assert all(e.token_ids for e in mine[:-1])
    assert outputs[-1].finish_reason == "error"
    assert {o.index: (o.error, o.seed) for o in outputs} == {i: (mine[-1].error, mine[-1].seed) for i, mine in events.items()}
    assert outputs[-1].error == f"prompt[0]: expected a token id from 0 to {MIRROR_VOCAB - 1}, found {MIRROR_VOCAB}"
    assert [o.error for o in outputs[:-1]] == [None] * 5
    assert len(events[0]) > 2
    assert llm.metrics is not None
    assert llm.metrics.cycles == sum(o.metrics.cycles for o in outputs)


@pytest.mark.parametrize("run_ahead", [0, 2])
@pytest.mark.parametrize("events", [0, 1, 4])
def test_closing_a_stream_frees_what_it_held(pair: Pair, run_ahead: int, events: int, monkeypatch: pytest.MonkeyPatch) -> None:
    Lockstep(monkeypatch)
    made = watch_schedulers(monkeypatch)
    llm = pair.llm(**CHAIN, cycles_in_flight=run_ahead + 1, max_rows=2)
    stream = llm.stream(prompts(4), SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(events):
        next(stream)
    if events:
        assert made[0].allocator.num_used > 0
    stream.close()
    llm.warm_up()  # ends when nothing is in flight any more
    assert llm.cycle.in_flight == 0
    (scheduler,) = made
    assert scheduler.allocator.num_used == 0
    assert not scheduler.busy
    assert {r.finish_reason for r in scheduler.seen} == ({"abort"} if events else set()), "a stream that is not iterated is never queued"


def test_a_bad_request_alone_raises_at_the_first_event(pair: Pair) -> None:
    with pytest.raises(RequestError, match="found -5"):
        next(iter(pair.llm(**PLAIN).stream([-5])))


class Slow:
    """A tokenizer of bytes that can only decode all tokens at once, with the methods that :class:`Detokenizer` uses."""

    spelling = SimpleNamespace(separable=False)

    def hidden(self, **_: object) -> frozenset[int]:
        return frozenset()

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(tokens).decode(errors="replace")


class SlowWords(Slow):
    """A space before every word but the first, as sentencepiece decoders do."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return words(tokens)


@pytest.fixture(scope="module")
def fast_bytes(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A token for every byte; 256 is a special token."""
    from tokenizers import Tokenizer as Rust
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    rust = Rust(models.BPE({letter: byte for byte, letter in bytes_to_unicode().items()}, []))
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens(["<end>"])
    folder = tmp_path_factory.mktemp("bytes")
    PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<end>").save_pretrained(folder)
    return Tokenizer(folder)


def pieces(tokenizer: Any, tokens: list[int], **how: Any) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **how)
    return [*map(detokenizer.push, tokens), detokenizer.rest()]


@given(st.text(st.characters(exclude_characters="\ufffd", exclude_categories=("Cs",)), max_size=12))
def test_characters_split_over_tokens_come_out_whole(fast_bytes: Tokenizer, text: str) -> None:
    for tokenizer in (fast_bytes, Slow()):
        found = pieces(tokenizer, list(text.encode()))
        assert "".join(found) == text
        assert not any("\ufffd" in piece for piece in found)
        assert found[-1] == ""


@given(st.lists(st.integers(0, 256), max_size=12))
def test_what_is_no_text_is_not_lost(fast_bytes: Tokenizer, tokens: list[int]) -> None:
    for skip in (True, False):
        whole = fast_bytes.decode(tokens, skip_special_tokens=skip)
        assert "".join(pieces(fast_bytes, tokens, skip_special_tokens=skip)) == whole
        assert ("<end>" in whole) == (not skip and 256 in tokens)


def test_a_character_is_held_until_it_is_whole(fast_bytes: Tokenizer) -> None:
    for tokenizer in (fast_bytes, Slow()):
        assert pieces(tokenizer, [*"a€b".encode(), 0xE2, 0x82]) == ["a", "", "", "€", "b", "", "", fast_bytes.decode([0xE2, 0x82])]


def test_bytes_that_change_what_was_read_before_them(tmp_path: Any) -> None:
    """Bytes that are no text spoil the ones next to them; what was returned stays, and what follows is not lost."""
    from tokenizers import Tokenizer as Rust
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    rust = Rust(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)} | {"A": 256}, [], byte_fallback=True))
    rust.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    PreTrainedTokenizerFast(tokenizer_object=rust).save_pretrained(tmp_path)
    assert "".join(pieces(Tokenizer(tmp_path), [66, 128, 256, 67, 256])) == "B\ufffdACA"


@given(st.lists(st.integers(0, MIRROR_VOCAB - 1), max_size=6))
def test_spaces_that_depend_on_the_token_before(pair: Pair, tokens: list[int]) -> None:
    for tokenizer in (Tokenizer(pair.target), SlowWords()):
        assert "".join(pieces(tokenizer, tokens)) == words(tokens)

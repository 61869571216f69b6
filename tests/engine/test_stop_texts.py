"""Stop texts end a request where they occur in its text, at any position within tokens and accepted runs."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphspec.api.llm import LLM, SamplingParams
from graphspec.api.outputs import OutputText, StopCheck, StopTexts, overlap
from graphspec.errors import RequestError
from graphspec.plan.buffers import Status
from tests.support.engines import CHAIN, TREE, Pair, add_tokenizer, continued, mirror_pair, prompts, watch_schedulers, words

PLAIN: dict[str, Any] = {"variant": "none"}
SHAPES = pytest.mark.parametrize("shape", [PLAIN, CHAIN, {**TREE, "cycles_in_flight": 3}], ids=["none", "chain", "tree-ahead"])
DEMO = Path("graphspec/demo/target")
LENGTH = 20


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    made = mirror_pair(tmp_path_factory.mktemp("pair"), noise=0.8)
    add_tokenizer(made.target, chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}")
    return made


class Syllables:
    """A tokenizer of short texts, with the methods that :class:`OutputText` uses."""

    spelling = SimpleNamespace(separable=False)
    texts = ("a", "b", "ab", "bab", "aab", "ca")

    def hidden(self, **_: object) -> frozenset[int]:
        return frozenset()

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(self.texts[token] for token in tokens)


def stopped(tokens: list[int], params: SamplingParams) -> tuple[str, int, str | None]:
    """Text, tokens and stop text by definition: after each token, does a stop text end in what it added?"""
    text = ""
    for count, token in enumerate(tokens, 1):
        known, text = len(text), text + Syllables.texts[token]
        if count > params.min_tokens:
            for end in range(known + 1, len(text) + 1):
                found = [stop for stop in params.stop or () if text[:end].endswith(stop)]
                if found:
                    stop = max(found, key=len)
                    return text[: end if params.include_stop_str_in_output else end - len(stop)], count, stop
    return text, len(tokens), None


@given(st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=8), st.text("abc", max_size=30))
def test_the_automaton_equals_the_naive_search(stops: list[str], text: str) -> None:
    found, state = StopTexts(stops), 0
    for place, character in enumerate(text, 1):
        state, seen = found.step(state, character), text[:place]
        assert found.ends[state] == max((stop for stop in stops if seen.endswith(stop)), key=len, default="")
        assert found.held[state] == max(overlap(seen, stop) for stop in stops)


def test_the_work_does_not_grow_with_the_number_of_stop_texts() -> None:
    """Steps and falls together are at most two for each character."""

    class Counting(StopTexts):
        steps = 0

        def step(self, state: int, character: str) -> int:
            while state and character not in self._children[state]:
                Counting.steps += 1
                state = self._fail[state]
            Counting.steps += 1
            return self._children[state].get(character, 0)

    text = "ab" * 2000
    for count in (1, 32):
        found, state = Counting(["ab" * (10 + place) + "c" for place in range(count)]), 0
        Counting.steps = 0
        for character in text:
            state = found.step(state, character)
        assert Counting.steps <= 2 * len(text)


@given(
    st.lists(st.integers(0, 5), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
    st.integers(0, 4),
    st.lists(st.integers(1, 4), min_size=12, max_size=12),
)
def test_text_up_to_the_first_stop_text(tokens: list[int], stops: list[str], include: bool, minimum: int, sizes: list[int]) -> None:
    params = SamplingParams(stop=stops, include_stop_str_in_output=include, min_tokens=minimum)
    expected, count, stop = stopped(tokens, params)
    text = OutputText(Syllables(), params)  # type: ignore[arg-type]
    check = StopCheck(lambda: OutputText(Syllables(), params))  # type: ignore[arg-type]
    shown, output, ended, left = "", list[int](), False, list(tokens)
    for size in sizes:
        run, left = left[:size], left[size:]
        # What an interrupt undid comes once more.
        check.cut(output, run[:1], Status.LIVE)
        kept, status = check.cut(output, run, Status.LIVE if left else Status.LENGTH)
        output += kept
        ended = ended or status == Status.STOPPED
        last = ended or not left
        fresh = text.push(kept, last=last)
        shown += fresh
        assert expected.startswith(shown), "nothing is taken back"
        if last:
            break
    assert (shown, output, text.stop) == (expected, tokens[:count], stop)
    assert ended == (stop is not None)


@SHAPES
def test_a_stop_text_ends_the_run_it_is_in(pair: Pair, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = watch_schedulers(monkeypatch)
    llm, prompt = pair.llm(**shape, max_rows=4), prompts(1)[0]
    whole = pair.greedy(prompt, LENGTH, ignore_eos=True)
    # A word, two of them, the end of one and the beginning of the next, and one that never comes.
    second = words(whole[6:8])
    options: list[dict[str, Any]] = [
        {"stop": f"w{whole[5]}"},
        {"stop": [second, "x"], "include_stop_str_in_output": True},
        {"stop": second[1:-1]},
        {"stop": "w44"},
        {"stop": f"w{whole[2]}", "min_tokens": 3},
        {},
    ]
    params = [SamplingParams(max_tokens=LENGTH, ignore_eos=True, logprobs=1, **one) for one in options]
    outputs = llm.generate([prompt] * len(params), params)
    text = continued(whole)
    for output, one in zip(outputs, params, strict=True):
        found = [
            (count, stop)
            for count in range(one.min_tokens + 1, LENGTH + 1)
            for stop in one.stop or ()
            if continued(whole[:count]).find(stop, max(0, len(continued(whole[: count - 1])) - len(stop) + 1)) >= 0
        ]
        count, stop = min(found, default=(LENGTH, None))
        assert (output.token_ids, output.finish_reason, output.stop_reason) == (whole[:count], "stop" if stop else "length", stop)
        assert output.logprobs is not None and [entry.token_id for entry in output.logprobs] == output.token_ids
        assert sum(output.timing.cycle_tokens) == count - 1
        if stop is not None and one.min_tokens == 0:
            assert output.text == text[: text.index(stop) + (len(stop) if one.include_stop_str_in_output else 0)]
    assert [output.finish_reason for output in outputs] == ["stop", "stop", "stop", "length", "stop", "length"]
    (scheduler,) = made
    assert scheduler.allocator.num_used == 0
    assert not scheduler.busy


@SHAPES
def test_a_stream_holds_back_what_may_begin_a_stop_text(pair: Pair, shape: dict[str, Any]) -> None:
    llm, prompt_ids = pair.llm(**shape), prompts(4)
    texts = [continued(pair.greedy(prompt, LENGTH, ignore_eos=True)) for prompt in prompt_ids]
    params = [SamplingParams(max_tokens=LENGTH, ignore_eos=True, stop=[text[20:25], "w1 w2 w3"]) for text in texts]
    outputs = llm.generate(prompt_ids, params)
    events: dict[int, list[Any]] = defaultdict(list)
    for event in llm.stream(prompt_ids, params):
        events[event.index].append(event)
    for output, text, one in zip(outputs, texts, params, strict=True):
        mine, stop = events[output.index], (one.stop or ())[0]
        assert "".join(event.text for event in mine) == output.text == text[: text.index(stop)]
        assert [token for event in mine for token in event.token_ids] == output.token_ids
        assert [event.stop_reason for event in mine] == [None] * (len(mine) - 1) + [output.stop_reason]
        assert (mine[-1].finish_reason, output.stop_reason) == ("stop", stop)


def test_stop_ids_have_their_reason_and_the_chat_its_stop(pair: Pair) -> None:
    llm, prompt = pair.llm(**CHAIN), prompts(1)[0]
    whole = pair.greedy(prompt, LENGTH, ignore_eos=True)
    [output] = llm.generate(prompt, SamplingParams(max_tokens=LENGTH, stop_token_ids=[whole[4]], ignore_eos=True))
    assert (output.stop_reason, output.token_ids[-1], output.finish_reason) == (whole[4], whole[4], "stop")
    message = {"role": "user", "content": words(prompt)}
    [output] = llm.chat([message], sampling_params=SamplingParams(max_tokens=LENGTH, stop=f"w{whole[3]}", ignore_eos=True))
    assert (output.stop_reason, output.token_ids) == (f"w{whole[3]}", whole[: whole.index(whole[3]) + 1])
    assert "".join(e.text for e in llm.stream_chat([message], sampling_params=SamplingParams(max_tokens=4))) == continued(whole[:4])


def test_preempted_rows_stop_where_they_would_have(pair: Pair) -> None:
    prompt_ids = prompts(4, (9, 16))
    texts = [continued(pair.greedy(prompt, 30, ignore_eos=True)) for prompt in prompt_ids]
    params = [SamplingParams(max_tokens=30, ignore_eos=True, stop=text[60:66]) for text in texts]
    outputs = pair.llm(**CHAIN, page_size=4, num_pages=26).generate(prompt_ids, params)
    assert [output.text for output in outputs] == [text[: text.index(text[60:66])] for text in texts]


def test_stop_strings_of_transformers() -> None:
    """On the demo model, whose tokens are parts of words and spaces."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer, model = AutoTokenizer.from_pretrained(DEMO), LlamaForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    llm, prompt = LLM(runtime="eager", **CHAIN), "class A:\n    def a(self):\n        return 1\n\n    "
    token_BT = torch.tensor([tokenizer.encode(prompt)])
    [whole] = llm.generate([prompt], SamplingParams(max_tokens=30))
    stops = [[whole.text[at : at + 6], "zzz"] for at in (3, 10, 20, 31)]
    outputs = llm.generate([prompt] * len(stops), [SamplingParams(max_tokens=40, stop=stop) for stop in stops])
    for stop, output in zip(stops, outputs, strict=True):
        how = {"max_new_tokens": 40, "do_sample": False, "stop_strings": stop, "tokenizer": tokenizer, "pad_token_id": 0}
        found = model.generate(token_BT, attention_mask=torch.ones_like(token_BT), **how)[0, token_BT.shape[1] :].tolist()
        assert output.token_ids == found
        assert output.finish_reason == "stop"
        assert output.text == tokenizer.decode(found).split(stop[0])[0]


def test_stop_texts_need_text(tmp_path: Path) -> None:
    bare = mirror_pair(tmp_path)
    for name, value in (("stop", "a"), ("echo", True), ("bad_words", ["a"])):
        with pytest.raises(RequestError, match=f"^sampling.{name}: expected a checkpoint with a tokenizer"):
            bare.llm(**PLAIN).generate([1, 2], SamplingParams(**{name: value}))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"^sampling.detokenize: expected true with sampling.stop"):
        SamplingParams(stop="a", detokenize=False)

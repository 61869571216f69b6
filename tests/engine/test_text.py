"""Ids and texts are those of ``tokenizer.json``, for every form of tokenizer; a text goes on where the one before it ends."""

from __future__ import annotations

import json
import threading
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from graphspec.api.outputs import OutputText
from graphspec.engine.request import SamplingParams
from graphspec.errors import CheckpointError, RequestError
from graphspec.text.conversation import Conversation
from graphspec.text.tokenizer import Detokenizer, Tokenizer
from tests.support.tokenizer_forms import EOS, FORMS, MARK, TEMPLATE, write_config, write_form

TEXTS = ("the capital of France", " the  capital", "the</s>Paris", "it's 450 of 12345\n\n    x.\n", "", "Paris ß 🙂\u0141", "<mark>is")
CLASSES = (
    "PreTrainedTokenizerFast", "LlamaTokenizer", "LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer", "GemmaTokenizer", "T5Tokenizer",
    "BertTokenizer", "Unheard", None,
)  # fmt: skip
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma": "GemmaForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
every_form = pytest.mark.parametrize("form", FORMS)


@cache
def tokenizer(form: str) -> Tokenizer:
    return Tokenizer(write_form(Path(mkdtemp()), form, chat_template=TEMPLATE))


@every_form
@pytest.mark.parametrize("around", [False, True], ids=["bare", "around"])
def test_ids_and_texts_are_those_of_the_file(form: str, around: bool, tmp_path: Path) -> None:
    """Whatever class and family the other files name, and however the file's last texts were cut and filled up."""
    file = tmp_path / "tokenizer.json"
    write_form(tmp_path, form, around=around)
    library = Library.from_file(str(file))
    cut = Library.from_file(str(file))
    cut.enable_truncation(3)
    cut.enable_padding(length=9)
    cut.save(str(file))
    with_tokens, bare = ([library.encode(text, add_special_tokens=special).ids for text in TEXTS] for special in (True, False))
    lists = [*with_tokens, [*range(library.get_vocab_size())]]
    decoded = [[library.decode(ids, skip_special_tokens=skip) for ids in lists] for skip in (False, True)]
    chat = library.encode("<s>[INST] the capital [/INST]", add_special_tokens=False).ids
    question = Conversation([{"role": "user", "content": "the capital"}])
    for name in CLASSES:
        write_config(tmp_path, chat_template=TEMPLATE, **{"tokenizer_class": name} if name else {})
        for model_type, architecture in FAMILIES.items():
            (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "architectures": [architecture]}))
            found = Tokenizer(tmp_path)
            assert [found.encode(text) for text in TEXTS] == with_tokens, (name, model_type)
            assert [found.words(text) for text in TEXTS] == bare, (name, model_type)
            assert [[found.decode(ids, skip_special_tokens=skip) for ids in lists] for skip in (False, True)] == decoded
        assert found.chat(question) == chat, name


def words_of(form: str) -> st.SearchStrategy[list[int]]:
    """Ids that follow each other: any one, or all bytes of a character where those are tokens."""
    library = tokenizer(form).library
    count, first = library.get_vocab_size(), library.token_to_id("<0x00>")
    if first is None:
        return st.integers(0, count - 1).map(lambda token: [token])
    characters = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=1)
    return st.one_of(st.integers(0, first - 1).map(lambda token: [token]), characters.map(lambda one: [first + b for b in one.encode()]))


def text_of(form: str, prompt: list[int], output: list[int], **how: Any) -> str:
    pieces = Detokenizer(tokenizer(form), prompt=prompt, **how)
    return "".join([*map(pieces.push, output), pieces.rest()])


@every_form
@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_a_text_goes_on_where_the_prompt_ends(form: str, data: st.DataObject, skip: bool) -> None:
    """Cut anywhere, also inside a character: what is whole of the prompt, and the output's text, are the text of all tokens."""
    ids = [token for word in data.draw(st.lists(words_of(form), max_size=30)) for token in word]
    cut = data.draw(st.integers(0, len(ids)))
    prompt, output = ids[:cut], ids[cut:]
    pieces = Detokenizer(tokenizer(form), skip_special_tokens=skip)
    whole = "".join(map(pieces.push, prompt))
    alone = tokenizer(form).decode(prompt, skip_special_tokens=skip)
    assert "\ufffd" in alone or alone == whole
    found = text_of(form, prompt, output, skip_special_tokens=skip)
    assert whole + found == tokenizer(form).decode(ids, skip_special_tokens=skip)
    params = SamplingParams(skip_special_tokens=skip, stop=["\0never"])
    assert OutputText(tokenizer(form), params, prompt).push(output, last=True) == found
    echo = SamplingParams(skip_special_tokens=skip, echo=True)
    assert OutputText(tokenizer(form), echo, prompt).push(output, last=True) == whole + found


@every_form
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_bytes_of_tokens_are_those_of_their_text(form: str, data: st.DataObject) -> None:
    ids = [token for word in data.draw(st.lists(words_of(form), max_size=12)) for token in word]
    if tokenizer(form).spelling.separable:
        bytes_ = b"".join(tokenizer(form).token_bytes(token, first=place == 0) for place, token in enumerate(ids))
        text = tokenizer(form).decode(ids)
        assert "\ufffd" in text or bytes_ == text.encode()
        assert "\ufffd" in text or bytes_.decode() == text


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=20))
def test_bytes_that_are_no_text_lose_no_token(ids: list[int]) -> None:
    """A decoder with byte fallback takes back what it wrote for a run of bytes once the run is no text; what was returned stays."""
    form = "SentencePiece, Llama 2"
    library = tokenizer(form).library
    ids = [token for token in ids if token < library.get_vocab_size()]
    text, whole = text_of(form, [], ids), tokenizer(form).decode(ids, skip_special_tokens=True)
    assert text == whole or "\ufffd" in whole
    assert sum(letter in "abcPFINST" for letter in text) >= sum(letter in "abcPFINST" for letter in whole)


def test_tokens_of_parts_of_characters_are_bytes() -> None:
    spelled = {form: tokenizer(form).library.token_to_id for form in FORMS}
    one = tokenizer("SentencePiece, Llama 2")
    of = spelled["SentencePiece, Llama 2"]
    assert [one.token_bytes(of(name)) for name in ("\u2581Paris", "Paris", "<0xF0>", "<0x0A>", "</s>")] == [
        b" Paris", b"Paris", b"\xf0", b"\n", b"</s>",
    ]  # fmt: skip
    assert one.token_bytes(of("\u2581Paris"), first=True) == b"Paris"
    assert one.token_bytes(10**6) == b"" and one.token_text(of("<0xF0>")) == "\ufffd"
    byte_level = tokenizer("byte-level, GPT-2")
    assert {byte_level.token_bytes(token) for token in range(4, 260)} == {bytes((byte,)) for byte in range(256)}
    pieces = tokenizer("WordPiece")
    assert [pieces.token_bytes(spelled["WordPiece"](name)) for name in ("the", "##ing", ".")] == [b" the", b"ing", b"."]


def test_a_prompt_is_not_read_again_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only lists can be decoded here: they stay short, however long the prompt is."""
    one, form = tokenizer("suffixes"), "suffixes"
    lengths: list[int] = []
    decode = one.decode

    def measured(tokens: list[int], **how: Any) -> str:
        lengths.append(len(tokens))
        return decode(tokens, **how)

    monkeypatch.setattr(one, "decode", measured)
    prompt = list(range(5, 105)) * 20
    text_of(form, prompt, prompt[:200])
    assert max(lengths) < 40


def test_stop_texts_are_found_in_special_tokens() -> None:
    """The text before one is the same as without: special tokens are left out of it."""
    one = tokenizer("SentencePiece, Llama 2")
    prompt, paris, the = one.words("the capital"), one.library.token_to_id("\u2581Paris"), one.library.token_to_id("\u2581the")
    output = [the, MARK, paris, EOS, the]
    for stop, count, text in (("</s>", 4, " the Paris"), ("k> Paris", 3, " the"), ("</s> then", 5, " the Paris the"), ("<mark", 2, " the")):
        for include in (False, True):
            found = OutputText(one, SamplingParams(stop=stop, include_stop_str_in_output=include), prompt)
            shown = "".join(found.push([token], last=place == len(output)) for place, token in enumerate(output, 1))
            ended = stop if stop != "</s> then" else None
            assert (shown, found.count, found.stop) == (text + (ended or "") * include, count, ended)


def test_special_tokens_that_are_kept() -> None:
    one = tokenizer("SentencePiece, Llama 2")
    output = [one.library.token_to_id("\u2581the"), MARK, one.library.token_to_id("Paris"), EOS]

    def text(**how: Any) -> str:
        return OutputText(one, SamplingParams(**how), one.words("the")).push(output, last=True)

    assert text() == " theParis" and text(skip_special_tokens=False) == " the<mark>Paris</s>"
    assert text(kept_special_tokens=["<mark>", "no token"]) == " the<mark>Paris" == text(kept_special_tokens="<mark>")
    assert text(kept_special_tokens=["<mark>"], stop="k>P") == " the<mar"
    with pytest.raises(RequestError, match=r"^sampling.kept_special_tokens\[0\]: expected text, found 3"):
        SamplingParams(kept_special_tokens=[3])  # type: ignore[list-item]
    with pytest.raises(RequestError, match=r"^sampling.detokenize: expected true with sampling.kept_special_tokens"):
        SamplingParams(kept_special_tokens=["<mark>"], detokenize=False)


def test_threads_do_not_wait_for_each_other() -> None:
    """A text that is encoded keeps nobody from decoding another."""
    one, decoded = tokenizer("words"), threading.Event()

    class Slow:
        def encode_batch_fast(self, texts: list[str], **_: object) -> list[Any]:
            assert decoded.wait(60)
            return one.library.encode_batch_fast(texts)

        def decode_batch(self, lists: list[list[int]], **_: object) -> list[str]:
            decoded.set()
            return one.library.decode_batch(lists)

    other = Tokenizer(one.folder)
    other.library = Slow()  # type: ignore[assignment]
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append(other.encode("Paris is")))
    thread.start()
    assert other.decode([4, 5]) == "Paris is"
    thread.join()
    assert found == [[4, 5]]


def test_a_checkpoint_without_the_file_is_converted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = write_form(tmp_path, "byte-level, GPT-2", tokenizer_class="GPT2Tokenizer", chat_template=TEMPLATE)
    expected = Tokenizer(made)
    data = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(data["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(merge) for merge in data["merges"]))
    (tmp_path / "tokenizer.json").unlink()
    assert caplog.messages == []
    found = Tokenizer(tmp_path)
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "transformers converted" in caplog.messages[0]
    question = Conversation([{"role": "user", "content": "the"}])
    assert (found.words("the capital of 450"), found.chat(question)) == (expected.words("the capital of 450"), expected.chat(question))
    assert list(found.ends) == [EOS]


def test_chat_templates_in_files_of_their_own(tmp_path: Path) -> None:
    write_form(tmp_path, "words")
    assert not Tokenizer(tmp_path).has_chat_template
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    question = [{"role": "user", "content": "Paris"}]
    assert Tokenizer(tmp_path).chat(Conversation(question)) == [1, 4, 2]
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages[0].content }} {{ tools[0].name }}")
    found = Tokenizer(tmp_path)
    assert found.chat(Conversation(question)) == [1, 4, 2] and found.chat(Conversation(question, tools=[{"name": "is"}])) == [4, 5]
    named = [{"name": "default", "template": "{{ messages[0].content }}"}, {"name": "tool_use", "template": "the"}]
    for file in (tmp_path / "chat_template.jinja", tmp_path / "additional_chat_templates" / "tool_use.jinja"):
        file.unlink()
    write_config(tmp_path, chat_template=named)
    found = Tokenizer(tmp_path)
    assert found.chat(Conversation(question)) == [4] and found.chat(Conversation(question, tools=[{"name": "is"}])) == [6]


@pytest.mark.parametrize(
    ("file", "keys", "message"),
    [
        ("tokenizer_config.json", {"eos_token": 5}, r"eos_token: expected the text of a token.* found 5"),
        ("tokenizer_config.json", {"eos_token": {"text": "</s>"}}, r"eos_token: expected the text of a token"),
        ("special_tokens_map.json", {"bos_token": ["<s>"]}, r"special_tokens_map.json: bos_token: expected the text of a token"),
        ("tokenizer_config.json", {"model_max_length": "x"}, r"model_max_length: expected a number, found 'x'"),
    ],
)
def test_names_of_odd_types_are_one_message(tmp_path: Path, file: str, keys: dict[str, Any], message: str) -> None:
    write_form(tmp_path, "words")
    (tmp_path / file).write_text(json.dumps(keys))
    with pytest.raises(CheckpointError, match=message) as caught:
        Tokenizer(tmp_path)
    assert "\n" not in str(caught.value)

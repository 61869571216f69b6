"""What ends a text: the model's configuration, the tokenizer's end of text, and the end of a turn in its chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graphspec import LLM, SamplingParams, Structured
from graphspec.cli.inspect import spelled_ends
from graphspec.text.conversation import Conversation
from graphspec.text.tokenizer import Tokenizer
from tests.support.engines import CHAIN, MIRROR_VOCAB, SMALL, Pair, add_tokenizer, mirror_pair
from tests.support.tokenizer_forms import BOS, EOS, MARK, write_config, write_form

CHATML = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<mark>\n{% endfor %}[assistant]"
TURN = 21
"""Of the mirror pair's tokens, the one that its chat template writes after an answer."""
NAMED = 20
"""And the one that its tokenizer names."""


@pytest.mark.parametrize(
    ("template", "config", "expected"),
    [
        (None, {}, [EOS]),
        (None, {"eos_token": None}, []),
        (None, {"eos_token": "unheard"}, []),
        (None, {"eos_token": {"content": "<mark>", "special": True}}, [MARK]),
        (CHATML, {}, [EOS, MARK]),
        (CHATML, {"eos_token": "<mark>"}, [MARK]),
        # As Llama 2 writes it.
        ("{% for m in messages %}{{ bos_token }}[x] {{ m.content }} {{ eos_token }}{% endfor %}", {"eos_token": "<mark>"}, [MARK]),
        ("{% for m in messages %}<s>{{ m.content }} </s>{% endfor %}", {"eos_token": None}, [EOS]),
        # Nothing ends an answer: the next turn begins, with a token of its own, or no special token follows at once.
        ("{% for m in messages %}{{ '<unk>' if m.role == 'user' else '<mark>' }}{{ m.content }}{% endfor %}<mark>", {}, [EOS]),
        ("{% for m in messages %}<mark>{{ m.content }}{% endfor %}", {}, [EOS]),
        ("{% for m in messages %}{{ m.content }}<s>{% endfor %}", {}, [EOS]),
        ("{% for m in messages %}{{ m.content }} or <mark>{% endfor %}", {}, [EOS]),
        ("{{ messages[0].content }}<mark>", {}, [EOS]),
        ("{% for m in messages %}{{ m.content | upper }}<mark>{% endfor %}", {}, [EOS, MARK]),
        ("{% for m in messages %}{{ raise_exception('no') }}{% endfor %}", {}, [EOS]),
        ("{{", {}, [EOS]),
    ],
)
def test_ends_that_a_tokenizer_states(tmp_path: Path, template: str | None, config: dict[str, Any], expected: list[int]) -> None:
    write_form(tmp_path, "SentencePiece, Llama 2", **{"chat_template": template} if template else {}, **config)
    assert list(Tokenizer(tmp_path).ends) == expected


def test_the_map_of_special_tokens_is_read_as_transformers_does(tmp_path: Path) -> None:
    write_form(tmp_path, "words", chat_template="{{ eos_token }}")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<mark>"}}))
    any_ = Conversation([{"role": "user", "content": "x"}])
    assert list(Tokenizer(tmp_path).ends) == [MARK] == Tokenizer(tmp_path).chat(any_)
    added = {str(EOS): {"content": "</s>", "special": True}}
    write_config(tmp_path, chat_template="{{ eos_token }}", added_tokens_decoder=added)
    assert list(Tokenizer(tmp_path).ends) == [EOS] == Tokenizer(tmp_path).chat(any_)
    assert BOS not in Tokenizer(tmp_path).ends


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    made = mirror_pair(tmp_path_factory.mktemp("pair"))
    template = f"{{% for m in messages %}} {{{{ m.content }}}} w{TURN}{{% endfor %}}"
    add_tokenizer(made.target, chat_template=template)
    data = json.loads((made.target / "tokenizer.json").read_text())
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    data["added_tokens"] = [{"id": token, "content": f"w{token}", **special} for token in (NAMED, TURN)]
    (made.target / "tokenizer.json").write_text(json.dumps(data))
    config = json.loads((made.target / "tokenizer_config.json").read_text())
    (made.target / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": f"w{NAMED}"}))
    return made


@pytest.mark.parametrize("shape", [{"variant": "none"}, CHAIN], ids=["none", "chain"])
def test_every_end_ends_a_request(pair: Pair, shape: dict[str, Any]) -> None:
    """Prompts of ids too, and wherever the ends count: the plan, ``ignore_eos``, ``min_tokens``, and what ``inspect`` prints."""
    llm = pair.llm(**shape)
    assert llm.plan.target.eos_token_ids == (MIRROR_VOCAB - 1, NAMED, TURN)
    assert spelled_ends(llm) == [
        f"{NAMED} ' w{NAMED}' (eos_token of the tokenizer)",
        f"{TURN} ' w{TURN}' (chat template)",
        f"{MIRROR_VOCAB - 1} ' w{MIRROR_VOCAB - 1}' (configuration)",
    ]
    for end in llm.plan.target.eos_token_ids:
        bias = {end: 100.0}
        for prompt in ([1, 2, 3], "w1 w2 w3"):
            [output] = llm.generate(prompt, SamplingParams(max_tokens=6, logit_bias=bias))
            assert (output.token_ids, output.finish_reason, output.stop_reason) == ([end], "stop", None)
        [output] = llm.generate([1, 2], SamplingParams(max_tokens=6, logit_bias=bias, ignore_eos=True))
        assert output.token_ids == [end] * 6
        [output] = llm.generate([1, 2], SamplingParams(max_tokens=6, logit_bias=bias, min_tokens=2))
        assert len(output.token_ids) == 3 and output.token_ids[-1] == end and not set(output.token_ids[:2]) & set(llm.ends)
        [output] = llm.generate([1, 2], SamplingParams(max_tokens=6, logit_bias=bias, stop=[f"w{end}"], ignore_eos=True))
        assert (output.token_ids, output.stop_reason) == ([end], f"w{end}")


def test_a_grammar_may_end_with_each_of_them(pair: Pair) -> None:
    llm = pair.llm(variant="none")
    for end in (NAMED, TURN):
        params = SamplingParams(max_tokens=4, structured=Structured(choice=[" w7 w8"]), logit_bias={end: 50.0})
        [output] = llm.generate([1, 2], params)
        assert (output.token_ids, output.text, output.finish_reason) == ([7, 8, end], " w7 w8", "stop")


def test_a_tokenizer_that_can_not_be_read_leaves_token_ids(tmp_path: Path, pair: Pair) -> None:
    for file in pair.target.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.json").write_text("{")
    llm = LLM(tmp_path, variant="none", **SMALL)
    assert llm.plan.target.eos_token_ids == (MIRROR_VOCAB - 1,)
    assert len(llm.generate([1, 2], SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False))[0].token_ids) == 3


def test_ends_of_the_demo_are_those_of_its_configuration() -> None:
    assert list(LLM(variant="none", runtime="eager").ends.items()) == [(0, "configuration")]

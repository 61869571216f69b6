"""Structured output: tokens are those of plain decoding with the same grammar, and every text parses, for all drafters and runtimes."""

from __future__ import annotations

import json
import random
import re
from functools import partial
from typing import Any

import pytest
import torch

from graphspec import LLM, SamplingParams, Structured
from graphspec.api.grammar import Grammars, RowGrammar, first_children
from graphspec.engine.engine import Engine
from graphspec.errors import RequestError
from graphspec.graphs.cycle import Cycle
from graphspec.graphs.programs import PrefillKey
from graphspec.graphs.stages.stage import HostStage
from graphspec.shapes import SamplingClass
from tests.support.grammars import parses, random_structured
from tests.support.tape import TapeCapturer

CHAIN = {"variant": "eagle3", "num_steps": 4, "topk": 1, "num_draft_tokens": 5}
TREE = {"variant": "eagle3", "num_steps": 3, "topk": 3, "num_draft_tokens": 10}
TRIE = {"variant": "ngram_trie"}
NGRAM = {"variant": "ngram"}
NONE = {"variant": "none"}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["x", "yy"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
NESTED = Structured(grammar='root ::= "(" root ")" | "x"')
END = 0
"""The demo model's end-of-text id."""


def engine(**keys: Any) -> LLM:
    return LLM(runtime="eager", **{"max_rows": 8, "buckets": [1, 8], "prefill_chunks": [16, 64], **keys})


@pytest.fixture(scope="module")
def plain() -> LLM:
    return engine(**NONE)


@pytest.fixture(scope="module")
def tree() -> LLM:
    return engine(**TREE)


def requests() -> tuple[list[str], list[SamplingParams]]:
    """Grammars of every kind, greedy and sampled, among rows without one; and what else a request may ask."""
    rng = random.Random(5)
    kinds: list[dict[str, Any]] = [
        {"structured": Structured(json_schema=PERSON, any_whitespace=False)},
        {},
        {"structured": Structured(regex="(ab|cd){3,6}x"), "logprobs": 2},
        {"structured": Structured(choice=["class Foo:", "def", "é€"]), "repetition_penalty": 1.3},
        {"structured": NESTED, "logit_bias": {7: 3.0}},
        {"structured": Structured(json_schema=PERSON, any_whitespace=False), "frequency_penalty": 0.5, "presence_penalty": 0.2},
        *({"structured": random_structured(rng)} for _ in range(6)),
    ]
    params = [
        SamplingParams(max_tokens=50, seed=17 + place, temperature=(0, 0.9)[place % 2], top_p=0.95, **kind)
        for place, kind in enumerate(kinds)
    ]
    return ["def fib(n):\n", "class Stack:", "import re\n"] * (len(params) // 3), params


def run(llm: LLM, count: int | None = None) -> list[tuple[list[int], str, str]]:
    prompts, params = requests()
    return [(out.token_ids, out.text, out.finish_reason) for out in llm.generate(prompts[:count], params[:count])]


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[tuple[list[int], str, str]]:
    return run(plain)


def test_every_text_parses(expected: list[tuple[list[int], str, str]]) -> None:
    _, params = requests()
    structured = [(param.structured, *found) for param, found in zip(params, expected, strict=True) if param.structured is not None]
    assert len(structured) == 11
    for grammar, tokens, text, reason in structured:
        if grammar is NESTED:
            assert re.fullmatch(r"(\(*)x?\)*", text), text
            continue
        assert reason == "stop" and tokens[-1] == END, (grammar, text)
        assert parses(grammar, text), (grammar, text)


WAYS: dict[str, dict[str, Any]] = {
    "chain": CHAIN,
    "tree": TREE,
    "trie": TRIE,
    "target-only": {**TREE, "rule": "target_only"},
    "rejection": {**CHAIN, "rule": "rejection"},
    "rejection-of-blocks": {**CHAIN, "rule": "rejection", "block_verification": True},
    "mtp": {**TREE, "variant": "mtp"},
    "eagle": {**CHAIN, "variant": "eagle"},
    "ngram": NGRAM,
    "ngram-chain": {**CHAIN, "variant": "ngram"},
    "depths": {**CHAIN, "depths": [0, 2]},
}


@pytest.mark.parametrize("keys", WAYS.values(), ids=WAYS)
def test_tokens_are_those_of_plain_decoding(keys: dict[str, Any], expected: list[tuple[list[int], str, str]]) -> None:
    keys = dict(keys)
    rule = keys.pop("rule", "match")
    with engine(**keys, **({"rule": rule} if rule != "match" else {})) as llm:
        found = run(llm)
    if rule == "match":
        assert found == expected
        return
    # Another rule samples other tokens, of the same grammars; greedy, it has the same tokens.
    _, params = requests()
    for param, (tokens, text, reason), right in zip(params, found, expected, strict=True):
        if param.temperature == 0:
            assert (tokens, text, reason) == right
        elif param.structured is not None and param.structured is not NESTED:
            assert reason == "stop" and tokens[-1] == END and parses(param.structured, text), (param.structured, text)


def test_captured_segments_give_the_tokens_of_direct_launches(tree: LLM, expected: list[tuple[list[int], str, str]]) -> None:
    cycle = Cycle(
        tree.plan, tree.cycle.target, tree.cycle.draft, tree.cycle.kernels, capturer=partial(TapeCapturer, poisons=False)
    )  # fmt: skip
    llm = engine(**TREE)
    llm._engine.close()
    llm.cycle, llm._engine = cycle, Engine(cycle)
    with llm:
        assert run(llm, 4) == expected[:4]
    cut = {key: program for key, program in cycle.programs.items() if key.sampling.grammar}
    assert cut
    for key, program in cut.items():
        captured = [segment for segment in program.segments if not segment.on_host]
        assert len(captured) == (1 if isinstance(key, PrefillKey) else 3)
        before = [] if isinstance(key, PrefillKey) else ["forced_runs", "tree_to_host"]
        assert [stage.name for stage in program.on_host] == [*before, "grammar_masks"]


def test_rows_without_a_grammar_pay_one_launch(tree: LLM) -> None:
    """Also next to rows that have one, as soon as those have finished; programs of such a class serve no other rows."""
    alone = tree.generate("import os", SamplingParams(max_tokens=30))[0]
    keys = []
    launch = tree.cycle.launch

    def noted(key: Any, message: Any) -> int:
        keys.append((key.sampling.grammar, [grammar is not None for grammar in message.grammars], tree.cycle.in_flight))
        return launch(key, message)

    tree.cycle.launch = noted  # type: ignore[method-assign]
    try:
        both = tree.generate(
            ["import os", "x"], [SamplingParams(max_tokens=30), SamplingParams(structured=Structured(choice=["ab"]), max_tokens=9)]
        )
    finally:
        del tree.cycle.launch
    assert both[0].token_ids == alone.token_ids and both[1].text == "ab"
    load = tree.load()
    assert 0 < sum(times.count for times in load.with_grammar.values()) < sum(times.count for times in load.cycles.values())
    cycles = [entry for entry in keys if entry[1]]
    assert cycles and not keys[-1][0], "the last cycles are whole again"
    # A grammar's cycle is launched when everything before it was read.
    assert all(in_flight == 0 for _, grammars, in_flight in cycles if any(grammars) and len(grammars) == 2)
    for program in tree.cycle.programs.values():
        assert bool(program.on_host) == any(isinstance(stage, HostStage) for stage in program.stages)
    assert not any(program.on_host for key, program in tree.cycle.programs.items() if not key.sampling.grammar)


def test_preemption_and_few_rows_change_nothing(expected: list[tuple[list[int], str, str]]) -> None:
    with engine(**TREE, page_size=4, num_pages=24) as llm:
        seen = []
        preempt = llm._engine.scheduler._preempt
        llm._engine.scheduler._preempt = lambda: (seen.append(1), preempt())[1]  # type: ignore[method-assign, func-returns-value]
        assert run(llm) == expected
    assert seen


def test_an_interrupted_step_changes_nothing(tree: LLM, expected: list[tuple[list[int], str, str]]) -> None:
    """Between the acceptance of a token and its counting, and in the middle of a launch."""
    prompts, params = requests()
    place = next(place for place, param in enumerate(params) if param.structured is not None and param.temperature > 0)
    failed: list[str] = []
    fill = RowGrammar.fill

    def once(self: RowGrammar, *args: Any) -> None:
        if len(failed) < 2:
            failed.append("x")
            self._known = None
            raise KeyboardInterrupt
        fill(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        other = tree.submit("while True:", SamplingParams(max_tokens=40))
        patch.setattr(RowGrammar, "fill", once)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                tree.generate(prompts[place], params[place])
        while not other.ended:
            other.wait()
    assert len(failed) == 2
    assert tree.generate(prompts[place], params[place])[0].token_ids == expected[place][0]


def test_abort_leaves_the_others_alone(tree: LLM, expected: list[tuple[list[int], str, str]]) -> None:
    prompts, params = requests()
    stream = tree.submit(prompts[0], SamplingParams(max_tokens=200, structured=Structured(regex="[ab]{190,}")))
    stream.wait()
    stream.abort()
    assert tree.generate(prompts[0], params[0])[0].token_ids == expected[0][0]


def test_each_sample_follows_its_own_grammar(plain: LLM, tree: LLM) -> None:
    params = SamplingParams(n=4, seed=3, temperature=1.0, max_tokens=40, structured=Structured(regex="[a-z]{2,9}!"))
    outputs = [[out.token_ids for out in llm.generate("x = ", params)] for llm in (plain, tree)]
    assert outputs[0] == outputs[1]
    assert len({tuple(tokens) for tokens in outputs[0]}) > 1


def test_stop_text_and_stop_id_end_before_the_grammar_does(plain: LLM, tree: LLM) -> None:
    grammar = Structured(regex="(ab){5}")
    for stop, text in (({"stop": ["ba"]}, "a"), ({"stop_token_ids": plain.tokenizer.words("b")}, "ab")):
        for llm in (plain, tree):
            out = llm.generate("x", SamplingParams(structured=grammar, logit_bias={plain.tokenizer.words("ab")[0]: -100}, **stop))[0]
            assert (out.text, out.finish_reason) == (text, "stop")


def test_a_budget_cuts_the_text(plain: LLM, tree: LLM) -> None:
    params = SamplingParams(structured=Structured(regex="[ab]{90}"), max_tokens=7)
    first, second = (llm.generate("x", params)[0] for llm in (plain, tree))
    assert first.token_ids == second.token_ids and len(first.token_ids) == 7 and first.finish_reason == "length"


def test_a_refused_token_ends_its_request_alone(tree: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = Structured(regex="[ab]{9}")
    monkeypatch.setattr(RowGrammar, "fill", lambda self, tokens, parents, mask: None)
    outputs = tree.generate(["x", "y"], [SamplingParams(structured=grammar, max_tokens=20), SamplingParams(max_tokens=20)])
    assert [out.finish_reason for out in outputs] == ["error", "length"]
    assert outputs[0].error is not None and "expected a token that the grammar allows" in outputs[0].error


def test_text_before_a_tag_is_free(plain: LLM, tree: LLM) -> None:
    """The grammar begins inside the output, and may begin inside a draft: after the tag's first text, wherever that comes."""
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags", "triggers": ["def "],
            "tags": [{"begin": "def ", "content": {"type": "regex", "pattern": "<[0-9]{3}>"}, "end": ":"}],
        },
    }  # fmt: skip
    for temperature in (0, 0.9):
        params = SamplingParams(structured=Structured(structural_tag=tag), max_tokens=60, seed=1, temperature=temperature)
        first, second = (llm.generate("def first(x):\n    return x\n\n\n", params)[0] for llm in (plain, tree))
        assert first.token_ids == second.token_ids
        tags = [part for part in first.text.split("def ")[1:] if len(part) > 5]
        assert tags and all(re.match(r"<[0-9]{3}>:", part) for part in tags), first.text


# One row's grammar, by itself.


def grammar(llm: LLM, structured: Structured) -> RowGrammar:
    return Grammars(llm.plan).grammar(SamplingParams(structured=structured), (END,), lambda: llm.tokenizer)


def bits(mask_Vw: torch.Tensor) -> set[int]:
    return {32 * word + bit for word, value in enumerate(mask_Vw.tolist()) for bit in range(32) if value >> bit & 1}


def test_masks_of_a_tree(plain: LLM) -> None:
    """Legal and illegal siblings, a branch below an illegal one, an end inside the tree and what follows it, and no node."""
    a, b, c, d, e = (plain.tokenizer.words(text)[0] for text in "abcde")
    one = grammar(plain, Structured(regex="a(bc|d)e"))
    assert one.follow([a])
    tokens = [a, d, e, b, END, d, e, END, -1]
    parents = [-1, 0, 1, 0, 2, 3, 5, 4, -1]
    assert first_children(tokens, parents) == ([1, 2, 4, 5, 7, 6, -1, -1, -1], [-1, 3, -1, -1, -1, -1, -1, -1, -1])
    mask = torch.full((9, 64), -1, dtype=torch.int32)
    one.fill(tokens, parents, mask)
    assert {a, c, e, END}.isdisjoint(bits(mask[0])) and {b, d} <= bits(mask[0])
    assert bits(mask[1]) == {e} and bits(mask[2]) == {END}
    assert bits(mask[4]) == {END}, "a distribution is defined after the end too"
    assert c in bits(mask[3]) and d not in bits(mask[3])
    # Nodes below a token that the grammar refuses are never accepted.
    assert bits(mask[6]) == bits(mask[8]) == set(range(2048))
    # The walk left no trace.
    assert one.follow([a, b]) and one.follow([a, b, c, e, END])


def test_a_terminated_matcher_leaves_stop_ids_and_accepts_nothing(plain: LLM) -> None:
    a = plain.tokenizer.words("a")[0]
    one = grammar(plain, Structured(choice=["a"]))
    mask = torch.full((1, 64), -1, dtype=torch.int32)
    assert one.follow([a, END])
    one.fill([END], [-1], mask)
    assert bits(mask[0]) == {END}
    assert not one.follow([a, END, a])
    # What was refused is no state: an output that is right is followed again.
    assert one.follow([a]) and one.follow([a, END])


def test_what_must_follow_is_spelled(plain: LLM) -> None:
    """The longest tokens that spell it, up to the requested length, and the end token where nothing else may come."""
    one = grammar(plain, Structured(json_schema=PERSON, any_whitespace=False))
    run = one.forced(20)
    assert plain.tokenizer.decode(run) == '{"name": "' and len(run) < 8
    assert one.forced(2) == run[:2]
    assert one.follow(run) and one.forced(20) == []
    choice = grammar(plain, Structured(choice=["def self"]))
    assert plain.tokenizer.decode(choice.forced(20)[:-1]) == "def self" and choice.forced(20)[-1] == END
    assert choice.follow(choice.forced(20)) and choice.forced(20) == []
    # Inside a character nothing is text.
    inside = grammar(plain, Structured(choice=["é"]))
    [first] = [token for token in range(256) if plain.tokenizer.token_bytes(token) == b"\xc3"]
    assert inside.follow([first]) and inside.forced(20) == []
    either = grammar(plain, Structured(regex="a(b?)"))
    assert plain.tokenizer.decode(either.forced(20)) == "a"
    assert either.follow(either.forced(20)) and either.forced(20) == []


@pytest.mark.parametrize(
    "keys", [CHAIN, TREE, TRIE, NGRAM, {**CHAIN, "variant": "ngram"}], ids=["chain", "tree", "trie", "ngram", "ngram-chain"]
)
def test_forced_text_is_accepted_whole(keys: dict[str, Any], tree: LLM) -> None:
    """One way to spell a digit, twelve times and an end: as fast as the depth allows."""
    params = SamplingParams(
        structured=Structured(regex="(x7){6}"), max_tokens=40, logit_bias=dict.fromkeys(tree.tokenizer.words("x"), 50.0)
    )
    with engine(**keys) as llm:
        out = llm.generate("a = ", params)[0]
        depth = llm.plan.shape.num_steps
    assert out.text == "x7" * 6 and len(out.token_ids) == 13
    assert len(out.timing.cycle_tokens) == -(-12 // (depth + 1))


def test_the_highest_bit_of_a_word_is_a_token_too(plain: LLM) -> None:
    other = grammar(plain, Structured(choice=["a"]))
    one = RowGrammar(other._compiled, (31,), other._speller)
    assert one.follow([plain.tokenizer.words("a")[0], 31])
    mask = torch.full((1, 64), -1, dtype=torch.int32)
    one.fill([31], [-1], mask)
    assert bits(mask[0]) == {31}


def test_classes_with_and_without_a_grammar() -> None:
    with_one = SamplingParams(structured=NESTED).resolve().sampling_class
    assert with_one == SamplingClass(grammar=True) and with_one.bans
    assert hash(SamplingParams(structured=Structured(json_schema=PERSON))) is not None
    assert Structured(json_schema=PERSON) == Structured(json_schema=json.dumps(PERSON))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "sampling.structured: expected exactly one of json_schema, .* found none of them"),
        ({"regex": "a", "choice": ["b"]}, "expected exactly one of .* found regex, choice"),
        ({"regex": 5}, r"sampling.structured.regex: expected text, found 5 \(int\)"),
        ({"regex": ""}, "sampling.structured.regex: expected a text of 1 to"),
        ({"choice": "ab"}, "sampling.structured.choice: expected a list of texts"),
        ({"choice": []}, "sampling.structured.choice: expected at least one text"),
        ({"choice": ["a", ""]}, r"sampling.structured.choice\[1\]: expected a text of 1 to"),
        ({"json_schema": "{"}, "sampling.structured.json_schema: expected JSON, as text or as an object"),
        ({"json_schema": {"a": {1, 2}}}, "sampling.structured.json_schema: expected JSON, as text or as an object"),
        ({"json_schema": "[1]"}, "sampling.structured.json_schema: expected a JSON object"),
        ({"json_object": 1}, "sampling.structured.json_object: expected true or false"),
        ({"grammar": "\ud800"}, "sampling.structured.grammar: expected text in UTF-8, found the lone surrogate U\\+D800 at character 0"),
    ],
)
def test_what_is_no_grammar_is_refused_at_once(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Structured(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"regex": "("}, "sampling.structured.regex: expected a closing parenthesis for each opening one"),
        ({"grammar": "a"}, "sampling.structured.grammar: expected a grammar that xgrammar takes"),
        ({"json_schema": {"type": "nope"}}, "sampling.structured.json_schema: expected a grammar that xgrammar takes.*nope"),
        ({"structural_tag": {"type": "nope"}}, "sampling.structured.structural_tag: expected a grammar that xgrammar takes"),
        ({"json_schema": {"not": {}}}, "sampling.structured.json_schema.not: expected keywords that xgrammar enforces"),
    ],
)
def test_a_bad_grammar_is_one_error_at_submit(plain: LLM, values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        plain.submit("x", SamplingParams(structured=Structured(**values)))
    assert "\n" not in str(caught.value) and ".cc" not in str(caught.value)


def test_what_can_not_end_is_refused(plain: LLM) -> None:
    with pytest.raises(RequestError, match="expected a special token to end with"):
        plain.submit("x", SamplingParams(structured=NESTED, ignore_eos=True))
    with pytest.raises(RequestError, match=r"sampling.min_tokens: expected 0 with sampling.structured"):
        SamplingParams(structured=NESTED, min_tokens=3)


def test_a_missing_package_is_named(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "xgrammar", None)
    with pytest.raises(RequestError, match=r"expected the package xgrammar, found no such package \(pip install 'xgrammar"):
        Grammars(plain.plan).grammar(SamplingParams(structured=NESTED), (END,), lambda: plain.tokenizer)

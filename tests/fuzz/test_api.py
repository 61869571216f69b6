"""The Python API under inputs of every kind: taken, or refused by an error of ours, and the engine serves the next call as before."""

from __future__ import annotations

import dataclasses
import random
from collections import UserList
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from graphspec import LLM, SamplingParams
from graphspec.config.checks import brief
from graphspec.config.command_options import LaunchConfig
from graphspec.config.schema import Config, NgramSettings
from graphspec.errors import RequestError
from tests.support.engines import MIRROR_VOCAB, Pair, add_tokenizer, mirror_pair

from ._harness import Case, choose, faults
from ._values import (
    FIELDS,
    KEYS,
    Evil,
    EvilRepr,
    EvilSequence,
    Text,
    any_id,
    any_value,
    is_real,
    is_whole,
    is_whole_list,
    key_values,
    values,
)

GOOD = [[5, 6, 7, 8], [9, 10, 1], [20, 21, 22, 23, 24]]
LENGTH = 12
CONTEXT = 96
ENGINE = {"num_steps": 3, "topk": 2, "num_draft_tokens": 6, "buckets": [1, 2, 4], "max_rows": 4}
HEALTH_EVERY = 5
"""Cases between two health checks; the last case is followed by one."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    made = mirror_pair(tmp_path_factory.mktemp("pair"), noise=0.5, max_positions=CONTEXT)
    add_tokenizer(made.target)
    return made


class Shared:
    """An engine that many cases run on, and what it gave when it was new."""

    def __init__(self, pair: Pair) -> None:
        self.llm = pair.llm(**ENGINE)
        self.good = SamplingParams(max_tokens=LENGTH)
        self.reference = [output.token_ids for output in self.llm.generate(GOOD, self.good)]
        assert self.reference == [pair.greedy(prompt, LENGTH) for prompt in GOOD]
        self.checked = 0

    def healthy(self) -> str:
        """Empty when the good prompts still get their tokens."""
        self.checked += 1
        if self.checked % HEALTH_EVERY:
            return ""
        found = [output.token_ids for output in self.llm.generate(GOOD, self.good)]
        return "" if found == self.reference else f"good prompts give {found}"

    def among_good(self, prompt: Any, params: Any) -> list[int]:
        """Tokens of a request in the middle of three; the two around it must get theirs.

        Raises:
            RequestError: it was refused.
        """
        outputs = self.llm.generate([GOOD[0], prompt, GOOD[2]], [self.good, params, self.good])
        neighbours = [outputs[0].token_ids, outputs[2].token_ids]
        assert neighbours == [self.reference[0], self.reference[2]], f"the neighbours got {neighbours}"
        if outputs[1].finish_reason == "error":
            assert "logits" not in str(outputs[1].error), outputs[1].error
            raise RequestError("the request in the middle", "to be served", outputs[1].error)
        return outputs[1].token_ids

    def stream(self, prompts: Any, params: Any) -> list[int]:
        """Tokens of a stream; the error of its first request is raised."""
        events = list(self.llm.stream(prompts, params))
        for event in events:
            if event.finish_reason == "error":
                raise RequestError("the stream", "to be served", event.error)
        return [token for event in events for token in event.token_ids]


def is_prompt(value: Any) -> bool:
    """Whether a value may be taken for one prompt."""
    if isinstance(value, dict):
        keys = list(value)
        if keys == ["prompt"]:
            return isinstance(value["prompt"], str)
        return keys == ["prompt_token_ids"] and is_whole_list(value["prompt_token_ids"]) and len(value["prompt_token_ids"]) > 0
    return isinstance(value, str) or (is_whole_list(value) and 0 < len(value) < CONTEXT)


def is_prompts(value: Any) -> bool:
    """Whether a value may be taken for the prompts of a call."""
    if isinstance(value, np.ndarray | torch.Tensor) and value.ndim == 2:
        return all(is_prompt(row) for row in value)
    return is_prompt(value) or (isinstance(value, list | tuple | UserList) and all(is_prompt(entry) for entry in value))


def prompts_of_every_kind() -> dict[str, Any]:
    return {
        "None": None, "int": 5, "float": 1.5, "bool": True, "empty list": [], "empty text": "", "empty texts": [""], "empty ids": [[]],
        "bytes": b"w1 w2", "negative id": [1, -1], "id outside": [MIRROR_VOCAB], "huge id": [10**30], "endless id": [10**5000],
        "bool ids": [True, False], "float ids": [1.0, 2.0], "nested floats": [[1.5, 2.7]], "nan": [[float("nan")]], "inf": [[float("inf")]],
        "texts for ids": [["1", "2"]], "None for an id": [[None]], "text and ids": ["w1", [1, 2]], "id and text": [1, "w2"],
        "None in a list": [None], "numpy": np.array([1, 2, 3]), "numpy 2-d": np.array([[1, 2], [3, 4]]), "numpy floats": np.array([[1.5]]),
        "numpy number": np.array(1), "numpy bools": np.array([True]), "numpy empty": np.array([], dtype=int), "tensor": torch.tensor([1]),
        "tensor 2-d": torch.tensor([[1, 2], [3, 4]]), "tensor 3-d": torch.ones(1, 1, 1, dtype=torch.int64), "tensor 0-d": torch.tensor(1),
        "float tensor": torch.tensor([1.0]), "tensors": [torch.tensor([1])] * 2, "numbers of numpy": [np.int64(1), np.uint8(2)],
        "tuple": (1, 2, 3), "range": range(5), "endless range": range(10**15), "generator": iter([1]), "mapping": {1: 2}, "set": {1, 2},
        "evil": Evil(), "evil sequence": EvilSequence(), "evil repr": EvilRepr(), "evil in a list": [EvilSequence(), [1]], "deep": [[[1]]],
        "very deep": __import__("functools").reduce(lambda inner, _: [inner], range(500), 1), "surrogate": "\ud800", "null": "\0",
        "long text": "w1 " * 5000, "too long": [1] * CONTEXT, "nearly too long": [1] * (CONTEXT - 1), "a million ids": [1] * 10**6,
        "ten, one bad": [[1]] * 9 + [[-1]], "right to left": "\u202e w1", "emoji": "\U0001f600", "complex": [1 + 2j], "Text": Text("w1"),
        "bytearray": bytearray(b"\x01"), "bytes in a list": [b"\x01"], "memoryview": memoryview(b"\x01"), "deque": UserList([1, 2]),
        "dict of text": {"prompt": "w1"}, "dict of ids": {"prompt_token_ids": [1]}, "dict of the wrong ids": {"prompt_token_ids": [1.5]},
        "dict of the wrong text": {"prompt": 5}, "dict with more": {"prompt": "w1", "multi_modal_data": {}}, "empty dict": {},
        "dicts": [{"prompt": "w1"}, {"prompt_token_ids": [2]}], "dict of both": {"prompt": "w1", "prompt_token_ids": [1]},
    }  # fmt: skip


def request_cases(shared: Shared) -> list[Case]:
    """Prompts, parameters, and the other arguments of calls."""
    short = SamplingParams(max_tokens=3)
    llm = shared.llm

    def generate(prompts: Any, *arguments: Any) -> list[list[int]]:
        outputs = llm.generate(prompts, *arguments)
        for output in outputs:
            if output.finish_reason == "error":
                raise RequestError(f"output {output.index}", "to be served", output.error)
        return [output.token_ids for output in outputs]

    def propagates() -> None:
        with pytest.raises(ZeroDivisionError):
            llm.generate([[1]], short, lambda *_: 1 / 0)

    cases = [Case("progress raises", propagates)]

    def add(name: str, run: Callable[[], Any], wrong: bool) -> None:
        cases.append(Case(name, run, wrong))

    for name in prompts_of_every_kind():
        add(
            f"generate {name}",
            lambda name=name: generate(prompts_of_every_kind()[name], short),
            not is_prompts(prompts_of_every_kind()[name]),
        )
        add(
            f"stream {name}",
            lambda name=name: shared.stream(prompts_of_every_kind()[name], short),
            not is_prompts(prompts_of_every_kind()[name]),
        )
        wrong = not is_prompt(prompts_of_every_kind()[name])
        add(f"in the middle {name}", lambda name=name: shared.among_good(prompts_of_every_kind()[name], short), wrong)
    for field, legal in FIELDS.items():
        hot = {"temperature": 0.8} if field in ("top_k", "top_p", "min_p", "seed") else {}
        for place, value in enumerate(values()):

            def run(field: str = field, place: int = place, hot: dict[str, Any] = hot) -> list[int]:
                return shared.among_good(GOOD[1], SamplingParams(**{"max_tokens": 4, **hot, field: values()[place]}))

            add(f"{field}={brief(value)} #{place}", run, not legal(value))
    stops = (
        [1] * 9000,
        list(range(44)),
        list(range(10**4)),
        [-1],
        [MIRROR_VOCAB],
        [1.5],
        "abc",
        [None],
        [True],
        np.array([1, 2]),
        {1, 2},
        range(10**15),
    )
    for place, value in enumerate(stops):
        add(
            f"stop ids {brief(value)} #{place}",
            lambda v=value: shared.among_good(GOOD[1], SamplingParams(stop_token_ids=v)),
            not is_whole_list(value),
        )
    biases: tuple[Any, ...] = (
        {44: 1.0}, {-1: 1.0}, {1: float("nan")}, {1: float("inf")}, {1: 1e9}, {"1": 1.0}, {1.5: 1}, {1: None}, {1: "1"}, {True: 1}, {1: 5},
        dict.fromkeys(range(301), 1.0), dict.fromkeys(range(43), -100.0), [(1, 1.0)], {1: torch.tensor(1.0)},
        {np.int64(1): np.float32(0.5)},
    )  # fmt: skip
    for place, value in enumerate(biases):
        legal_bias = FIELDS["logit_bias"](value)
        add(
            f"bias {brief(value)} #{place}",
            lambda v=value: shared.among_good(GOOD[1], SamplingParams(logit_bias=v, max_tokens=4)),
            not legal_bias,
        )
    parameters: tuple[Any, ...] = (
        [short], [], [None], {"max_tokens": 3}, [{"max_tokens": 3}], {"max_new_tokens": 3}, {3: 3}, {None: 1}, {"seed": 1.5}, [{}, {}],
        Evil(), 3, SamplingParams, "x", None, short, (short,), EvilSequence(), [short] * 2,
    )  # fmt: skip
    for place, value in enumerate(parameters):
        fair = (short, {"max_tokens": 3})
        taken = value is None or value in fair or (isinstance(value, list | tuple) and len(value) == 1 and value[0] in fair)
        add(f"params {brief(value)} #{place}", lambda v=value: generate([[1]], v), not taken)
    for value in (3, "x", [], object()):
        add(f"progress {brief(value)}", lambda v=value: generate([[1]], short, v), True)
    for value in (0, -5, 10**9, "a", float("nan"), 1.0, True, None, 1, np.int64(2)):
        add(f"warm_up {brief(value)}", lambda v=value: llm.warm_up(v), not is_whole(value, 1))
        add(f"draft_tree {brief(value)} cycles", lambda v=value: llm.draft_tree([1, 2], v), not is_whole(value, 1, CONTEXT - 2))
    for value in ([[1], [2]], [], [1] * (CONTEXT - 1), [[1]], "w1", {"prompt": "w1"}, [1.5], None):
        one = is_prompt(value) or (isinstance(value, list) and len(value) == 1 and is_prompt(value[0]))
        add(f"draft_tree {brief(value)}", lambda v=value: llm.draft_tree(v), not one)
    return cases


def invented_request(shared: Shared, rng: random.Random, number: int) -> Case:
    """A few random fields and a prompt, valid or not."""
    fields = {field: any_value(rng) for field in rng.sample(sorted(FIELDS), rng.randrange(4))}
    fields.setdefault("max_tokens", rng.randrange(1, 9))
    if rng.random() < 0.7:
        fields.setdefault("temperature", rng.choice([0.0, 0.7, 20.0]))
    prompt = any_value(rng) if rng.random() < 0.5 else [any_id(rng) for _ in range(rng.randrange(6))]
    wrong = not is_prompt(prompt) or not all(FIELDS[field](value) for field, value in fields.items())
    name = f"invented {number}: {brief(prompt)} with {', '.join(f'{field}={brief(value)}' for field, value in fields.items())}"
    return Case(name, lambda: shared.among_good(prompt, SamplingParams(**fields)), wrong)


def test_requests(pair: Pair, request: pytest.FixtureRequest) -> None:
    shared = Shared(pair)
    seed, budget = request.config.getoption("--fuzz-seed"), request.config.getoption("--fuzz-budget")
    cases = choose(request_cases(shared), lambda rng, number: invented_request(shared, rng, number), seed=seed, budget=budget)
    assert faults(cases, shared.healthy) == []
    shared.checked = -1
    assert shared.healthy() == ""


def constructor_cases(pair: Pair) -> list[Case]:
    """Arguments of ``LLM``; where an engine is built it must also serve a request."""
    whole = {"model": pair.target, "draft": pair.draft, "runtime": "eager"}
    small = {"num_steps": 3, "topk": 2, "num_draft_tokens": 6, "buckets": [1, 2], "max_rows": 2, "prefill_chunks": [16]}

    def serve(**keys: Any) -> list[int]:
        return LLM(**keys).generate([5, 6, 7, 8], SamplingParams(max_tokens=6))[0].token_ids

    cases = []
    arguments: list[tuple[dict[str, Any], bool]] = [
        *[({"model": v}, True) for v in (None, 5, "", "\0", "\ud800", "/", "/etc/passwd", "/nope", b"/tmp", [], pair.draft)],
        *[({"variant": v}, True) for v in (None, "x", 5, [], "", Text("eagle"), True)],
        *[({"draft": v}, True) for v in (5, "", "/nope", pair.target, b"x", "\0", [])],
        *[({"runtime": v}, True) for v in (None, "x", 5, "", True)],
        *[({"config": v}, True) for v in (5, {}, "x", Config, [])],
        *[({"progress": v}, True) for v in (5, "x", [])],
        *[({name: 1}, True) for name in ("nope", "name", "max_model_len", "seed", "temperature", "tensor_parallel_size", "_runtime", "")],
        ({"model": str(pair.target), "draft": str(pair.draft)}, False), ({"config": Config()}, True),
    ]  # fmt: skip
    for keys, wrong in arguments:
        cases.append(Case(f"LLM {brief(keys)}", lambda keys=keys: serve(**{**whole, **keys}), wrong))
    for key, legal in KEYS.items():
        for place, value in enumerate(key_values()):
            run = lambda key=key, place=place: serve(**{**whole, **small, key: key_values()[place]})  # noqa: E731
            if not (key == "threads" and legal(value)) and not (
                key in ("mode", "attention") and value in ("compiled", "fused", "flashinfer")
            ):
                cases.append(Case(f"LLM {key}={brief(value)} #{place}", run, not legal(value)))
    return cases


def test_constructor(pair: Pair, request: pytest.FixtureRequest) -> None:
    cases = constructor_cases(pair)
    before = torch.get_num_threads()

    def invent(rng: random.Random, number: int) -> Case:
        first, second = rng.sample(cases, 2)

        def run() -> None:
            first.run()
            second.run()

        return Case(f"{first.name}, then {second.name}", run, first.wrong or second.wrong)

    seed, budget = request.config.getoption("--fuzz-seed"), request.config.getoption("--fuzz-budget")
    assert faults(choose(cases, invent, seed=seed, budget=budget)) == []
    assert torch.get_num_threads() == before


def group_cases() -> list[Case]:
    """Every field of every group, by values that its annotation doesn't allow; nothing is built."""
    cases = []
    whole = LaunchConfig()
    groups = [getattr(whole, field.name) for field in dataclasses.fields(whole)]
    for group in [whole, NgramSettings(), *(group for group in groups if dataclasses.is_dataclass(group))]:
        for field in dataclasses.fields(group):
            wanted = str(field.type)
            for place, value in enumerate(key_values()):
                run = lambda group=group, field=field, place=place: dataclasses.replace(group, **{field.name: key_values()[place]})  # noqa: E731
                cases.append(Case(f"{type(group).__name__}.{field.name}={brief(value)} #{place}", run, not _may_be(wanted, value)))
    return cases


def _may_be(wanted: str, value: Any) -> bool:
    """Whether an annotation allows a value's type, regardless of its range."""
    if value is None:
        return "None" in wanted or wanted == "Any"
    plain = wanted.removesuffix(" | None")
    if plain == "int":
        return is_whole(value)
    if plain == "float":
        return is_real(value, -1e308, 1e308)
    if plain == "bool":
        return type(value) is bool
    if plain == "str":
        return isinstance(value, str)
    if plain.startswith("list"):
        inner = plain.removeprefix("list[").removesuffix("]")
        return isinstance(value, list | tuple) and all(_may_be(inner, entry) for entry in value)
    if plain.startswith("dict"):
        return isinstance(value, dict) and all(is_whole(key) for key in value)
    return plain == "Any" and isinstance(value, str | list | tuple)


def test_groups_of_the_configuration(request: pytest.FixtureRequest) -> None:
    seed, budget = request.config.getoption("--fuzz-seed"), request.config.getoption("--fuzz-budget")
    assert faults(choose(group_cases(), None, seed=seed, budget=10 * budget)) == []

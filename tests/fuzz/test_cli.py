"""The command line with odd inputs: either text and exit code 0, or exit code 2 and a line that says why."""

from __future__ import annotations

import io
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from graphspec.cli import main as cli
from graphspec.config.command_options import LaunchConfig
from graphspec.errors import GraphspecError
from tests.support.engines import add_tokenizer, mirror_pair

from ._harness import Case, choose, faults
from ._words import LINES, REFUSED

VALUES = (
    "x", "null", "nan", "inf", "-inf", "-1", "0", "1e999", "99999999999999999999", "[1,2", "{a:1}", "[]", "true", "''", "1.5", "\u0661",
    "😀", "${oc.env:HOME}", "${nope}", "???", "a=b", "[nan]", "[[1]]", "{1:{2:nan}}", "9" * 5000, "[" * 500, "~", "\udcff", "a\0b",
    "a" * 5000,
)  # fmt: skip
SLOW = {"runtime.name": "compiled", "variant.num_draft_tokens": "99999999999999999999"}


class RefusedError(GraphspecError):
    """Exit code 2 and nothing but complaints on stderr."""

    def __init__(self, reported: str) -> None:
        Exception.__init__(self, reported)


class Input(io.StringIO):
    """Standard input that no terminal is."""

    def isatty(self) -> bool:
        return False


def run(words: Sequence[str], stdin: str | bytes | None = "", complaints: int = 1) -> str:
    """Hand ``words`` to the console script.

    Args:
        words: the command line.
        stdin: what it reads; bytes are decoded as the interpreter does; None: it is closed.
        complaints: most lines a refusal may have.
    """
    out, err, before = io.StringIO(), io.StringIO(), sys.stdin
    if isinstance(stdin, bytes):
        sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    else:
        sys.stdin = Input(stdin) if stdin is not None else None  # type: ignore[assignment]
    code: object = None
    try:
        with redirect_stdout(out), redirect_stderr(err):
            cli.main(list(words))
    except SystemExit as exit_:
        code = exit_.code
    finally:
        sys.stdin = before
    reported = err.getvalue().splitlines()
    if code == 2 and 1 <= len(reported) <= complaints and all(line.startswith("graphspec: ") for line in reported):
        raise RefusedError(reported[0])
    assert code == 0, f"exit code {code}: {reported}"
    return out.getvalue()


class Place:
    """A folder with tiny checkpoints and odd files, where the cases run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        pair = mirror_pair(folder, noise=1.0, max_positions=512)
        add_tokenizer(pair.target)
        self.target, self.draft = pair.target, pair.draft
        self.model = [f"model.path={pair.target}", f"variant.draft={pair.draft}"]
        self.small = [
            *self.model, "runtime=eager", "variant.num_steps=2", "variant.topk=1", "variant.num_draft_tokens=3", "runtime.buckets=[1]",
            "runtime.max_rows=1", "runtime.prefill_chunks=[16]", "sampling.max_tokens=2",
        ]  # fmt: skip
        self._files = 0

    def generate(self, *words: str) -> list[str]:
        return ["generate", *self.small, *words]

    def file(self, content: bytes | str, suffix: str) -> Path:
        self._files += 1
        path = self.folder / f"file{self._files}{suffix}"
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
        return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("cli"))
    # What is imported once counts for no case.
    assert run(made.generate("prompt=w1 w2"))
    assert run(["plan", *made.model, "hardware=h200"])
    yield made


@pytest.fixture(autouse=True)
def _here(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.folder)


# Keys and values.


def keys() -> dict[str, Any]:
    """Every key of the configuration, and the annotation of its value."""
    found: dict[str, Any] = {}

    def collect(prefix: str, schema: type) -> None:
        hints = get_type_hints(schema)
        for field in fields(schema):
            if is_dataclass(hints[field.name]):
                collect(f"{prefix}{field.name}.", hints[field.name])
            else:
                found[prefix + field.name] = hints[field.name]

    collect("", LaunchConfig)
    return {key: hint for key, hint in found.items() if key != "prompt"}


def suits(hint: Any, value: str) -> bool:
    """Whether ``value`` is of a type that ``hint`` allows. What is in a list or mapping is not looked at."""
    parts = get_args(hint) if get_origin(hint) not in (list, dict) and get_args(hint) else (hint,)
    if value in ("???", "[1,2") or "${" in value:
        return False
    if value == "null":
        return type(None) in parts or hint is Any
    spelled = {
        bool: r"true|false",
        int: r"-?[0-9]+",
        float: r"-?[0-9]+(\.[0-9]+)?",
        str: r"[^\[{].*",
        list: r"\[.*\]",
        dict: r"\{.*\}",
    }
    return hint is Any or any(re.fullmatch(spelled.get(get_origin(part) or part, "(?!)"), value, re.DOTALL) for part in parts)


def setting(place: Place, key: str, hint: Any, value: str, *, plan: bool = False) -> Case:
    word = f"{key}={value}"
    words = ["plan", *place.model, "hardware=h200", word] if plan else place.generate("prompt=w1 w2", word)
    return Case(f"{words[0]} {word[:60]!r}", lambda: run(words), wrong=not suits(hint, value))


def settings(place: Place) -> list[Case]:
    of_plan = ("plan.", "hardware.", "model.", "variant.")
    return [
        setting(place, key, hint, value, plan=plan)
        for key, hint in keys().items()
        for value in VALUES
        for plan in ((False, True) if key.startswith(of_plan) else (False,))
        if (key, value) not in SLOW.items()
    ]


def a_number(rng: random.Random) -> str:
    return rng.choice(
        [str(rng.randint(-3, 40)), str(rng.choice([-1, 1]) * 2 ** rng.randint(7, 70)), repr(rng.uniform(-3, 3)), "1e39", "nan"]
    )


def a_setting(place: Place) -> Callable[[random.Random, int], Case]:
    """Several keys at once, to values that are often of the right type."""
    known = {key: hint for key, hint in keys().items() if key not in SLOW}

    def invent(rng: random.Random, number: int) -> Case:
        chosen = rng.sample(sorted(known), rng.randint(1, 3))
        values = {
            key: rng.choice(
                [a_number(rng), f"[{a_number(rng)},{a_number(rng)}]", f"{{{a_number(rng)}:{a_number(rng)}}}", rng.choice(VALUES)]
            )
            for key in chosen
        }
        words = [f"{key}={value}" for key, value in values.items()]
        wrong = not all(suits(known[key], value) for key, value in values.items())
        return Case(f"{number}: {' '.join(words)[:200]!r}", lambda: run(place.generate("prompt=w1 w2", *words)), wrong=wrong)

    return invent


def test_settings(place: Place, request: pytest.FixtureRequest) -> None:
    seed, budget = (request.config.getoption(name) for name in ("--fuzz-seed", "--fuzz-budget"))
    assert faults(choose(settings(place), a_setting(place), seed=seed, budget=budget // 2)) == []


# Prompts and words.


def words_of(place: Place) -> list[Case]:
    def case(name: str, words: Sequence[str], stdin: str | bytes | None = "", *, wrong: bool = True) -> Case:
        return Case(name, lambda: run(words, stdin), wrong=wrong)

    for name in ("d", "d.jsonl", "d.yaml"):
        (place.folder / name).mkdir(exist_ok=True)
    named = {"TARGET": str(place.target), "DRAFT": str(place.draft)}
    lines = [case(f"line {line[:70]!r}", place.generate(f"prompt_file={place.file(line, '.jsonl')}", "format=json")) for line in LINES]
    fine = [
        case(f"line of three: {line[:70]!r}", place.generate(f"prompt_file={place.file(text, '.jsonl')}"), wrong=False)
        for line in (
            '{"prompt": "w1", "temperature": 1e39}',
            '{"prompt": "' + "w1 " * 600 + '"}',
            '{"prompt": "w1", "max_tokens": 10000000}',
        )
        for text in (f'"w1"\n{line}\n"w2"',)
    ]
    odd = {"latin.txt": b"w1 \xe9\xff", "empty.txt": b"", "empty.jsonl": b"", "bom.jsonl": b'\xef\xbb\xbf"w1"\n', "half.jsonl": b'"w1'}
    files = [str(place.file(content, name)) for name, content in odd.items()]
    files += ["d", "d.jsonl", "nope.txt", "/dev/null", "/dev/zero", "/proc/self/mem", "a" * 5000, "\udcff", "/etc/shadow/x", "''"]
    prompts = [case(f"prompt_file {name[-40:]!r}", place.generate(f"prompt_file={name}")) for name in files]
    reported = place.file("prompt: x\nmodel: {path: '${oc.env:HOME}'}\n", ".yaml")
    experiments = [
        b"{{{",
        b"\xff",
        b"[" * 20000,
        b"[1]",
        b"sampling: {nope: 1}",
        b"defaults: [nope]",
        b"runtime: {debug: 7}",
        b"a: !!python/object:os.x",
    ]
    yamls = [
        case(f"experiment {text[:40]!r}", place.generate("prompt=w1", f"experiment={place.file(text, '.yaml')}")) for text in experiments
    ]
    return [
        *lines,
        *fine,
        *prompts,
        *yamls,
        *(case(" ".join(words)[:80], [named.get(word, word) for word in words]) for words in REFUSED),
        case("an experiment that looks into the environment", ["generate", "runtime=eager", "variant=none", f"experiment={reported}"]),
        case("nothing on stdin", place.generate()),
        case("stdin closed", place.generate(), None),
        case("stdin not UTF-8", place.generate(), b"\xff\xfe w1"),
        case("a null character", place.generate(f"prompt_file={place.file(bytes(2), '.txt')}"), wrong=False),
        case("empty prompt", place.generate("prompt=")),
        case("a list of an empty prompt", place.generate('prompt=[""]')),
        case("prompt in brackets", place.generate("prompt=[a]")),
        case("prompt too long", place.generate("prompt=" + "w1 " * 600)),
        case("half a surrogate pair", place.generate("prompt=\udcff w1")),
        case("chat without a template", place.generate("prompt=w1", "chat=true")),
    ]  # fmt: skip


JSON_VALUES = (
    5,
    -1,
    1.5,
    True,
    None,
    "x",
    "5",
    [],
    [1],
    ["a"],
    {},
    {"1": 1},
    {"a": "b"},
    10**30,
    1e300,
    "\ud800",
    [[[]]],
    2**63,
    -(2**63) - 1,
)


def a_line(rng: random.Random) -> str:
    known = [*get_type_hints(type(LaunchConfig().sampling)), "prompt", "messages", "nope"]
    row = {key: rng.choice(JSON_VALUES) for key in rng.sample(known, rng.randint(0, 4))}
    if rng.random() < 0.7:
        row["prompt"] = "w1 w2"
    text = json.dumps(row if rng.random() < 0.9 else rng.choice(JSON_VALUES))
    if rng.random() < 0.3:
        place = rng.randrange(len(text) + 1)
        text = text[:place] + rng.choice(["", '"', "{", "\\", "\x00", "NaN", "\u2028", "9" * 50]) + text[place + rng.randint(0, 3) :]
    return text


def a_request(place: Place) -> Callable[[random.Random, int], Case]:
    """Lines of requests, bytes on standard input, and lines of results."""

    def invent(rng: random.Random, number: int) -> Case:
        kind = rng.choice(["lines", "lines", "stdin", "results", "words"])
        if kind == "lines":
            lines = [a_line(rng) for _ in range(rng.randint(1, 3))]
            words = place.generate(f"prompt_file={place.file(chr(10).join(lines), '.jsonl')}", "format=json")
            return Case(f"{number}: {lines}"[:300], lambda: run(words, complaints=len(lines)))
        if kind == "stdin":
            data = rng.randbytes(rng.randint(0, 20))
            return Case(f"{number}: {data!r}", lambda: run(place.generate(), data))
        if kind == "results":
            row = {"kind": rng.choice(["side", "plan", "prediction", "generation", 5])}
            row |= {key: rng.choice(JSON_VALUES) for key in rng.sample(("case", "side", "role", "batch", "equal", "shape", "cycles"), 4)}
            results = place.file(json.dumps(row), ".jsonl")
            return Case(f"{number}: {row}", lambda: run(["report", f"report.files=[{results}]", "report.out=page.html"]))
        word = "".join(rng.choice("abc=.[]{},:'\"\\ $~+-@/*!#%&()<>?|;\t\u00e9\udcff0123456789") for _ in range(rng.randint(1, 12)))
        return Case(f"{number}: word {word!r}", lambda: run(place.generate("prompt=w1", word)))

    return invent


def test_words(place: Place, request: pytest.FixtureRequest) -> None:
    seed, budget = (request.config.getoption(name) for name in ("--fuzz-seed", "--fuzz-budget"))
    assert faults(choose(words_of(place), a_request(place), seed=seed, budget=budget - budget // 2)) == []

"""Damaged and hostile tokenizer files, as ``transformers`` reads them from a target."""

from __future__ import annotations

import json
import os
import random
import shutil
from itertools import cycle
from pathlib import Path
from typing import Any

from tests.support.tokenizer_forms import FORMS, write_form

from ._bench import DRAFT, TARGET, Bench, Mutate, command, ids, instead, keys, talk, text, write
from ._harness import Case

FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")
CLASSES = ("LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", "T5Tokenizer", "BertTokenizer", "../Evil", "")
CODE = "import os\nos.system({!r})\nclass Tok: pass\n"
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    10**12,
    0.5,
    float("nan"),
    "",
    "x",
    "../x",
    "\x00",
    "os.system",
    [],
    [[]],
    ["x"],
    {},
    {"a": 1},
    [0] * 5000,
]


def _auto_map(name: str) -> Mutate:
    """A tokenizer class of the checkpoint's own, which runs something when it is imported."""

    def mutate(folder: Path) -> None:
        (folder / "evil.py").write_text(CODE.format(command(folder)))
        keys({"auto_map": {"AutoTokenizer": [name, name]}, "tokenizer_class": "Tok"}, "tokenizer_config.json")(folder)
        keys({"auto_map": {"AutoConfig": name, "AutoTokenizer": [name, None]}, "model_type": "evilmodel"})(folder)

    return mutate


def _template(code: str) -> Mutate:
    """``code`` as chat template in both places that have one; in it, ``COMMAND`` touches the canary."""

    def mutate(folder: Path) -> None:
        template = code.replace("COMMAND", repr(command(folder)))
        (folder / "chat_template.jinja").write_text(template)
        keys({"chat_template": template}, "tokenizer_config.json")(folder)

    return mutate


def _without(*files: str) -> Mutate:
    return lambda folder: [(folder / file).unlink() for file in files]


def _beside(name: str) -> Mutate:
    """``evil.py`` where an import would find it, named by a key that classes are read from."""

    def mutate(folder: Path) -> None:
        (folder / "evil.py").write_text(CODE.format(command(folder)))
        keys({"tokenizer_class": name}, "tokenizer_config.json")(folder)

    return mutate


def _named(file: str, key: str, value: Any) -> Mutate:
    """A special token as one of the files names it."""

    def mutate(folder: Path) -> None:
        values = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
        (folder / file).write_text(json.dumps(values | {key: value}))

    return mutate


def _form(form: str, name: str) -> Mutate:
    """Another form of tokenizer, and a class that may rebuild it."""

    def mutate(folder: Path) -> None:
        write_form(folder, form, tokenizer_class=name, chat_template="{{ messages[0].content }}{{ eos_token }}")

    return mutate


def _linked(folder: Path) -> None:
    shutil.move(folder / "tokenizer.json", folder.parent / "blob")
    (folder / "tokenizer.json").symlink_to(Path("..") / "blob")


def tokenizer_cases(bench: Bench) -> list[Case]:
    """The listed ones; a text prompt reads all of it, and token ids read it for the text of the output."""
    words = json.loads((bench.words / "tokenizer.json").read_text())
    hostile = {
        "auto_map": _auto_map("evil.Tok"),
        "auto_map into another repository": _auto_map("nobody/none--evil.Tok"),
        "auto_map out of the folder": _auto_map("../evil.Tok"),
        "a class of another module": keys({"tokenizer_class": "os.system"}, "tokenizer_config.json"),
        "a class in evil.py": _beside("evil.Tok"),
    }
    templates = {
        "globals": "{{ cycler.__init__.__globals__.os.system(COMMAND) }}",
        "subclasses": "{% for c in ''.__class__.__mro__[1].__subclasses__() %}{% if c.__name__ == '_wrap_close' %}"
        "{{ c.__init__.__globals__['system'](COMMAND) }}{% endif %}{% endfor %}",
        "an import": "{% import 'os' as os %}{{ os.system(COMMAND) }}",
        "an endless loop": "{% for i in range(10**12) %}{% endfor %}",
        "a syntax error": "{{",
        "a number": "{{ 1 // 0 }}",
        "no text": "{{ messages[5].content.lower() }}",
    }
    others = {
        "a named pipe": os.mkfifo,
        "a folder": lambda file: file.mkdir(),
        "a link to itself": lambda file: file.symlink_to(file),
        "a link to /dev/zero": lambda file: file.symlink_to("/dev/zero"),
    }
    broken = {
        "no files": _without("tokenizer.json", "tokenizer_config.json"),
        **{
            f"{file}: {what}": write(content, file)
            for file in ("tokenizer.json", "tokenizer_config.json")
            for what, content in {
                "an open brace": "{",
                "bytes": random.Random(0).randbytes(1000),
                "deep": "[" * 200000,
                "empty": "",
            }.items()
        },
        **{
            f"{file}: {key} = {value!r:.30}": _named(file, key, value)
            for file in ("tokenizer_config.json", "special_tokens_map.json")
            for key in ("bos_token", "eos_token")
            for value in (5, True, ["w5"], {}, {"content": None}, {"content": 5})
        },
        "special_tokens_map.json: a list": write("[]", "special_tokens_map.json"),
        "special_tokens_map.json: an open brace": write("{", "special_tokens_map.json"),
        "model_max_length is a text": keys({"model_max_length": "x"}, "tokenizer_config.json"),
        **{f"tokenizer.json is {what}": instead("tokenizer.json", make) for what, make in others.items()},
        "tokenizer.json: no keys": write("{}", "tokenizer.json"),
        "tokenizer.json: a list": write("[]", "tokenizer.json"),
        "tokenizer_config.json: a list": write("[]", "tokenizer_config.json"),
        "tokenizer.json: texts as ids": write(json.dumps(words | {"model": words["model"] | {"vocab": {"w0": "1"}}}), "tokenizer.json"),
        "tokenizer.json: an unknown model": write(json.dumps(words | {"model": {"type": "Evil"}}), "tokenizer.json"),
    }
    fair = {
        "an id past the vocabulary": write(
            json.dumps(words | {"model": words["model"] | {"vocab": words["model"]["vocab"] | {"w5": 10**9}}}), "tokenizer.json"
        ),
        "undamaged": lambda folder: None,
        **{
            f"{file}: eos_token = {value!r:.30}": _named(file, "eos_token", value)
            for file in ("tokenizer_config.json", "special_tokens_map.json")
            for value in (None, "", "unheard", "\x00", "w5" * 10**5, {"content": "w5", "special": 5})
        },
        **{f"{form} for {name}": _form(form, name) for form, name in zip(FORMS, cycle(CLASSES), strict=False)},
        # transformers takes these for no file at all
        **{f"tokenizer_config.json is {what}": instead("tokenizer_config.json", make) for what, make in others.items()},
        "linked": _linked,
        "fewer words": write(json.dumps(words | {"model": words["model"] | {"vocab": {"w0": 0, "w5": 5}}}), "tokenizer.json"),
        "an auto_map for models": keys({"auto_map": {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.C"}}),
        "a model_type that is a path": keys({"model_type": "../../x"}),
        "initializer_range": keys({"initializer_range": ["x"]}),
        "auto_map is a number": keys({"auto_map": 10**12}),
        "attention_bias is null": keys({"attention_bias": None}),
    }
    return [
        *(
            bench.case(f"{name}; the user says {answer!r}", mutate, use=text, answer=answer)
            for name, mutate in hostile.items()
            for answer in ("", "y\n")
        ),
        *(bench.case(f"chat template: {name}", _template(code), use=talk) for name, code in templates.items()),
        bench.case("chat template: fair", _template("{{ messages[0]['content'] }}"), use=talk),
        *(bench.case(name, mutate, use=text, wrong=True) for name, mutate in broken.items()),
        *(bench.case(name, mutate, use=text) for name, mutate in fair.items()),
        *(bench.case(f"{name}, with token ids", mutate, use=ids) for name, mutate in (broken | fair | hostile).items()),
        bench.case("auto_map of a draft", _spoken(bench, _auto_map("evil.Tok")), DRAFT, use=text, answer="y\n"),
    ]


def _spoken(bench: Bench, mutate: Mutate) -> Mutate:
    def both(folder: Path) -> None:
        shutil.copytree(bench.words, folder, dirs_exist_ok=True)
        mutate(folder)

    return both


def invent_tokenizer(bench: Bench, rng: random.Random, number: int) -> Case:
    """A value somewhere in one of the files replaced, or some bytes of it."""
    file = rng.choice(FILES)
    origin = (bench.good / TARGET if file == "config.json" else bench.words) / file
    if rng.random() < 0.3:
        data = bytearray(origin.read_bytes())
        for _ in range(rng.choice((1, 3, 20))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return bench.case(f"{number}: {file}: bytes", write(bytes(data), file), use=text)
    values = at = json.loads(origin.read_text())
    path = []
    while True:
        step = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
        path.append(step)
        if rng.random() < 0.3 or not isinstance(at[step], dict | list) or not at[step]:
            break
        at = at[step]
    at[step] = rng.choice(ODD)
    return bench.case(f"{number}: {file}: {'.'.join(map(str, path))} = {at[step]!r:.40}", write(json.dumps(values), file), use=text)

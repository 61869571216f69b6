"""Write what the docs take from the code: ``python docs/generate.py``.

``docs/configuration.md`` comes from the docstrings of ``graphspec/config/schema.py``, the layers in ``docs/design.md`` from the import
contract in ``pyproject.toml`` and the first sentence of each module's docstring, ``docs/models.md`` from the configs of published models,
the signatures in ``docs/api.md`` from the source.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

from graphspec.errors import CheckpointError
from graphspec.facts import read_model_facts

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"
DESIGN = ROOT / "docs" / "design.md"
API = ROOT / "docs" / "api.md"
LAYERS = ("<!-- layers: python docs/generate.py -->\n", "<!-- end of layers -->\n")
HEAD = """# Configuration

Groups are chosen by name (`variant=none runtime=eager experiment=demo_tree`), keys are set by path (`runtime.page_size=1`). `model=` takes
a checkpoint as well (`model=/folder`, `model=./folder`, `model=org/name` of the Hugging Face Hub) and means `model.path=` then. From Python
the bare key is a keyword of `LLM` (`page_size=1`; those of `sampling` are fields of each request's `SamplingParams`), and
`graphspec.load_config("runtime=eager", "runtime.page_size=1")` gives the typed configuration. `null` means: derive it.
`graphspec generate --cfg job` prints the result without running; an unknown key, a bad value and a contradiction each give one
message and exit code 2.

This page is written by `python docs/generate.py` from `graphspec/config/schema.py`.
"""
MODELS = ROOT / "tests" / "models" / "published_models.json"
MODELS_PAGE = ROOT / "docs" / "models.md"
MODELS_HEAD = """# What people run

The models that are run most at the end of 2026, and what happens to their `config.json` here. *Loads*: a family's layers describe it,
in the [formats](checkpoints.md#low-precision-and-gguf) that load. *`model.family=transformers`*: transformers' modules
[run it](checkpoints.md#any-other-model-of-transformers), slower. *Refused*: one message says why. Drafts are those that others publish for
the model; `ngram` and `standalone` need none of its own.

This page is written by `python docs/generate.py` from `tests/models/published_models.json`. `tests/models/test_published_models.py`
shrinks each config, builds what loads with random weights and runs it, tries transformers' modules where the table says so, and checks
that the others are refused.

"""


def _groups(tree: ast.Module) -> dict[str, str]:
    config = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Config")
    return {ast.unparse(f.annotation): ast.unparse(f.target) for f in config.body if isinstance(f, ast.AnnAssign)}


def _default(value: ast.expr | None) -> str:
    if value is None:
        return ""
    if isinstance(value, ast.Call):
        return (
            ast.unparse(next(k.value.body for k in value.keywords if isinstance(k.value, ast.Lambda)))
            if "lambda" in ast.unparse(value)
            else "{}"
            if "dict" in ast.unparse(value)
            else "[]"
        )
    literal = ast.literal_eval(value)
    return "null" if literal is None else str(literal).lower() if isinstance(literal, bool) else str(literal)


def _rows(node: ast.ClassDef, classes: dict[str, ast.ClassDef], prefix: str = "") -> list[str]:
    """A row per key; the keys of a nested group follow its own under its name."""
    rows = []
    for i, field in enumerate(node.body):
        if not isinstance(field, ast.AnnAssign):
            continue
        after = node.body[i + 1] if i + 1 < len(node.body) else None
        said = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
        name = prefix + ast.unparse(field.target)
        nested = classes.get(ast.unparse(field.annotation))
        if nested is None:
            rows.append(f"| `{name}` | `{_default(field.value)}` | {' '.join(str(said).split())} |")
        else:
            rows += _rows(nested, classes, name + ".")
    return rows


def page() -> str:
    """The page's text."""
    tree = ast.parse((ROOT / "graphspec" / "config" / "schema.py").read_text(encoding="utf-8"))
    groups, out = _groups(tree), [HEAD]
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for name, node in classes.items():
        if name in groups:
            head = ["| key | default | meaning |", "|---|---|---|"]
            out += [f"## {groups[name]}", "", ast.get_docstring(node) or "", "", *head, *_rows(node, classes), ""]
    return "\n".join(out).rstrip() + "\n"


def _first_sentence(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    text = ast.get_docstring(node) or ""
    sentence = " ".join(re.split(r"(?<=\.)\s", text, maxsplit=1)[0].split())
    return re.sub(r"``(.+?)``", r"`\1`", re.sub(r":\w+:`~?(.+?)`", r"`\1`", sentence)).replace("|", "\\|")


def layers() -> str:
    """The table of layers, top first: a file imports only from the rows of lower layers."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    law = next(contract for contract in contracts if contract.get("containers") == ["graphspec"])
    rows = ["| layer | module | holds |", "|---:|---|---|"]
    for number, layer in enumerate(law["layers"][::-1]):
        for place, module in enumerate(re.split(r"\s*[|:]\s*", layer)):
            path = ROOT / "graphspec" / module
            name, file = (f"{module}/", path / "__init__.py") if path.is_dir() else (module, path.with_suffix(".py"))
            rows.insert(2 + place, f"| {number} | `{name}` | {_first_sentence(ast.parse(file.read_text(encoding='utf-8')))} |")
    return "\n".join(rows) + "\n"


def design() -> str:
    """``docs/design.md`` with the present table of layers."""
    text = DESIGN.read_text(encoding="utf-8")
    begin, end = (text.index(mark) for mark in LAYERS)
    return text[: begin + len(LAYERS[0])] + "\n" + layers() + "\n" + text[end:]


def models() -> str:
    """The text of ``docs/models.md``: what loads is asked of the readers of ``config.json``."""
    rows = ["| model | class | answer | drafts that load | what is missing |", "|---|---|---|---|---|"]
    for row in json.loads(MODELS.read_text(encoding="utf-8")):
        with TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(row["config"]), encoding="utf-8")
            try:
                read_model_facts(folder)
                answer = "loads"
            except CheckpointError:
                answer = "`model.family=transformers`" if row["through"] else "refused"
        missing = "" if answer == "loads" and row["through"] else row["missing"]
        drafts = ", ".join(f"`{name}`" for name in row["drafts"].split(", ") if name and answer == "loads")
        rows.append(f"| {row['name']} | `{row['config']['architectures'][0]}` | {answer} | {drafts} | {missing} |")
    return MODELS_HEAD + "\n".join(rows) + "\n"


def _code(node: ast.AST) -> str:
    """Source of a node with the house's quotes; ``ast`` writes the others."""
    return ast.unparse(node).replace("'", '"')


def _call(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> str:
    """One call as it is written, without ``self`` and annotations of arguments."""
    arguments = function.args
    named, defaults = arguments.args, [None] * (len(arguments.args) - len(arguments.defaults)) + list(arguments.defaults)
    words = [_argument(argument, default) for argument, default in zip(named, defaults, strict=True) if argument.arg not in ("self", "cls")]
    words += [f"*{arguments.vararg.arg}"] if arguments.vararg else ["*"] if arguments.kwonlyargs else []
    words += [_argument(argument, default) for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    words += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    returns = f" -> {ast.unparse(function.returns)}" if function.returns is not None and function.name != "__init__" else ""
    return f"{name}({', '.join(words)}){returns}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    return argument.arg if default is None else f"{argument.arg}={_code(default)}"


def signature(node: ast.ClassDef | ast.FunctionDef) -> str:
    """A call, or a class with its fields or its constructor, and a table of its public methods and properties."""
    if isinstance(node, ast.FunctionDef):
        return f"```python\n{_call(node, node.name)}\n```\n"
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
    constructor = next((method for method in methods if method.name == "__init__"), None)
    fields = [_code(item) for item in node.body if isinstance(item, ast.AnnAssign) and not ast.unparse(item.target).startswith("_")]
    bases = ", ".join(map(ast.unparse, node.bases))
    head = (
        _call(constructor, node.name)
        if constructor
        else "\n    ".join([f"class {node.name}({bases}):" if bases else f"class {node.name}:", *fields])
    )
    lines = ["```python", head, "```"]
    public = [method for method in methods if not method.name.startswith("_") and not _is_setter(method)]
    if public:
        lines += ["", "| member | |", "|---|---|"]
    for method in public:
        is_property = any(ast.unparse(decorator).endswith("property") for decorator in method.decorator_list)
        shown = f"{method.name}: {ast.unparse(method.returns)}" if is_property and method.returns else _call(method, method.name)
        shown = f"await {shown}" if isinstance(method, ast.AsyncFunctionDef) else shown
        lines.append(f"| `{shown.replace('|', chr(92) + '|')}` | {_first_sentence(method)} |")
    return "\n".join(lines) + "\n"


def _is_setter(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(decorator).endswith(".setter") for decorator in method.decorator_list)


def api() -> str:
    """``docs/api.md`` with the present signatures."""
    package = ast.parse((ROOT / "graphspec" / "__init__.py").read_text(encoding="utf-8"))
    homes = next(node.value for node in package.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES")
    files = {name: ROOT / "graphspec" / (module[1:].replace(".", "/") + ".py") for name, module in ast.literal_eval(homes).items()}

    def block(match: re.Match[str]) -> str:
        name = match[1]
        tree = ast.parse(files[name].read_text(encoding="utf-8"))
        node = next(item for item in tree.body if isinstance(item, ast.ClassDef | ast.FunctionDef) and item.name == name)
        return f"<!-- signature: graphspec.{name} -->\n{signature(node)}<!-- end -->"

    return re.sub(r"<!-- signature: graphspec\.(\w+) -->\n.*?<!-- end -->", block, API.read_text(encoding="utf-8"), flags=re.DOTALL)


if __name__ == "__main__":
    MODELS_PAGE.write_text(models(), encoding="utf-8")
    API.write_text(api(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    DESIGN.write_text(design(), encoding="utf-8")

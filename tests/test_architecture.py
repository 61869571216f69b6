"""The structure of the repository: which module may import which, what an import costs, no branches on variant names."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphspec.config.catalog import VARIANTS
from graphspec.facts.folders import SHIPPED
from tests.house import arrows, rooms

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "graphspec"
MAX_LINES = 500
SPINE = {"graphspec/plan/plan.py", "graphspec/graphs/cycle.py", "graphspec/engine/scheduler.py", "graphspec/api/llm.py"}
"""Files that a reader follows from end to end; they may have :data:`MAX_SPINE_LINES`, since their pieces would be read together."""
MAX_SPINE_LINES = 700
MAX_ROOMS = 20
MAX_ARROWS = 130
MAX_ENTERED = {"compiled": 32, "eager": 45}
"""Files that one warm ``generate()`` of the demo's chain may enter, by runtime."""
NAMES = set(VARIANTS)
REQUIRED = {
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "conf",
    "constraints.txt",
    "graphspec",
    "pyproject.toml",
    "setup.py",
    "tests",
}
TOP_LEVEL = REQUIRED | {"CITATION.cff", "docs", "examples", "mkdocs.yml", "perf", "recipes"}
GENERATED = {"build", "dist", "graphspec.egg-info", "multirun", "outputs", "site"}

# Everything at the level of the plan and below, and the faces that --help and notebooks touch first.
WITHOUT_TORCH = [
    "graphspec", "graphspec.errors", "graphspec.shapes", "graphspec.host.native_build", "graphspec.host.progress",
    "graphspec.config.schema", "graphspec.config.catalog", "graphspec.config.compose", "graphspec.config.train_options",
    "graphspec.facts", "graphspec.facts.layouts", "graphspec.plan.static_tree", "graphspec.plan.plan",
    "graphspec.cli.demo", "graphspec.cli.inspect", "graphspec.cli.main",
    *(path.partition(":")[0] for path in VARIANTS.values()),
]  # fmt: skip


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_layer_law():
    """The contracts are in pyproject.toml, section importlinter."""
    done = python("import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))")
    assert done.returncode == 0, done.stdout + done.stderr


BLOCK = """
import importlib, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
for name in {modules!r}:
    importlib.import_module(name)
"""


def test_the_plan_and_the_faces_import_no_torch():
    done = python(BLOCK.format(blocked={"torch", "triton", "transformers", "numpy", "safetensors"}, modules=WITHOUT_TORCH))
    assert done.returncode == 0, done.stderr


def test_below_the_faces_nothing_needs_hydra_rich_or_triton():
    modules = ["graphspec.kernels", "graphspec.graphs.cycle", "graphspec.api.llm"]
    # Dynamo and Inductor take as long to import as all the rest; only programs that compile need them.
    no_compiler = "assert not {'torch._dynamo', 'torch._inductor'} & set(sys.modules)"
    done = python(BLOCK.format(blocked={"triton", "hydra", "omegaconf", "rich", "transformers"}, modules=modules) + no_compiler)
    assert done.returncode == 0, done.stderr


def asks_for_a_variant(node: ast.AST) -> bool:
    """Whether ``node`` compares something with a name of the catalog.

    ``none`` is a word with other uses: there the other side must speak of a variant. A checkpoint's own architecture may be checked.
    """
    if isinstance(node, ast.Match):
        patterns = [p.value for case in node.cases for p in ast.walk(case.pattern) if isinstance(p, ast.MatchValue)]
        sides: list[ast.expr] = [node.subject, *patterns]
    elif isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
    else:
        return False
    words = {leaf.value for side in sides for leaf in ast.walk(side) if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)}
    text = " ".join(ast.unparse(side) for side in sides).lower()
    if "architecture" in text:
        return False
    return bool(words & (NAMES - {"none"})) or ("none" in words and "variant" in text)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ('if plan.variant.name == "eagle3": pass', True),
        ('x = "eagle3" != name', True),
        ('if name in ("eagle3", "x"): pass', True),
        ('if variant.name == "none": pass', True),
        ('match name:\n    case "eagle3": pass', True),
        ('if noise == "none": pass', False),
        ('if "eagle3" not in architecture.lower(): pass', False),
        ("if variant.has_network: pass", False),
        ('VariantConfig(name="eagle3")', False),
    ],
)
def test_the_detector_of_name_ladders(code, expected):
    assert any(asks_for_a_variant(node) for node in ast.walk(ast.parse(code))) is expected


def test_no_branch_on_variant_names():
    found = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', '?')}: {ast.unparse(node)[:80]}"
        for path in sources("graphspec")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if asks_for_a_variant(node)
    ]
    assert found == [], "ask the catalog entry for a capability instead"


def test_files_have_one_screenful_of_reasons_to_change():
    sizes = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in sources("graphspec", "perf", "recipes")
    }
    assert {name: size for name, size in sizes.items() if size > (MAX_SPINE_LINES if name in SPINE else MAX_LINES)} == {}
    assert sizes.keys() >= SPINE


def test_few_rooms_and_few_arrows_between_them():
    assert len(rooms()) <= MAX_ROOMS
    assert len(arrows()) <= MAX_ARROWS
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py", "errors.py", "shapes.py"}


@pytest.mark.parametrize("runtime", MAX_ENTERED)
def test_a_warm_call_enters_few_files(runtime: str):
    done = python(f"from tests.house import entered; print(len(entered({runtime!r})))")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) <= MAX_ENTERED[runtime]


def test_top_level_holds_what_it_should():
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".") and path.name != "__pycache__"} - GENERATED
    assert found <= TOP_LEVEL
    assert found >= REQUIRED


def test_the_version_is_defined_once():
    import graphspec

    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == graphspec.__version__


def test_the_pinned_versions_satisfy_the_declared_ones():
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pinned = dict(
        line.lower().replace("_", "-").split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )
    for text in [*project["dependencies"], *extras["dev"], *extras["report"]]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pinned[requirement.name.lower()], prereleases=True), text


def test_the_wheel_brings_its_configuration(tmp_path):
    """Built from a copy, unpacked elsewhere, run from there: what a user without the repository has."""
    for name in ("graphspec", "conf"):
        shutil.copytree(ROOT / name, tmp_path / "src" / name, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    for name in ("pyproject.toml", "setup.py", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tmp_path / "src" / name)
    build = "from setuptools.build_meta import build_wheel; build_wheel('../dist')"
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path / "src", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    shipped = {str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*") if path.is_file()}
    expected = {"graphspec/conf/" + str(path.relative_to(ROOT / "conf")) for path in (ROOT / "conf").rglob("*.yaml")}
    expected |= {str(path.relative_to(ROOT)) for path in sources("graphspec")}
    expected |= {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.cpp")}
    shipped_models = [path for name in SHIPPED for path in (PACKAGE / name).rglob("*")]
    expected |= {str(path.relative_to(ROOT)) for path in shipped_models if path.is_file() and path.suffix != ".safetensors"}
    assert expected <= shipped
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import graphspec\n"
    code += "print(graphspec.__file__, graphspec.load_config('experiment=demo_chain').variant.topk)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(tmp_path / "site" / "graphspec" / "__init__.py"), "1"], done.stderr

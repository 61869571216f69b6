"""The documents are correct: generated pages are current, links lead somewhere, named tests exist."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from graphspec import load_config
from graphspec.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("docs", "examples", "recipes", "perf")
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])


def test_generated_pages_are_current() -> None:
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == generate["page"](), "run python docs/generate.py"
    assert (ROOT / "docs" / "models.md").read_text(encoding="utf-8") == generate["models"](), "run python docs/generate.py"
    assert (ROOT / "docs" / "api.md").read_text(encoding="utf-8") == generate["api"](), "run python docs/generate.py"
    assert (ROOT / "docs" / "design.md").read_text(encoding="utf-8") == generate["design"](), "run python docs/generate.py"


def test_pictures_are_current() -> None:
    draw = runpy.run_path(str(ROOT / "docs" / "pictures.py"))
    for name, svg in draw["pictures"]().items():
        assert (ROOT / "docs" / "images" / name).read_text(encoding="utf-8") == svg, "run python docs/pictures.py"


def commands(page: Path) -> list[str]:
    """Every ``graphspec COMMAND ...`` of a page, from its code blocks and between backticks."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("graphspec ")]
    return lines + re.findall(r"`(graphspec [a-z]+ [^`]*)`", text)


def overrides(line: str) -> tuple[str, list[str]]:
    """A line's command and the words that make its configuration; of a sweep the first case."""
    command, *words = shlex.split(line, comments=True)[1:]
    sweep = "--multirun" in words
    skipped = ("-", "hydra.", "hydra/", "prompt=", "experiment=tuned")
    kept = [word for word in words if "=" in word and not word.startswith(skipped) and "..." not in word]
    return command, [word.split(",")[0] if sweep and "[" not in word else word for word in kept]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page) and ROOT / "examples" not in page.parents], ids=lambda p: p.name)
def test_every_command_of_the_pages_composes(page: Path) -> None:
    for line in commands(page):
        command, words = overrides(line)
        assert command in COMMANDS, line
        if not COMMANDS[command].raw_arguments:
            load_config(*words)


def test_nothing_is_installed_by_the_name_that_another_project_has() -> None:
    """On PyPI ``graphspec`` is not this package."""
    texts = [*PAGES, *(ROOT / "graphspec").rglob("*.py"), ROOT / "docs" / "serving" / "Dockerfile"]
    assert [path.name for path in texts if re.search(r"pip install [^\n]*\bgraphspec\[", path.read_text(encoding="utf-8"))] == ["hints.py"]
    for project in (ROOT / "examples").rglob("pyproject.toml"):
        assert re.search(r'dependencies = \["graphspec(\[\w+\])?<1"\]', project.read_text(encoding="utf-8")), project


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    named = re.findall(r"`((?:graphspec|tests|perf|docs|recipes|conf)/[\w./]+\.\w+)`", text)
    missing = [link for link in links if not (page.parent / link).exists()] + [name for name in named if not (ROOT / name).exists()]
    assert not missing

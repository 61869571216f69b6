"""The documents tell the truth: generated pages are current, links lead somewhere, named tests exist."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from graphspec import load_config

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def test_generated_pages_are_current() -> None:
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == generate["page"](), "run python docs/generate.py"
    assert (ROOT / "docs" / "design.md").read_text(encoding="utf-8") == generate["design"](), "run python docs/generate.py"


def test_pictures_are_current() -> None:
    draw = runpy.run_path(str(ROOT / "docs" / "pictures.py"))
    for name, svg in draw["pictures"]().items():
        assert (ROOT / "docs" / "images" / name).read_text(encoding="utf-8") == svg, "run python docs/pictures.py"


def test_every_command_of_the_tutorial_composes() -> None:
    lines = re.findall(r"^graphspec (\w+) (.+)$", (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {command for command, _ in lines} == {"generate", "train", "plan", "profile", "tune"}
    for _, words in lines:
        load_config(*(word for word in shlex.split(words) if not word.startswith(("prompt=", "experiment=tuned"))))


def test_nothing_is_installed_by_the_name_that_another_project_has() -> None:
    """On PyPI ``graphspec`` is not this package."""
    texts = [*PAGES, *(ROOT / "examples").rglob("*.md"), *(ROOT / "graphspec").rglob("*.py"), ROOT / "docs" / "serving" / "Dockerfile"]
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

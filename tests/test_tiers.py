"""The tiers of the tests: each test is in one, the kernel tier holds what it should, and .ci/kernel_tier.py sees when it is needed."""

from __future__ import annotations

import itertools
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / ".ci" / "kernel_tier.py"
ELSEWHERE: tuple[str, ...] = runpy.run_path(str(SCRIPT))["ELSEWHERE"]
MARKS = ("kernels", "full", "gpu", "browser", "clients")
CELLS = ("covers", "of_family")
"""Marks of the tests behind docs/features.md, in any tier."""
LEFT_OUT, RUNS = "test\n", "test test-kernels\n"


def selections() -> dict[str, str]:
    """What each target selects, by name."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    variables = dict(re.findall(r"^(\w+) := ('.+')$", makefile, re.M))
    options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]["addopts"]
    found = {"test": options[options.index("-m") + 1]}
    for target in ("test-kernels", "test-full", "test-oldest", "features", "test-browser", "test-clients"):
        recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.M)
        assert recipe is not None
        chosen = re.findall(r" -m (\$\(\w+\)|'[^']+'|\w+)(?= |$)", recipe[1], re.M)[-1]
        found[target] = variables.get(chosen.strip("$()"), chosen).strip("'")
    return found


def chosen_by(expression: str, marks: tuple[str, ...]) -> bool:
    return bool(eval(expression, {}, {mark: mark in marks for mark in (*MARKS, *CELLS)}))


@pytest.mark.parametrize("marks", [some for n in range(3) for some in itertools.combinations(MARKS, n)], ids="-".join)
def test_a_test_is_in_one_tier_and_the_wider_targets_hold_the_narrower(marks: tuple[str, ...]) -> None:
    found = {target: chosen_by(expression, marks) for target, expression in selections().items()}
    needs_machine = not {"gpu", "browser", "clients"}.isdisjoint(marks)
    assert found["test"] == (not marks)
    assert found["test-kernels"] == (marks == ("kernels",))
    assert found["test-full"] == (not needs_machine)
    assert found["test-oldest"] == (found["test"] or found["test-kernels"])
    assert found["test-browser"] == ("browser" in marks)
    assert found["test-clients"] == ("clients" in marks)
    assert not found["features"]


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("marks", [some for n in range(3) for some in itertools.combinations(MARKS, n)], ids="-".join)
def test_the_features_table_is_written_from_tests_of_every_tier_that_needs_no_machine(marks: tuple[str, ...], cell: str) -> None:
    found = {target: chosen_by(expression, (*marks, cell)) for target, expression in selections().items()}
    assert found["features"] == found["test-full"]


def test_everything_about_fused_kernels_is_marked(request: pytest.FixtureRequest) -> None:
    """Of this run; tests that were left out are not seen here."""
    fused = [item for item in request.session.items if ROOT / "tests" / "kernels" / "fused" in item.path.parents]
    assert [item.nodeid for item in fused if item.get_closest_marker("kernels") is None] == []


def test_marked_tests_are_in_folders_that_trigger_their_tier() -> None:
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    marked = [file for file in files if "mark.kernels" in (ROOT / file).read_text(encoding="utf-8")]
    assert marked and [file for file in marked if file.startswith(ELSEWHERE)] == []


def test_what_kernels_graphs_and_models_are_built_from_counts() -> None:
    graph = grimp.build_graph("graphspec")
    rooms = [room for room in ("graphspec.kernels", "graphspec.graphs", "graphspec.models", "graphspec.drafters") if room in graph.modules]
    needed = {module for room in rooms for module in graph.find_upstream_modules(room, as_package=True)}
    assert len(rooms) >= 3 and "graphspec.plan.buffers" in needed
    assert [module for module in needed if f"{module.replace('.', '/')}.py".startswith(ELSEWHERE)] == []


def test_what_does_not_count_exists() -> None:
    assert [name for name in ELSEWHERE if not (ROOT / name).exists()] == ["CITATION.cff"] * (not (ROOT / "CITATION.cff").exists())


def git(folder: Path, *arguments: str) -> str:
    named = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *named, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(folder: Path, name: str) -> str:
    """Changes the file ``name``; returns the commit."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{file.read_text() if file.exists() else ''}a line\n")
    git(folder, "add", "--", name)
    git(folder, "commit", "-qm", name)
    return git(folder, "rev-parse", "HEAD")


def decide(folder: Path, *arguments: str) -> tuple[str, str]:
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("kernel tier: ")
    return done.stdout, done.stderr


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    commit(folder, "graphspec/kernels/a.py")
    return folder


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("graphspec/kernels/fused/b.py", RUNS), ("graphspec/graphs/b.py", RUNS), ("graphspec/models/b.py", RUNS),
        ("graphspec/plan/plan.py", RUNS),
        ("graphspec/a_new_room/b.py", RUNS), ("tests/kernels/test_b.py", RUNS), ("tests/support/b.py", RUNS), ("tests/conftest.py", RUNS),
        ("pyproject.toml", RUNS), ("constraints.txt", RUNS), ("Makefile", RUNS), (".ci/run", RUNS),
        ("README.md", LEFT_OUT), ("docs/b.md", LEFT_OUT), ("graphspec/lab/b.py", LEFT_OUT), ("tests/lab/test_b.py", LEFT_OUT),
    ],
)  # fmt: skip
def test_what_changed_decides(repository: Path, name: str, expected: str) -> None:
    commit(repository, name)
    targets, reason = decide(repository)
    assert targets == expected and (expected == LEFT_OUT or name in reason)


def test_main_is_compared_with_its_parent_and_a_branch_with_where_it_left_main(repository: Path) -> None:
    assert decide(repository)[0] == RUNS, "the first commit has no parent"
    commit(repository, "README.md")
    assert decide(repository)[0] == LEFT_OUT
    git(repository, "switch", "-qc", "branch")
    commit(repository, "graphspec/kernels/a.py")
    commit(repository, "README.md")
    assert decide(repository)[0] == RUNS, "two commits after it left main"
    git(repository, "switch", "-q", "main")
    git(repository, "merge", "-q", "--no-ff", "branch")
    assert decide(repository)[0] == RUNS, "main's parent is the first"
    git(repository, "branch", "-D", "-q", "branch")
    git(repository, "branch", "-m", "trunk")
    assert decide(repository)[0] == RUNS, "it is not known where main was"


def test_what_is_not_committed_counts(repository: Path) -> None:
    commit(repository, "README.md")
    (repository / "constraints.txt").write_text("torch\n")
    assert decide(repository)[0] == RUNS
    git(repository, "add", "constraints.txt")
    assert decide(repository)[0] == RUNS


def test_a_file_that_was_moved_away_or_removed_counts(repository: Path) -> None:
    (repository / "docs").mkdir()
    git(repository, "mv", "graphspec/kernels/a.py", "docs/a.py")
    git(repository, "commit", "-qm", "moved")
    assert "graphspec/kernels/a.py" in decide(repository)[1]


def test_changes_are_compared_with_the_last_release(repository: Path) -> None:
    git(repository, "tag", "v0.1.0")
    commit(repository, "graphspec/kernels/a.py")
    before = commit(repository, "README.md")
    commit(repository, "README.md")
    assert decide(repository, before) == (RUNS, "kernel tier: runs, graphspec/kernels/a.py changed since release v0.1.0\n")
    git(repository, "tag", "v0.2.0")
    commit(repository, "README.md")
    assert decide(repository) == (LEFT_OUT, "kernel tier: left out, nothing it covers changed since release v0.2.0\n")


def test_a_given_revision_replaces_the_parent(repository: Path) -> None:
    before = git(repository, "rev-parse", "HEAD")
    commit(repository, "graphspec/kernels/a.py")
    commit(repository, "README.md")
    assert decide(repository)[0] == decide(repository, "")[0] == LEFT_OUT
    assert decide(repository, before)[0] == RUNS
    targets, reason = decide(repository, "0" * 40)
    assert targets == RUNS and "does not have the history" in reason


def test_without_history_it_runs(repository: Path, tmp_path: Path) -> None:
    commit(repository, "README.md")
    commit(repository, "README.md")
    git(tmp_path, "clone", "-q", "--depth=2", f"file://{repository}", "shallow")
    (tmp_path / "archive").mkdir()
    (repository / "unpacked").mkdir()
    for folder in (tmp_path / "shallow", tmp_path / "archive", repository / "unpacked"):
        targets, reason = decide(folder)
        assert targets == RUNS and "does not have the history" in reason


def test_ci_runs_what_was_decided() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert 'targets=$(.venv/bin/python .ci/kernel_tier.py "$@")' in lines and "for target in $targets; do" in lines

"""Two revisions side by side: the statistics, the worktrees, and the whole command on a small package whose speed is known."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphspec.errors import ResourceError
from perf.compare import __main__ as compare
from perf.compare.revisions import RevisionProcess, checkouts, git, resolve_commit
from perf.compare.verdict import FASTER, SAME, SLOWER, TOO_FEW, UNEQUAL, Comparison, quantile

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("share", "expected"), [(0, 1.0), (0.1, 1.4), (0.5, 3.0), (0.9, 4.6), (1, 5.0)])
def test_quantiles_lie_between_neighbours(share: float, expected: float) -> None:
    assert quantile([5, 1, 4, 2, 3], share) == pytest.approx(expected)
    assert quantile([7], share) == 7


def test_a_quantile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        quantile([], 0.5)


def around(middle: float, spread: float, starts: int = 3, rounds: int = 6, seed: int = 0) -> list[list[float]]:
    rng = random.Random(seed)
    return [[middle * rng.uniform(1 - spread, 1 + spread) for _ in range(rounds)] for _ in range(starts)]


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        (around(1.0, 0.02), SAME),
        (around(0.9, 0.02), FASTER),
        (around(1.1, 0.02), SLOWER),
        (around(1.1, 0.4), SAME),
        (around(1.01, 0.001), SAME),
        ([[1.1] * 6, [1.1] * 6, [1.005] * 6], SAME),
        ([[0.9] * 6, [0.9] * 6, [0.995] * 6], SAME),
        (around(1.1, 0.02, starts=1, rounds=20), TOO_FEW),
        (around(0.9, 0.02, starts=3, rounds=3), TOO_FEW),
        (around(1.0, 0.02, starts=1, rounds=1), SAME),
    ],
    ids=["same", "faster", "slower", "wide", "small", "one start disagrees", "the same, faster", "one start", "few rounds", "one round"],
)
def test_verdicts(ratios: list[list[float]], verdict: str) -> None:
    assert Comparison(ratios).verdict == verdict
    assert Comparison(ratios, equal=False).verdict == UNEQUAL


def test_equal_code_is_seldom_called_different() -> None:
    """Rounds that scatter by 5 % around starts that scatter by 2 %, as two processes of one program do."""
    rng = random.Random(1)
    wrong = 0
    for _ in range(400):
        starts = [rng.gauss(1, 0.02) for _ in range(3)]
        wrong += Comparison([[start * rng.gauss(1, 0.05) for _ in range(6)] for start in starts]).verdict != SAME
    assert wrong <= 8


def test_a_row_is_built_from_ratios_within_a_round() -> None:
    row = compare.Row("none", base=[[1.0, 2.0], [4.0, 1.0]], head=[[2.0, 4.0], [8.0, 2.0]], tokens=[[[1]], [[1]]])
    record = row.record(0.03)
    assert (record["median"], record["p10"], record["p90"], record["rounds"]) == (2.0, 2.0, 2.0, 4)
    row.tokens.append([[2]])
    record = row.record(0.03)
    assert record["verdict"] == UNEQUAL and record["median"] is record["p10"] is record["p90"] is None
    text = compare.table([record])
    assert text.splitlines()[1].split() == ["none", "4", "tokens", "differ"]


PACKAGE = """
import os, random, time
__version__ = "0"
# A clock that only generate moves: what else runs on the machine is not the matter here.
now, scatter = [0.0], random.Random(os.getcwd())
time.perf_counter = lambda: now[0]
class SamplingParams:
    def __init__(self, max_tokens, temperature, ignore_eos):
        self.max_tokens = max_tokens
class Output:
    def __init__(self, token_ids):
        self.token_ids = token_ids
class Tokenizer:
    def encode(self, text):
        return [ord(c) for c in text]
class LLM:
    tokenizer = Tokenizer()
    def __init__(self, model, variant, **keys):
        print("noise on standard output")
    def generate(self, prompt, params):
        now[0] += DELAY * scatter.uniform(0.98, 1.02)
        time.sleep(SLEEP)
        return [Output([FIRST] * params.max_tokens)]
"""


def package(delay: float = 0.004, first: int = 1, sleep: float = 0.0) -> str:
    return PACKAGE.replace("DELAY", str(delay)).replace("FIRST", str(first)).replace("SLEEP", str(sleep))


class Repository:
    """A git repository with a package called graphspec."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "graphspec").mkdir(parents=True)
        git(folder, "init", "--quiet", "--initial-branch=main")

    def write(self, text: str) -> None:
        (self.folder / "graphspec" / "__init__.py").write_text(text, encoding="utf-8")

    def commit(self, text: str, name: str) -> None:
        self.write(text)
        git(self.folder, "add", "-A")
        git(self.folder, "-c", "user.name=n", "-c", "user.email=e@example.org", "commit", "--quiet", "-m", name)
        git(self.folder, "tag", name)

    def worktrees(self) -> int:
        return git(self.folder, "worktree", "list", "--porcelain").count("worktree ")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path / "repository")
    made.commit(package(), "first")
    return made


Run = Callable[..., tuple[int, list[dict[str, Any]], str]]


@pytest.fixture
def run(repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def compared(base: str, head: str, *options: str) -> tuple[int, list[dict[str, Any]], str]:
        file = tmp_path / "out.jsonl"
        words = [base, head, "--repository", str(repository.folder), "--json", str(file), "--starts", "2", *options]
        code = compare.main(words)
        return code, [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()], capsys.readouterr().out

    return compared


def test_a_slower_working_tree_is_found(repository: Repository, run: Run) -> None:
    repository.write(package(delay=0.012))
    code, (origin, settings, *rows), text = run("first", ".", "--workloads", "none", "tree")
    assert code == 0 and [row["workload"] for row in rows] == ["none", "tree"]
    assert all(row["verdict"] == SLOWER and 2.8 < row["p10"] < row["median"] < row["p90"] < 3.2 and row["rounds"] == 12 for row in rows), (
        rows
    )
    commit = resolve_commit(repository.folder, "first")
    assert (settings["base_commit"], settings["head_commit"]) == (commit, f"{commit}-dirty")
    assert origin["kind"] == "provenance" and "repository" not in settings
    assert f"BASE first = {commit}" in text and SLOWER in text
    assert repository.worktrees() == 1


def test_a_faster_commit_is_found_and_the_same_one_is_the_same(repository: Repository, run: Run) -> None:
    repository.commit(package(delay=0.001), "second")
    _, (_, _, row), _ = run("first", "second", "--workloads", "chain")
    assert row["verdict"] == FASTER and row["median"] == pytest.approx(0.25, rel=0.05)
    _, (_, _, row), text = run("second", "main", "--workloads", "chain")
    assert row["verdict"] == SAME and SAME in text


def test_other_tokens_get_no_ratio(repository: Repository, run: Run) -> None:
    repository.commit(package(delay=0.001, first=2), "second")
    code, (_, _, row), text = run("first", "second", "--workloads", "none", "--rounds", "1")
    assert code == 1 and row["verdict"] == UNEQUAL and row["median"] is None
    assert UNEQUAL in text and " .. " not in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (package().replace("ignore_eos", "other"), r"revision second \([0-9a-f]{12}\).*'build none'.*unexpected keyword argument"),
        (package().replace("class SamplingParams", "class Params"), r"'build none'.*cannot import name 'SamplingParams'"),
        ("raise SystemExit('gone')", r"'hello' to work.*its process ended: gone"),
    ],
    ids=["an argument", "a name", "an import"],
)
def test_a_revision_that_lacks_an_api_is_named(repository: Repository, run: Run, broken: str, expected: str) -> None:
    repository.commit(broken, "second")
    with pytest.raises(SystemExit, match=expected) as caught:
        run("first", "second", "--workloads", "none")
    assert "\n" not in str(caught.value)
    assert repository.worktrees() == 1


def test_an_unknown_revision_is_refused(repository: Repository, run: Run) -> None:
    for revision in ("nowhere", "--all"):
        with pytest.raises(ResourceError, match=f"revision: expected a commit.*found {revision}"):
            resolve_commit(repository.folder, revision)
    with pytest.raises(SystemExit, match="found nowhere"):
        run("first", "nowhere")
    assert repository.worktrees() == 1


def test_a_package_from_elsewhere_is_refused(repository: Repository) -> None:
    """An installed copy must not be measured in place of the checkout."""
    (repository.folder / "graphspec" / "__init__.py").rename(repository.folder / "other.py")
    (repository.folder / "graphspec").rmdir()
    with (
        checkouts(repository.folder, ".") as [checkout],
        pytest.raises(ResourceError, match=r"revision \..*expected"),
        RevisionProcess(checkout),
    ):
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "kill"])
def test_nothing_is_left_after_an_interrupt(repository: Repository, tmp_path: Path, number: int) -> None:
    repository.commit(package(sleep=0.05), "second")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    # A shell's background jobs ignore Ctrl-C, and hand that down to all they start.
    heed = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    heed += "runpy.run_module('perf.compare', None, '__main__', True)"
    command = [sys.executable, "-c", heed, "first", "second", "--repository", str(repository.folder), "--rounds", "1000"]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while time.monotonic() < until and repository.worktrees() < 3:
        time.sleep(0.05)
    assert repository.worktrees() == 3
    time.sleep(0.5)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == (1 if number == signal.SIGINT else 143), error
    assert "Traceback" not in error
    assert repository.worktrees() == 1 and list(temporary.iterdir()) == []


def test_a_tree_that_was_never_finished_is_forgotten(repository: Repository) -> None:
    """An interrupt while git makes the tree leaves an entry without one."""
    with pytest.raises(KeyboardInterrupt), checkouts(repository.folder, "first") as [checkout]:
        (checkout.folder / ".git").unlink()
        raise KeyboardInterrupt
    assert repository.worktrees() == 1 and not checkout.folder.exists()


@pytest.mark.parametrize("words", [["a", "b", "--rounds", "0"], ["a", "b", "--workloads", "other"], ["a"]])
def test_bad_arguments(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.parse(words)
    assert "error:" in capsys.readouterr().err


@pytest.mark.full
def test_this_revision_against_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The real engine, eagerly: tokens are equal, and what is the same is not called different."""
    file = tmp_path / "out.jsonl"
    options = ["--runtime", "eager", "--max-tokens", "12", "--prompt-tokens", "64", "--threads", "1", "--json", str(file)]
    assert compare.main(["HEAD", "HEAD", "--starts", "2", "--rounds", "5", *options]) == 0
    _, _, *rows = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
    assert [row["workload"] for row in rows] == list(compare.WORKLOADS)
    assert {row["verdict"] for row in rows} == {SAME}, capsys.readouterr().out

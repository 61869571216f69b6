"""Checks out revisions, each in a temporary git worktree, and runs their code in processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from graphspec.errors import ResourceError

WORKER = Path(__file__).with_name("worker.py")
WORKING_TREE = "."


@dataclass(frozen=True)
class Checkout:
    """The files of a revision.

    Attributes:
        label: the revision as the user gave it.
        commit: its hash, followed by ``-dirty`` for a working tree that differs from it.
        folder: its root.
        cache: folder of its compiled code, not shared with other checkouts.
    """

    label: str
    commit: str
    folder: Path
    cache: Path


def git(repository: Path, *words: str) -> str:
    """The output of a git command.

    Raises:
        ResourceError: git fails.
    """
    done = subprocess.run(["git", "-C", str(repository), *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ResourceError(f"git {words[0]}", "exit code 0", done.stderr.strip() or f"exit code {done.returncode}")
    return done.stdout.strip()


def resolve_commit(repository: Path, revision: str) -> str:
    """The hash of a revision.

    Raises:
        ResourceError: git knows no such commit.
    """
    try:
        return git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    except ResourceError:
        raise ResourceError("revision", "a commit, branch or tag of this repository, or . for the working tree", revision) from None


@contextmanager
def checkouts(repository: Path, *revisions: str) -> Iterator[list[Checkout]]:
    """A context in which every revision is checked out; ``.`` is the working tree itself. All worktrees are removed at its end.

    Raises:
        ResourceError: no such revision, or git fails.
    """
    commits = [resolve_commit(repository, "HEAD" if revision == WORKING_TREE else revision) for revision in revisions]
    with ExitStack() as stack:
        # Runs last, after the folder is removed: only then does git forget a worktree whose creation was interrupted.
        stack.callback(_git_quietly, repository, "worktree", "prune")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="graphspec-compare-")))
        found = []
        for number, (revision, commit) in enumerate(zip(revisions, commits, strict=True)):
            cache = folder / f"cache-{number}"
            cache.mkdir()
            if revision == WORKING_TREE:
                dirty = "-dirty" if git(repository, "status", "--porcelain", "--untracked-files=no") else ""
                found.append(Checkout(revision, commit + dirty, repository, cache))
                continue
            tree = folder / f"tree-{number}"
            # Registered before the worktree is made: one whose creation is interrupted has to be removed too.
            stack.callback(_git_quietly, repository, "worktree", "remove", "--force", str(tree))
            git(repository, "worktree", "add", "--detach", str(tree), commit)
            found.append(Checkout(revision, commit, tree, cache))
        yield found


def _git_quietly(repository: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(repository), *words], capture_output=True, check=False)


class RevisionProcess:
    """The process of one checkout, a context manager: the process ends with the block.

    Args:
        checkout: whose package it imports.
        threads: CPU threads it may use; None: as many as torch takes.
    """

    def __init__(self, checkout: Checkout, threads: int | None = None) -> None:
        self.checkout, self.threads = checkout, threads
        self._log = checkout.cache / "stderr.log"
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        folder, cache = self.checkout.folder, self.checkout.cache
        limits = {"OMP_NUM_THREADS": str(self.threads)} if self.threads is not None else {}
        own = {
            "PYTHONPATH": str(folder),
            "PYTHONSAFEPATH": "1",
            "XDG_CACHE_HOME": str(cache),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        }
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with self._log.open("w", encoding="utf-8") as log:
            # In a new session, so that Ctrl-C reaches only the controlling process, which then ends both sides.
            self._process = subprocess.Popen(
                [sys.executable, str(WORKER)], cwd=folder, env={**os.environ, **limits, **own}, stderr=log, start_new_session=True, **pipes
            )
        try:
            package = Path(self.ask("hello")["package"])
            if package.parent != folder.resolve():
                raise ResourceError(f"revision {self.checkout.label}", f"the package in {folder}", package)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Send one command to the process and wait for its answer.

        Raises:
            ResourceError: the revision can't do it, or its process died.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)  # what it says last comes after the end of its output
            error = f"its process ended: {self._log.read_text(encoding='utf-8', errors='replace').strip()[-500:]}"
        else:
            answer: dict[str, Any] = json.loads(line)
            if "error" not in answer:
                return answer
            error = answer["error"]
        doing = f"{what} {arguments['name']}" if "name" in arguments else what
        key = f"revision {self.checkout.label} ({self.checkout.commit[:12]})"
        raise ResourceError(key, f"{doing!r} to work through the public API", error, "compare revisions that both have what is measured")

"""Prints the test targets that a change needs: ``test``, and ``test-kernels`` unless nothing that tier covers has changed.

The rehearsal of a GPU machine has a cheap half in them: ``test`` runs everything with the packages of such a machine alone, whatever has
changed (tests/perf/test_gpu_machine.py), and ``test-kernels``, which also a change of perf/gpu brings, has Inductor write code for CUDA
under the pinned torch (tests/kernels/test_cuda_code.py). ``make rehearse-gpu`` is the whole.

Compared are the working tree and the last release tag; without one, what main was before: its first parent, on a branch the commit where
it left main, or the revision given as the argument. Where git does not have that history, the tier runs. One line on stderr says what
was chosen, and why.
"""

from __future__ import annotations

import subprocess
import sys

ELSEWHERE = (
    "docs/", "examples/", "perf/", "recipes/",
    "graphspec/demo/", "graphspec/lab/", "graphspec/serve/", "graphspec/cli/",
    "tests/browser/", "tests/command/", "tests/engine/", "tests/fuzz/", "tests/gpu/",
    "tests/clients/", "tests/lab/", "tests/perf/", "tests/recipes/", "tests/serve/", "tests/train/",
    "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md",
)  # fmt: skip
"""What kernels, graphs and models are not built from and not tested by. Anything else counts, so that a new folder does."""
COVERED = ("perf/gpu/",)
"""Folders within these that count all the same."""


def git(*arguments: str) -> str | None:
    """What git prints, without the last line's end; None where it fails."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip("\n") if done.returncode == 0 else None


def base(given: str | None) -> tuple[str, str] | None:
    """The commit to compare with and its name; None where the history does not tell."""
    if git("rev-parse", "--show-prefix") != "" or git("rev-parse", "--is-shallow-repository") != "false":
        return None
    if tag := git("describe", "--tags", "--abbrev=0", "--match", "v[0-9]*"):
        return tag, f"release {tag}"
    if given is not None:
        return (given, given[:12]) if git("cat-file", "-e", f"{given}^{{commit}}") is not None else None
    head = git("rev-parse", "HEAD")
    for main in ("refs/remotes/origin/main", "refs/heads/main"):
        if git("rev-parse", "--verify", "--quiet", main) is not None:
            left = git("merge-base", "HEAD", main)
            before = git("rev-parse", "--verify", "--quiet", "HEAD^1") if left == head else left
            return (before, f"main's parent {before[:12]}") if before else None
    return None


def changes(commit: str) -> list[str] | None:
    """Files that differ between ``commit`` and the working tree, old names of moved ones and untracked files included."""
    listed = [git("diff", "--name-only", "--no-renames", "-z", commit, "--"), git("ls-files", "--others", "--exclude-standard", "-z")]
    return None if None in listed else [name for part in listed if part for name in part.split("\0") if name]


def main() -> None:
    """Prints the targets in one line, the reason on stderr."""
    found = base(sys.argv[1] if len(sys.argv) > 1 and sys.argv[1] else None)
    changed = changes(found[0]) if found else None
    if found is None or changed is None:
        reason = "this clone does not have the history to compare with"
    elif covered := [name for name in changed if name.startswith(COVERED) or not name.startswith(ELSEWHERE)]:
        reason = f"{covered[0]}{f' and {len(covered) - 1} more' if covered[1:] else ''} changed since {found[1]}"
    else:
        sys.stderr.write(f"kernel tier: left out, nothing it covers changed since {found[1]}\n")
        sys.stdout.write("test\n")
        return
    sys.stderr.write(f"kernel tier: runs, {reason}\n")
    sys.stdout.write("test test-kernels\n")


if __name__ == "__main__":
    main()

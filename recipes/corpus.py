"""The training corpus: the source of the Python standard library, with named modules held out."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

# Tests and generated tables are left out: they repeat themselves, and a model that learns them is good at nothing else.
EXCLUDED_PACKAGES = frozenset(
    {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages", "turtledemo", "ensurepip", "__pycache__"}
)

# Whole modules, of several kinds (algorithms, text, I/O, command line, protocol), that no training step ever sees.
HELD_OUT = (
    "argparse.py", "bisect.py", "calendar.py", "collections/__init__.py", "csv.py", "fractions.py", "heapq.py", "json/decoder.py",
    "logging/handlers.py", "queue.py", "shlex.py", "statistics.py", "tarfile.py", "textwrap.py", "urllib/request.py",
    "zipfile.py", "zipfile/__init__.py",
)  # fmt: skip


@dataclass(frozen=True)
class Corpus:
    """Documents by file name, relative to the standard library's folder."""

    train: dict[str, str]
    held_out: dict[str, str]


def load_corpus(root: Path | None = None) -> Corpus:
    """Read every module under ``root`` (default: this interpreter's standard library).

    Raises:
        FileNotFoundError: ``root`` holds no Python file.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    train: dict[str, str] = {}
    held_out: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if EXCLUDED_PACKAGES.intersection(name.split("/")) or name.startswith(("config-", "_sysconfigdata")):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if text.strip():
            (held_out if name in HELD_OUT else train)[name] = text
    if not train:
        raise FileNotFoundError(f"corpus root {root}: expected Python source files, found none")
    return Corpus(train, held_out)

"""The corpus of the demo models: the Python standard library, and packages of this environment under MIT, BSD, Apache or PSF licences.

``python -m recipes.corpus --out DIR [--packages]`` writes ``train/`` and ``held_out/`` for ``graphspec train``, ``NOTICE`` with every
licence, and ``corpus.json`` with the counts. The same environment gives the same files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shutil
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distributions
from pathlib import Path, PurePosixPath
from typing import Any

from graphspec.errors import ConfigError

from .duplicates import NEAR, GramFilter, NearDuplicates, words
from .licences import licence_of, main_licences

# Tests and generated tables are left out: they are repetitive, and a small model would learn little else.
EXCLUDED_PACKAGES = frozenset(
    {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages", "turtledemo", "ensurepip", "__pycache__"}
)
VENDORED = frozenset(
    {"_vendor", "vendor", "vendored", "_vendored", "_vendored_packages", "third_party", "thirdparty", "extern", "externals", "_externals"}
)
"""Folders of third-party code, whose licence is not the package's."""
TESTING = frozenset({"testing", "_testing", "benchmarks", "_generated", "generated"})
LARGEST_FILE = 256 * 1024
"""Bytes of the largest file that is used; larger ones are tables or generated."""
LONGEST_LINE = 1000
SHORTEST = 200
"""Characters of the shortest piece that is kept after overlaps were cut out."""

# Whole modules, of several kinds (algorithms, text, I/O, command line, protocol), that no training step ever sees.
HELD_OUT = (
    "argparse.py", "bisect.py", "calendar.py", "collections/__init__.py", "csv.py", "fractions.py", "heapq.py", "json/decoder.py",
    "logging/handlers.py", "queue.py", "shlex.py", "statistics.py", "tarfile.py", "textwrap.py", "urllib/request.py",
    "zipfile.py", "zipfile/__init__.py",
)  # fmt: skip


@dataclass
class CorpusConfig:
    """Sources and filters of a corpus."""

    root: str | None = None
    """Folder of the standard library; None: this interpreter's."""
    site: str | None = None
    """Folder of installed packages; None: this environment's."""
    packages: bool = False
    """Whether the packages of ``site`` are used too."""
    clean: bool = True
    """Remove near-duplicates, and text that shares 13 words in a row with a held-out module."""


@dataclass(frozen=True)
class Corpus:
    """Documents by file name, relative to the standard library's folder."""

    train: dict[str, str]
    held_out: dict[str, str]


@dataclass(frozen=True)
class Source:
    """One package whose text is used.

    Attributes:
        name: of the distribution.
        version: of the distribution.
        licence: one of the accepted ones.
        text: of its licence files.
        documents: by path below the folder of packages.
    """

    name: str
    version: str
    licence: str
    text: str
    documents: dict[str, str]


@dataclass
class Built:
    """A corpus, its sources, and counts of what was left out."""

    corpus: Corpus
    sources: list[Source]
    left_out: dict[str, int] = field(default_factory=dict)


def load_corpus(root: Path | None = None) -> Corpus:
    """Read every module under ``root`` (default: this interpreter's standard library).

    Raises:
        ConfigError: ``root`` has no Python file to train on.
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
        raise ConfigError("corpus.root", "a folder of Python source files", str(root))
    return Corpus(train, held_out)


def package_sources(site: Path) -> list[Source]:
    """The packages under ``site`` whose licence files are all of accepted kinds, by name.

    Only the licence files directly in a package's metadata count, not its classifiers. Left out are vendored trees (:data:`VENDORED`, and
    subfolders with their own licence), tests, tables and generated files.
    """
    found: dict[str, Source] = {}
    for distribution in distributions(path=[str(site)]):
        name = distribution.metadata["Name"]
        texts = main_licences(distribution)
        kinds = {licence_of(text) for text in texts}
        if not texts or None in kinds:
            continue
        documents = dict(_documents(distribution, site))
        if documents:
            licence = " and ".join(sorted(kind for kind in kinds if kind is not None))
            found[name.lower()] = Source(name, distribution.version, licence, "\n\n".join(texts), documents)
    return [found[name] for name in sorted(found)]


def _documents(distribution: Distribution, site: Path) -> Iterator[tuple[str, str]]:
    files = sorted({PurePosixPath(str(file)) for file in distribution.files or []})
    licensed = {file.parent for file in files if file.name.upper().startswith(("LICENSE", "LICENCE", "COPYING"))}
    for file in files:
        folders = file.parts[:-1]
        # A subfolder with its own licence is third-party code.
        foreign = any(parent in licensed for parent in file.parents if len(parent.parts) > 1)
        foreign |= bool((VENDORED | TESTING | EXCLUDED_PACKAGES).intersection(folders))
        named_out = file.name.startswith(("test_", "__editable__"))
        if file.suffix != ".py" or ".." in folders or foreign or named_out:
            continue
        path = site / file
        if not path.is_file() or path.stat().st_size > LARGEST_FILE:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        lines = text.splitlines()
        if not text.strip() or max(map(len, lines)) > LONGEST_LINE or any("DO NOT EDIT" in line.upper() for line in lines[:20]):
            continue
        yield file.as_posix(), text


def build(config: CorpusConfig) -> Built:
    """Make the corpus of ``config``; documents of packages are named ``<package>/<path>``."""
    library = load_corpus(Path(config.root) if config.root else None)
    site = Path(config.site) if config.site else Path(sysconfig.get_paths()["purelib"])
    sources = package_sources(site) if config.packages else []
    documents = {f"stdlib/{name}": text for name, text in library.train.items()}
    documents |= {f"{source.name}/{name}": text for source in sources for name, text in source.documents.items()}
    if not config.clean:
        return Built(Corpus(documents, library.held_out), sources)
    grams, near = GramFilter(library.held_out.values()), NearDuplicates(NEAR)
    kept: dict[str, str] = {}
    cut = dropped = repeated = 0
    for name, text in documents.items():
        pieces = [piece for piece in grams.without_overlap(text) if len(piece.strip()) >= min(SHORTEST, len(text.strip()))]
        cut += pieces != [text] and bool(pieces)
        dropped += not pieces
        for number, piece in enumerate(pieces):
            if near.seen(words(piece)):
                repeated += 1
                continue
            kept[name if number == 0 else f"{name.removesuffix('.py')}.{number}.py"] = piece
    left_out = {"documents_cut": cut, "documents_overlapping": dropped, "near_duplicates": repeated}
    return Built(Corpus(kept, library.held_out), sources, left_out)


def notice(sources: Sequence[Source]) -> str:
    """The text of ``NOTICE``: the sources, their licences, and the texts of these."""
    version = platform.python_version()
    head = [
        f"The text these models were trained on comes from the standard library of CPython {version} (Python Software Foundation License)"
    ]
    head[0] += " and from these packages:\n" if sources else ".\n"
    listed = [f"- {source.name} {source.version}: {source.licence}" for source in sources]
    texts = [f"\n{'=' * 100}\n{source.name} {source.version}\n{'=' * 100}\n\n{source.text.strip()}" for source in sources]
    return "\n".join([*head, *listed, *texts]) + "\n"


def write(built: Built, out: Path) -> dict[str, Any]:
    """Write ``train/``, ``held_out/``, ``NOTICE`` and ``corpus.json`` to ``out``; returns the content of the last."""
    corpus = built.corpus
    out.mkdir(parents=True, exist_ok=True)
    for side, documents in (("train", corpus.train), ("held_out", corpus.held_out)):
        shutil.rmtree(out / side, ignore_errors=True)
        for name, text in documents.items():
            file = out / side / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8", newline="")
    (out / "NOTICE").write_text(notice(built.sources), encoding="utf-8")
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "train_modules": len(corpus.train),
        "train_bytes": sum(len(text.encode()) for text in corpus.train.values()),
        "held_out_modules": sorted(corpus.held_out),
        "held_out_bytes": sum(len(text.encode()) for text in corpus.held_out.values()),
        "sha256": _digest(corpus),
    }
    if built.sources:
        facts["packages"] = [{"name": s.name, "version": s.version, "licence": s.licence} for s in built.sources]
    facts |= built.left_out
    (out / "corpus.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return facts


def _digest(corpus: Corpus) -> str:
    hashed = hashlib.sha256()
    for side in (corpus.train, corpus.held_out):
        for name, text in sorted(side.items()):
            hashed.update(f"{name}\0{len(text)}\0{text}".encode())
    return hashed.hexdigest()


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.corpus", description="Write the corpus of the demo models.")
    parser.add_argument("--out", type=Path, required=True, help="where train/, held_out/ and NOTICE go")
    parser.add_argument("--packages", action="store_true", help="also the packages of this environment")
    options = parser.parse_args(arguments)
    facts = write(build(CorpusConfig(packages=options.packages)), options.out)
    print(f"{facts['train_modules']} modules, {facts['train_bytes'] / 1e6:.1f} MB written to {options.out}")


if __name__ == "__main__":
    main()

"""Reads a folder of result files: which runs belong together, what they measured, and whether their checks were green.

Every call of ``make gpu-check`` writes its own files into one folder. Those of the same code on the same kind of machine belong together,
so that latency measured in one call counts as verified if the checks of another were green.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphspec.lab.measure.provenance import ROOT

Record = dict[str, Any]
IDENTITY = ("revision", "tree", "torch", "triton")
"""Keys of the first record that are equal in files that belong together; the names of the GPUs are compared too."""
CODE = ("graphspec", "perf", "tests")


def append(file: Path, record: Mapping[str, Any]) -> None:
    """Append one line to a result file."""
    with file.open("a", encoding="utf-8") as sink:
        sink.write(json.dumps(record, default=str) + "\n")


ARCHIVE = "gpu-results.tar.gz"


def pack_results(folder: Path) -> Path | None:
    """Put the results and logs of ``folder`` into one archive in it, in place of the one there; None: there are none.

    Whole at any moment: it is written under another name first.
    """
    files = sorted(file for pattern in ("*.jsonl", "*.log") for file in folder.glob(pattern))
    if not files:
        return None
    archive, draft = folder / ARCHIVE, folder / f".{ARCHIVE}"
    with tarfile.open(draft, "w:gz") as tar:
        for file in files:
            tar.add(file, arcname=file.name)
    draft.replace(archive)
    return archive


def read(file: Path) -> list[Record]:
    """Records of a result file, without an incomplete last line."""
    records = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def tree_digest(root: Path = ROOT) -> str:
    """Digest of all code: a commit does not include later changes, and a packed tree may have none."""
    digest = hashlib.sha256()
    for folder in CODE:
        for file in sorted(path for path in (root / folder).rglob("*") if path.suffix in (".py", ".cpp") and path.is_file()):
            digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def identity(head: Mapping[str, Any]) -> tuple[str, ...]:
    """Values that are equal in files that belong together, from a file's first record."""
    gpus = [gpu["name"] for gpu in head.get("gpus") or []]
    return (*(str(head.get(key)) for key in IDENTITY), ",".join(sorted(set(gpus))))


@dataclass(slots=True)
class Evidence:
    """The files that belong to one :func:`identity`.

    Attributes:
        head: first record of the newest file.
        checks: records of the check files, oldest first.
        rows: of the latency files; for a task that was measured more than once, the newest.
        engine: rows of the whole engine, likewise.
    """

    head: Record
    checks: list[Record] = field(default_factory=list)
    rows: list[Record] = field(default_factory=list)
    engine: list[Record] = field(default_factory=list)

    @property
    def summaries(self) -> dict[str, Record]:
        """The newest summary of each part that runs tests, without those of a selection of tests."""
        return {record["part"]: record for record in self.checks if record["kind"] == "summary" and not record["selected"]}

    @property
    def verified(self) -> bool:
        """Whether tests ran, and the newest run of each part with tests was green."""
        return bool(self.summaries) and all(summary["green"] for summary in self.summaries.values())

    def outcomes(self) -> dict[str, str]:
        """The newest outcome of every test."""
        return {record["name"]: record["outcome"] for record in self.checks if record["kind"] == "check"}

    def measured(self) -> list[str]:
        """Latency tasks with a figure."""
        return [row["task"] for row in self.rows if "task" in row and row["kind"] not in ("failed", "not_run")]


def gather(folder: Path, head: Mapping[str, Any] | None = None) -> Evidence | None:
    """Collect the files that belong together.

    Args:
        folder: of the result files.
        head: first record whose :func:`identity` the files have; None: that of the newest check or latency file.

    Returns:
        None if there is no such file.
    """
    files = _files(folder)
    if head is None:
        newest = _newest_heads(files)
        if not newest:
            return None
        head = newest[-1]
    belongs = {kind: [records for _, records in found if identity(records[0]) == identity(head)] for kind, found in files.items()}
    if not any(belongs.values()):
        return None
    return Evidence(
        head=dict(head),
        checks=[record for records in belongs["gpu-check"] for record in records[1:]],
        rows=_newest_of_each(belongs["gpu-latency"]),
        engine=_newest_of_each(belongs["gpu-engine"]),
    )


def gather_kinds(folder: Path) -> list[Evidence]:
    """:func:`gather` for each kind of GPU: the newest files of each, by the GPU's name."""
    found = [gather(folder, head) for head in _newest_heads(_files(folder))]
    return sorted((evidence for evidence in found if evidence is not None), key=lambda evidence: gpu_name(evidence.head))


def gpu_name(head: Mapping[str, Any]) -> str:
    """Name of the GPU that a file's first record tells; empty: none is named."""
    gpus = head.get("gpus")
    return str(gpus[0]["name"]) if gpus else ""


def _files(folder: Path) -> dict[str, list[tuple[Path, list[Record]]]]:
    return {kind: _heads(folder, kind) for kind in ("gpu-check", "gpu-latency", "gpu-engine")}


def _newest_heads(files: Mapping[str, Iterable[tuple[Path, list[Record]]]]) -> list[Record]:
    """The first record of the newest file of each kind of GPU, the newest of all last."""
    named = sorted(((path.name, records[0]) for found in files.values() for path, records in found), key=lambda pair: pair[0])
    newest: dict[str, Record] = {}
    for _, head in named:
        newest.pop(gpu_name(head), None)
        newest[gpu_name(head)] = head
    return list(newest.values())


def _heads(folder: Path, kind: str) -> list[tuple[Path, list[Record]]]:
    """Files of one kind with a provenance record, oldest first."""
    found = [(path, read(path)) for path in sorted(folder.glob(f"*-{kind}.jsonl"))]
    return [(path, records) for path, records in found if records and records[0].get("kind") == "provenance"]


def _newest_of_each(files: Iterable[list[Record]]) -> list[Record]:
    """Rows of several files; a task that failed, or had no time, does not replace an older figure."""
    kept: dict[str, Record] = {}
    for number, records in enumerate(files):
        for row in records[1:]:
            # Every file has its own bandwidth, from which its floors were computed.
            name = str(row.get("task", f"{row['kind']} {number}"))
            if name not in kept or row["kind"] not in ("failed", "not_run") or kept[name]["kind"] in ("failed", "not_run"):
                kept[name] = row
    return [row for row in kept.values() if row["kind"] != "begun"]

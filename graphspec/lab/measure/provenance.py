"""Provenance of results: commit, versions, hardware, configuration, date. It is the first record of every result file."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from ... import __version__
from ...config.paths import make_folder, unwritable
from ...config.schema import Config

ROOT = Path(__file__).resolve().parents[3]
REVISION_FILE = ".revision"
"""File written by :mod:`perf.gpu.pack`: the commit of a tree that is copied without its ``.git``."""
PACKAGES = ("torch", "triton", "transformers", "numpy")


def _output(*command: str) -> str | None:
    """Output of ``command``, or None if it doesn't exist or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def within_repository(path: str | Path) -> str:
    """``path`` relative to the repository if it is in it, so that results contain no paths of this machine."""
    return str(path).removeprefix(f"{ROOT}{os.sep}")


def command_line(words: Sequence[str]) -> list[str]:
    """A command whose paths are reduced to those in the repository, or else to the file's name, values of ``key=value`` too."""

    def reduced(word: str) -> str:
        key, equals, value = word.rpartition("=")
        value = within_repository(value)
        return f"{key}{equals}{Path(value).name if Path(value).is_absolute() else value}"

    return [reduced(word) for word in words]


def revision() -> str | None:
    """The commit, followed by ``-dirty`` when tracked files differ from it; None outside a git checkout."""
    if (ROOT / ".git").exists():
        commit = _output("git", "rev-parse", "HEAD")
        if commit is None:
            return None
        return commit + ("-dirty" if _output("git", "status", "--porcelain", "--untracked-files=no") else "")
    file = ROOT / REVISION_FILE
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def version(package: str) -> str | None:
    """Installed version; None when it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """Model name of the processor, as the kernel reports it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def devices() -> dict[str, Any]:
    """Versions and devices of torch: its CUDA, the driver, the GPUs; ``gpus`` is empty on a machine without one."""
    import torch

    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        gpus.append({
            "name": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_mib": properties.total_memory // 2**20,
        })  # fmt: skip
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpus else None
    return {
        "cuda": torch.version.cuda,
        "driver": driver.splitlines()[0] if driver else None,
        "gpus": gpus,
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }


def provenance(config: Config | None = None, plan: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The provenance record, a flat object."""
    record: dict[str, Any] = {
        "kind": "provenance",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(sys.argv),
        "revision": revision(),
        "graphspec": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{package: version(package) for package in PACKAGES},
        **devices(),
    }
    if config is not None:
        record["config"] = asdict(config)
    if plan is not None:
        record["plan"] = dict(plan)
    return record


def result_file(folder: Path, name: str) -> Path:
    """``folder/<UTC date and time>-<name>.jsonl``; the folder is made.

    Raises:
        ConfigError: the folder can't be made.
    """
    make_folder("results", folder)
    return folder / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{name}.jsonl"


def write_jsonl(file: Path, records: Iterable[Mapping[str, Any]], key: str = "results") -> None:
    """Write one record per line; values that JSON doesn't have (paths, dtypes) become text.

    Raises:
        ConfigError: the file can't be written; names ``key``.
    """
    try:
        file.write_text("".join(json.dumps(record, default=str) + "\n" for record in records), encoding="utf-8")
    except OSError as error:
        raise unwritable(key, file, error) from error

"""The Python packages that are assumed to be on a GPU machine without a network: ``machine.txt``."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from graphspec.lab.measure.provenance import ROOT

MACHINE = Path(__file__).with_name("machine.txt")
"""One ``name==version`` a line."""


def normalized(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def packages() -> dict[str, str]:
    """Version of each package of the machine, by its normalized name."""
    lines = (line.strip() for line in MACHINE.read_text(encoding="utf-8").splitlines())
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {normalized(name): version for name, version in pairs}


def closure(requirements: Iterable[str], python: str, without: Mapping[str, str] | None = None) -> list[str]:
    """Normalized names of packages and of everything they need, as those installed here declare it.

    Args:
        requirements: as in ``pyproject.toml``.
        python: version of the Python that they are for, which decides about conditional requirements.
        without: packages that are there; they and what only they need are left out.

    Raises:
        SystemExit: one of them is not installed here, so its requirements are unknown.
    """
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux", "platform_system": "Linux"}
    found: dict[str, None] = {}
    todo = [Requirement(text) for text in requirements]
    while todo:
        wanted = todo.pop(0)
        name = normalized(wanted.name)
        extras = wanted.extras or {""}
        if wanted.marker is not None and not wanted.marker.evaluate(environment | {"extra": ""}):
            continue
        if name in found or name in (without or {}):
            continue
        found[name] = None
        try:
            needs = [Requirement(text) for text in metadata.requires(name) or ()]
        except metadata.PackageNotFoundError as error:
            raise SystemExit(f"{name}: expected it to be installed here, which tells what it needs; found nothing") from error
        for need in needs:
            if need.marker is None or any(need.marker.evaluate(environment | {"extra": extra}) for extra in extras):
                need.marker = None
                todo.append(need)
    return sorted(found)


def lacking(python: str, extras: Iterable[str] = ()) -> list[str]:
    """What this project and its ``extras`` need and the machine does not have.

    Args:
        python: version of Python there.
        extras: keys of ``[project.optional-dependencies]``.

    Raises:
        SystemExit: an extra that does not exist, or see :func:`closure`.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project.get("optional-dependencies", {})
    wanted = list(project["dependencies"])
    for extra in extras:
        if extra not in optional:
            raise SystemExit(f"--extra: expected one of {', '.join(optional)}, found {extra!r}")
        wanted += optional[extra]
    return closure(wanted, python, packages())

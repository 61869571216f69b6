"""Programmatic dependent launch: whether a fused engine uses it on this machine.

A kernel launched so begins while the one before it drains, and waits where it first reads what another writes. A wait that is missing
shows as a wrong token on some machines and on none of the others. So it is off until :mod:`graphspec.lab.measure.programmatic` has
compared engines with and without it on this machine; the verdict is kept in the cache folder and holds for that GPU, those versions and
these kernels.
"""

from __future__ import annotations

import hashlib
import json
import os
from importlib.resources import files
from pathlib import Path

import torch

from ..errors import ConfigError
from ..host.native_build import cache_folder

FILE = "programmatic_launch.json"
KEY = "kernels.programmatic_launch"
CAPABILITY = (9, 0)
"""First compute capability that has it."""


def identity(device: torch.device) -> dict[str, str]:
    """What a verdict is valid for: the GPU, the versions, and the kernels' source."""
    from ..kernels.linear.fused.linear_choice import device_identity

    source = hashlib.sha256()
    for file in sorted(Path(str(files("graphspec.kernels"))).rglob("fused/*.py")):
        source.update(file.read_bytes())
    return {**device_identity(device), "cuda": str(torch.version.cuda), "kernels": source.hexdigest()[:20]}


def verdict(device: torch.device) -> bool | None:
    """The probe's verdict on a CUDA device of this machine; None: it has not run here, or ran for other versions or kernels."""
    try:
        kept = json.loads((cache_folder() / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    # Other content is not a verdict.
    if not isinstance(kept, dict) or kept.get("identity") != identity(device) or not isinstance(kept.get("passed"), bool):
        return None
    return bool(kept["passed"])


def remember(device: torch.device, passed: bool) -> Path:
    """Store a verdict; returns its file.

    Raises:
        OSError: it can't be written.
    """
    path = cache_folder() / FILE
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    scratch = path.with_name(f".{FILE}-{os.getpid()}")
    scratch.write_text(json.dumps({"identity": identity(device), "passed": passed}, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)
    return path


def resolve(setting: bool | None, mode: str, device: torch.device) -> bool:
    """Whether an engine uses it.

    Args:
        setting: ``kernels.programmatic_launch``.
        mode: resolved ``kernels.mode``.
        device: of the engine.

    Raises:
        ConfigError: it is true and the GPU has no such thing.
    """
    if mode != "fused" or device.type != "cuda" or setting is False:
        return False
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY:
        if setting:
            raise ConfigError(KEY, "null or false below compute capability 9.0", f"true on {found[0]}.{found[1]}")
        return False
    return setting is True or verdict(device) is True

"""Installs what :mod:`perf.gpu.pack` packed, without a network, next to it: ``python3 -m perf.gpu.install``.

Nothing outside the folder is touched, except that compiled kernels for FlashInfer, where there are any, go into its own folder.
``perf.gpu_check`` does it before all else. Only the standard library is imported.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import invalidate_caches, metadata
from importlib.util import find_spec
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = ".gpu-pack"
"""Folder of the repository with the wheels; git ignores it."""
AOT = "flashinfer-aot"
"""Its folder of compiled kernels for FlashInfer."""
DONE = ".installed"


def install(folder: Path = REPOSITORY / FOLDER) -> Path | None:
    """Install the wheels of ``folder`` into ``folder/site``, unless they are there, and put that on this process's and its children's path.

    Returns:
        The folder of the installed packages; None: nothing was packed.

    Raises:
        SystemExit: pip refuses, or kernels are for another version of FlashInfer.
    """
    wheels, site = sorted(folder.glob("*.whl")), folder / "site"
    if not wheels and not (folder / AOT).is_dir():
        return None
    names = "\n".join(wheel.name for wheel in wheels)
    done = site / DONE
    if not done.is_file() or done.read_text(encoding="utf-8") != names:
        shutil.rmtree(site, ignore_errors=True)
        site.mkdir(parents=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--target", str(site)]
        if wheels and subprocess.run([*pip, *map(str, wheels)], check=False).returncode != 0:
            expected = f"wheels that pip installs into Python {sys.version.split()[0]}"
            raise SystemExit(f"{folder}: expected {expected}, found {', '.join(wheel.name for wheel in wheels)}")
        done.write_text(names, encoding="utf-8")
    sys.path.insert(0, str(site))
    invalidate_caches()
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{site}{os.pathsep}{before}" if before else str(site)
    if (folder / AOT).is_dir():
        place_kernels(folder / AOT)
    return site


def place_kernels(folder: Path) -> None:
    """Copy compiled kernels next to FlashInfer, where it looks for those that need no compiler.

    Raises:
        SystemExit: they are for another version of FlashInfer.
    """
    built = (folder / "VERSION").read_text(encoding="utf-8").strip()
    try:
        found = metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        found = "none"
    spec = find_spec("flashinfer")
    if found != built or spec is None or spec.origin is None:
        raise SystemExit(f"{AOT}: expected flashinfer-python {built}, found {found}")
    aot = Path(spec.origin).parent / "data" / "aot"
    for kernel in folder.glob("*/*.so"):
        (aot / kernel.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy2(kernel, aot / kernel.parent.name / kernel.name)


if __name__ == "__main__":
    print(f"export PYTHONPATH={install() or ''}")

"""Packs the repository and the wheels that a machine lacks into one folder, for a GPU machine without a network.

    python -m perf.gpu.pack --out /tmp/graphspec-gpu --tar
    # there:
    tar xf graphspec-gpu.tar.gz && cd graphspec-gpu && ./install.sh && . ./env.sh && cd repo && python3 -m perf.gpu_check

The machine is assumed to have torch, triton, transformers, pytest and hypothesis; other packages that it lacks are ``--requirement``.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graphspec.lab.measure.provenance import REVISION_FILE, ROOT, revision

DEFAULT_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
DEFAULT_REQUIREMENTS = ("hydra-core", "omegaconf", "antlr4-python3-runtime", "pytest-xdist", "execnet")
SOURCE_ONLY = ("antlr4-python3-runtime",)
"""Packages published without a wheel; they are pure Python, so a wheel built here runs anywhere."""
MIB = 2**20

INSTALL = """#!/bin/sh
# Installs the wheels next to this script into ./site, without a network. Nothing outside this folder is touched, except that compiled
# kernels for FlashInfer, where there are any, go into its own folder.
set -eu
cd "$(dirname "$0")"
"${PYTHON:-python3}" -c 'import sys
sys.exit(0 if sys.version_info[:2] == (@MAJOR@, @MINOR@) else "these wheels are for Python @MAJOR@.@MINOR@")'
if ls wheels/*.whl >/dev/null 2>&1; then
    "${PYTHON:-python3}" -m pip install --quiet --no-index --no-deps --upgrade --target site wheels/*.whl
fi
if [ -d flashinfer-aot ]; then
    # Next to FlashInfer, where it looks for kernels that need no compiler.
    PYTHONPATH="$PWD/site" "${PYTHON:-python3}" -c 'import shutil, sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
built = Path("flashinfer-aot/VERSION").read_text().strip()
try:
    found = metadata.version("flashinfer-python")
except metadata.PackageNotFoundError:
    found = "none"
if found != built:
    sys.exit(f"flashinfer-aot: expected flashinfer-python {built}, found {found}")
aot = Path(find_spec("flashinfer").origin).parent / "data" / "aot"
for kernel in Path("flashinfer-aot").glob("*/*.so"):
    (aot / kernel.parent.name).mkdir(parents=True, exist_ok=True)
    shutil.copy2(kernel, aot / kernel.parent.name / kernel.name)'
fi
printf 'export PYTHONPATH=%s/site:%s/repo\\n' "$PWD" "$PWD" > env.sh
echo "installed; now: . $PWD/env.sh && cd $PWD/repo && ${PYTHON:-python3} -m perf.gpu_check"
"""


@dataclass(frozen=True, slots=True)
class Target:
    """The machine that the wheels are for."""

    python: str
    platforms: tuple[str, ...]

    @property
    def version(self) -> tuple[int, int]:
        major, minor = self.python.split(".")
        return int(major), int(minor)


def pinned(requirement: str, constraints: str) -> str:
    """``requirement`` with its version from constraints.txt; unchanged if it names a version or isn't in the file."""
    if any(sign in requirement for sign in "=<>~!@"):
        return requirement
    versions = dict(line.split("==") for line in constraints.splitlines() if "==" in line)
    known = {name.lower().replace("_", "-"): version for name, version in versions.items()}
    name = requirement.lower().replace("_", "-")
    return f"{requirement}=={known[name]}" if name in known else requirement


def wheel_command(requirement: str, folder: Path, target: Target) -> list[str]:
    """The pip command that puts one wheel into ``folder``."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    if requirement.partition("==")[0].lower().replace("_", "-") in SOURCE_ONLY:
        return [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), requirement]
    tags = [word for tag in target.platforms for word in ("--platform", tag)]
    python = ["--python-version", target.python, "--implementation", "cp"]
    return [*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:", *python, *tags, "--dest", str(folder), requirement]


def repository_files() -> list[Path]:
    """Files of the working tree as git sees them: tracked, or new and not ignored; paths relative to the root.

    Raises:
        SystemExit: this is no git checkout.
    """
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"packing needs a git checkout: {done.stderr.strip()}")
    paths = [Path(name) for name in sorted(set(done.stdout.split("\0"))) if name]
    return [path for path in paths if (ROOT / path).is_file()]


def sizes(files: Sequence[Path]) -> dict[str, int]:
    """Bytes per top-level entry of the repository, largest first."""
    found: dict[str, int] = {}
    for path in files:
        found[path.parts[0]] = found.get(path.parts[0], 0) + (ROOT / path).stat().st_size
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def copy_repository(files: Sequence[Path], folder: Path) -> None:
    """Copy ``files`` and write the commit next to them, since ``.git`` is not copied."""
    for path in files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / path)
    (folder / REVISION_FILE).write_text(f"{revision() or 'unknown'}\n", encoding="utf-8")


def write_install(folder: Path, target: Target) -> None:
    """``install.sh``: checks the Python version, installs without an index, writes ``env.sh``."""
    major, minor = target.version
    script = folder / "install.sh"
    script.write_text(INSTALL.replace("@MAJOR@", str(major)).replace("@MINOR@", str(minor)), encoding="utf-8")
    script.chmod(0o755)


def check_wheels(folder: Path, target: Target) -> None:
    """Check that every wheel fits the target.

    Raises:
        SystemExit: a wheel is for another platform.
    """
    for wheel in sorted(folder.glob("*.whl")):
        tags = wheel.stem.split("-")[-1].split(".")
        if "any" not in tags and not set(tags) & set(target.platforms):
            raise SystemExit(f"{wheel.name}: built for {'.'.join(tags)}, wanted any of {', '.join(target.platforms)}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.gpu.pack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist, or be empty")
    parser.add_argument("--python", default="3.12", help="Python version there (default: 3.12)")
    parser.add_argument("--platform", action="append", help=f"platform tag there, may be repeated (default: {' '.join(DEFAULT_PLATFORMS)})")
    parser.add_argument(
        "--requirement", action="append", help=f"a package it lacks, may be repeated (default: {' '.join(DEFAULT_REQUIREMENTS)})"
    )
    parser.add_argument("--no-wheels", action="store_true", help="the repository alone")
    parser.add_argument("--flashinfer", type=Path, help="folder of compiled kernels, written by perf.gpu.build_flashinfer")
    parser.add_argument("--limit-mib", type=float, help="refuse a larger package")
    parser.add_argument("--tar", action="store_true", help="also write OUT.tar.gz")
    parser.add_argument("--dry-run", action="store_true", help="say what would be packed, and write nothing")
    options = parser.parse_args(argv)
    version = options.python.split(".")
    if len(version) != 2 or not all(part.isdigit() for part in version):
        parser.error(f"--python: expected a version like 3.12, found {options.python!r}")
    if options.no_wheels and options.requirement:
        parser.error("--no-wheels contradicts --requirement")
    if options.flashinfer is not None and not (options.flashinfer / "VERSION").is_file():
        parser.error(f"--flashinfer: expected a folder written by perf.gpu.build_flashinfer, found {options.flashinfer}")
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        parser.error(f"--out: expected a new or empty folder, found {options.out}")
    if options.out.resolve() == ROOT or ROOT in options.out.resolve().parents:
        parser.error(f"--out: expected a folder outside the repository, found {options.out}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or an error message."""
    options = parse(argv)
    target = Target(options.python, tuple(options.platform or DEFAULT_PLATFORMS))
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    wanted = [] if options.no_wheels else [pinned(r, constraints) for r in options.requirement or DEFAULT_REQUIREMENTS]
    files, out = repository_files(), options.out.resolve()
    total = 0
    for name, size in sizes(files).items():
        print(f"{size / MIB:9.2f} MiB  repo/{name}")
        total += size
    for path in sorted(options.flashinfer.glob("*/*.so")) if options.flashinfer is not None else ():
        print(f"{path.stat().st_size / MIB:9.2f} MiB  flashinfer-aot/{path.name}")
        total += path.stat().st_size
    commands = [wheel_command(requirement, out / "wheels", target) for requirement in wanted]
    if options.dry_run:
        for command in commands:
            print("would run:", shlex.join(command))
        print(f"{total / MIB:9.2f} MiB  repository, wheels not counted; nothing was written")
        _check_limit(total, options.limit_mib)
        return 0
    _check_limit(total, options.limit_mib)
    (out / "wheels").mkdir(parents=True)
    for command in commands:
        if subprocess.run(command, check=False).returncode != 0:
            raise SystemExit(f"pip failed: {shlex.join(command)}")
    check_wheels(out / "wheels", target)
    for wheel in sorted((out / "wheels").glob("*.whl")):
        print(f"{wheel.stat().st_size / MIB:9.2f} MiB  wheels/{wheel.name}")
        total += wheel.stat().st_size
    _check_limit(total, options.limit_mib)
    copy_repository(files, out / "repo")
    if options.flashinfer is not None:
        shutil.copytree(options.flashinfer, out / "flashinfer-aot")
    write_install(out, target)
    print(f"{total / MIB:9.2f} MiB  in {out}")
    if options.tar:
        archive = out.with_name(out.name + ".tar.gz")
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(out, arcname=out.name)
        print(f"{archive.stat().st_size / MIB:9.2f} MiB  {archive}")
    return 0


def _check_limit(total: int, limit_mib: float | None) -> None:
    if limit_mib is not None and total > limit_mib * MIB:
        raise SystemExit(f"--limit-mib: expected at most {limit_mib:g} MiB, found {total / MIB:.2f}")


if __name__ == "__main__":
    raise SystemExit(main())

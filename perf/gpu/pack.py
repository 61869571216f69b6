"""Packs the repository and the wheels that a machine lacks into one folder, for a GPU machine without a network.

    python -m perf.gpu.pack --out /tmp/graphspec-gpu --tar
    # there:
    tar xf graphspec-gpu.tar.gz && cd graphspec-gpu/repo && python3 -m perf.gpu_check

What the machine has is ``machine.txt``; the project's other dependencies are packed (``--extra`` adds those of an extra, ``--requirement``
replaces them all). The wheels lie in ``.gpu-pack`` of the repository, and every call installs them before all else. ``--in-tree`` puts
them into that folder of this working tree, which git ignores, for a machine that the tree is sent to as it is.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graphspec.lab.measure.provenance import REVISION_FILE, ROOT, revision
from perf.gpu.install import AOT, FOLDER
from perf.gpu.machine import lacking

DEFAULT_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
SOURCE_ONLY = ("antlr4-python3-runtime",)
"""Packages published without a wheel; they are pure Python, so a wheel built here runs anywhere."""
MIB = 2**20

TRAVELS_MIB = 64.0
"""Default of ``--limit-mib``: more is not sent to a machine that a working tree is copied to."""


@dataclass(frozen=True, slots=True)
class Target:
    """The machine that the wheels are for."""

    python: str
    platforms: tuple[str, ...]


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
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--out", type=Path, help="folder to write; must not exist, or be empty")
    place.add_argument("--in-tree", action="store_true", help=f"the wheels alone, into {FOLDER} of this working tree")
    parser.add_argument("--python", default="3.12", help="Python version there (default: 3.12)")
    parser.add_argument("--platform", action="append", help=f"platform tag there, may be repeated (default: {' '.join(DEFAULT_PLATFORMS)})")
    parser.add_argument("--extra", action="append", default=[], help="an extra of the project to take along, may be repeated")
    parser.add_argument("--requirement", action="append", help="a package to take along instead of those that it lacks, may be repeated")
    parser.add_argument("--no-wheels", action="store_true", help="the repository alone")
    parser.add_argument("--flashinfer", type=Path, help="folder of compiled kernels, written by perf.gpu.build_flashinfer")
    parser.add_argument("--limit-mib", type=float, default=TRAVELS_MIB, help=f"refuse more (default: {TRAVELS_MIB:g})")
    parser.add_argument("--tar", action="store_true", help="also write OUT.tar.gz")
    parser.add_argument("--dry-run", action="store_true", help="say what would be packed, and write nothing")
    options = parser.parse_args(argv)
    version = options.python.split(".")
    if len(version) != 2 or not all(part.isdigit() for part in version):
        parser.error(f"--python: expected a version like 3.12, found {options.python!r}")
    if options.no_wheels and (options.requirement or options.extra or options.in_tree):
        parser.error("--no-wheels contradicts --requirement, --extra and --in-tree")
    if options.in_tree and (options.tar or options.flashinfer):
        parser.error("--in-tree contradicts --tar and --flashinfer")
    if options.flashinfer is not None and not (options.flashinfer / "VERSION").is_file():
        parser.error(f"--flashinfer: expected a folder written by perf.gpu.build_flashinfer, found {options.flashinfer}")
    if options.in_tree:
        return options
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
    names = [] if options.no_wheels else options.requirement or lacking(options.python, options.extra)
    wanted = [pinned(name, constraints) for name in names]
    repository = ROOT if options.in_tree else options.out.resolve() / "repo"
    folder = repository / FOLDER
    files, total = repository_files(), 0
    for name, size in sizes(files).items():
        print(f"{size / MIB:9.2f} MiB  repo/{name}")
        total += size
    for path in sorted(options.flashinfer.glob("*/*.so")) if options.flashinfer is not None else ():
        print(f"{path.stat().st_size / MIB:9.2f} MiB  {AOT}/{path.name}")
        total += path.stat().st_size
    if options.dry_run:
        for requirement in wanted:
            print("would run:", shlex.join(wheel_command(requirement, folder, target)))
        print(f"{total / MIB:9.2f} MiB  repository, wheels not counted; nothing was written")
        _check_limit(total, options.limit_mib)
        return 0
    _check_limit(total, options.limit_mib)
    with tempfile.TemporaryDirectory(prefix="graphspec-") as scratch:
        downloads = Path(scratch)
        for requirement in wanted:
            command = wheel_command(requirement, downloads, target)
            if subprocess.run(command, check=False).returncode != 0:
                raise SystemExit(f"pip failed: {shlex.join(command)}")
        check_wheels(downloads, target)
        wheels = sorted(downloads.glob("*.whl"))
        for wheel in wheels:
            print(f"{wheel.stat().st_size / MIB:9.2f} MiB  {FOLDER}/{wheel.name}")
            total += wheel.stat().st_size
        _check_limit(total, options.limit_mib)
        if options.in_tree:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            copy_repository(files, repository)
        folder.mkdir(parents=True)
        for wheel in wheels:
            shutil.copy2(wheel, folder / wheel.name)
    if options.flashinfer is not None:
        shutil.copytree(options.flashinfer, folder / AOT)
    print(f"{total / MIB:9.2f} MiB  in {repository.parent if options.out else folder}")
    if options.tar:
        out = options.out.resolve()
        archive = out.with_name(out.name + ".tar.gz")
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(out, arcname=out.name)
        print(f"{archive.stat().st_size / MIB:9.2f} MiB  {archive}")
    return 0


def _check_limit(total: int, limit_mib: float) -> None:
    if total > limit_mib * MIB:
        raise SystemExit(f"--limit-mib: expected at most {limit_mib:g} MiB, found {total / MIB:.2f}")


if __name__ == "__main__":
    raise SystemExit(main())

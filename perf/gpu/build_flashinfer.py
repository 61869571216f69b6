"""Compiles the FlashInfer kernels of a model on a machine without a GPU, into a folder that :mod:`perf.gpu.pack` includes.

    python -m perf.gpu.build_flashinfer --out /tmp/flashinfer-aot --model path/to/target --page-size 16 --tokens 8 --tokens 1
    python -m perf.gpu.pack --out /tmp/graphspec-gpu --flashinfer /tmp/flashinfer-aot

FlashInfer and the CUDA toolkit (``nvcc``) must be installed here. For a model with key/value heads it compiles the prefill kernels of its
prompts, and ``xqa`` per number of query tokens: ``num_draft_tokens`` for verification, and for ``variant=standalone`` also
``num_steps + 1`` and, in a chain, 1; ``variant=none`` needs 1. For one with latent rows it compiles the MLA kernels, which serve any number
of tokens. ``--backend`` chooses the implementation; ``fa3`` is that of compute capability 9.x.

The folder has ``NAME/NAME.so``, as FlashInfer expects it in its ``data/aot``, to which ``perf.gpu.install`` copies it; from there it is
loaded without ninja and compiler. Kernels are for one version of FlashInfer, which the folder records; ``perf.gpu.install`` refuses others.

The toolkit's major version must be that of torch on the GPU machine (``libcudart``). A machine without a GPU has no driver library to
link with; a library of its name with empty functions, built here, replaces it. The linker may need
``LIBRARY_PATH`` with the toolkit's ``lib64``, the compiler ``CPATH`` with a folder that has ``cuda.h``; ``--library-path`` and
``--include-path`` set them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from graphspec.errors import ConfigError, GraphspecError
from graphspec.facts import read_model_facts
from graphspec.kernels.flashinfer import version

VERSION_FILE = "VERSION"
ARCHITECTURE = "9.0a"
BACKENDS = ("fa3", "fa2")
DRIVER = "libcuda.so.1"
DRIVER_FUNCTIONS = ("cuGetErrorName", "cuTensorMapEncodeTiled")
"""Driver functions that csrc/xqa calls. The linker would drop a library that defines none of them."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Parameters of one ``xqa`` kernel."""

    dtype: str
    page_size: int
    head_dim: int
    group_ratio: int
    tokens: int

    calls_driver: ClassVar[bool] = True

    def __str__(self) -> str:
        shape = f"page_size={self.page_size} head_dim={self.head_dim} queries_per_group={self.group_ratio} tokens={self.tokens}"
        return f"xqa {self.dtype} {shape}"

    def spec(self) -> Any:
        """What FlashInfer compiles."""
        import torch
        from flashinfer.jit.xqa import gen_xqa_module

        dtype = getattr(torch, self.dtype)
        # Positional arguments, the same in all supported versions: input, cache, page, head, ratio, sliding window, output, tokens.
        return gen_xqa_module(dtype, dtype, self.page_size, self.head_dim, self.group_ratio, False, dtype, self.tokens)


@dataclass(frozen=True, slots=True)
class Prefill:
    """Parameters of the kernels for a model's prompts."""

    dtype: str
    backend: str
    head_dim: int
    sliding_window: bool

    calls_driver: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"prefill {self.dtype} {self.backend} head_dim={self.head_dim}{' sliding_window' if self.sliding_window else ''}"

    def spec(self) -> Any:
        """What FlashInfer compiles."""
        import torch
        from flashinfer.jit import gen_batch_prefill_module

        dtype = getattr(torch, self.dtype)
        # Query, cache, output, offsets, both head dimensions, no rotation, sliding window, no cap, sums in float32.
        sizes = torch.int32, self.head_dim, self.head_dim, 0
        return gen_batch_prefill_module(self.backend, dtype, dtype, dtype, *sizes, self.sliding_window, False, False)


@dataclass(frozen=True, slots=True)
class Latent:
    """Parameters of the MLA kernels of a model."""

    dtype: str
    backend: str
    rank: int
    rope_dim: int

    calls_driver: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"mla {self.dtype} {self.backend} compressed={self.rank} rotated={self.rope_dim}"

    def spec(self) -> Any:
        """What FlashInfer compiles."""
        import torch
        from flashinfer.jit import gen_batch_mla_module

        dtype = getattr(torch, self.dtype)
        return gen_batch_mla_module(self.backend, dtype, dtype, dtype, torch.int32, self.rank, self.rope_dim, False)


AnyKernel = Kernel | Prefill | Latent


def kernels_for(model: Path, page_size: int, dtype: str | None, tokens: Sequence[int], backend: str = BACKENDS[0]) -> list[AnyKernel]:
    """The kernels that a target needs.

    Args:
        model: folder of the checkpoint.
        page_size: tokens of a page.
        dtype: of weights and KV; None: the checkpoint's.
        tokens: numbers of query tokens of ``xqa``; empty: no ``xqa``.
        backend: of planned kernels.

    Raises:
        GraphspecError: no such checkpoint, or a model that FlashInfer does not serve.
    """
    facts = read_model_facts(model)
    chosen = dtype or facts.dtype
    heads, latent = (facts.num_heads, facts.num_kv_heads, facts.head_dim), facts.latent
    rows = None if latent is None else (latent.rank, latent.rope_dim)
    version.check_pool("target", page_size, chosen, *heads, facts.sliding_window, latent=rows)
    if rows is not None:
        return [Latent(chosen, backend, *rows)]
    ratio = facts.num_heads // facts.num_kv_heads
    windows = sorted({window is not None for window in facts.sliding_window}) if facts.head_dim in version.PROMPT_DIMS else []
    return [
        *(Prefill(chosen, backend, facts.head_dim, sliding) for sliding in windows),
        *(Kernel(chosen, page_size, facts.head_dim, ratio, count) for count in sorted(set(tokens))),
    ]


def driver_stub(folder: Path) -> Path:
    """Build a ``libcuda.so`` of empty functions under ``folder``: linking needs names only, the GPU machine has the real one.

    Raises:
        SystemExit: no C compiler, or it failed.
    """
    folder.mkdir()
    source = "".join(f"void {name}(void) {{}}\n" for name in DRIVER_FUNCTIONS)
    command = [os.environ.get("CC", "cc"), "-shared", "-x", "c", "-", f"-Wl,-soname,{DRIVER}", "-o", str(folder / "libcuda.so")]
    try:
        subprocess.run(command, input=source, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"no stand-in for libcuda: {getattr(error, 'stderr', '') or error}") from error
    return folder


def build(kernels: Sequence[AnyKernel], out: Path) -> list[Path]:
    """Compile ``kernels`` and lay them out for ``flashinfer/data/aot``.

    FlashInfer reads its environment when it is imported, so this may be called only once per process.

    Raises:
        SystemExit: a kernel was not linked to the driver.
    """
    with tempfile.TemporaryDirectory(prefix="flashinfer-") as scratch:
        os.environ["FLASHINFER_CUDA_ARCH_LIST"] = ARCHITECTURE
        os.environ["FLASHINFER_WORKSPACE_BASE"] = scratch
        paths = [os.environ.get("LIBRARY_PATH", ""), str(driver_stub(Path(scratch) / "stubs"))]
        os.environ["LIBRARY_PATH"] = os.pathsep.join(path for path in paths if path)
        written = []
        for kernel in kernels:
            spec = kernel.spec()
            print(f"compiling {kernel}", flush=True)
            spec.build(False)
            if kernel.calls_driver and DRIVER.encode() not in spec.jit_library_path.read_bytes():
                raise SystemExit(f"{spec.name}: expected to depend on {DRIVER}, found that it does not")
            target = out / spec.name / f"{spec.name}.so"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(spec.jit_library_path, target)
            written.append(target)
    (out / VERSION_FILE).write_text(f"{version.installed()}\n", encoding="utf-8")
    return written


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.gpu.build_flashinfer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist, or be empty")
    parser.add_argument("--model", type=Path, required=True, help="folder of the target's checkpoint (its config.json is read)")
    parser.add_argument("--page-size", type=int, default=16, help="runtime.page_size (default: 16)")
    parser.add_argument("--dtype", choices=version.DTYPES, help="hardware.dtype (default: the checkpoint's)")
    parser.add_argument("--tokens", type=int, action="append", default=[], help="query tokens of a call of xqa, may be repeated")
    parser.add_argument("--backend", choices=BACKENDS, default=BACKENDS[0], help=f"planned kernels (default: {BACKENDS[0]})")
    parser.add_argument("--library-path", help="LIBRARY_PATH for the linker")
    parser.add_argument("--include-path", help="CPATH for the compiler")
    parser.add_argument("--dry-run", action="store_true", help="say what would be compiled; needs neither FlashInfer nor nvcc")
    options = parser.parse_args(argv)
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        parser.error(f"--out: expected a new or empty folder, found {options.out}")
    if min(options.tokens, default=1) < 1:
        parser.error(f"--tokens: expected at least 1, found {min(options.tokens)}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 and an error message."""
    options = parse(argv)
    for name, value in (("LIBRARY_PATH", options.library_path), ("CPATH", options.include_path)):
        if value is not None:
            os.environ[name] = value
    try:
        kernels = kernels_for(options.model, options.page_size, options.dtype, options.tokens, options.backend)
        if not kernels:
            raise ConfigError("--tokens", "at least one number: of this model only xqa serves anything", "none")
        if options.dry_run:
            for kernel in kernels:
                print(f"would compile {kernel} for {ARCHITECTURE}")
            return 0
        version.check_version()
    except GraphspecError as error:
        print(error, file=sys.stderr)
        return 2
    for path in build(kernels, options.out.resolve()):
        print(f"{path.stat().st_size / 2**20:9.2f} MiB  {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Fills Triton's cache on disk before anything is measured: ``python -m perf.gpu.warm``.

An engine has its kernels compiled while its code is written (:mod:`graphspec.kernels.fused.ahead`). The programs that gpu-check measures
don't wait for code, so here the cycles of README's rows run on fake tensors, which shows all their launches. A kernel that does not compile
is reported and stops nothing.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget

from graphspec.config.catalog import load_object, resolve_variant
from graphspec.facts import read_model_facts
from graphspec.graphs.programs import program_stages
from graphspec.graphs.stages.mailbox import MailLayout
from graphspec.kernels.fused.ahead import Job, KernelCompiler
from graphspec.kernels.fused.launch import INTERPRETED, Launch, recording
from graphspec.models.decoder import Decoder
from graphspec.models.layers import use_kernels
from graphspec.plan.buffers import DTYPES, Arena
from graphspec.plan.plan import make_plan
from graphspec.shapes import GREEDY
from perf.gpu.bench import Bench, Case, draft_of, write_configs
from perf.gpu.latency import SHAPES, SHORTER
from perf.gpu.processes import triton_cache
from perf.gpu.results import append

ROWS = (*(Case(name, shape) for name, shape in SHAPES.items()), SHORTER)
"""The cases of README's rows."""
PROCESSES = 16
SECONDS = 30.0
WARP = 32


def launches_of(case: Case, target: Path, draft: Path) -> list[Launch]:
    """Every launch of one cycle of ``case``, in order, found on tensors without data.

    Args:
        case: of :mod:`perf.gpu.latency`.
        target, draft: folders with a ``config.json``, of the case's variant.
    """
    speculates = case.shape.num_steps > 0
    facts = read_model_facts(target)
    head = load_object(resolve_variant(case.variant).facts)(draft, facts)
    plan = make_plan(Bench.config_of(case, target, draft, "cuda", "captured"), facts, head if speculates else None, device="cuda")
    with FakeTensorMode(), torch.no_grad():
        kernels = Bench.kernels_of(plan)
        before = torch.get_default_dtype()
        torch.set_default_dtype(DTYPES[plan.dtype])
        try:
            with torch.device("cuda"):
                networks: list[Any] = [Decoder(facts, plan.tap_layers, plan.max_positions)]
                networks += [draft_of(head, plan.max_positions, networks[0])] if speculates else []
        finally:
            torch.set_default_dtype(before)
        use_kernels(kernels, *networks)
        for network in networks:
            network.rotary.to("cuda")
        if speculates and networks[1].target_token_Vd is not None:
            networks[1].target_token_Vd = networks[1].target_token_Vd.to("cuda")
        arena = Arena(plan, MailLayout.of(plan).size)
        arena.allocate(GREEDY)
        key = plan.graph_keys(GREEDY)[0]
        views = arena.views(key.bucket, key.shape)
        stages = program_stages(plan, kernels, networks[0], networks[1] if speculates else None, key)
        with recording() as launches:
            for stage in stages:
                stage(views)
    return launches


def warm(cases: Iterable[Case], target: GPUTarget, seconds: float, processes: int) -> dict[str, Any]:
    """Compile the kernels of the cycles of ``cases``.

    Args:
        cases: of :mod:`perf.gpu.latency`.
        target: device to compile for.
        seconds: time limit.
        processes: number of processes.

    Returns:
        ``kind``, numbers of kernels ``wanted``, ``cached`` before and ``compiled``, ``seconds``, and ``failed``: kernel to error.
    """
    began = time.monotonic()
    found: list[Launch] = []
    with tempfile.TemporaryDirectory() as folder:
        configs = write_configs(Path(folder))
        for case in cases:
            found += launches_of(case, *configs)
    recorded = time.monotonic() - began
    with closing(KernelCompiler(target, processes)) as compiler:
        compiler.take(found)
        done = compiler.wait(max(0.0, seconds - recorded))
    return {
        "kind": "cache",
        "wanted": len({Job.of(launch, target) for launch in found}),
        "cached": len(compiler.cached),
        "compiled": sum(not kernel.error for kernel in done),
        "recording_seconds": round(recorded, 1),
        "seconds": round(time.monotonic() - began, 1),
        "failed": {kernel.kernel: kernel.error for kernel in done if kernel.error},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit code 0: every kernel compiled; 1: some did not, or there was no time for them."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.gpu.warm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for everything (default: {SECONDS:.0f})")
    parser.add_argument(
        "--processes", type=int, default=min(PROCESSES, os.cpu_count() or 1), help="how many compile (default: %(default)s)"
    )
    parser.add_argument("--file", type=Path, help="append the record to this file too")
    options = parser.parse_args(argv)
    if INTERPRETED:
        parser.error("TRITON_INTERPRET is set: interpreted kernels can't be compiled")
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was compiled")
        return 0
    os.environ.update(triton_cache())
    major, minor = torch.cuda.get_device_capability()
    record = warm(ROWS, GPUTarget("cuda", 10 * major + minor, WARP), options.seconds, options.processes)
    if options.file is not None:
        append(options.file, record)
    ready = record["cached"] + record["compiled"]
    print(f"{ready} of {record['wanted']} kernels in {record['seconds']} s, {record['cached']} of them before")
    for kernel, error in record["failed"].items():
        print(f"{kernel}: {error}")
    return 0 if ready == record["wanted"] else 1


if __name__ == "__main__":
    raise SystemExit(main())

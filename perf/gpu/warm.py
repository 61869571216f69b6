"""Fills Triton's cache on disk before anything is measured: ``python -m perf.gpu.warm``.

An engine compiles its kernels one after the other, on one core. Here the cycles of README's rows run on fake tensors, which shows all their
launches; many processes compile the kernels of these, each as the launch would compile it, so that the engine finds them in the cache. A
kernel that does not compile is reported and stops nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from graphspec.config.catalog import load_object, resolve_variant
from graphspec.facts import read_model_facts
from graphspec.graphs.programs import program_stages
from graphspec.graphs.stages.mailbox import MailLayout
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
        for network in networks:
            network.rotary.to("cuda")
            use_kernels(network, kernels)
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


class _Target:
    """A driver of Triton for a process that compiles for a device without using it."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_launch(launch: Launch) -> str:
    """Compile the kernel of a launch as the launch would; returns the name of its cache entry."""
    programmatic = {"launch_pdl": True} if launch.constexprs.get("PDL") else {}
    kernel = launch.kernel.warmup(
        *launch.args, grid=launch.grid, num_warps=launch.num_warps, num_stages=launch.num_stages, **programmatic, **launch.constexprs
    )
    return str(kernel.hash)


def distinct(launches: Iterable[Launch]) -> list[Launch]:
    """One launch per kernel to compile: kernels differ in types, alignment and special values of their arguments."""
    found: dict[tuple[Any, ...], Launch] = {}
    for launch in launches:
        arguments = tuple(_kind(value) for value in launch.args)
        constants = tuple(sorted((name, repr(value)) for name, value in launch.constexprs.items()))
        found.setdefault((launch.kernel, arguments, constants, launch.num_warps, launch.num_stages), launch)
    return list(found.values())


def _kind(value: Any) -> object:
    if isinstance(value, Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        # How Triton specialises a number: 1 is a constant; divisible by 16; 32 or 64 bits.
        return "one" if value == 1 else (value % 16 == 0, -(1 << 31) <= value < 1 << 31)
    return value if value is None else type(value).__name__


def _work(launches: Sequence[Launch], target: GPUTarget, turn: Any, folder: Path) -> None:
    """One process: compiles the next launch that no other process has started, until there is none."""
    driver.set_active(_Target(target))
    with (folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as sink:
        while True:
            with turn.get_lock():
                number, turn.value = turn.value, turn.value + 1
            if number >= len(launches):
                return
            began, record = time.monotonic(), {"kernel": launches[number].kernel.fn.__name__, "error": ""}
            try:
                record["hash"] = compile_launch(launches[number])
            except Exception as error:  # noqa: BLE001 - one kernel that does not compile must not cost the others
                record["error"] = f"{type(error).__name__}: {error}"[:1000]
            sink.write(json.dumps(record | {"seconds": round(time.monotonic() - began, 1)}) + "\n")
            sink.flush()


def compile_all(launches: Sequence[Launch], target: GPUTarget, seconds: float, processes: int) -> list[dict[str, Any]]:
    """Compile the kernels of launches, as many as the time allows.

    Args:
        launches: whose kernels are compiled.
        target: device to compile for.
        seconds: time limit.
        processes: number of processes. They are forked, because a kernel can't be sent to another process.

    Returns:
        For each launch that was compiled or refused: ``kernel``, ``seconds``, ``error``, and ``hash`` without an error.
    """
    if seconds <= 0:
        return []
    context, ends = multiprocessing.get_context("fork"), time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as name:
        folder, turn = Path(name), context.Value("i", 0)
        workers = [context.Process(target=_work, args=(launches, target, turn, folder)) for _ in range(min(processes, len(launches)))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(max(0.0, ends - time.monotonic()))
        for worker in workers:
            if worker.is_alive():
                worker.kill()
                worker.join(1.0)
        return [json.loads(line) for file in sorted(folder.iterdir()) for line in file.read_text().splitlines()]


def warm(cases: Iterable[Case], target: GPUTarget, seconds: float, processes: int) -> dict[str, Any]:
    """Compile the kernels of the cycles of ``cases``.

    Args:
        cases: of :mod:`perf.gpu.latency`.
        target: device to compile for.
        seconds: time limit.
        processes: number of processes.

    Returns:
        ``kind``, numbers of kernels ``wanted`` and ``compiled``, ``seconds``, and ``failed``: kernel to error.
    """
    began = time.monotonic()
    found: list[Launch] = []
    with tempfile.TemporaryDirectory() as folder:
        configs = write_configs(Path(folder))
        for case in cases:
            found += launches_of(case, *configs)
    launches, recorded = distinct(found), time.monotonic() - began
    done = compile_all(launches, target, seconds - recorded, processes)
    return {
        "kind": "cache",
        "wanted": len(launches),
        "compiled": sum(not record["error"] for record in done),
        "recording_seconds": round(recorded, 1),
        "seconds": round(time.monotonic() - began, 1),
        "failed": {record["kernel"]: record["error"] for record in done if record["error"]},
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
    print(f"{record['compiled']} of {record['wanted']} kernels in {record['seconds']} s")
    for kernel, error in record["failed"].items():
        print(f"{kernel}: {error}")
    return 0 if record["compiled"] == record["wanted"] else 1


if __name__ == "__main__":
    raise SystemExit(main())

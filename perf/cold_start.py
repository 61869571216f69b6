"""What a GPU machine's first request waits for, as far as it can be timed without a GPU: ``python -m perf.cold_start``.

The programs of a chat's first request, greedy and of fewer than 768 tokens, in the shapes of Llama-3.1-8B with an EAGLE-3 head: a cycle,
and chunks of three sizes. As in an engine, their code is written one after the other (Dynamo, AOTAutograd, Inductor), while other processes
compile our kernels for sm_90, and each program then waits for its own. The kernels that Inductor wrote are compiled afterwards, by one
process. No cache is used. Reading weights, captures and first launches are not in it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from triton.backends.compiler import GPUTarget

from graphspec.graphs.programs import compiled_parts, prefill_keys
from graphspec.kernels.fused.ahead import KernelCompiler, processes_for
from graphspec.kernels.fused.launch import observing
from graphspec.lab.measure.provenance import provenance, result_file, within_repository, write_jsonl
from graphspec.shapes import GREEDY, CycleShape
from tests.support.codegen import compile_kernels, launches_of
from tests.support.shapes_8b import FakeCycle, fake_cycle, run_stages

RESULTS = Path(__file__).parent / "results"
SHAPE, LAYERS, TOKENS = CycleShape(5, 4, 32), 32, 767
TARGET = GPUTarget("cuda", 90, 32)


def programs(cycle: FakeCycle) -> dict[str, Callable[[], list[Callable[[], None]]]]:
    """What makes each program's parts, by name."""

    def prefill(chunk: int) -> list[Callable[[], None]]:
        return [run_stages(part, cycle.views) for part in compiled_parts(cycle.prefill(chunk))]

    chunks = [key.chunk for key in prefill_keys(cycle.plan, GREEDY, TOKENS) if key.lanes == 1]
    return {"cycle": cycle.parts, **{f"prefill of {chunk} tokens": lambda chunk=chunk: prefill(chunk) for chunk in chunks}}  # type: ignore[misc]


def measure(shape: CycleShape, layers: int, processes: int) -> list[dict[str, Any]]:
    """One record per program, in the order in which they are built, then one of our kernels."""
    found: list[dict[str, Any]] = []
    with fake_cycle(shape, layers) as cycle, closing(KernelCompiler(TARGET, processes)) as compiler:
        for name, parts in programs(cycle).items():
            started = time.perf_counter()
            with observing(compiler.take):
                written = launches_of(*parts())
            code = time.perf_counter() - started
            started = time.perf_counter()
            ours = compiler.wait()
            waited = time.perf_counter() - started
            started = time.perf_counter()
            kernels = compile_kernels(written)
            record = {"kind": "program", "program": name, "launches": len(written), "code_seconds": round(code, 1)}
            record |= {"wait_seconds": round(waited, 1), "inductor_kernels": len(kernels)}
            found.append(record | {"inductor_seconds": round(time.perf_counter() - started, 1)})
            print(found[-1], flush=True)
    failed = sorted(kernel.kernel for kernel in ours if kernel.error)
    seconds = round(sum(kernel.seconds for kernel in ours), 1)
    found.append({"kind": "kernels", "kernels": len(ours), "processes": processes, "process_seconds": seconds, "failed": failed})
    print(found[-1], flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the records to ``--out``; 1 if a kernel does not compile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the target (default: %(default)s)")
    processes = max(1, processes_for())
    parser.add_argument("--processes", type=int, default=processes, help="that compile our kernels (default here: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as caches:
        os.environ |= {"TRITON_CACHE_DIR": caches, "TORCHINDUCTOR_CACHE_DIR": caches}
        found = measure(SHAPE, args.layers, args.processes)
    file = result_file(args.out, "cold-start")
    write_jsonl(file, [provenance(), {"kind": "settings", "layers": args.layers}, *found])
    code, waited = (sum(record[name] for record in found[:-1]) for name in ("code_seconds", "wait_seconds"))
    print(f"code of {len(found) - 1} programs {code:.0f} s, then {waited:.0f} s until our {found[-1]['kernels']} kernels were compiled")
    print(within_repository(file))
    return 1 if found[-1]["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""What a GPU machine's first request waits for, as far as it can be timed without a GPU: ``python -m perf.cold_start``.

The programs of a chat's first request, greedy and of fewer than 768 tokens, in the shapes of Llama-3.1-8B with an EAGLE-3 head: a cycle,
and chunks of three sizes. An engine writes their code one after the other (Dynamo, AOTAutograd, Inductor); their Triton kernels are
compiled for sm_90, ours by one process. No cache is used. Reading weights, captures and first launches are not in it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from triton.backends.compiler import GPUTarget

from graphspec.graphs.programs import compiled_parts, prefill_keys
from graphspec.kernels.fused.launch import Launch
from graphspec.lab.measure.provenance import provenance, result_file, within_repository, write_jsonl
from graphspec.shapes import GREEDY, CycleShape
from perf.gpu.warm import compile_all, distinct
from tests.support.codegen import compile_kernels, launches_of
from tests.support.launches import operator_calls
from tests.support.shapes_8b import FakeCycle, fake_cycle, run_stages

RESULTS = Path(__file__).parent / "results"
SHAPE, LAYERS, TOKENS = CycleShape(5, 4, 32), 32, 767
TARGET = GPUTarget("cuda", 90, 32)
SECONDS = 600.0
"""Most for our kernels."""


def programs(cycle: FakeCycle) -> dict[str, Callable[[], list[Callable[[], None]]]]:
    """What makes each program's parts, by name."""

    def prefill(chunk: int) -> list[Callable[[], None]]:
        return [run_stages(part, cycle.views) for part in compiled_parts(cycle.prefill(chunk))]

    chunks = [key.chunk for key in prefill_keys(cycle.plan, GREEDY, TOKENS) if key.lanes == 1]
    return {"cycle": cycle.parts, **{f"prefill of {chunk} tokens": lambda chunk=chunk: prefill(chunk) for chunk in chunks}}  # type: ignore[misc]


def measure(shape: CycleShape, layers: int) -> list[dict[str, Any]]:
    """One record per program, in the order in which they are built, then one of our kernels."""
    found: list[dict[str, Any]] = []
    ours: list[Launch] = []
    with fake_cycle(shape, layers) as cycle:
        for name, parts in programs(cycle).items():
            started = time.perf_counter()
            written = launches_of(*parts())
            code = time.perf_counter() - started
            started = time.perf_counter()
            kernels = compile_kernels(written)
            ours += [launch for part in parts() for call in operator_calls(part) for launch in call.launches]
            record = {"kind": "program", "program": name, "launches": len(written), "code_seconds": round(code, 1)}
            found.append(record | {"inductor_kernels": len(kernels), "inductor_seconds": round(time.perf_counter() - started, 1)})
            print(found[-1], flush=True)
    started = time.perf_counter()
    done = compile_all(distinct(ours), TARGET, SECONDS, 1)
    seconds = round(time.perf_counter() - started, 1)
    failed = sorted(record["kernel"] for record in done if record["error"])
    found.append({"kind": "kernels", "kernels": len(done), "seconds": seconds, "failed": failed})
    print(found[-1], flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the records to ``--out``; 1 if a kernel does not compile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the target (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as caches:
        os.environ |= {"TRITON_CACHE_DIR": caches, "TORCHINDUCTOR_CACHE_DIR": caches}
        found = measure(SHAPE, args.layers)
    file = result_file(args.out, "cold-start")
    write_jsonl(file, [provenance(), {"kind": "settings", "layers": args.layers}, *found])
    code = sum(record["code_seconds"] for record in found if record["kind"] == "program")
    print(f"code of {len(found) - 1} programs {code:.0f} s, our {found[-1]['kernels']} kernels {found[-1]['seconds']:.0f} s")
    print(within_repository(file))
    return 1 if found[-1]["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())

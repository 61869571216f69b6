"""Native products of a few rows next to the plainest loops over the same weights.

``python -m perf.product_floor`` times the products of one pass of SmolLM2-135M at 1 and at 5 rows, in Q4_1 with a head in Q8_0, in Q8_0
and in bfloat16, with activations in float32 and rounded as ``kernels.activations`` can: by the engine's native op, and by loops that know
one format and no odd shape (``product_floor.cpp``). Weights are random; those of all layers are one matrix, so calls and hand-overs
between threads, of which the engine's decoder op has few, hardly count. The sides take turns; a figure is the median over rounds of the
ratio of their best times. The processor needs AVX-512.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from graphspec.errors import ResourceError
from graphspec.host.native_build import cpu_flags, find_compiler
from graphspec.kernels.linear.packed import Packed
from graphspec.kernels.native import multiply_packed, pack_codes, pack_linear
from graphspec.lab.measure.provenance import provenance, result_file, write_jsonl

GROUP = 32
FORMATS = {"q4_1": ("q4_1", "q8_0"), "q8_0": ("q8_0", "q8_0"), "bf16": ("bf16", "bf16")}
"""Formats of layers and head, by the name of the pair."""
ROUNDED = {"q4_1": "int8", "q8_0": "int8", "bf16": "bfloat16"}
"""What activations are rounded to, by the name of the pair. The loops round nothing, so such products may take less time than they."""
ROWS = (1, 5)
REPEATS = 30
LAYERS = 30
SMOLLM2 = [(960 * LAYERS, 576), (576 * LAYERS, 576), (3072 * LAYERS, 576), (576 * LAYERS, 1536), (49152, 576)]
"""Outputs and channels of the matrices of a pass, each as tall as those of all layers; the last is the head."""


def random_weight(name: str, outputs: int, channels: int, activations: str) -> torch.Tensor:
    """A weight of a format of :data:`FORMATS`, as native products read it that have these activations."""
    if name == "bf16":
        return pack_linear(torch.randn(outputs, channels).bfloat16().float(), activations=activations)
    groups = (outputs, channels // GROUP)
    scales = (torch.rand(groups) / 16).half()
    if name == "q8_0":
        return pack_codes(Packed(torch.randint(-127, 128, (outputs, channels), dtype=torch.int8), scales, "int8", GROUP), activations)
    codes = torch.randint(0, 256, (outputs, channels // 2), dtype=torch.uint8)
    return pack_codes(Packed(codes, scales, "uint4", GROUP, minimums=-torch.rand(groups).half()), activations)


class Products:
    """The products of a pass by the native op."""

    def __init__(self, layer: str, head: str, activations: str = "full") -> None:
        *layers, last = SMOLLM2
        self.weights = [(random_weight(layer, *shape, activations), shape) for shape in layers]
        self.weights.append((random_weight(head, *last, activations), last))

    def best_seconds(self, rows: int) -> float:
        """The fastest of :data:`REPEATS` passes."""
        inputs = {channels: torch.randn(rows, channels) for _, channels in SMOLLM2}
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            for weight, (outputs, channels) in self.weights:
                multiply_packed(inputs[channels], weight, outputs, None, None, 0.0)
            times.append(time.perf_counter() - begin)
        return min(times)


def build_loops(folder: Path) -> Path:
    """The compiled ``product_floor.cpp``.

    Raises:
        ResourceError: a processor without AVX-512, no C++ compiler, or one that fails.
    """
    if "avx512f" not in cpu_flags():
        raise ResourceError("product floor", "a processor with AVX-512", "one without")
    program, source = folder / "loops", Path(__file__).with_suffix(".cpp")
    compiler = find_compiler("product floor", "install g++ or clang++")
    command = [compiler, "-O3", "-march=native", "-fopenmp", str(source), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ResourceError("product floor", "a compiler that takes product_floor.cpp", done.stderr.strip()[-400:])
    return program


def loop_seconds(program: Path, threads: int) -> dict[tuple[str, int], float]:
    """The loops' best times by format and rows."""
    numbers = (threads, *(size for shape in SMOLLM2 for size in shape))
    out = subprocess.run([str(program), *map(str, numbers)], capture_output=True, text=True, check=True).stdout
    lines = [line.split() for line in out.splitlines()]
    return {(name, int(rows)): float(seconds) for name, rows, seconds in lines}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print a line per format and number of rows, and write a result file if asked to."""
    parser = argparse.ArgumentParser(prog="python -m perf.product_floor", description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="times that each side has its turn (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder of a result file")
    args = parser.parse_args(argv)
    threads = torch.get_num_threads()
    products = {name: Products(*formats) for name, formats in FORMATS.items()}
    products |= {f"{name}, {ROUNDED[name]}": Products(*formats, ROUNDED[name]) for name, formats in FORMATS.items()}
    times: dict[tuple[str, int], list[tuple[float, float]]] = {(name, rows): [] for name in products for rows in ROWS}
    with tempfile.TemporaryDirectory() as folder:
        program = build_loops(Path(folder))
        for _ in range(args.rounds):
            floor = loop_seconds(program, threads)
            for (name, rows), pairs in times.items():
                pairs.append((products[name].best_seconds(rows), floor[name.partition(",")[0], rows]))
    records = []
    for (name, rows), pairs in times.items():
        ours, loops = (statistics.median(side) * 1e3 for side in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        records.append({"format": name, "rows": rows, "ms": round(ours, 3), "loops_ms": round(loops, 3), "ratio": round(ratio, 3)})
        print(f"{name} {rows} rows: {ours:.2f} ms, plain loops {loops:.2f} ms, ratio {ratio:.2f}")
    if args.out is not None:
        settings = {"kind": "settings", "threads": threads, "rounds": args.rounds, "products": len(SMOLLM2)}
        write_jsonl(result_file(args.out, "product-floor"), [provenance(), settings, *({"kind": "products", **each} for each in records)])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

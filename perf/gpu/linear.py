"""Linear layers of a few rows on a GPU: every fused candidate against cuBLAS, in the shapes of a model.

``python -m perf.gpu.linear --rows 1 8 16 64`` measures the layers of Llama-3.1-8B and its EAGLE-3 head, prints the fastest of each kind
with its bandwidth, and writes all figures to ``perf/results``. ``--table FILE`` stores the choices for later starts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from graphspec.kernels.fused.launch import LaunchState, launching
from graphspec.kernels.linear.fused.linear_choice import LinearShape, LinearTable, device_identity
from graphspec.kernels.linear.fused.linear_tune import Measured, tune
from graphspec.lab.measure.provenance import ROOT, provenance, result_file, write_jsonl

LAYERS: dict[str, dict[str, Any]] = {
    "qkv": {"outputs": 6144, "inputs": 4096, "norm": True, "summed": True},
    "o": {"outputs": 4096, "inputs": 4096, "residual": True},
    "gate-up": {"outputs": 28672, "inputs": 4096, "norm": True, "gated": True, "summed": True},
    "down": {"outputs": 4096, "inputs": 14336, "residual": True},
    "head": {"outputs": 128256, "inputs": 4096, "float32": True},
    "eagle3-fc": {"outputs": 4096, "inputs": 12288},
    "eagle3-qkv": {"outputs": 6144, "inputs": 8192},
    "eagle3-head": {"outputs": 32000, "inputs": 4096, "norm": True, "float32": True},
}


def shapes(rows: Sequence[int], layers: Sequence[str], dtype: str) -> dict[LinearShape, str]:
    """The shapes to measure, and their names."""
    return {LinearShape(rows=count, dtype=dtype, **LAYERS[name]): name for count in rows for name in layers}


def record(name: str, measured: Measured) -> dict[str, Any]:
    """One line of the result file; the bandwidth is that of the weights alone, in GB/s."""
    shape = measured.shape
    fused = {config: time for config, time in measured.times.items() if config is not None}
    best = min(fused, key=lambda config: fused[config], default=None)
    size = shape.outputs * shape.inputs * shape.weight_bits // 8
    line: dict[str, Any] = {"kind": "linear", "layer": name, **asdict(shape), "torch_us": measured.times[None]}
    line["torch_gb_s"] = size / measured.times[None] / 1000
    if best is not None:
        line |= {"fused_us": fused[best], "fused_gb_s": size / fused[best] / 1000, "config": asdict(best)}
    line["chosen"] = "torch" if measured.best is None else "fused"
    times = [(None if config is None else list(config.encoded()), time) for config, time in measured.times.items()]
    line["all"] = [[config, time if math.isfinite(time) else None] for config, time in times]
    return line


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a line per shape, write the records."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.gpu.linear", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--layers", nargs="+", choices=list(LAYERS), default=list(LAYERS))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--programmatic-launch", action="store_true", help="fused kernels may start while the one before drains")
    parser.add_argument("--table", type=Path, help="also write the choices here")
    parser.add_argument("--out", type=Path, default=ROOT / "perf" / "results", help="folder of the result file")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no CUDA device: nothing measured")
        return 1
    device, table = torch.device("cuda"), LinearTable()
    names = shapes(args.rows, args.layers, args.dtype)
    records: list[dict[str, Any]] = []

    def done(measured: Measured) -> None:
        line = record(names[measured.shape], measured)
        records.append(line)
        fused = f"fused {line['fused_us']:8.1f} us {line['fused_gb_s']:6.0f} GB/s" if "fused_us" in line else "fused        -"
        torch_part = f"torch {line['torch_us']:8.1f} us {line['torch_gb_s']:6.0f} GB/s"
        print(f"{line['layer']:12} rows {line['rows']:4}  {fused}  {torch_part}  {line.get('config', '')}", flush=True)

    with launching(LaunchState(args.programmatic_launch)):
        tune(table, names, device, done=done)
    if args.table is not None:
        table.save(args.table, device_identity(device))
    settings = {"kind": "settings", "rows": args.rows, "layers": args.layers, "dtype": args.dtype, "pdl": args.programmatic_launch}
    write_jsonl(result_file(args.out, "gpu-linear"), [provenance(), settings, *records])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

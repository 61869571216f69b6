"""Ahead-of-time compilation of the fused kernels for sm_90, on any machine: ``python -m tests.kernels.proof.aot [FILE ...] [--write]``.

Compiles every call of :data:`CALLS` with the ptxas that comes with Triton, and reads registers, stack, shared memory and local
memory from the cubin. ``--write`` stores the table, or the rows of the named files; without either, the table is compared. Kernels that
spill are an error, and so are those in which :mod:`~tests.kernels.proof.races` finds a race.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from graphspec.kernels.fused import hopper
from graphspec.kernels.fused.launch import INTERPRETED, Launch, recording
from tests.kernels.proof import attention, linear, recurrent, sampling, tree
from tests.kernels.proof.calls import AotCase
from tests.kernels.proof.races import early, merged, overwritten, unordered, unseen
from tests.kernels.proof.sass import arrivals, cuobjdump, fenced_arrivals, instructions

TABLE = Path(hopper.__file__).with_name("sm_90.json")
CALLS: dict[str, tuple[AotCase, ...]] = {**attention.AOT, **linear.AOT, **recurrent.AOT, **sampling.AOT, **tree.AOT}
"""By file."""
TARGET = GPUTarget("cuda", 90, 32)
INT32 = 1 << 31
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
POINTERS = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float64: "*fp64", torch.int64: "*i64",
    torch.int32: "*i32", torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8", torch.bool: "*i1",
}  # fmt: skip
"""Triton's type names of pointer arguments, by torch dtype."""


def aot_cases() -> Iterator[tuple[str, AotCase]]:
    """``(file, case)`` of every file with Triton kernels."""
    for file in sorted(CALLS):
        for case in CALLS[file]:
            yield file, case


def source_of(launch: Launch) -> ASTSource:
    """The source that Triton compiles for this launch: argument types, constants, and which numbers are divisible by 16."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    names = launch.kernel.arg_names
    # Triton makes a number that equals 1, and None, a constant of the compiled kernel.
    for index, (name, value) in enumerate(zip(names, launch.args, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif value is None or isinstance(value, bool) or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, int):
            signature[name] = "i32" if -INT32 <= value < INT32 else "i64"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    for name, value in launch.constexprs.items():
        signature[name], constants[name] = "constexpr", value
    ordered = {name: signature[name] for name in names}
    return ASTSource(fn=launch.kernel, signature=ordered, constexprs=constants, attrs=attributes)


def compiled_for_gpu(launch: Launch) -> Any:
    """The launch's kernel, compiled for sm_90 (``triton.compiler.CompiledKernel``)."""
    return triton.compile(source_of(launch), target=TARGET, options={"num_warps": launch.num_warps, "num_stages": launch.num_stages})


def lowered(launch: Launch, last: str = "ttgir") -> str:
    """The launch's kernel in Triton's GPU dialect, an early stage of :func:`compiled_for_gpu` that takes a fraction of its time.

    Args:
        launch: the launch.
        last: stage to stop after: ``make_ir`` (Triton's dialect as the source is read), ``ttir`` or ``ttgir``.
    """
    backend = make_backend(TARGET)
    source = source_of(launch)
    options = backend.parse_options({"num_warps": launch.num_warps, "num_stages": launch.num_stages, **source.parse_options()})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(TARGET, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    metadata: dict[str, Any] = {}
    order = ("make_ir", "ttir", "ttgir")
    for stage in order[1 : order.index(last) + 1]:
        module = stages[stage](module, metadata)
    return str(module)


def unspecialised(launch: Launch) -> list[str]:
    """Errors of compiling the kernel where integers of the launch are 1, which Triton turns into constants.

    Tried with each integer by itself, then with all of them, as far as Triton's own dialect.
    """
    whole = [index for index, value in enumerate(launch.args) if isinstance(value, int) and not isinstance(value, bool)]
    found = []
    for ones in (*([index] for index in whole), whole):
        args = tuple(1 if index in ones else value for index, value in enumerate(launch.args))
        try:
            lowered(replace(launch, args=args), last="make_ir")
        except triton.CompilationError as error:
            names = ", ".join(launch.kernel.arg_names[index] for index in ones)
            found.append(f"can't be compiled where {names} is 1: {str(error).strip().splitlines()[-1]}")
    return found


def faults(launch: Launch, ttgir: str, programmatic: bool = True) -> list[str]:
    """Races that :mod:`~tests.kernels.proof.races` finds in one launch.

    Args:
        launch: the launch.
        ttgir: its kernel in Triton's GPU dialect, compiled as it was launched.
        programmatic: also compile it for programmatic launch and look for early reads. Takes about as long as all the rest.
    """
    name = launch.kernel.fn.__name__
    found = [f"loads and stores {argument} with no barrier between" for argument in unordered(name, ttgir)]
    found += [f"stores {argument} twice with no barrier between" for argument in overwritten(name, ttgir)]
    found += [f"loads parts of {argument} that its arrival does not show it" for argument in unseen(ttgir)]
    if programmatic and "PDL" in launch.constexprs:
        waiting = replace(launch, constexprs={**launch.constexprs, "PDL": True})
        found += [f"touches {argument} before it waits for the kernel before it" for argument in early(name, lowered(waiting))]
    return found


def unfenced(compiled: Any) -> list[str]:
    """Missing fences in the machine code of a kernel whose programs merge parts that others wrote.

    Args:
        compiled: :func:`compiled_for_gpu` of a launch.
    """
    parts, expected = merged(compiled.asm["ttgir"]), arrivals(compiled.asm["ptx"])
    if not parts and not expected:
        return []
    fenced = fenced_arrivals(instructions(cuobjdump(compiled.asm["cubin"], "-sass")))
    # The assembler may duplicate code, but never drops it.
    return [] if 0 < expected <= fenced else [f"merges {', '.join(parts)} with {fenced} fenced of {expected} arrivals"]


def resources(launch: Launch, compiled: Any) -> dict[str, int]:
    """Registers per thread, and bytes of stack, local and shared memory of one launch.

    Args:
        launch: the launch.
        compiled: :func:`compiled_for_gpu` of it.

    Raises:
        RuntimeError: the output of the bundled cuobjdump can't be read.
    """
    printed = cuobjdump(compiled.asm["cubin"], "--dump-resource-usage")
    found = USAGE.search(printed)
    if found is None:
        raise RuntimeError(f"cuobjdump: no resource usage in {printed!r}")
    registers, stack, _, local = map(int, found.groups())
    ptx = compiled.asm["ptx"]
    spilled = sum(ptx.count(word) for word in ("st.local", "ld.local"))
    return {
        "registers": registers,
        "stack": stack,
        "local": local + spilled,
        "shared": int(compiled.metadata.shared),
        "warps": launch.num_warps,
    }


def compile_all(only: Sequence[str] = (), jobs: int = 1) -> dict[str, dict[str, int]]:
    """Resources by ``op/case/kernel``, in order; further launches of one kernel in a call get ``#2``, ``#3``...

    Args:
        only: files to compile; empty: all.
        jobs: number of processes.
    """
    files = [file for file in dict.fromkeys(op for op, _ in aot_cases()) if not only or file in only]
    if jobs == 1:
        tables = [compile_file(file) for file in files]
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            tables = list(pool.map(compile_file, files))
    return {name: used for table in tables for name, used in table.items()}


def compile_file(op: str) -> dict[str, dict[str, int]]:
    """The part of the table that belongs to one file.

    Raises:
        RuntimeError: a kernel has :func:`faults`, or is :func:`unspecialised` or :func:`unfenced`.
    """
    table: dict[str, dict[str, int]] = {}
    kernels: set[str] = set()
    fenced: set[str] = set()
    for file, case in aot_cases():
        if file != op:
            continue
        with recording() as launches:
            case.launcher(**case.arguments())
        assert launches, f"{op}/{case.name} launches nothing"
        for launch in launches:
            name = f"{op}/{case.name}/{launch.kernel.fn.__name__.strip('_')}"
            repeated = sum(key == name or key.startswith(name + "#") for key in table)
            compiled = compiled_for_gpu(launch)
            kernel = launch.kernel.fn.__name__
            wrong = faults(launch, compiled.asm["ttgir"], programmatic=kernel not in kernels)
            if kernel not in fenced and merged(compiled.asm["ttgir"]):
                # Once per kernel: disassembling takes as long as compiling, and every case has its dialect checked for arrivals.
                wrong += unfenced(compiled)
                fenced.add(kernel)
            wrong += unspecialised(launch) if kernel not in kernels else []
            kernels.add(kernel)
            if wrong:
                raise RuntimeError(f"{name} " + ", ".join(wrong))
            table[f"{name}#{repeated + 1}" if repeated else name] = resources(launch, compiled)
    return table


def spilling(table: dict[str, dict[str, int]]) -> list[str]:
    """Names of the kernels that spill registers to memory."""
    return [name for name, used in table.items() if used["stack"] or used["local"]]


def file_of(name: str) -> str:
    """The op's file, from the name of a table row."""
    return name.partition("/")[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if nothing spills and the table is as committed or was written, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.kernels.proof.aot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ops", nargs="*", help="files to compile (default: all; the table is then compared or written)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    options = parser.parse_args(argv)
    if INTERPRETED:
        parser.error("TRITON_INTERPRET is set: interpreted kernels can't be compiled")
    table = compile_all(options.ops, options.jobs)
    width = max(map(len, table), default=0)
    for name, used in table.items():
        print(name.ljust(width), *(f"{key} {value:>6}" for key, value in used.items()))
    if spills := spilling(table):
        print("spilling:", *spills, sep="\n  ")
        return 1
    if options.ops and not options.write:
        return 0
    committed = json.loads(TABLE.read_text(encoding="utf-8"))
    if options.write:
        others = {name: used for name, used in committed["kernels"].items() if options.ops and file_of(name) not in options.ops}
        if others and committed["triton"] != triton.__version__:
            parser.error(f"the table is of triton {committed['triton']}, this is {triton.__version__}: write all of it")
        kernels = dict(sorted((others | table).items(), key=lambda row: file_of(row[0])))
        found = {"triton": triton.__version__, "target": "sm_90", "kernels": kernels}
        TABLE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return 0
    if committed["triton"] != triton.__version__:
        print(f"the table is of triton {committed['triton']}, this is {triton.__version__}: not compared")
        return 0
    different = sorted(k for k in committed["kernels"].keys() | table.keys() if committed["kernels"].get(k) != table.get(k))
    print("\n".join(f"{k}: expected {committed['kernels'].get(k)}, found {table.get(k)}" for k in different) or "as committed")
    return 1 if different else 0


if __name__ == "__main__":
    raise SystemExit(main())

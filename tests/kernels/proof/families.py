"""How products and attention add under the law, for every number of rows: ``python -m tests.kernels.proof.families``.

``mma`` and ``wgmma`` accumulate in different ways, so a weight must be multiplied by one of them, in one shape, whatever the number of
rows. Other sums of more than two numbers, such as those of squares, are made in the order of a tile's layout, which must not follow the
number of rows either. Triton compiles a launch anew where an integer is 1 or a multiple of 16, so the row counts fall into few kernels;
each is compiled for sm_90 once. Instructions are read from SASS, layouts from Triton's GPU dialect. Prints both as JSON: by name and
what was found, the numbers of rows.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphspec.kernels.fused.launch import Launch, launcher, recording
from graphspec.kernels.linear.fused.linear import linear, linear_summed
from graphspec.kernels.linear.fused.linear_choice import LinearShape, invariant_config
from graphspec.kernels.linear.fused.packed_linear import packed_linear
from graphspec.kernels.registry import op_of
from tests.kernels.proof.aot import compiled_for_gpu, source_of
from tests.kernels.proof.attention import latent_attention_case
from tests.kernels.proof.linear import FORMATS, SHAPES, _linear_call, _linear_kv_write, head_product_case
from tests.kernels.proof.sass import Instruction, cuobjdump, instructions

ROWS = (*range(1, 65), 100, 512)
"""Of a cycle, all of them; of prompts, one that 16 divides and one that it does not."""
REDUCE = re.compile(r'"tt\.reduce"\(.*?\) <\{axis = (\d) : i32\}> \(\{(.*?)\}\) : \(tensor<([\dx]+)xf32, (#\w+)', re.DOTALL)
MATRIX = ("HMMA", "HGMMA", "IMMA", "IGMMA", "QMMA", "QGMMA")


def matrix_instructions(code: Sequence[Instruction]) -> tuple[str, ...]:
    """Opcodes of matrix instructions, with shape and dtypes, each once."""
    return tuple(sorted({instruction.opcode for instruction in code if instruction.opcode.partition(".")[0] in MATRIX}))


def sums(ttgir: str) -> tuple[str, ...]:
    """Sums of more than two numbers of floating point, each once: the axis, what is summed, and its layout."""
    layouts = dict(re.findall(r"^(#\w+) = (#.*?)(?: loc.*)?$", ttgir, re.MULTILINE))
    found = set()
    for axis, body, shape, layout in REDUCE.findall(ttgir):
        if "arith.addf" in body and int(shape.split("x")[int(axis)]) > 2:
            found.add(f"axis {axis} of {shape} in {layouts[layout]}")
    return tuple(sorted(found))


def _product(outputs: int, inputs: int, *parts: str) -> Callable[[int], None]:
    called = linear_summed if "stream" in parts else linear
    return lambda rows: called(**_linear_call(rows, outputs, inputs, *parts, "invariant"))


def _kv_write(inputs: int, *parts: str) -> Callable[[int], None]:
    def call(rows: int) -> None:
        case = _linear_kv_write("", rows, inputs, *parts, "invariant")
        case.launcher(**case.arguments())

    return call


def _packed(name: str) -> Callable[[int], None]:
    kind = FORMATS[name]

    def call(rows: int) -> None:
        x, weight = torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta"), kind.without_data(4096, 4096)
        config = invariant_config(LinearShape(rows, 4096, 4096, "bfloat16", code=kind.code, group=kind.group or 4096))
        packed_linear(x, weight, config=config.encoded())

    return call


def _tree_attention(rows: int) -> None:
    sizes = {"B": 1, "T": rows, "Q": 32, "D": 128, "P": 256, "X": -(-rows // 64)}
    op, pool = op_of("tree_attention"), (torch.bfloat16, 32, 2, 1025, 16, 8, 128)
    launcher(op, "batch_invariant")(**op.without_data(sizes, query_BTQD=torch.bfloat16, kv_pool=pool, layer=31, scale=0.1, sink_Q=None))


def _latent_attention(rows: int) -> None:
    case = latent_attention_case("", rows, 16, 8192, words=-(-rows // 64), numerics="batch_invariant")
    case.launcher(**case.arguments())


def _head_product(values: bool) -> Callable[[int], None]:
    def call(rows: int) -> None:
        case = head_product_case("deepseek-v3", rows, values)
        case.launcher(**case.arguments())

    return call


CALLS: dict[str, Callable[[int], None]] = {
    **{name: _product(outputs, inputs, *parts) for name, outputs, inputs, parts in SHAPES},
    **{f"{name}-fp16": _product(outputs, inputs, *parts, "fp16") for name, outputs, inputs, parts in SHAPES if name in ("qkv", "o")},
    **{name: _packed(name) for name in ("int4", "fp8-block", "q4-1")},
    "qkv-write": _kv_write(4096, "summed"),
    "first-qkv-write": _kv_write(4096, "norm"),
    "head-norm-qkv-write": _kv_write(4096, "norm", "head-norm"),
    "latent queries": _head_product(False),
    "latent values": _head_product(True),
    "tree attention": _tree_attention,
    "latent attention": _latent_attention,
}
TREES = ("tree attention", "latent attention")
"""Their rows are nodes, of which there are 128 at most."""


def _key(launch: Launch) -> str:
    source = source_of(launch)
    return repr((launch.kernel.fn.__name__, sorted(source.signature.items()), sorted(source.constants.items(), key=repr),
                 sorted(source.attrs.items()), launch.num_warps, launch.num_stages))  # fmt: skip


def families(name: str, rows: Sequence[int] = ROWS) -> dict[tuple[str, ...], list[int]]:
    """What adds for these numbers of rows; several keys mean that bits depend on the number of rows.

    Of attention the matrix instructions alone: a tile's rows are what its kernel is compiled for.
    """
    compiled: dict[str, tuple[str, ...]] = {}
    found: dict[tuple[str, ...], list[int]] = {}
    for count in rows:
        if name in TREES and count > 128:
            continue
        with recording() as launches:
            CALLS[name](count)
        used: set[str] = set()
        for launch in launches:
            key = _key(launch)
            if key not in compiled:
                kernel = compiled_for_gpu(launch)
                compiled[key] = matrix_instructions(instructions(cuobjdump(kernel.asm["cubin"], "-sass")))
                compiled[key] += () if name in TREES else sums(kernel.asm["ttgir"])
            used.update(compiled[key])
        found.setdefault(tuple(sorted(used)), []).append(count)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """1 if something is multiplied by different instructions for different numbers of rows, or by none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these: " + ", ".join(CALLS))
    named = parser.parse_args(argv).names or list(CALLS)
    if unknown := set(named) - set(CALLS):
        parser.error(f"no product or attention of the name {', '.join(sorted(unknown))}")
    found: dict[str, Any] = {name: {" ".join(used): rows for used, rows in families(name).items()} for name in named}
    print(json.dumps(found))
    return 0 if all(len(used) == 1 and "" not in used for used in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())

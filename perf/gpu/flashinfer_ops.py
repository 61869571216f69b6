"""FlashInfer's norm, rope and sampling next to ours on a GPU, in the shapes of Llama-3.1-8B: ``python -m perf.gpu.flashinfer_ops``.

Every pair does the same work on the same tensors inside a CUDA graph; the result file has a line for each, with the median time of a call
in microseconds. Ours are the kernels of a fused cycle; the package does not use FlashInfer's, regardless of the result.

Norms are part of our linear layers, so they are measured with one: residual and norm before the product of queries, keys and values.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphspec.kernels.attention.fused.rope_kv_write import rope_kv_write
from graphspec.kernels.flashinfer import version
from graphspec.kernels.formulas import rms_norm
from graphspec.kernels.linear.fused.linear import fused_linear
from graphspec.kernels.linear.fused.linear_tune import graph_timer
from graphspec.kernels.sampling.fused.sample_tokens import sample_tokens
from graphspec.lab.measure.provenance import ROOT, provenance, result_file, write_jsonl

HIDDEN, QUERIES, GROUPS, DIM, VOCAB, EPS = 4096, 32, 8, 128, 128256, 1e-5
PAGE_SIZE, CONTEXT = 16, 2048
LANES, TOKENS = (1, 8), (1, 8)
Call = Callable[[], object]
Pair = tuple[str, Call, Call]
"""Name of the work, our call, FlashInfer's call."""


def norms(rows: int, device: torch.device, dtype: torch.dtype) -> Iterator[Pair]:
    """Residual and norm alone (ours by the compiler), and before a linear layer."""
    import flashinfer

    x, residual = (torch.randn(rows, HIDDEN, device=device, dtype=dtype) for _ in range(2))
    weight, matrix = (torch.randn(*size, HIDDEN, device=device, dtype=dtype) for size in ((), ((QUERIES + 2 * GROUPS) * DIM,)))
    # Always the fused kernel, whatever a table of measured choices contains.
    multiply = fused_linear("batch_invariant")

    def added() -> tuple[Tensor, Tensor]:
        total = residual + x
        return rms_norm(total, weight, EPS), total

    def theirs() -> Tensor:
        flashinfer.fused_add_rmsnorm(x, residual, weight, EPS)
        return torch.nn.functional.linear(x, matrix)

    yield "add, norm", torch.compile(added, dynamic=False), lambda: flashinfer.fused_add_rmsnorm(x, residual, weight, EPS)
    # Our layer before this one adds the residual, so only the norm is left.
    yield "norm, linear", lambda: multiply(x, matrix, norm_weight=weight, norm_eps=EPS), theirs


def rope(lanes: int, tokens: int, device: torch.device, dtype: torch.dtype) -> Iterator[Pair]:
    """Rotation of queries and keys, and the write of keys and values into pages."""
    import flashinfer

    columns = CONTEXT // PAGE_SIZE
    packed = torch.randn(lanes, tokens, QUERIES + 2 * GROUPS, DIM, device=device, dtype=dtype)
    query, key, value = packed.split((QUERIES, GROUPS, GROUPS), 2)
    flat = [part.flatten(0, 1).contiguous() for part in (query, key, value)]
    table = torch.randn(CONTEXT, DIM, device=device)
    pool = torch.zeros(1, 2, lanes * columns + 1, PAGE_SIZE, GROUPS, DIM, device=device, dtype=dtype)
    pages = torch.arange(1, lanes * columns + 1, device=device, dtype=torch.int32).view(lanes, columns)
    slot = (CONTEXT - tokens + torch.arange(tokens, device=device)).expand(lanes, -1).contiguous()
    valid = torch.ones(lanes, tokens, dtype=torch.bool, device=device)
    lane = torch.arange(lanes, device=device, dtype=torch.int32).repeat_interleave(tokens)
    offsets = torch.arange(0, (lanes + 1) * columns, columns, device=device, dtype=torch.int32)
    full = torch.full((lanes,), PAGE_SIZE, device=device, dtype=torch.int32)
    position = slot.flatten()
    where = (position.int(), (pool[0, 0], pool[0, 1]), pages.flatten(), offsets, full)

    def theirs() -> None:
        flashinfer.apply_rope_with_cos_sin_cache_inplace(position, flat[0].flatten(1), flat[1].flatten(1), DIM, table)
        flashinfer.append_paged_kv_cache(flat[1], flat[2], lane, *where)

    yield "rope, write", lambda: rope_kv_write(query, key, value, table, slot, pool, 0, pages, slot, valid), theirs


def sampling(lanes: int, tokens: int, device: torch.device) -> Iterator[Pair]:
    """A token from every row of logits: the most likely one, and a drawn one."""
    import flashinfer

    logits = torch.randn(lanes, tokens, VOCAB, device=device)
    rows, temperature = logits.flatten(0, 1), torch.ones(lanes, device=device)
    seed = torch.arange(lanes, device=device)
    position = torch.arange(tokens, device=device).expand(lanes, -1).contiguous()
    # As tensors: a graph would freeze numbers and torch's generator.
    theirs = {"seed": torch.zeros(1, dtype=torch.int64, device=device), "offset": torch.zeros(1, dtype=torch.int64, device=device)}
    # FlashInfer has no argmax; it is compared with torch's.
    yield "greedy", lambda: sample_tokens(logits, None, None, None, None, None, None, True), lambda: rows.argmax(-1)
    ours = (logits, temperature, seed, position, None, None, None, True)
    yield "drawn", lambda: sample_tokens(*ours), lambda: flashinfer.sampling_from_logits(rows, **theirs)


def pairs(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Iterator[tuple[dict[str, Any], Call, Call]]:
    """All pairs, with their sizes."""
    for lanes in LANES:
        for tokens in TOKENS:
            sizes = {"lanes": lanes, "tokens": tokens}
            groups = norms(lanes * tokens, device, dtype), rope(lanes, tokens, device, dtype), sampling(lanes, tokens, device)
            for name, ours, theirs in (pair for group in groups for pair in group):
                yield {"kind": "op", "name": name, **sizes}, ours, theirs


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a line per pair, write the records."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.gpu.flashinfer_ops", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "perf" / "results", help="folder of the result file")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available() or find_spec("flashinfer") is None:
        print("nothing measured: needs a CUDA device and FlashInfer")
        return 1
    version.check_version()
    records: list[dict[str, Any]] = []
    for line, ours, theirs in pairs(torch.device("cuda")):
        line |= {"ours_us": graph_timer([ours]), "flashinfer_us": graph_timer([theirs])}
        records.append(line)
        print(
            f"{line['name']:14} {line['lanes']} x {line['tokens']}  ours {line['ours_us']:8.1f} us  {line['flashinfer_us']:8.1f} us",
            flush=True,
        )
    write_jsonl(result_file(options.out, "gpu-flashinfer-ops"), [{**provenance(), "flashinfer": version.installed()}, *records])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

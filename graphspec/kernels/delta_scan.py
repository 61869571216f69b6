"""Gated delta rule over a run of tokens, one after the other: commit, and prompts where bits matter."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from .delta_rule import delta_tokens, delta_update, random_tokens, rows_of
from .op import Case, KernelOp, Written
from .state_runs import along, scan_run


def delta_scan(
    mixed_BTE: Tensor,
    gate_BTG: Tensor,
    matrix_RUHKV: Written,
    layer: int,
    lane_row_B: Tensor,
    length_B: Tensor,
    fresh_B: Tensor | None = None,
    path_BA: Tensor | None = None,
) -> Tensor:
    """Update the states of the lanes' rows by ``length`` tokens, one after the other, and say what each token reads.

    The update is that of :mod:`graphspec.kernels.delta_rule`. A lane of length 0 that isn't fresh keeps its row's state, bit for bit. What
    isn't among them may be NaN. With the accepted path of a tree this is its commit: the operations are those of
    :func:`~graphspec.kernels.delta_walk.delta_walk`, in the same order.

    Args:
        mixed_BTE, gate_BTG: as in :func:`~graphspec.kernels.delta_walk.delta_walk`.
        matrix_RUHKV: float32, written at the lanes' rows. Lanes of one row agree in everything, or nobody reads the row.
        layer: static; of the recurrent ones.
        lane_row_B: int64.
        length_B: int64, at most the number of steps.
        fresh_B: bool: the row's tokens start here, from a state of zeros, whatever it held. None: in no lane.
        path_BA: int64, the place in T of each step's token; the steps are A. None: the first tokens, in order; the steps are T.

    Returns:
        ``[B, steps, H, V]`` in the dtype of ``mixed``; 0 past a lane's length.
    """
    heads, key_dim, value_dim = matrix_RUHKV.shape[2:]
    tokens = delta_tokens(*along(path_BA, mixed_BTE, gate_BTG), heads, key_dim, value_dim)
    start_BHKV = rows_of(matrix_RUHKV, layer, lane_row_B, fresh_B)
    state_BHKV, out_BTHV = scan_run(delta_update, start_BHKV, tokens, length_B)
    matrix_RUHKV[:, layer].index_copy_(0, lane_row_B, state_BHKV)
    return out_BTHV.to(mixed_BTE.dtype)


def run_cases(generator: Generator) -> list[Case]:
    """Of this op and of :func:`~graphspec.kernels.delta_chunk.delta_chunk`: odd sizes, runs of every length, fresh rows."""

    def case(lanes: int, tokens: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, *, fresh: bool) -> Case:
        made = random_tokens(generator, lanes, tokens, key_heads, value_heads, key_dim, value_dim)
        made["length_B"] = torch.randint(0, tokens + 1, (lanes,), generator=generator)
        made["length_B"][0] = tokens
        made["fresh_B"] = torch.rand(lanes, generator=generator) < 0.5 if fresh else None
        return made

    return [
        case(1, 1, 1, 1, 4, 4, fresh=False),
        case(3, 6, 2, 4, 8, 6, fresh=True),
        case(4, 5, 1, 3, 5, 7, fresh=False),
        case(2, 130, 1, 2, 4, 8, fresh=True),
    ]


def path_cases(generator: Generator) -> list[Case]:
    """Those of a run, and accepted paths through trees, off which nothing may be read."""
    cases = run_cases(generator)
    for lanes, tokens, width in ((1, 6, 3), (3, 9, 5)):
        made = random_tokens(generator, lanes, tokens, 2, 4, 8, 6)
        made["path_BA"] = torch.stack([torch.randperm(tokens, generator=generator)[:width].sort().values for _ in range(lanes)])
        made["length_B"] = torch.randint(0, width + 1, (lanes,), generator=generator)
        for lane in range(lanes):
            off = sorted(set(range(tokens)) - set(made["path_BA"][lane, : int(made["length_B"][lane])].tolist()))
            made["mixed_BTE"][lane, off] = made["gate_BTG"][lane, off] = torch.nan
        cases.append(made)
    return cases


OP = KernelOp(delta_scan, path_cases, native="native.recurrent", exact=False)

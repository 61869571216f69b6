"""Gated delta rule over a run of tokens, one after the other: commit, and prompts where bits matter."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from .delta_rule import delta_tokens, delta_update, random_tokens, rows_of
from .op import Case, KernelOp, Written


def delta_scan(
    mixed_BTE: Tensor,
    gate_BTG: Tensor,
    matrix_RUHKV: Written,
    layer: int,
    lane_row_B: Tensor,
    length_B: Tensor,
    fresh_B: Tensor | None = None,
) -> Tensor:
    """Update the states of the lanes' rows by their first ``length`` tokens, in order, and say what each token reads.

    The update is that of :mod:`graphspec.kernels.delta_rule`. A lane of length 0 that isn't fresh keeps its row's state, bit for bit. What
    lies past a lane's length may be NaN. With the accepted path of a tree this is its commit: the operations are those of
    :func:`~graphspec.kernels.delta_walk.delta_walk`, in the same order.

    Args:
        mixed_BTE, gate_BTG: as in :func:`~graphspec.kernels.delta_walk.delta_walk`.
        matrix_RUHKV: float32, written at the lanes' rows. Lanes of one row agree in everything, or nobody reads the row.
        layer: static; of the recurrent ones.
        lane_row_B: int64.
        length_B: int64, at most T.
        fresh_B: bool: the row's tokens start here, from a state of zeros, whatever it held. None: in no lane.

    Returns:
        ``[B, T, H, V]`` in the dtype of ``mixed``; nobody reads it past a lane's length.
    """
    heads, key_dim, value_dim = matrix_RUHKV.shape[2:]
    tokens = delta_tokens(mixed_BTE, gate_BTG, heads, key_dim, value_dim)
    state_BHKV, out = rows_of(matrix_RUHKV, layer, lane_row_B, fresh_B), []
    for token in range(mixed_BTE.shape[1]):
        after_BHKV, read_BHV = delta_update(state_BHKV, tokens.at(token))
        state_BHKV = torch.where((token < length_B)[:, None, None, None], after_BHKV, state_BHKV)
        out.append(read_BHV)
    matrix_RUHKV[:, layer].index_copy_(0, lane_row_B, state_BHKV)
    return torch.stack(out, 1).to(mixed_BTE.dtype)


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


OP = KernelOp(delta_scan, run_cases, fused=None, exact=False)

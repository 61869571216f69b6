"""Commit of a convolution's window: the last inputs of every row, in all layers that are handed in."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from ..op import Case, KernelOp, Written


def conv_shift(
    input_UBTE: Tensor,
    column_RUOE: Written,
    layer: int,
    lane_row_B: Tensor,
    path_BA: Tensor,
    length_B: Tensor,
    fresh_B: Tensor | None = None,
) -> None:
    """The columns of each lane's row, then the inputs ``path[:length]``, oldest first: keep the last O of them, in place.

    The new columns are a parallel copy of the old ones and the inputs: every value is read before any is written. A lane of length 0 that
    isn't fresh keeps its columns, bit for bit. Inputs off the path may be NaN.

    Args:
        input_UBTE: inputs of U layers, as :func:`~graphspec.kernels.recurrent.tree_conv.tree_conv` takes them.
        column_RUOE: the last O inputs of each row and recurrent layer, oldest first; written from ``layer`` on.
        layer: static; the first of the U layers.
        lane_row_B: int64.
        path_BA: int64 places in T, of which the first ``length`` count.
        length_B: int64, at most A.
        fresh_B: bool: the row's tokens start here, after columns of zeros. None: in no lane.
    """
    layers, lanes, _, channels = input_UBTE.shape
    columns = column_RUOE.shape[2]
    old_BUOE = column_RUOE[lane_row_B, layer : layer + layers]
    if fresh_B is not None:
        old_BUOE = torch.where(fresh_B[:, None, None, None], 0.0, old_BUOE)
    place_BO = length_B[:, None] + torch.arange(columns, device=length_B.device)
    on_path_BO = place_BO >= columns
    node_BO = path_BA.gather(1, (place_BO - columns).clamp(0, path_BA.shape[1] - 1))
    node_BO = torch.where(on_path_BO, node_BO, 0)
    index_UBOE = node_BO[None, :, :, None].expand(layers, lanes, columns, channels)
    new_BUOE = input_UBTE.gather(2, index_UBOE).transpose(0, 1)
    kept_BUOE = old_BUOE.gather(2, place_BO.clamp(max=columns - 1)[:, None, :, None].expand(lanes, layers, columns, channels))
    column_RUOE[:, layer : layer + layers].index_copy_(0, lane_row_B, torch.where(on_path_BO[:, None, :, None], new_BUOE, kept_BUOE))


def _cases(generator: Generator) -> list[Case]:
    def case(layers: int, lanes: int, tokens: int, width: int, columns: int, channels: int, *, fresh: bool = False) -> Case:
        path = torch.stack([torch.randperm(tokens, generator=generator)[:width].sort().values for _ in range(lanes)])
        length = torch.randint(0, width + 1, (lanes,), generator=generator)
        inputs = torch.randn(layers, lanes, tokens, channels, generator=generator)
        for lane in range(lanes):
            off = [node for node in range(tokens) if node not in path[lane, : int(length[lane])].tolist()]
            inputs[:, lane, off] = torch.nan
        return {
            "input_UBTE": inputs,
            "column_RUOE": torch.randn(lanes + 1, 3, columns, channels, generator=generator),
            "layer": 3 - layers,
            "lane_row_B": torch.randperm(lanes + 1, generator=generator)[:lanes],
            "path_BA": path,
            "length_B": length,
            "fresh_B": torch.rand(lanes, generator=generator) < 0.5 if fresh else None,
        }

    return [case(1, 1, 1, 1, 3, 4), case(3, 3, 9, 5, 3, 6), case(2, 4, 5, 5, 1, 3), case(1, 3, 12, 12, 3, 5, fresh=True)]


OP = KernelOp(conv_shift, _cases, native="native.recurrent")

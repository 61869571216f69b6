"""Commit of a convolution's window: the last inputs of every row, in all layers that are handed in."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import Bool, Int64, Written, kernel_op


@kernel_op(native="native.recurrent")
def conv_shift(
    input_UBTE: Tensor,
    column_RUOE: Written[Tensor],
    layer: int,
    lane_row_B: Int64,
    path_BA: Int64,
    length_B: Int64,
    fresh_B: Bool | None = None,
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

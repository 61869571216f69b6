"""Causal convolution over the paths of a tree, or over a run of tokens, in front of a recurrent layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..op import Bool, Int64, kernel_op
from .state_tokens import rows_of


@kernel_op(native="native.recurrent", exact=False)
def tree_conv(
    input_BTE: Tensor,
    column_RUOE: Tensor,
    layer: int,
    lane_row_B: Int64,
    parent_BT: Int64,
    weight_EO: Tensor,
    bias_E: Tensor | None = None,
    fresh_B: Bool | None = None,
) -> Tensor:
    """``silu(bias + sum over j of weight[:, j] * x[j])``, channel by channel, over a node and the tokens before it on its path.

    The last weight is the node's own, the one before its parent's, and so on; where the path leaves the tree it goes on in the committed
    columns, the newest of which is the token before the root. A run of tokens is a tree in which each is the parent of the next.

    Args:
        input_BTE: what the projection left, floating point.
        column_RUOE: dtype of the input; the last O inputs of each row and recurrent layer, oldest first.
        layer: static; of the recurrent ones.
        lane_row_B: int64.
        parent_BT: int64, the place of each node's parent, before its own; -1: the root, or an unused node, whose result is not read.
        weight_EO: ``[E, O + 1]``.
        bias_E: dtype of the input.
        fresh_B: bool: the row's tokens start here, after columns of zeros, whatever it held. None: in no lane.

    Returns:
        ``[B, T, E]`` in the dtype of the input. Products are summed in float32, oldest first, and rounded before the activation.
    """
    columns = column_RUOE.shape[2]
    source_BSE = torch.cat((rows_of(column_RUOE, layer, lane_row_B, fresh_B), input_BTE), 1)
    # A place below 0 is a column: -1 the newest, and the one before a column is the next older one.
    place_BT = torch.arange(parent_BT.shape[1], device=parent_BT.device).expand_as(parent_BT)
    places = [place_BT]
    for _ in range(columns):
        place_BT = torch.where(place_BT >= 0, parent_BT.gather(1, place_BT.clamp(min=0)), place_BT - 1)
        places.append(place_BT)
    lane_B1 = torch.arange(input_BTE.shape[0], device=input_BTE.device)[:, None]
    return convolved([source_BSE[lane_B1, place_BT + columns] for place_BT in reversed(places)], weight_EO, bias_E)


def convolved(taps: Sequence[Tensor], weight_EO: Tensor, bias_E: Tensor | None) -> Tensor:
    """Convolution and activation, from the inputs under each weight, oldest first, ``[..., E]``; weights may have dimensions in front."""
    wide = torch.float64 if taps[0].dtype == torch.float64 else torch.float32
    out = torch.zeros_like(taps[0], dtype=wide)
    for tap, x in enumerate(taps):
        out = out + x.to(wide) * weight_EO[..., tap].to(wide)
    out = out if bias_E is None else out + bias_E.to(wide)
    return F.silu(out.to(taps[0].dtype))

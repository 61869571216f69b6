"""The hidden state from which a drafter proposes."""

from __future__ import annotations

from torch import Tensor

from ..op import Int64, Written, kernel_op


@kernel_op(native="native.state")
def take_last(hidden_BTH: Tensor, known_B: Int64, out_BH: Written[Tensor]) -> None:
    """The hidden state of the last valid entry of each lane: ``out[b] = hidden[b, known[b] - 1]``, entry 0 where nothing is valid.

    It is written in place, because torch.compile would copy a result to the slot once more at the end of the region.

    Args:
        hidden_BTH: any floating point, contiguous.
        known_B: int64, at most T: how many entries are valid.
        out_BH: the same dtype, contiguous, written whole.
    """
    last_B11 = (known_B - 1).clamp(min=0)[:, None, None]
    out_BH.copy_(hidden_BTH.gather(1, last_B11.expand(-1, 1, hidden_BTH.shape[-1])).squeeze(1))

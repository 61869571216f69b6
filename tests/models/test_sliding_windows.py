"""The extent of a sliding window against transformers' mask: W positions including the query's own, wherever position 0 is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import sliding_window_causal_mask_function

from graphspec.kernels import select_kernels
from graphspec.kernels.formulas import Rotation
from graphspec.kernels.tree.tree_build import causal_words
from graphspec.models.attention import ChunkAttention, HeadTransform, TreeAttention

LENGTH, WINDOW, PAGE = 12, 4, 4


def seen(shift: int, tree: bool) -> Tensor:
    """Which positions each of ``LENGTH`` consecutive queries attends, bool ``[T, T]``; ``shift`` slots before them are empty."""
    kernels = select_kernels("reference", "auto", "cpu")
    pages = (LENGTH + shift) // PAGE + 1
    pool = torch.zeros(1, 2, pages + 1, PAGE, 1, 16)
    table = torch.arange(1, pages + 1, dtype=torch.int32)[None]
    position = torch.arange(LENGTH)[None]
    rotation = Rotation(torch.cat((torch.ones(1, 8), torch.zeros(1, 8)), 1), torch.zeros_like(position))
    valid = torch.ones(1, LENGTH, dtype=torch.bool)
    # Keys are all alike, so every visible value weighs the same; values say where they come from.
    key, value = torch.zeros(1, LENGTH, 1, 16), torch.eye(LENGTH, 16)[None, :, None]
    arguments = (0, torch.zeros(1, LENGTH, 1, 16), key, value, HeadTransform(rotation), 1.0, WINDOW)
    if not tree:
        chunk = ChunkAttention(kernels, pool, table, position, position + 1, valid, position + shift, torch.full_like(position, shift))
        return chunk(*arguments)[0].view(LENGTH, 16)[:, :LENGTH] > 0
    # As in a cycle: what a query may see lies before it, and its own slot is the window's.
    rows = []
    for at in range(LENGTH):
        query = TreeAttention(
            kernels, pool, table, position[:, at : at + 1], valid[:, at : at + 1], position[:, at : at + 1] + shift,
            torch.full((1, 1), shift), torch.tensor([at + shift]), causal_words(1, 1, torch.device("cpu")).expand(1, -1, -1),
        )  # fmt: skip
        heads = HeadTransform(Rotation(rotation.table_LD, rotation.row_BT[:, at : at + 1]))
        out = query(0, *(x[:, at : at + 1] for x in arguments[1:4]), heads, 1.0, WINDOW)
        rows.append(out.view(16)[:LENGTH] > 0)
    return torch.stack(rows)


@pytest.mark.parametrize("tree", [False, True], ids=["prefill", "cycle"])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_window_reaches_as_far_as_that_of_transformers(shift: int, tree: bool) -> None:
    mask = sliding_window_causal_mask_function(WINDOW)
    at_T = torch.arange(LENGTH)
    expected = torch.stack([torch.stack([mask(at_T[:1], at_T[:1], q, k).squeeze() for k in at_T]) for q in at_T])
    assert torch.equal(seen(shift, tree), expected)
    assert int(expected.sum(1).max()) == WINDOW

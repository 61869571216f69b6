"""Converters to and from other spellings of a tree, on a tree drawn by hand and on random ones."""

from __future__ import annotations

import pytest
import torch

from graphspec.errors import ConfigError
from graphspec.kernels.tree.tree_build import tree_build
from tests.kernels.cases.tree import candidate_pool
from tests.support.tree_forms import (
    TreeMaskMode,
    depths_from_parents,
    links_from_parents,
    mask_from_words,
    parents_from_links,
    parents_from_words,
    square_from_words,
    words_from_mask,
    words_from_square,
)

# 0 -> 1, 2; 1 -> 3, 4; 2 -> 5; node 6 unused.
PARENT = torch.tensor([[-1, 0, 0, 1, 1, 2, -1]])
WORDS = torch.tensor([[[0b1], [0b11], [0b101], [0b1011], [0b10011], [0b100101], [0b1000000]]])


def test_links_by_hand() -> None:
    index, next_token, next_sibling = links_from_parents(torch.cat((PARENT, PARENT)))
    assert index.tolist() == [list(range(7)), list(range(7, 14))]
    assert next_token[1].tolist() == [1, 3, 5, -1, -1, -1, -1]
    assert next_sibling[1].tolist() == [-1, 2, -1, 4, -1, -1, -1]
    assert depths_from_parents(PARENT).tolist() == [[0, 1, 1, 2, 2, 2, 0]]


def test_masks_by_hand() -> None:
    rows = ["1000000", "1100000", "1010000", "1101000", "1100100", "1010010", "1000001"]
    square = [[cell == "1" for cell in row] for row in rows]
    lengths = torch.tensor([2])
    assert mask_from_words(WORDS, lengths, TreeMaskMode.QLEN_ONLY).tolist() == [cell for row in square for cell in row]
    assert mask_from_words(WORDS, lengths, TreeMaskMode.FULL_MASK).tolist() == [cell for row in square for cell in (True, True, *row)]
    packed = mask_from_words(WORDS, lengths, TreeMaskMode.QLEN_ONLY_BITPACKING)
    assert packed.dtype == torch.uint8
    assert packed.tolist() == [int(row[::-1], 2) for row in rows]


@pytest.mark.parametrize(
    ("num_nodes", "dtype"), [(8, torch.uint8), (9, torch.uint16), (16, torch.uint16), (17, torch.uint32), (32, torch.uint32)]
)
def test_packed_word_size(num_nodes: int, dtype: torch.dtype) -> None:
    words = torch.ones(1, num_nodes, 1, dtype=torch.int64) << torch.arange(num_nodes)[:, None]
    packed = mask_from_words(words, torch.tensor([0]), TreeMaskMode.QLEN_ONLY_BITPACKING)
    assert packed.dtype == dtype
    assert packed.to(torch.int64).tolist() == [1 | 1 << n for n in range(num_nodes)]


def test_too_many_nodes_to_pack() -> None:
    with pytest.raises(ConfigError, match="at most 32 nodes, found 33"):
        mask_from_words(torch.ones(1, 33, 1, dtype=torch.int64), torch.tensor([0]), TreeMaskMode.QLEN_ONLY_BITPACKING)


@pytest.mark.parametrize("num_nodes", [1, 8, 16, 31, 32, 33, 64, 65, 100])
@pytest.mark.parametrize("broken", [False, True])
def test_round_trips(num_nodes: int, broken: bool) -> None:
    pool = candidate_pool(torch.Generator().manual_seed(num_nodes), 3, 4, 6)
    if broken:
        pool["score_BM"][:, ::3] = torch.nan
    words = 2
    root = torch.zeros(3, dtype=torch.int64)
    token, parent, depth, ancestors = tree_build(**pool, root_B=root, num_nodes=num_nodes, num_words=words, max_depth=4)
    _, next_token, next_sibling = links_from_parents(parent)
    assert torch.equal(parents_from_links(next_token, next_sibling), parent)
    assert torch.equal(depths_from_parents(parent), depth)
    assert torch.equal(parents_from_words(ancestors, depth), parent)
    assert torch.equal(words_from_square(square_from_words(ancestors), words), ancestors)
    lengths = torch.tensor([0, 5, 11])
    rooted = torch.where((token >= 0)[..., None], ancestors, ancestors | torch.tensor([1, 0]))
    for mode in TreeMaskMode:
        if mode is TreeMaskMode.QLEN_ONLY_BITPACKING and num_nodes > 32:
            continue
        mask = mask_from_words(ancestors, lengths, mode)
        assert torch.equal(words_from_mask(mask, lengths, num_nodes, words, mode), rooted)
        with pytest.raises(ConfigError, match=mode.name):
            words_from_mask(mask[1:], lengths, num_nodes, words, mode)

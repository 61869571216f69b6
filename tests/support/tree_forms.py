"""Other representations of a verify tree: linked lists of children, and dense or packed tree masks, as in SGLang's tree kernels.

They are an oracle for tests, and a help for readers who know SGLang. They run on the host, read lengths, and may return ragged results;
none of them runs in a cycle. Semantics follow ``build_tree_kernel_efficient`` of sgl-kernel, expressed in (parent, ancestors) as
:func:`~graphspec.kernels.tree.tree_build.tree_build` returns them.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from graphspec.errors import ConfigError

PACKED_DTYPES = ((8, torch.uint8), (16, torch.uint16), (32, torch.uint32))


class TreeMaskMode(IntEnum):
    """What a tree mask covers; numbered as in SGLang."""

    FULL_MASK = 0
    """bool, flat and ragged: lane after lane, N rows of ``seq_len + N`` cells, the prefix all True."""
    QLEN_ONLY = 1
    """bool, flat: ``B * N * N``, the prefix left out."""
    QLEN_ONLY_BITPACKING = 2
    """One unsigned word of 8, 16 or 32 bits per node, flat ``B * N``; bit j: it attends node j."""


def links_from_parents(parent_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``retrieve_index``, ``retrieve_next_token``, ``retrieve_next_sibling``, each int64 ``[B, N]``.

    ``retrieve_index[b, n] = b * N + n``; next token is the first child, next sibling the following child of the same parent, both in
    ascending node order and -1 for none. Unused nodes (parent -1) are in no list.
    """
    lanes, num_nodes = parent_BN.shape
    index = torch.arange(lanes * num_nodes).view(lanes, num_nodes)
    next_token = torch.full((lanes, num_nodes), -1)
    next_sibling = torch.full((lanes, num_nodes), -1)
    for lane, parents in enumerate(parent_BN.tolist()):
        for node in range(num_nodes - 1, 0, -1):
            parent = parents[node]
            if parent >= 0:
                next_sibling[lane, node] = next_token[lane, parent]
                next_token[lane, parent] = node
    return index, next_token, next_sibling


def parents_from_links(next_token_BN: Tensor, next_sibling_BN: Tensor) -> Tensor:
    """The inverse of :func:`links_from_parents`: int64 ``[B, N]``, -1 for the root and for nodes in no list."""
    parent_BN = torch.full(next_token_BN.shape, -1)
    for lane, (first, following) in enumerate(zip(next_token_BN.tolist(), next_sibling_BN.tolist(), strict=True)):
        for parent, child in enumerate(first):
            while child >= 0:
                parent_BN[lane, child] = parent
                child = following[child]
    return parent_BN


def depths_from_parents(parent_BN: Tensor) -> Tensor:
    """Depth of every node, int64 ``[B, N]``; 0 for the root and for unused nodes. Parents come before children."""
    depth_BN = torch.zeros_like(parent_BN)
    for lane, parents in enumerate(parent_BN.tolist()):
        for node, parent in enumerate(parents):
            if parent >= 0:
                depth_BN[lane, node] = depth_BN[lane, parent] + 1
    return depth_BN


def square_from_words(ancestors_BNX: Tensor) -> Tensor:
    """A bool square ``[B, N, N]``: cell (n, j) is bit j of node n's words."""
    num_nodes = ancestors_BNX.shape[1]
    node_N = torch.arange(num_nodes)
    return ((ancestors_BNX[:, :, node_N >> 6] >> (node_N & 63)) & 1) == 1


def words_from_square(square_BNN: Tensor, num_words: int) -> Tensor:
    """The inverse of :func:`square_from_words`: int64 ``[B, N, X]``."""
    lanes, rows, columns = square_BNN.shape
    bits = torch.zeros(lanes, rows, 64 * num_words, dtype=torch.int64)
    bits[..., :columns] = square_BNN
    return (bits.view(lanes, rows, num_words, 64) << torch.arange(64)).sum(-1)


def packed_dtype(num_nodes: int) -> torch.dtype:
    """The smallest unsigned type with a bit per node.

    Raises:
        ConfigError: more than 32 nodes.
    """
    for maximum, dtype in PACKED_DTYPES:
        if num_nodes <= maximum:
            return dtype
    raise ConfigError("tree mask mode QLEN_ONLY_BITPACKING", "at most 32 nodes", num_nodes)


def mask_from_words(ancestors_BNX: Tensor, seq_len_B: Tensor, mode: TreeMaskMode) -> Tensor:
    """The tree mask of one mode, flat.

    In these masks every row attends the root, rows of unused nodes included; there the words hold the node's own bit only.

    Raises:
        ConfigError: packing more than 32 nodes.
    """
    square_BNN = square_from_words(ancestors_BNX)
    square_BNN[:, :, 0] = True
    num_nodes = square_BNN.shape[1]
    if mode is TreeMaskMode.QLEN_ONLY:
        return square_BNN.flatten()
    if mode is TreeMaskMode.QLEN_ONLY_BITPACKING:
        dtype = packed_dtype(num_nodes)
        return (square_BNN.to(torch.int64) << torch.arange(num_nodes)).sum(-1).flatten().to(dtype)
    lanes = [
        torch.cat((torch.ones(num_nodes, length, dtype=torch.bool), square), 1)
        for length, square in zip(seq_len_B.tolist(), square_BNN, strict=True)
    ]
    return torch.cat([lane.flatten() for lane in lanes])


def words_from_mask(mask: Tensor, seq_len_B: Tensor, num_nodes: int, num_words: int, mode: TreeMaskMode) -> Tensor:
    """The inverse of :func:`mask_from_words`, up to the root's bit in rows of unused nodes; int64 ``[B, N, X]``.

    Raises:
        ConfigError: a mask of another size than lanes, lengths and nodes give.
    """
    lengths: list[int] = seq_len_B.tolist()
    expected = {
        TreeMaskMode.FULL_MASK: num_nodes * (sum(lengths) + len(lengths) * num_nodes),
        TreeMaskMode.QLEN_ONLY: len(lengths) * num_nodes**2,
        TreeMaskMode.QLEN_ONLY_BITPACKING: len(lengths) * num_nodes,
    }[mode]
    if mask.numel() != expected:
        raise ConfigError(f"tree mask {mode.name}", f"{expected} cells", mask.numel())
    if mode is TreeMaskMode.QLEN_ONLY_BITPACKING:
        square = ((mask.to(torch.int64).view(-1, num_nodes, 1) >> torch.arange(num_nodes)) & 1) == 1
    elif mode is TreeMaskMode.QLEN_ONLY:
        square = mask.view(-1, num_nodes, num_nodes)
    else:
        parts = mask.split([num_nodes * (length + num_nodes) for length in lengths])
        square = torch.stack([part.view(num_nodes, -1)[:, -num_nodes:] for part in parts])
    return words_from_square(square, num_words)


def parents_from_words(ancestors_BNX: Tensor, depth_BN: Tensor) -> Tensor:
    """int64 ``[B, N]``: the ancestor one level up, -1 for the root and unused nodes (both of depth 0)."""
    square_BNN = square_from_words(ancestors_BNX)
    above_BNN = square_BNN & (depth_BN[:, None, :] == depth_BN[:, :, None] - 1)
    node_N = torch.arange(depth_BN.shape[1])
    # Unused nodes also have depth 0, but no used node has them as an ancestor.
    return torch.where(above_BNN.any(-1) & (depth_BN > 0), torch.where(above_BNN, node_N, 0).sum(-1), -1)

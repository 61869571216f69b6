"""The recurrence that a recurrent layer calls: one interface over the states of all rows, for draft trees and for prompt chunks.

For every recurrent layer a row keeps a matrix per head and the last inputs of a convolution. Verification does not write these states. It
records the convolution's inputs and the gates, from which the commit recomputes the states along the accepted path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..kernels.registry import KernelSet


class RecurrentStates(NamedTuple):
    """The states of all rows; fields are named like their slots."""

    matrix_RUHKV: Tensor
    """float32."""
    column_RUOE: Tensor
    """The convolution's last inputs, oldest first, in the dtype of the model."""


class NodeRecords(NamedTuple):
    """What verification records for the commit, per recurrent layer and node."""

    record_input_UBNE: Tensor
    record_gate_UBNG: Tensor
    """float32."""


class Convolution(NamedTuple):
    """Weights of :func:`~graphspec.kernels.recurrent.tree_conv.tree_conv`; those of all layers have a dimension U in front."""

    weight_EO: Tensor
    bias_E: Tensor | None = None


class Recurrence(Protocol):
    """Recurrence over some tokens, from the states of the rows they belong to."""

    def __call__(self, layer: int, input_BTE: Tensor, gate_BTG: Tensor, convolution: Convolution, skip_H: Tensor | None) -> Tensor:
        """Apply convolution and rule; each token comes after those before it on its path.

        Args:
            layer: index among the recurrent layers.
            input_BTE: the projected inputs of the convolution.
            gate_BTG: float32, the log-decays of all heads, then their rates or steps.
            convolution: its weights.
            skip_H: how the matrices change, see :func:`~graphspec.kernels.recurrent.state_walk.state_walk`.

        Returns:
            ``[B, T, H, V]`` in the dtype of the input.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class TreeRecurrence:
    """The nodes of a tree, from their row's state, which is not changed."""

    kernels: KernelSet
    states: RecurrentStates
    records: NodeRecords
    lane_row_B: Tensor
    parent_BT: Tensor
    """int64; -1: the root, or an unused node."""
    ancestors_BTX: Tensor
    exact: bool
    """Use the op that gives the bits of plain decoding."""

    def __call__(self, layer: int, input_BTE: Tensor, gate_BTG: Tensor, convolution: Convolution, skip_H: Tensor | None) -> Tensor:
        matrix, column = self.states
        self.records.record_input_UBNE[layer].copy_(input_BTE)
        self.records.record_gate_UBNG[layer].copy_(gate_BTG)
        mixed_BTE = self.kernels.tree_conv(input_BTE, column, layer, self.lane_row_B, self.parent_BT, *convolution)
        # A single node takes one update: there is no tree to solve.
        op = self.kernels.state_walk if self.exact or input_BTE.shape[1] == 1 else self.kernels.state_tree
        out_BTHV: Tensor = op(mixed_BTE, gate_BTG, skip_H, matrix, layer, self.lane_row_B, self.ancestors_BTX)
        return out_BTHV


@dataclass(frozen=True, slots=True, eq=False)
class RunRecurrence:
    """Consecutive tokens of a prompt, from their row's state, which they advance."""

    kernels: KernelSet
    states: RecurrentStates
    lane_row_B: Tensor
    length_B: Tensor
    """Tokens of each lane; the rest is padding."""
    fresh_B: Tensor | None
    """bool: the chunk is the first of its row, whose state starts from zeros. None: no lane's is."""
    exact: bool
    """Use the op that gives the bits of plain decoding."""

    def __call__(self, layer: int, input_BTE: Tensor, gate_BTG: Tensor, convolution: Convolution, skip_H: Tensor | None) -> Tensor:
        matrix, column = self.states
        place_T = torch.arange(input_BTE.shape[1], device=input_BTE.device)
        place_BT = place_T.expand(input_BTE.shape[:2])
        mixed_BTE = self.kernels.tree_conv(input_BTE, column, layer, self.lane_row_B, place_BT - 1, *convolution, self.fresh_B)
        op = self.kernels.state_scan if self.exact else self.kernels.state_chunk
        out_BTHV: Tensor = op(mixed_BTE, gate_BTG, skip_H, matrix, layer, self.lane_row_B, self.length_B, self.fresh_B)
        self.kernels.conv_shift(input_BTE[None], column, layer, self.lane_row_B, place_BT, self.length_B, self.fresh_B)
        return out_BTHV


def commit_path(
    kernels: KernelSet,
    states: RecurrentStates,
    records: NodeRecords,
    convolution: Convolution,
    lane_row_B: Tensor,
    path_BA: Tensor,
    length_B: Tensor,
    *,
    selective: bool,
) -> None:
    """Replay the accepted path of every lane into its row's states, in all layers, from what verification recorded.

    Args:
        kernels: the ops.
        states: written.
        records: of the nodes.
        convolution: weights of all layers.
        lane_row_B: int64.
        path_BA: int64 nodes.
        length_B: nodes of the path; 0: the row keeps its states, bit for bit.
        selective: the layers are Mamba-2's, see :func:`~graphspec.kernels.recurrent.state_commit.state_commit`.
    """
    matrix, column = states
    kernels.state_commit(*records, *convolution, column, matrix, lane_row_B, path_BA, length_B, selective)
    # After the matrices, which need the old columns.
    kernels.conv_shift(records.record_input_UBNE, column, 0, lane_row_B, path_BA, length_B)

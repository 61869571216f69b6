"""What a recurrent layer sees of its rows' states: one callable, nothing of rows, trees or chunks.

States live per row: a matrix and the last inputs of a convolution for every recurrent layer. Verification writes none of them. It records
what enters the convolution, and the gates; the commit computes everything else from these again, along the accepted path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..kernels.registry import KernelSet


class RecurrentStates(NamedTuple):
    """The states of all rows, named as the slots they are."""

    matrix_RUHKV: Tensor
    """float32."""
    column_RUOE: Tensor
    """The convolution's last inputs, oldest first, in the dtype of the model."""


class NodeRecords(NamedTuple):
    """What verification leaves to the commit, of every recurrent layer and node."""

    record_input_UBNE: Tensor
    record_gate_UBNG: Tensor
    """float32."""


class Recurrence(Protocol):
    """The tokens at hand, and the states of the rows they belong to."""

    def gated_delta(self, layer: int, input_BTE: Tensor, gate_BTG: Tensor, weight_EO: Tensor) -> Tensor:
        """Convolution and gated delta rule (:mod:`graphspec.kernels.delta_rule`), each token after those before it on its path.

        Args:
            layer: of the recurrent ones.
            input_BTE: queries, keys and values as projected, side by side.
            gate_BTG: float32, log-decays and then rates of all heads.
            weight_EO: of the convolution.

        Returns:
            ``[B, T, H, V]`` in the dtype of the input.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class TreeRecurrence:
    """The nodes of a tree after their row's state, which stays as it is."""

    kernels: KernelSet
    states: RecurrentStates
    records: NodeRecords
    lane_row_B: Tensor
    parent_BT: Tensor
    """int64; -1: the root, or an unused node."""
    ancestors_BTX: Tensor
    exact: bool
    """Nodes have the bits of plain decoding."""

    def gated_delta(self, layer: int, input_BTE: Tensor, gate_BTG: Tensor, weight_EO: Tensor) -> Tensor:
        self.records.record_input_UBNE[layer].copy_(input_BTE)
        self.records.record_gate_UBNG[layer].copy_(gate_BTG)
        mixed_BTE = self.kernels.tree_conv(input_BTE, self.states.column_RUOE, layer, self.lane_row_B, self.parent_BT, weight_EO)
        # Of one node there is nothing to solve.
        op = self.kernels.delta_walk if self.exact or input_BTE.shape[1] == 1 else self.kernels.delta_solve
        out_BTHV: Tensor = op(mixed_BTE, gate_BTG, self.states.matrix_RUHKV, layer, self.lane_row_B, self.ancestors_BTX)
        return out_BTHV


@dataclass(frozen=True, slots=True, eq=False)
class RunRecurrence:
    """Tokens that follow each other, after their row's state, which they advance: prompts."""

    kernels: KernelSet
    states: RecurrentStates
    lane_row_B: Tensor
    length_B: Tensor
    """Tokens of each lane that count."""
    fresh_B: Tensor | None
    """bool: the row's tokens start here. None: in no lane."""
    exact: bool
    """The state has the bits of plain decoding."""

    def gated_delta(self, layer: int, input_BTE: Tensor, gate_BTG: Tensor, weight_EO: Tensor) -> Tensor:
        matrix, column = self.states
        place_T = torch.arange(input_BTE.shape[1], device=input_BTE.device)
        place_BT = place_T.expand(input_BTE.shape[:2])
        mixed_BTE = self.kernels.tree_conv(input_BTE, column, layer, self.lane_row_B, place_BT - 1, weight_EO, None, self.fresh_B)
        op = self.kernels.delta_scan if self.exact else self.kernels.delta_chunk
        out_BTHV: Tensor = op(mixed_BTE, gate_BTG, matrix, layer, self.lane_row_B, self.length_B, self.fresh_B)
        self.kernels.conv_shift(input_BTE[None], column, layer, self.lane_row_B, place_BT, self.length_B, self.fresh_B)
        return out_BTHV


@dataclass(frozen=True, slots=True, eq=False)
class PathCommit:
    """The accepted path of every lane, replayed into its row's state from what verification recorded."""

    kernels: KernelSet
    states: RecurrentStates
    records: NodeRecords
    lane_row_B: Tensor
    parent_BN: Tensor
    """int64, as verification had them."""
    path_BA: Tensor
    """int64 nodes."""
    length_B: Tensor
    """Nodes of the path; 0: the row keeps its state, bit for bit."""

    def gated_delta(self, layer: int, weight_EO: Tensor) -> None:
        """Advance the matrices of one layer."""
        matrix, column = self.states
        input_BNE, gate_BNG = (record[layer] for record in self.records)
        # Of all nodes, as in verification: that costs less than a launch that gathers the path's.
        mixed_BNE = self.kernels.tree_conv(input_BNE, column, layer, self.lane_row_B, self.parent_BN, weight_EO)
        self.kernels.delta_scan(mixed_BNE, gate_BNG, matrix, layer, self.lane_row_B, self.length_B, None, self.path_BA)

    def shift_columns(self) -> None:
        """Advance the convolutions of all layers; last, for the matrices need the old columns."""
        self.kernels.conv_shift(self.records.record_input_UBNE, self.states.column_RUOE, 0, self.lane_row_B, self.path_BA, self.length_B)

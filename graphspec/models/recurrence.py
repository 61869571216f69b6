"""What a recurrent layer sees of its rows' states: one callable, nothing of rows, trees or chunks.

States live per row: a matrix and the last inputs of a convolution for every recurrent layer. Verification writes none of them. It records
what enters the convolution, and the gates; the commit computes everything else from these again, along the accepted path.
"""

from __future__ import annotations

from collections.abc import Callable
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


class Convolution(NamedTuple):
    """Weights of :func:`~graphspec.kernels.tree_conv.tree_conv`."""

    weight_EO: Tensor
    bias_E: Tensor | None = None


class Rule(Protocol):
    """How a token changes the matrices of its row, and reads them: four ops of one contract."""

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """What the ops take between the gates of the tokens and the matrices."""
        ...

    def of_tree(self, kernels: KernelSet, *, exact: bool) -> Callable[..., Tensor]:
        """The op for the nodes of a tree; ``exact``: with the bits of plain decoding."""
        ...

    def of_run(self, kernels: KernelSet, *, exact: bool) -> Callable[..., Tensor]:
        """The op for tokens that follow each other, which advances the matrices.

        ``exact``: with the bits of plain decoding; such an op takes a path through its tokens as well.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class GatedDeltaRule:
    """:mod:`graphspec.kernels.delta_rule`."""

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return ()

    def of_tree(self, kernels: KernelSet, *, exact: bool) -> Callable[..., Tensor]:
        return kernels.delta_walk if exact else kernels.delta_solve

    def of_run(self, kernels: KernelSet, *, exact: bool) -> Callable[..., Tensor]:
        return kernels.delta_scan if exact else kernels.delta_chunk


@dataclass(frozen=True, slots=True, eq=False)
class SelectiveRule:
    """:mod:`graphspec.kernels.ssm_rule`."""

    skip_H: Tensor

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self.skip_H,)

    def of_tree(self, kernels: KernelSet, *, exact: bool) -> Callable[..., Tensor]:
        return kernels.ssm_walk if exact else kernels.ssm_dual

    def of_run(self, kernels: KernelSet, *, exact: bool) -> Callable[..., Tensor]:
        return kernels.ssm_scan if exact else kernels.ssm_chunk


class Recurrence(Protocol):
    """The tokens at hand, and the states of the rows they belong to."""

    def __call__(self, layer: int, input_BTE: Tensor, gate_BTG: Tensor, convolution: Convolution, rule: Rule) -> Tensor:
        """Convolution and rule, each token after those before it on its path.

        Args:
            layer: of the recurrent ones.
            input_BTE: what the convolution reads, as projected.
            gate_BTG: float32, log-decays and then rates or steps of all heads.
            convolution: its weights.
            rule: of the matrices.

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

    def __call__(self, layer: int, input_BTE: Tensor, gate_BTG: Tensor, convolution: Convolution, rule: Rule) -> Tensor:
        matrix, column = self.states
        self.records.record_input_UBNE[layer].copy_(input_BTE)
        self.records.record_gate_UBNG[layer].copy_(gate_BTG)
        mixed_BTE = self.kernels.tree_conv(input_BTE, column, layer, self.lane_row_B, self.parent_BT, *convolution)
        # One node is one update.
        op = rule.of_tree(self.kernels, exact=self.exact or input_BTE.shape[1] == 1)
        return op(mixed_BTE, gate_BTG, *rule.parameters, matrix, layer, self.lane_row_B, self.ancestors_BTX)


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

    def __call__(self, layer: int, input_BTE: Tensor, gate_BTG: Tensor, convolution: Convolution, rule: Rule) -> Tensor:
        matrix, column = self.states
        place_T = torch.arange(input_BTE.shape[1], device=input_BTE.device)
        place_BT = place_T.expand(input_BTE.shape[:2])
        mixed_BTE = self.kernels.tree_conv(input_BTE, column, layer, self.lane_row_B, place_BT - 1, *convolution, self.fresh_B)
        op = rule.of_run(self.kernels, exact=self.exact)
        out_BTHV = op(mixed_BTE, gate_BTG, *rule.parameters, matrix, layer, self.lane_row_B, self.length_B, self.fresh_B)
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

    def advance(self, layer: int, convolution: Convolution, rule: Rule) -> None:
        """Advance the matrices of one layer, with the operations of plain decoding."""
        matrix, column = self.states
        input_BNE, gate_BNG = (record[layer] for record in self.records)
        # Of all nodes, as in verification: that costs less than a launch that gathers the path's.
        mixed_BNE = self.kernels.tree_conv(input_BNE, column, layer, self.lane_row_B, self.parent_BN, *convolution)
        op = rule.of_run(self.kernels, exact=True)
        op(mixed_BNE, gate_BNG, *rule.parameters, matrix, layer, self.lane_row_B, self.length_B, None, self.path_BA)

    def shift_columns(self) -> None:
        """Advance the convolutions of all layers; last, for the matrices need the old columns."""
        self.kernels.conv_shift(self.records.record_input_UBNE, self.states.column_RUOE, 0, self.lane_row_B, self.path_BA, self.length_B)

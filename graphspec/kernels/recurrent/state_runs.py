"""Runs of one-token updates of a matrix per head, whatever the rule: over the paths of a tree, over a run of tokens, and in blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .delta_rule import delta_solve_block, delta_tokens, delta_update
from .ssm_rule import ssm_block, ssm_tokens, ssm_update
from .state_tokens import StateTokens, ancestor_matrix

Update = Callable[[Tensor, StateTokens], tuple[Tensor, Tensor]]
"""From states ``[B, H, K, V]`` and one token to the states after it, and what it reads, ``[B, H, V]``."""
Block = Callable[[Tensor, StateTokens, Tensor], tuple[Tensor, Tensor, Tensor]]
"""From states, tokens and bool ``[B, T, T]`` (who lies on whose path) to what each token reads ``[B, T, H, V]``, its change
``[B, H, T, V]``, and the sum of log-decays on its path ``[B, H, T]``."""
BLOCK = 64
"""Tokens that are computed at once."""


def tokens_of(skip_H: Tensor | None, mixed_BTE: Tensor, gate_BTG: Tensor, matrix_RUHKV: Tensor) -> StateTokens:
    """Tokens taken apart by the rule of ``skip_H``."""
    return (delta_tokens if skip_H is None else ssm_tokens)(mixed_BTE, gate_BTG, *matrix_RUHKV.shape[2:])


def update_of(skip_H: Tensor | None) -> Update:
    """One token of that rule."""
    return delta_update if skip_H is None else partial(ssm_update, skip_H)


def block_of(skip_H: Tensor | None) -> Block:
    """Many tokens of that rule at once."""
    return delta_solve_block if skip_H is None else partial(ssm_block, skip_H)


def walk_tree(update: Update, start_BHKV: Tensor, tokens: StateTokens, ancestors_BTX: Tensor) -> Tensor:
    """What every node reads, ``[B, T, H, V]``, after its ancestors and itself; each goes on from its parent's state. Unused ones read 0."""
    state_BHKV, read_BHV = update(start_BHKV, tokens.at(0))
    lanes, count = ancestors_BTX.shape[:2]
    out = [read_BHV]
    if count > 1:
        device = ancestors_BTX.device
        node_T, lane_B = torch.arange(count, device=device), torch.arange(lanes, device=device)
        ancestor_BTT = ancestor_matrix(ancestors_BTX) & (node_T < node_T[:, None])
        parent_BT = torch.where(ancestor_BTT, node_T, -1).amax(-1)
        states = start_BHKV.new_empty(lanes, count + 1, *start_BHKV.shape[1:])
        states[:, 0], states[:, 1] = start_BHKV, state_BHKV
        for node in range(1, count):
            states[:, node + 1], read_BHV = update(states[lane_B, parent_BT[:, node] + 1], tokens.at(node))
            out.append(read_BHV)
    used_BT = ancestor_matrix(ancestors_BTX).diagonal(dim1=1, dim2=2)
    return torch.where(used_BT[..., None, None], torch.stack(out, 1), 0.0)


def scan_run(update: Update, state_BHKV: Tensor, tokens: StateTokens, length_B: Tensor) -> tuple[Tensor, Tensor]:
    """The states after the first ``length`` tokens of each lane, and what each token reads, ``[B, T, H, V]``; 0 past a lane's length."""
    out = []
    for token in range(tokens.decay_BTH.shape[1]):
        after_BHKV, read_BHV = update(state_BHKV, tokens.at(token))
        counts_B1 = (token < length_B)[:, None]
        state_BHKV = torch.where(counts_B1[..., None, None], after_BHKV, state_BHKV)
        out.append(torch.where(counts_B1[..., None], read_BHV, 0.0))
    return state_BHKV, torch.stack(out, 1)


def run_blocks(block: Block, start_BHKV: Tensor, tokens: StateTokens, length_B: Tensor) -> tuple[Tensor, Tensor]:
    """The same by blocks of :data:`BLOCK` tokens; those past a lane's length decay nothing and add nothing, whatever they hold."""
    lanes, count = tokens.decay_BTH.shape[:2]
    token_T = torch.arange(count, device=length_B.device)
    counts_BT = token_T < length_B[:, None]
    tokens = tokens.masked(counts_BT)
    state_BHKV, out = start_BHKV, []
    for begin in range(0, count, BLOCK):
        part = StateTokens(*(one[:, begin : begin + BLOCK] for one in tokens))
        place_T = token_T[: part.decay_BTH.shape[1]]
        before_BTT = (place_T <= place_T[:, None]).expand(lanes, -1, -1)
        read_BTHV, change_BHTV, path_BHT = block(state_BHKV, part, before_BTT)
        out.append(read_BTHV)
        end_BH1 = path_BHT[..., -1:]
        key_BHKT = part.key_BTHK.permute(0, 2, 3, 1) * (end_BH1 - path_BHT).exp()[:, :, None]
        state_BHKV = state_BHKV * end_BH1.exp()[..., None] + key_BHKT @ change_BHTV
    # A row that is not finite would not survive a product with 0.
    state_BHKV = torch.where((length_B > 0)[:, None, None, None], state_BHKV, start_BHKV)
    return state_BHKV, torch.where(counts_BT[..., None, None], torch.cat(out, 1), 0.0)

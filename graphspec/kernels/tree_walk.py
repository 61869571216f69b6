"""Acceptance: match sampled tokens against the tree, and cut the run at a stop id or at the budget."""

from __future__ import annotations

import torch
from torch import Tensor

from .op import Case, KernelOp
from .tree_build import bit_words, candidate_pool, tree_build

LIVE, STOPPED, OUT_OF_BUDGET = 0, 1, 2


def tree_walk(
    token_BN: Tensor,
    parent_BN: Tensor,
    depth_BN: Tensor,
    ancestors_BNX: Tensor,
    sample_BN: Tensor,
    depth_cap_B: Tensor,
    budget_B: Tensor,
    stop_BE: Tensor,
    accept_width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample, then match: which nodes agree with what the target sampled, and how many new tokens that makes.

    Node ``n >= 1`` matches when its token is not negative, equals ``sample[parent_n]``, and its depth is within ``depth_cap`` and
    ``accept_width - 1``. It is accepted when all of its ancestors (root excluded) match. Siblings are distinct, so the accepted nodes are
    one path, of depth a; the new tokens are ``sample[path[d]]`` for d = 0..a, the last of which is the next root. They are cut after the
    first stop id and at the budget.

    Args:
        token_BN, parent_BN, depth_BN, ancestors_BNX: int64, as :func:`~graphspec.kernels.tree_build.tree_build` returns them.
        sample_BN: int64, the token the target sampled at each node.
        depth_cap_B: int64, deepest node that may be accepted; <= 0: none.
        budget_B: int64, tokens the row may still emit.
        stop_BE: int64 stop ids per lane, padded with -1.
        accept_width: A, static.

    Returns:
        path ``[B, A]``: ``path[d]`` is the accepted node of depth d; ``path[0]`` is the root, entries past the last accepted node are 0.
        It is not shortened by a stop id or the budget.
        accept_len ``[B]``: new tokens emitted, which is also the KV rows to commit (root included), in ``1..a+1``, or 0 when the budget
        was used up before.
        reason ``[B]``: 0 live, 1 stop id, 2 budget used up; a stop id wins when both fall on the same token. All int64.
    """
    device = token_BN.device
    node_N = torch.arange(token_BN.shape[1], device=device)
    is_root_N = node_N == 0
    drawn_BN = sample_BN.gather(1, parent_BN.clamp(min=0))
    cap_B1 = depth_cap_B.clamp(max=accept_width - 1)[:, None]
    match_BN = (token_BN >= 0) & (parent_BN >= 0) & (token_BN == drawn_BN) & (depth_BN <= cap_B1)
    match_BN = match_BN | is_root_N
    # Bits are distinct, so their sum is their union.
    missing_BX = torch.where(match_BN[..., None], 0, bit_words(node_N, ancestors_BNX.shape[-1])).sum(1)
    accepted_BN = match_BN & ((ancestors_BNX & missing_BX[:, None]) == 0).all(-1)

    step_A = torch.arange(accept_width, device=device)
    on_path_BAN = accepted_BN[:, None] & (depth_BN[:, None] == step_A[:, None])
    path_BA = torch.where(on_path_BAN, node_N, 0).amax(-1)
    new_B = accepted_BN.sum(-1)

    emitted_BA = sample_BN.gather(1, path_BA)
    is_stop_BA = ((emitted_BA[..., None] == stop_BE[:, None]) & (stop_BE >= 0)[:, None]).any(-1)
    stop_len_B = torch.where(is_stop_BA & (step_A < new_B[:, None]), step_A + 1, accept_width + 1).amin(-1)
    accept_len_B = torch.minimum(torch.minimum(new_B, stop_len_B), budget_B.clamp(min=0))
    reason_B = torch.where(stop_len_B == accept_len_B, STOPPED, torch.where(budget_B <= accept_len_B, OUT_OF_BUDGET, LIVE))
    return path_BA, accept_len_B, reason_B


def _cases(generator: torch.Generator) -> list[Case]:
    def case(lanes: int, num_steps: int, topk: int, num_nodes: int, num_words: int, accept_width: int) -> Case:
        pool = candidate_pool(generator, lanes, num_steps, topk, vocab=topk + 1)
        root = torch.randint(0, topk + 1, (lanes,), generator=generator)
        tree = tree_build(**pool, root_B=root, num_nodes=num_nodes, num_words=num_words, max_depth=num_steps)
        stop = torch.randint(0, 4 * topk, (lanes, 3), generator=generator)
        return {
            **dict(zip(("token_BN", "parent_BN", "depth_BN", "ancestors_BNX"), tree, strict=True)),
            "sample_BN": torch.randint(0, topk + 1, (lanes, num_nodes), generator=generator),
            "depth_cap_B": torch.randint(0, num_steps + 1, (lanes,), generator=generator),
            "budget_B": torch.randint(0, 9, (lanes,), generator=generator),
            "stop_BE": torch.where(stop > topk, -1, stop),
            "accept_width": accept_width,
        }

    return [case(5, 3, 2, 8, 1, 4), case(7, 5, 3, 33, 1, 8), case(4, 3, 6, 70, 2, 4), case(3, 1, 1, 1, 1, 1), case(9, 4, 1, 5, 1, 5)]


OP = KernelOp(name="tree_walk", contract=tree_walk.__doc__ or "", reference=tree_walk, cases=_cases)

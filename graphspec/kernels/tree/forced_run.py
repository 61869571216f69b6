"""The run that a grammar forces, as the best path of a pool of n-gram continuations."""

from __future__ import annotations

import torch
from torch import Tensor

from ..groups import Candidates
from ..op import Int64, Written, kernel_op


def forced_run(score_BM: Tensor, token_BM: Tensor, parent_BM: Tensor, forced_BS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`forced_run_into` as a function: the pool with the run in it."""
    lanes, depth = forced_BS.shape
    paths = token_BM.shape[1] // depth
    score_BSK, token_BSK, parent_BSK = (x_BM.view(lanes, depth, paths) for x_BM in (score_BM, token_BM, parent_BM))
    run_B1 = forced_BS[:, :1] >= 0
    whole_B1 = (_follow(token_BSK, parent_BSK, forced_BS) >= 0).eq(forced_BS >= 0).all(1, keepdim=True)

    path_K = torch.arange(paths, device=token_BM.device)
    gives_way_B1K = (run_B1 & ~whole_B1)[..., None] & (path_K == paths - 1)
    token_BSK, parent_BSK = (torch.where(gives_way_B1K, -1, x_BSK) for x_BSK in (token_BSK, parent_BSK))
    score_BSK = torch.where(gives_way_B1K, -torch.inf, score_BSK - torch.where(run_B1, depth, 0)[..., None])

    place_BS = _follow(token_BSK, parent_BSK, forced_BS)
    place_BS = torch.where((forced_BS >= 0) & (place_BS < 0), paths - 1, place_BS)
    step_S = torch.arange(depth, device=token_BM.device)
    index_BS = step_S * paths + place_BS
    above_BS = torch.cat((torch.full_like(index_BS[:, :1], -1), index_BS[:, :-1]), 1)
    on_run_BSK = path_K == place_BS[..., None]
    score_BSK = torch.where(on_run_BSK, -step_S[:, None].to(score_BM.dtype), score_BSK)
    token_BSK = torch.where(on_run_BSK, forced_BS[..., None], token_BSK)
    parent_BSK = torch.where(on_run_BSK, above_BS[..., None], parent_BSK)
    return score_BSK.flatten(1), token_BSK.flatten(1), parent_BSK.flatten(1)


def _follow(token_BSK: Tensor, parent_BSK: Tensor, forced_BS: Tensor) -> Tensor:
    """Path whose entry has the run's token at each depth, ``[B, S]``; -1 from where the pool differs, and after the run."""
    paths = token_BSK.shape[2]
    above_B1 = torch.full_like(forced_BS[:, :1], -1)
    found = []
    for step, (token_BK, parent_BK) in enumerate(zip(token_BSK.unbind(1), parent_BSK.unbind(1), strict=True)):
        wanted_B1 = forced_BS[:, step : step + 1]
        same_BK = (token_BK == wanted_B1) & (parent_BK == above_B1) & (wanted_B1 >= 0)
        place_B1 = torch.where(same_BK.any(1, keepdim=True), same_BK.to(torch.int32).argmax(1, keepdim=True), -1)
        # No entry has a parent below -1.
        above_B1 = torch.where(place_B1 >= 0, step * paths + place_B1, -2)
        found.append(place_B1)
    return torch.cat(found, 1)


@kernel_op(name="forced_run", native="native.cycle", fused=None)
def forced_run_into(forced_BS: Int64, candidates: Written[Candidates]) -> None:
    """Put a run before the paths of a pool of :func:`~graphspec.kernels.tree.ngram_match.ngram_match`.

    Entries that have the first tokens of the run become part of it. Its other tokens replace the last path, which is no other's parent; a
    path that continues the run is kept. The scores of the run are ``-(d - 1)``, those of other entries are lowered by S.

    Args:
        forced_BS: int64, the run from depth 1 on, -1 after its end; S is static. A lane whose run is empty keeps its pool.
        candidates: written; float32, int64, int64, ``[B, K * S]``; entry ``(d - 1) * K + k`` is depth d of path k.
    """
    for slot, value in zip(candidates, forced_run(*candidates, forced_BS), strict=True):
        slot.copy_(value)

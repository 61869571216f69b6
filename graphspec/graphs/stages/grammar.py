"""Host boundaries of rows that follow a grammar: the draft tree goes to the host, masks come back before acceptance.

The tree is complete before verification begins, and masks are needed when it has ended: on a GPU the host fills them meanwhile.
"""

from __future__ import annotations

import torch

from ...plan.buffers import Views
from .stage import Build, HostStage


class ForcedRuns(HostStage):
    """Before the drafter: the tokens that must follow the root of a lane with a grammar."""

    name = "forced_runs"
    writes = ("forced_token_BS",)

    def forward(self, v: Views) -> None:
        forced_BS, on_gpu = v.forced_token_BS, self.plan.device == "cuda"
        forced_BS.fill_(-1)
        for lane, grammar in enumerate(self.taken()):
            run = list(grammar.forced(forced_BS.shape[1])) if grammar is not None else []
            if run:
                tokens = torch.tensor(run, pin_memory=on_gpu)
                forced_BS[lane, : len(run)].copy_(tokens, non_blocking=True)


class TreeToHost(HostStage):
    """Before verification: ask for the nodes. On a CPU they lie where the host can read them."""

    name = "tree_to_host"
    reads = ("node_token_BN", "node_parent_BN")

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self._copies: tuple[torch.Tensor, torch.Tensor] | None = None
        self._event: torch.cuda.Event | None = None

    def forward(self, v: Views) -> None:
        if not any(self.taken()) or self.plan.device == "cpu":
            return
        nodes = v.node_token_BN, v.node_parent_BN
        if self._copies is None:
            token_BN, parent_BN = (torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in nodes)
            self._copies, self._event = (token_BN, parent_BN), torch.cuda.Event()
        for copy, x_BN in zip(self._copies, nodes, strict=True):
            copy.copy_(x_BN, non_blocking=True)
        assert self._event is not None, "made with the copies"
        self._event.record()

    def nodes(self, v: Views) -> tuple[list[list[int]], list[list[int]]]:
        """Tokens and parents of every lane's nodes, which were asked for."""
        if self._copies is None or self._event is None:
            return v.node_token_BN.tolist(), v.node_parent_BN.tolist()
        self._event.synchronize()
        return self._copies[0].tolist(), self._copies[1].tolist()


class GrammarMasks(HostStage):
    """Before acceptance: for every node of a lane with a grammar, the tokens that may follow it; elsewhere all.

    Args:
        build: what every stage gets.
        tree: asked for the nodes. None: there are none, and the mask is that of the first token after a prompt.
    """

    name = "grammar_masks"
    writes = ("token_mask_BNVw",)

    def __init__(self, build: Build, tree: TreeToHost | None) -> None:
        super().__init__(build)
        self._tree = [tree]
        """The stage in a list, so that it counts as a stage of its own and not as a part of this one."""

    def forward(self, v: Views) -> None:
        v.token_mask_BNVw.fill_(-1)
        grammars = self.taken()
        if not any(grammars):
            return
        tree = self._tree[0]
        token_BN, parent_BN = tree.nodes(v) if tree is not None else ([[0]] * len(grammars), [[-1]] * len(grammars))
        for lane, grammar in enumerate(grammars):
            if grammar is None:
                continue
            mask_NVw = v.token_mask_BNVw[lane, : len(token_BN[lane])]
            if self.plan.device == "cuda":
                # torch keeps pinned memory until the copy has run.
                filled_NVw = torch.full(mask_NVw.shape, -1, dtype=mask_NVw.dtype, pin_memory=True)
                grammar.fill(token_BN[lane], parent_BN[lane], filled_NVw)
                mask_NVw.copy_(filled_NVw, non_blocking=True)
            else:
                grammar.fill(token_BN[lane], parent_BN[lane], mask_NVw)

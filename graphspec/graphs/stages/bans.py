"""Tokens that a row must not sample: all but the allowed ones, the last token of a bad word after its others, what its grammar refuses.

A row keeps its last committed tokens. For a node of a tree the node's ancestors follow them, so every branch is a separate text here too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.sampling.penalise import columns
from ...plan.buffers import Views
from .stage import Stage

WORDS = ("recent_token_RBt", "bad_word_RBwBt")


def ends_of_words(word_BwBt: Tensor, before_BTt: Tensor, vocab_size: int) -> Tensor:
    """Tokens that would end a bad word, bool ``[B, T, V]``.

    Args:
        word_BwBt: int64 ``[B, Bw, Bt]``, token sequences that end in the last column; -1 before them, and in rows without any.
        before_BTt: int64 ``[B, T, Bt - 1]``, tokens before the one being sampled, newest last.
        vocab_size: V.
    """
    others_B1Wt = word_BwBt[:, None, :, :-1]
    hit_BTW = ((others_B1Wt < 0) | (others_B1Wt == before_BTt[:, :, None])).all(-1)
    end_BTW = torch.where(hit_BTW, word_BwBt[:, None, :, -1], -1)
    banned_BTV = torch.zeros(*hit_BTW.shape[:2], vocab_size + 1, dtype=torch.bool, device=hit_BTW.device)
    return banned_BTV.scatter(-1, columns(end_BTW, vocab_size), True)[..., :-1]


def node_contexts(v: Views) -> Tensor:
    """The last tokens up to and with each node, newest last: int64 ``[B, N, Bt - 1]``. The root is the last of the row's recent tokens."""
    recent_BBt = v.recent_token_RBt[v.lane_row_B]
    width, count = recent_BBt.shape[1], v.node_token_BN.shape[1]
    token_BM = torch.cat((recent_BBt, v.node_token_BN[:, 1:]), 1)
    # The token before each, the first before itself. Inductor for CUDA can't order the bounds of a clamp here, once cat has shifted them.
    place_Bt = torch.arange(width, device=token_BM.device)
    before_Bt = torch.where(place_Bt > 0, place_Bt - 1, 0).expand_as(recent_BBt)
    above_BM = torch.cat((before_Bt, v.node_parent_BN[:, 1:].clamp(min=0) + width - 1), 1)
    at_BN = torch.arange(width - 1, width - 1 + count, device=token_BM.device).expand_as(v.node_token_BN)
    found = []
    for _ in range(width - 1):
        found.append(token_BM.gather(1, at_BN))
        at_BN = above_BM.gather(1, at_BN)
    return torch.stack(found[::-1], -1) if found else token_BM.new_empty(*v.node_token_BN.shape, 0)


def note_tokens(v: Views, token_BT: Tensor, count_B: Tensor) -> None:
    """Append the first ``count`` tokens of each lane to its row's recent ones."""
    row_B = v.lane_row_B
    recent_BBt = v.recent_token_RBt[row_B]
    place_Bt = torch.arange(recent_BBt.shape[1], device=row_B.device)
    v.recent_token_RBt.index_put_((row_B,), torch.cat((recent_BBt, token_BT), 1).gather(1, count_B[:, None] + place_Bt))


class RecentTokens(Stage):
    """After the commit: the tokens of the run, which no bad word may go on from."""

    name = "recent_tokens"
    reads = ("lane_row_B", "sample_BN", "path_BA", "accept_len_B", "recent_token_RBt")
    writes = ("recent_token_RBt",)

    def forward(self, v: Views) -> None:
        note_tokens(v, v.sample_BN.gather(1, v.path_BA), v.accept_len_B)

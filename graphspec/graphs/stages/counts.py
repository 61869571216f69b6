"""Which tokens a row has seen, for penalties: filled while the prompt is read, advanced by every commit."""

from __future__ import annotations

import torch
from torch import Tensor

from ...buffers import Views
from .mailbox import MailLayout
from .stage import Build, Stage


def count_tokens(v: Views, row_BT: Tensor, token_BT: Tensor, counted_BT: Tensor) -> None:
    """Add 1 to the output count of every token that is ``counted``; the others may be -1."""
    count_RV = v.output_count_RV
    index_BT = row_BT * count_RV.shape[1] + token_BT.clamp(min=0)
    count_RV.view(-1).scatter_add_(0, index_BT.flatten(), counted_BT.to(count_RV.dtype).flatten())


class PromptCounts(Stage):
    """Before a prefill chunk: tokens of the request's own prompt are marked as seen; those after it, of a row that resumes, are output."""

    name = "prompt_counts"
    reads = ("mail", "lane_row_B")
    writes = ("prompt_seen_RV", "output_count_RV")

    def __init__(self, build: Build, chunk: int) -> None:
        super().__init__(build)
        self.chunk, self.layout = chunk, MailLayout.of(build.plan)

    def forward(self, v: Views) -> None:
        at, row_1 = self.layout, v.lane_row_B
        start_1, length_1, _, _, prompt_1, _ = v.mail[at.chunk : at.tokens].split(1)
        entry_C = torch.arange(self.chunk, device=row_1.device)
        token_C, valid_C = v.mail[at.tokens : at.tokens + self.chunk], entry_C < length_1
        is_prompt_C = start_1 + entry_C < prompt_1
        seen_RV = v.prompt_seen_RV
        row_C = torch.where(valid_C & is_prompt_C, row_1, seen_RV.shape[0] - 1)
        seen_RV.view(-1).scatter_(0, row_C * seen_RV.shape[1] + token_C, 1)
        count_tokens(v, row_1.expand(self.chunk), token_C, valid_C & ~is_prompt_C)

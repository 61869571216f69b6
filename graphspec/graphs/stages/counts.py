"""Which tokens a row has seen, for penalties: filled while the prompt is read, advanced by every commit."""

from __future__ import annotations

import torch
from torch import Tensor

from ...plan.buffers import Views
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

    def __init__(self, build: Build, lanes: int, chunk: int) -> None:
        super().__init__(build)
        self.lanes, self.chunk, self.layout = lanes, chunk, MailLayout.of(build.plan)

    def forward(self, v: Views) -> None:
        row_B1, seen_RV = v.lane_row_B[:, None], v.prompt_seen_RV
        words_B6, token_BC = self.layout.prompt_parts(v.mail, self.lanes, self.chunk)
        start_B1, length_B1, _, _, prompt_B1, _ = words_B6.split(1, 1)
        entry_C = torch.arange(self.chunk, device=row_B1.device)
        valid_BC, is_prompt_BC = entry_C < length_B1, start_B1 + entry_C < prompt_B1
        row_BC = torch.where(valid_BC & is_prompt_BC, row_B1, seen_RV.shape[0] - 1)
        seen_RV.view(-1).scatter_(0, (row_BC * seen_RV.shape[1] + token_BC).flatten(), 1)
        count_tokens(v, row_B1.expand_as(token_BC), token_BC, valid_BC & ~is_prompt_BC)

"""Small inputs of the ops of ``graphspec.kernels.sampling``, odd sizes included, by name; drawn on the CPU."""

from __future__ import annotations

import torch
from torch import Generator

from graphspec.kernels.op import Case


def filter_logits(generator: Generator) -> list[Case]:
    def case(lanes: int, rows: int, vocab: int) -> Case:
        logits = torch.randn(lanes, rows, vocab, generator=generator).mul(3).round(decimals=1)
        logits[0, 0, vocab // 2 :] = -torch.inf
        logits[0, -1, :2] = torch.tensor([torch.nan, torch.inf])[:vocab]
        return {
            "logits_BTV": logits,
            "temperature_B": torch.tensor([0.7, 0.0, 2.0**-126, 1.6])[torch.arange(lanes) % 4],
            "top_k_B": torch.randint(-1, vocab + 2, (lanes,), generator=generator),
            "top_p_B": torch.tensor([0.3, 0.9, 1.0])[torch.randint(0, 3, (lanes,), generator=generator)],
            "min_p_B": torch.tensor([0.0, 0.05, 1.0])[torch.randint(0, 3, (lanes,), generator=generator)],
        }

    return [case(1, 1, 1), case(4, 1, 37), case(3, 2, 130)]


def gumbel_noise(generator: Generator) -> list[Case]:
    def case(lanes: int, tokens: int, vocab: int) -> Case:
        limit = 2**62
        return {
            "seed_B": torch.randint(-limit, limit, (lanes,), generator=generator),
            "position_BT": torch.randint(0, 5000, (lanes, tokens), generator=generator),
            "token_V": torch.randperm(vocab, generator=generator),
        }

    return [case(1, 1, 1), case(3, 2, 37), case(2, 5, 257)]


def sample_tokens(generator: Generator) -> list[Case]:
    def case(lanes: int, rows: int, vocab: int, noisy: bool, filtered: bool, strict: bool) -> Case:
        logits = torch.randn(lanes, rows, vocab, generator=generator).mul(3).round(decimals=1)
        logits[0, 0, vocab // 2 :] = -torch.inf
        logits[-1, -1, :1] = torch.nan
        logits[-1, 0, -1:] = torch.inf
        return {
            "logits_BTV": logits,
            "temperature_B": torch.tensor([0.7, 0.0, 2.0**-126, 1.6])[torch.arange(lanes) % 4] if noisy else None,
            "seed_B": torch.randint(-(2**62), 2**62, (lanes,), generator=generator) if noisy else None,
            "position_BT": torch.randint(0, 5000, (lanes, rows), generator=generator) if noisy else None,
            "top_k_B": torch.randint(-1, vocab + 2, (lanes,), generator=generator) if filtered else None,
            "top_p_B": torch.tensor([0.3, 0.9, 1.0])[torch.randint(0, 3, (lanes,), generator=generator)] if filtered else None,
            "min_p_B": torch.tensor([0.0, 0.05, 1.0])[torch.randint(0, 3, (lanes,), generator=generator)] if filtered else None,
            "strict": strict,
        }

    return [
        case(1, 1, 1, False, False, True),
        case(3, 2, 37, True, True, True),
        case(2, 3, 37, False, False, False),
        case(3, 2, 130, True, False, False),
        case(2, 2, 257, True, True, False),
    ]

"""Random inputs of the ops that change or read the states of recurrent layers, whatever the rule."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from ..op import Case

Draw = Callable[[Generator, int, int, int, int, int, int], Case]
"""Inputs of a rule's ops from numbers of lanes, tokens, key heads and value heads, and the sizes of a key and a value."""


def random_tokens(generator: Generator, lanes: int, tokens: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> Case:
    """Inputs of an op over ``lanes + 2`` rows and two layers, as cases have them."""
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    gate = torch.rand(lanes, tokens, 2 * value_heads, generator=generator)
    gate[..., :value_heads] *= -3
    return {
        "mixed_BTE": torch.randn(lanes, tokens, channels, generator=generator),
        "gate_BTG": gate,
        "matrix_RUHKV": torch.randn(lanes + 2, 2, value_heads, key_dim, value_dim, generator=generator),
        "layer": 1,
        "lane_row_B": torch.randperm(lanes + 2, generator=generator)[:lanes],
    }


def random_ancestors(generator: Generator, lanes: int, tokens: int) -> Tensor:
    """Words of random trees, parents before children, in which some nodes of lanes after the first are unused."""
    words = (tokens + 63) // 64
    matrix = torch.zeros(lanes, tokens, tokens, dtype=torch.bool)
    for lane in range(lanes):
        used = tokens if lane == 0 else int(torch.randint(0, tokens + 1, (1,), generator=generator))
        for node in range(used):
            if node:
                matrix[lane, node] = matrix[lane, int(torch.randint(max(0, node - 3), node, (1,), generator=generator))]
            matrix[lane, node, node] = True
    bits = torch.zeros(lanes, tokens, 64 * words, dtype=torch.int64)
    bits[..., :tokens] = matrix
    return (bits.view(lanes, tokens, words, 64) << torch.arange(64)).sum(-1)


def tree_cases(draw: Draw, generator: Generator) -> list[Case]:
    """Odd sizes, unused nodes, more than one word."""

    def case(lanes: int, tokens: int, *sizes: int) -> Case:
        made = draw(generator, lanes, tokens, *sizes)
        return {**made, "ancestors_BTX": random_ancestors(generator, lanes, tokens)}

    return [case(1, 1, 1, 1, 4, 4), case(2, 5, 2, 4, 8, 6), case(3, 9, 1, 3, 5, 7), case(1, 66, 1, 1, 4, 8)]


def run_cases(draw: Draw, generator: Generator) -> list[Case]:
    """Odd sizes, runs of every length, fresh rows."""

    def case(lanes: int, tokens: int, *sizes: int, fresh: bool) -> Case:
        made = draw(generator, lanes, tokens, *sizes)
        made["length_B"] = torch.randint(0, tokens + 1, (lanes,), generator=generator)
        made["length_B"][0] = tokens
        made["fresh_B"] = torch.rand(lanes, generator=generator) < 0.5 if fresh else None
        return made

    return [
        case(1, 1, 1, 1, 4, 4, fresh=False),
        case(3, 6, 2, 4, 8, 6, fresh=True),
        case(4, 5, 1, 3, 5, 7, fresh=False),
        case(2, 130, 1, 2, 4, 8, fresh=True),
    ]

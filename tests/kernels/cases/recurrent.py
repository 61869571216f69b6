"""Small inputs of the ops of ``graphspec.kernels.recurrent``, odd sizes included, by name; drawn on the CPU."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from graphspec.kernels.op import Case


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


def _tree_cases(generator: Generator) -> list[Case]:
    """Of both rules; odd sizes, unused nodes, more than one word."""

    def case(selective: bool, lanes: int, tokens: int, *sizes: int) -> Case:
        made = random_tokens(generator, lanes, tokens, *sizes)
        skip = torch.randn(sizes[1], generator=generator) if selective else None
        return {**made, "skip_H": skip, "ancestors_BTX": random_ancestors(generator, lanes, tokens)}

    sizes = ((1, 1, 1, 1, 4, 4), (2, 5, 2, 4, 8, 6), (3, 9, 1, 3, 5, 7), (1, 66, 1, 1, 4, 8))
    return [case(selective, *one) for selective in (False, True) for one in sizes]


def _run_cases(generator: Generator) -> list[Case]:
    """Of both rules; odd sizes, runs of every length, fresh rows."""

    def case(selective: bool, fresh: bool, lanes: int, tokens: int, *sizes: int) -> Case:
        made = random_tokens(generator, lanes, tokens, *sizes)
        made["skip_H"] = torch.randn(sizes[1], generator=generator) if selective else None
        made["length_B"] = torch.randint(0, tokens + 1, (lanes,), generator=generator)
        made["length_B"][0] = tokens
        made["fresh_B"] = torch.rand(lanes, generator=generator) < 0.5 if fresh else None
        return made

    sizes = ((False, 1, 1, 1, 1, 4, 4), (True, 3, 6, 2, 4, 8, 6), (False, 4, 5, 1, 3, 5, 7), (True, 2, 130, 1, 2, 4, 8))
    return [case(selective, *one) for selective in (False, True) for one in sizes]


def conv_shift(generator: Generator) -> list[Case]:
    def case(layers: int, lanes: int, tokens: int, width: int, columns: int, channels: int, *, fresh: bool = False) -> Case:
        path = torch.stack([torch.randperm(tokens, generator=generator)[:width].sort().values for _ in range(lanes)])
        length = torch.randint(0, width + 1, (lanes,), generator=generator)
        inputs = torch.randn(layers, lanes, tokens, channels, generator=generator)
        for lane in range(lanes):
            off = [node for node in range(tokens) if node not in path[lane, : int(length[lane])].tolist()]
            inputs[:, lane, off] = torch.nan
        return {
            "input_UBTE": inputs,
            "column_RUOE": torch.randn(lanes + 1, 3, columns, channels, generator=generator),
            "layer": 3 - layers,
            "lane_row_B": torch.randperm(lanes + 1, generator=generator)[:lanes],
            "path_BA": path,
            "length_B": length,
            "fresh_B": torch.rand(lanes, generator=generator) < 0.5 if fresh else None,
        }

    return [case(1, 1, 1, 1, 3, 4), case(3, 3, 9, 5, 3, 6), case(2, 4, 5, 5, 1, 3), case(1, 3, 12, 12, 3, 5, fresh=True)]


state_walk = state_tree = _tree_cases
state_scan = state_chunk = _run_cases


def state_commit(generator: Generator) -> list[Case]:
    def case(
        layers: int, lanes: int, tokens: int, width: int, key_heads: int, heads: int, key_dim: int, value_dim: int, *, selective: bool
    ) -> Case:
        channels = 2 * key_heads * key_dim + heads * value_dim
        columns = 1 if heads == 3 else 3

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        gate = torch.rand(layers, lanes, tokens, 2 * heads, generator=generator)
        gate[..., :heads] *= -3
        made: Case = {
            "input_UBTE": normal(layers, lanes, tokens, channels),
            "gate_UBTG": gate,
            "weight_UEO": normal(layers, channels, columns + 1),
            "bias_UE": normal(layers, channels) if selective else None,
            "column_RUOE": normal(lanes + 2, layers, columns, channels),
            "matrix_RUHKV": normal(lanes + 2, layers, heads, key_dim, value_dim),
            "lane_row_B": torch.randperm(lanes + 2, generator=generator)[:lanes],
            "path_BA": torch.stack([torch.randperm(tokens, generator=generator)[:width].sort().values for _ in range(lanes)]),
            "length_B": torch.randint(0, width + 1, (lanes,), generator=generator),
            "selective": selective,
        }
        made["length_B"][0] = width
        for lane in range(lanes):
            off = sorted(set(range(tokens)) - set(made["path_BA"][lane, : int(made["length_B"][lane])].tolist()))
            made["input_UBTE"][:, lane, off] = made["gate_UBTG"][:, lane, off] = torch.nan
        return made

    return [
        case(layers, lanes, tokens, width, *heads, selective=selective)
        for selective in (False, True)
        for layers, lanes, tokens, width, *heads in ((1, 1, 1, 1, 1, 1, 4, 4), (3, 3, 9, 5, 2, 4, 8, 6), (2, 4, 7, 7, 1, 3, 5, 7))
    ]


def tree_conv(generator: Generator) -> list[Case]:
    def case(lanes: int, tokens: int, channels: int, taps: int, *, chain: bool = False, bias: bool = False) -> Case:
        parent = torch.arange(-1, tokens - 1).repeat(lanes, 1)
        if not chain:
            drawn = (torch.rand(lanes, tokens, generator=generator) * torch.arange(tokens)).long()
            parent = torch.where(torch.arange(tokens) > 0, drawn, -1)
        return {
            "input_BTE": torch.randn(lanes, tokens, channels, generator=generator),
            "column_RUOE": torch.randn(lanes + 1, 2, taps - 1, channels, generator=generator),
            "layer": 1,
            "lane_row_B": torch.randperm(lanes + 1, generator=generator)[:lanes],
            "parent_BT": parent,
            "weight_EO": torch.randn(channels, taps, generator=generator),
            "bias_E": torch.randn(channels, generator=generator) if bias else None,
            "fresh_B": torch.rand(lanes, generator=generator) < 0.5 if chain else None,
        }

    return [case(1, 1, 5, 4), case(3, 9, 12, 4, bias=True), case(2, 7, 33, 2), case(3, 20, 8, 4, chain=True)]

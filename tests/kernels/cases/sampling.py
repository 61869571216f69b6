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


def _logits(generator: Generator, lanes: int, rows: int, columns: int) -> torch.Tensor:
    logits = torch.randn(lanes, rows, columns, generator=generator).mul(3).round(decimals=1)
    logits[0, 0, columns // 2 :] = -torch.inf
    logits[-1, -1, :2] = torch.tensor([torch.nan, torch.inf])[:columns]
    return logits


def _mapping(generator: Generator, columns: int, vocab: int) -> torch.Tensor | None:
    return None if columns == vocab else torch.randperm(vocab, generator=generator)[:columns].sort().values


def penalise(generator: Generator) -> list[Case]:
    def case(lanes: int, rows: int, columns: int, vocab: int, path: int | None) -> Case:
        slots = lanes + 2
        return {
            "logits_BTV": _logits(generator, lanes, rows, columns),
            "lane_row_B": torch.randperm(slots, generator=generator)[:lanes],
            "repetition_R": torch.tensor([1.0, 1.3, 0.7])[torch.arange(slots) % 3],
            "presence_R": torch.tensor([0.0, -0.5, 1.5])[torch.randint(0, 3, (slots,), generator=generator)],
            "frequency_R": torch.tensor([0.0, 0.3, -0.2])[torch.randint(0, 3, (slots,), generator=generator)],
            "output_count_RV": torch.randint(-3, 4, (slots, vocab), generator=generator).clamp(min=0).to(torch.int32),
            "prompt_seen_RV": torch.randint(0, 2, (slots, vocab), generator=generator).to(torch.int8),
            "path_BTs": None if path is None else torch.randint(-1, min(vocab, 6), (lanes, rows, path), generator=generator),
            "target_token_Vd": _mapping(generator, columns, vocab),
        }

    return [case(1, 1, 1, 1, None), case(3, 2, 37, 37, 4), case(2, 3, 13, 37, 3), case(2, 2, 20, 130, None), case(4, 2, 8192, 8192, 5)]


def mask_tokens(generator: Generator) -> list[Case]:
    def case(lanes: int, rows: int, columns: int, vocab: int, allowed: bool, grammar: bool) -> Case:
        slots = lanes + 2

        def words(bits: int, *shape: int) -> torch.Tensor:
            dtype, limit = (torch.int64, 2**63) if bits == 64 else (torch.int32, 2**31)
            return torch.randint(-limit, limit - 1, (*shape, -(-vocab // bits)), generator=generator).to(dtype)

        return {
            "logits_BTV": _logits(generator, lanes, rows, columns),
            "lane_row_B": torch.randperm(slots, generator=generator)[:lanes],
            "allowed_RU": words(64, slots) if allowed else None,
            "token_mask_BTVw": words(32, lanes, rows) if grammar else None,
            "target_token_Vd": _mapping(generator, columns, vocab),
        }

    return [
        case(1, 1, 1, 1, True, True),
        case(3, 2, 37, 37, True, True),
        case(2, 3, 130, 130, False, True),
        case(2, 2, 20, 130, True, True),
        case(2, 2, 64, 64, False, False),
        case(2, 4, 8192, 8192, True, False),
    ]


def bias_logits(generator: Generator) -> list[Case]:
    def case(lanes: int, rows: int, columns: int, vocab: int, ids: int, stops: int, positions: int) -> Case:
        slots = lanes + 2

        def distinct(count: int) -> torch.Tensor:
            chosen = torch.stack([torch.randperm(vocab, generator=generator)[:count] for _ in range(slots)])
            return torch.nn.functional.pad(chosen, (0, 2), value=-1)

        position = torch.randint(0, 9, (lanes, positions), generator=generator)
        return {
            "logits_BTV": _logits(generator, lanes, rows, columns),
            "lane_row_B": torch.randperm(slots, generator=generator)[:lanes],
            "bias_id_RI": distinct(ids),
            "bias_value_RI": torch.randn(slots, ids + 2, generator=generator).mul(3),
            "stop_id_RE": distinct(stops),
            "stop_from_R": torch.randint(0, 9, (slots,), generator=generator),
            "position_BT": position,
            "target_token_Vd": _mapping(generator, columns, vocab),
            "vocab_size": vocab,
        }

    return [
        case(1, 1, 1, 1, 1, 1, 1),
        case(3, 2, 37, 37, 5, 2, 2),
        case(2, 3, 13, 37, 9, 3, 1),
        case(4, 2, 8192, 8192, 300, 4, 2),
        case(2, 2, 20, 130, 0, 5, 2),
    ]


def ban_words(generator: Generator) -> list[Case]:
    def case(lanes: int, rows: int, vocab: int, words: int, length: int) -> Case:
        slots, few = lanes + 2, min(vocab, 3)
        word = torch.randint(0, few, (slots, words, length), generator=generator)
        begin = torch.randint(0, length + 1, (slots, words, 1), generator=generator)
        return {
            "logits_BTV": _logits(generator, lanes, rows, vocab),
            "lane_row_B": torch.randperm(slots, generator=generator)[:lanes],
            "bad_word_RBwBt": word.masked_fill(torch.arange(length) < begin, -1),
            "before_BTt": torch.randint(-1, few, (lanes, rows, length - 1), generator=generator),
        }

    return [case(1, 1, 1, 1, 1), case(3, 2, 37, 4, 3), case(2, 5, 130, 9, 2), case(4, 2, 8192, 3, 4)]


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


def put_first(generator: Generator) -> list[Case]:
    """Some rows on the forced path, some off it; forced tokens that are among the continuations, at every place, and others."""

    def case(lanes: int, rows: int, topk: int, depth: int, drafted: int | None) -> Case:
        token = torch.stack([torch.randperm(topk + 3, generator=generator)[:topk] for _ in range(lanes * rows)])
        path = None if drafted is None else torch.randint(0, 2, (lanes, rows, drafted), generator=generator)
        return {
            "score_BTK": torch.randn(lanes, rows, topk, generator=generator).sort(descending=True).values,
            "token_BTK": token.view(lanes, rows, topk),
            "forced_BS": torch.randint(-1, topk + 3 if drafted is None else 2, (lanes, depth), generator=generator),
            "path_BTs": path,
        }

    return [case(1, 1, 1, 1, 0), case(4, 7, 5, 7, None), case(5, 6, 4, 3, 2), case(3, 2, 16, 2, 1), case(6, 3, 1, 3, None)]

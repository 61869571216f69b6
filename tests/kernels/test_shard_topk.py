"""A vocabulary scored in parts and merged, against the same vocabulary scored as one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from graphspec.kernels.sampling.noise import gumbel_noise
from graphspec.kernels.sampling.sample_tokens import sample_tokens
from graphspec.kernels.sampling.topk import stable_topk
from graphspec.kernels.tree.draft_level import draft_topk
from graphspec.kernels.tree.shard_topk import merge_shards, pack_shard, shard_topk

LANES, ROWS = 3, 4


def case(vocab: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits with many ties, and temperature, seed and position; the first lane is greedy."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(LANES, ROWS, vocab, generator=generator).mul(2).round(decimals=1)
    seeds = torch.randint(-(2**62), 2**62, (LANES,), generator=generator)
    return logits, torch.tensor([0.0, 0.7, 1.3]), seeds, torch.randint(0, 5000, (LANES, ROWS), generator=generator)


def merged(logits: Tensor, ranks: int, topk: int, *noise: Tensor | None, tokens: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """What ``ranks`` ranks find together; ``noise`` is temperature, seed and position."""
    vocab = logits.shape[-1]
    tokens = torch.arange(vocab) if tokens is None else tokens
    size = -(-vocab // ranks)
    words = []
    for rank in range(ranks):
        absent = max(0, min(size, (rank + 1) * size - vocab))
        # What lies after the end of the vocabulary may hold anything.
        own = F.pad(logits[..., rank * size : (rank + 1) * size], (0, absent), value=torch.inf)
        ids = F.pad(tokens[rank * size : (rank + 1) * size], (0, absent), value=-1)
        words.append(pack_shard(*shard_topk(own, topk, ids, *(noise or (None, None, None)))))
    return merge_shards(torch.cat(words, -1), topk)


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("topk", [1, 4, 17])
@pytest.mark.parametrize("noisy", [False, True])
def test_tokens_and_their_order_are_those_of_the_gathered_logits(ranks: int, topk: int, noisy: bool) -> None:
    """Log-probabilities differ by the order of a sum of V terms: at most V roundings of the sum on either side, and those of the result."""
    vocab = 137
    logits, temperature, seed, position = case(vocab)
    tokens = torch.randperm(3 * vocab, generator=torch.Generator().manual_seed(1))[:vocab].sort().values
    noise = (temperature, seed, position) if noisy else ()
    logprob, token, sound = merged(logits, ranks, topk, *noise, tokens=tokens)
    for row in range(ROWS):
        noise_args = (seed, position[:, row].contiguous(), temperature) if noisy else (None, None, None)
        expected_logprob, expected_token = draft_topk(logits[:, row : row + 1], topk, tokens, *noise_args)
        assert torch.equal(token[:, row : row + 1], expected_token)
        allowed = 2 * vocab * 2.0**-24 + 4 * 2.0**-24 * expected_logprob.abs()
        assert ((logprob[:, row : row + 1] - expected_logprob).abs() <= allowed).all()
    assert sound.all()


@pytest.mark.parametrize("noisy", [False, True])
def test_keys_keep_their_bits(noisy: bool) -> None:
    logits, temperature, seed, position = case(64)
    noise = (temperature, seed, position) if noisy else (None, None, None)
    for begin in (0, 32):
        own, ids = logits[..., begin : begin + 32].contiguous(), torch.arange(begin, begin + 32)
        key_BTV = own
        if noisy:
            heat = temperature[:, None, None]
            key_BTV = torch.where(heat > 0, own + heat * gumbel_noise(seed, position, ids), own)
        value, token, _, _ = shard_topk(own, 5, ids, *noise)
        expected, index = stable_topk(key_BTV, 5)
        assert torch.equal(value, expected) and torch.equal(token, index + begin)


@pytest.mark.parametrize("noisy", [False, True])
def test_samples_are_those_of_one_rank(noisy: bool) -> None:
    logits, temperature, seed, position = case(61)
    logits[0, 1, 40] = torch.nan
    logits[2, 3, 5] = -torch.inf
    noise = (temperature, seed, position) if noisy else (None, None, None)
    _, token, sound = merged(logits, 4, 1, *(noise if noisy else ()))
    expected_token, expected_sound = sample_tokens(logits, *noise, None, None, None, True)
    assert torch.equal(token[..., 0], expected_token) and torch.equal(sound, expected_sound)
    assert not sound[0, 1] and not sound[2, 3] and sound.sum() == LANES * ROWS - 2


def test_a_tie_across_ranks_goes_to_the_lowest_id() -> None:
    logits = torch.full((1, 1, 12), -1.0)
    logits[..., [2, 5, 7, 11]] = torch.tensor([0.0, -0.0, 0.0, -0.0])
    _, token, _ = merged(logits, 4, 3)
    assert token.tolist() == [[[2, 5, 7]]]


def test_a_row_without_a_finite_key_is_impossible_not_nan() -> None:
    logits = torch.full((1, 3, 12), torch.nan)
    logits[0, 1] = torch.inf
    logits[0, 2, 9] = -7.0
    logprob, token, sound = merged(logits, 3, 3)
    expected_logprob, expected_token = draft_topk(logits, 3, None, None, None, None)
    assert torch.equal(logprob, expected_logprob) and torch.equal(token, expected_token) and not sound.any()

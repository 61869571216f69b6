"""Kernels over a vocabulary on a real GPU, in the sizes of a real model, against the references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphspec.kernels import OPS
from graphspec.kernels.sampling.filter_logits import filter_logits
from graphspec.kernels.sampling.noise import BELOW_ONE, counter_hash, gumbel_noise
from graphspec.kernels.tree.shard_topk import merge_shards, pack_shard

pytestmark = pytest.mark.gpu

VOCAB, DRAFT_VOCAB = 128256, 32000
OP = {op.name: op for op in OPS}


def model_logits(lanes: int, rows: int, vocab: int, seed: int = 0) -> Tensor:
    """Like a model's: bfloat16 values, so ties are common, and a few tokens far above the rest."""
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = torch.randn(lanes, rows, vocab, device="cuda", generator=generator) * 2.5
    logits[..., ::5003] += 12
    return logits.bfloat16().float()


def sampler_arguments(lanes: int, rows: int) -> dict[str, Any]:
    return {
        "temperature_B": torch.tensor([0.0, 0.7, 1.0, 1.3], device="cuda")[torch.arange(lanes, device="cuda") % 4],
        "seed_B": torch.arange(lanes, device="cuda") * 12345 - 7,
        "position_BT": torch.arange(lanes * rows, device="cuda").view(lanes, rows) + 100,
    }


def filters(lanes: int) -> dict[str, Any]:
    lane = torch.arange(lanes, device="cuda")
    return {
        "top_k_B": torch.tensor([-1, 50, 1000, 1], device="cuda")[lane % 4],
        "top_p_B": torch.tensor([0.95, 1.0, 0.8], device="cuda")[lane % 3],
        "min_p_B": torch.tensor([0.0, 0.02], device="cuda")[lane % 2],
    }


def assert_tokens_win(logits_BTV: Tensor, sampler: dict[str, Any], found_BT: Tensor) -> None:
    """Logarithms of two backends differ in the last bits, so the token's key, in float64, is the largest to within a few of them."""
    noise_BTV = gumbel_noise(sampler["seed_B"], sampler["position_BT"], torch.arange(logits_BTV.shape[-1], device="cuda")).double()
    temperature_B11 = sampler["temperature_B"].double()[:, None, None]
    key_BTV = torch.where(temperature_B11 > 0, logits_BTV.double() + temperature_B11 * noise_BTV, logits_BTV.double())
    deficit_BT = key_BTV.amax(-1) - key_BTV.gather(-1, found_BT[..., None]).squeeze(-1)
    assert deficit_BT.max() < 1e-5 and not deficit_BT[sampler["temperature_B"] <= 0].any()


@pytest.mark.references("sample_tokens")
@pytest.mark.parametrize(("lanes", "rows"), [(1, 1), (1, 8), (8, 8), (4, 64)])
def test_samples_win(lanes: int, rows: int) -> None:
    logits, sampler, fused = model_logits(lanes, rows, VOCAB), sampler_arguments(lanes, rows), OP["sample_tokens"].implementation("fused")
    token, sound = fused(logits, None, None, None, None, None, None, True)
    assert torch.equal(token, logits.argmax(-1)) and sound.all()
    token, sound = fused(logits, *sampler.values(), None, None, None, True)
    assert_tokens_win(logits, sampler, token)
    token, _ = fused(logits, *sampler.values(), *filters(lanes).values(), True)
    kept = filter_logits(logits, sampler["temperature_B"], **filters(lanes))
    assert_tokens_win(kept, sampler, token)
    logits[-1, -1, 77] = torch.nan
    sound = fused(logits, *sampler.values(), *filters(lanes).values(), False)[1]
    assert not sound[-1, -1] and sound.sum() == lanes * rows - 1


@pytest.mark.references("filter_logits")
@pytest.mark.parametrize(("lanes", "rows"), [(1, 1), (8, 8)])
def test_filters_keep_what_the_reference_keeps(lanes: int, rows: int) -> None:
    logits = model_logits(lanes, rows, VOCAB, 1)
    case = {"temperature_B": sampler_arguments(lanes, rows)["temperature_B"] + 0.1, **filters(lanes)}
    found, expected = OP["filter_logits"].implementation("fused")(logits, **case), filter_logits(logits, **case)
    # A weight may be cut to the next integer: at most the logits of one value come or go with it.
    differ = found.isfinite() != expected.isfinite()
    for row, values in zip(differ.flatten(0, 1), logits.flatten(0, 1), strict=True):
        assert values[row].unique().numel() <= 1
    assert differ.any(-1).sum() <= 1 + lanes * rows // 16


@pytest.mark.references("draft_topk")
@pytest.mark.parametrize(("lanes", "rows", "topk"), [(1, 1, 8), (8, 8, 8), (1, 1, 1), (2, 4, 32)])
@pytest.mark.parametrize("noisy", [False, True])
def test_draft_topk(lanes: int, rows: int, topk: int, noisy: bool) -> None:
    logits = model_logits(lanes, rows, DRAFT_VOCAB, 2)
    generator = torch.Generator("cuda").manual_seed(3)
    ids = torch.randperm(VOCAB, device="cuda", generator=generator)[:DRAFT_VOCAB].sort().values
    sampler = sampler_arguments(lanes, rows)
    noise = (sampler["seed_B"], sampler["position_BT"][:, 0].contiguous(), sampler["temperature_B"]) if noisy else (None, None, None)
    logprob, token = OP["draft_topk"].implementation("fused")(logits, topk, ids, *noise)
    expected_logprob, expected_token = OP["draft_topk"].reference(logits, topk, ids, *noise)
    oracle, _ = OP["draft_topk"].reference(
        logits.double(), topk, ids, *(x.double() if x is not None and x.is_floating_point() else x for x in noise)
    )
    own = (expected_logprob.double() - oracle).abs().max()
    # The noise of both is float32; its last bit is at most 2^-20, and the temperature at most 1.3.
    slack = 2.0**-19 if noisy else 0.0
    assert (logprob.double() - oracle).abs().max() <= 2 * own + slack + torch.finfo(torch.float32).eps * oracle.abs().max()
    if not noisy:
        assert torch.equal(token, expected_token)
    else:
        assert (token == expected_token).float().mean() > 0.99


@pytest.mark.references("shard_topk")
@pytest.mark.parametrize(("lanes", "rows", "topk"), [(1, 8, 1), (8, 8, 8)])
@pytest.mark.parametrize("noisy", [False, True])
def test_parts_of_a_vocabulary_together_give_the_tokens_of_the_whole(lanes: int, rows: int, topk: int, noisy: bool) -> None:
    """Both paths are the same kernel over the same keys, so a tie or a last bit can't decide between them."""
    logits, sampler, ranks = model_logits(lanes, rows, VOCAB, 5), sampler_arguments(lanes, rows), 8
    shard, whole = OP["shard_topk"], OP["draft_topk"].implementation("fused")
    ids, noise = torch.arange(VOCAB, device="cuda").chunk(ranks), tuple(sampler.values()) if noisy else (None, None, None)
    parts = [(own, topk, mine, *noise) for own, mine in zip(logits.chunk(ranks, -1), ids, strict=True)]
    found = [shard.implementation("fused")(*part) for part in parts]
    logprob, token, sound = merge_shards(torch.cat([pack_shard(*each) for each in found], -1), topk)
    for row in range(rows):
        noise_args = (
            (sampler["seed_B"], sampler["position_BT"][:, row].contiguous(), sampler["temperature_B"]) if noisy else (None, None, None)
        )
        expected_logprob, expected_token = whole(logits[:, row : row + 1].contiguous(), topk, None, *noise_args)
        assert torch.equal(token[:, row : row + 1], expected_token)
        torch.testing.assert_close(logprob[:, row : row + 1], expected_logprob, rtol=0, atol=2e-5)
    assert sound.all()
    if not noisy:
        for each, part in zip(found, parts, strict=True):
            key, index, total, _ = shard.reference(*part)
            assert torch.equal(each[0], key) and torch.equal(each[1], index)
            torch.testing.assert_close(each[2], total, rtol=1e-5, atol=0)


@pytest.mark.references("gumbel_noise")
def test_noise_is_that_of_the_reference_hash() -> None:
    """Two roundings from float64, of the exponential, which moves its logarithm by as much, and of the result."""
    seed, position = torch.tensor([0, -1, 2**63 - 1, 12345], device="cuda"), torch.tensor([[0, 2**31], [5, 2**32 - 1]] * 2, device="cuda")
    token = torch.arange(VOCAB, device="cuda")
    found = OP["gumbel_noise"].implementation("fused")(seed, position, token)
    uniform = ((counter_hash(seed, position, token).float() + 0.5) * 2.0**-32).clamp(max=BELOW_ONE).double()
    oracle = -torch.log(-torch.log1p(-uniform))
    assert found.dtype == torch.float32 and ((found.double() - oracle).abs() <= 2**-22 + 2**-23 * oracle.abs()).all()


def test_a_row_alone_has_the_bits_it_has_in_a_batch() -> None:
    logits, sampler = model_logits(8, 8, VOCAB, 4), sampler_arguments(8, 8)
    sample, rank = OP["sample_tokens"].implementation("fused"), OP["draft_topk"].implementation("fused")
    token, _ = sample(logits, *sampler.values(), *filters(8).values(), True)
    logprob, drafted = rank(logits, 8, None, sampler["seed_B"], sampler["position_BT"][:, 0].contiguous(), sampler["temperature_B"])
    for b, t in ((1, 0), (3, 7), (6, 2)):
        own = {"temperature_B": sampler["temperature_B"][b : b + 1], "seed_B": sampler["seed_B"][b : b + 1]}
        position, row = sampler["position_BT"][b : b + 1, t : t + 1], logits[b : b + 1, t : t + 1]
        alone, _ = sample(row, *own.values(), position, *(x[b : b + 1] for x in filters(8).values()), True)
        assert alone.item() == token[b, t]
        value, index = rank(row, 8, None, own["seed_B"], sampler["position_BT"][b : b + 1, 0].contiguous(), own["temperature_B"])
        assert torch.equal(value[0, 0], logprob[b, t]) and torch.equal(index[0, 0], drafted[b, t])

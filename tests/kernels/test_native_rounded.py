"""Native products with activations of 8 bits and in bfloat16 (``kernels.activations``): what they are, what they apply to, and that drafts
change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from graphspec import LLM, SamplingParams
from graphspec.errors import ConfigError
from graphspec.kernels import native
from graphspec.kernels.linear.packed import CODES, Packed, dequantise
from graphspec.kernels.native import cycle, experts, pack_codes, pack_segments, roundable
from graphspec.models.layers import Linear
from graphspec.models.packed_weight import PackedWeight
from graphspec.models.stack import round_activations
from graphspec.models.vocabulary import set_weight
from perf.committed_logits import committed
from tests.kernels.test_native_packed import PARTS, draw, mixed, multiply
from tests.support.checkpoints import build_hf, write_hf
from tests.support.engines import prompts
from tests.support.instruction_sets import FLAGS, use_products_for
from tests.support.moe_checkpoints import write_mixture
from tests.support.quantised_checkpoints import quantise, quantise_gpt_oss

INTEGERS = tuple(code for code in CODES if code != "e4m3")
SHAPES = ((83, 96, 32), (33, 64, 16), (5, 128, 128), (64, 160, 64), (40, 32, 32), (7, 192, 96))
"""Outputs, channels, group: blocks and groups that are cut short, groups of several sizes, a scale per row."""
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 33, 100)


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def rounded(x: Tensor) -> Tensor:
    """float64: activations as integers from -127 to 127 times a float32 scale, 32 channels to a scale."""
    groups = x.unflatten(-1, (-1, 32))
    most = groups.abs().amax(-1, keepdim=True)
    # `127 / most` would multiply by a rounded reciprocal.
    by = torch.where(most > 0, torch.tensor(127.0) / most, 0)
    return (torch.round(groups * by).double() * (most / 127).double()).flatten(-2)


def check(weight: Packed, generator: Generator, counts: tuple[int, ...] = ROWS) -> Tensor:
    """Products are those of the rounded activations, and the bits of a row are the same among any others. Returns them."""
    (outputs, channels), numbers = weight.shape, dequantise(weight, torch.float32).double()
    x = torch.randn(max(counts), channels, generator=generator) * torch.rand(max(counts), 1, generator=generator) * 9
    assert roundable(weight)
    packed = pack_codes(weight, activations="int8")
    whole = multiply(x, packed, outputs)
    error = (whole - rounded(x) @ numbers.T).abs()
    # The rounding of float32 sums, by the size of their terms.
    assert bool((error <= 4e-7 * (rounded(x).abs() @ numbers.abs().T)).all()), (weight.code, weight.shape, weight.group)
    assert not torch.equal(whole, multiply(x, pack_codes(weight), outputs)), "activations were rounded"
    for count in counts:
        assert torch.equal(multiply(x[:count], packed, outputs), whole[:count])
        assert torch.equal(multiply(x[-count:], packed, outputs), whole[-count:])
    return whole


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("code", INTEGERS)
def test_products_are_those_of_rounded_activations(code: str, parts: str, threads: int) -> None:
    torch.set_num_threads(threads)
    generator = Generator().manual_seed(threads)
    for outputs, channels, group in SHAPES:
        check(draw(generator, outputs, channels, code, group, parts), generator)
    check(draw(generator, 700, 256, code, 32, parts), generator, (1, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("parts", ["", "zeros", "minimums"])
def test_scales_of_other_precision(parts: str, dtype: torch.dtype) -> None:
    generator = Generator().manual_seed(3)
    for code in INTEGERS:
        check(draw(generator, 83, 96, code, 32, parts, dtype), generator, (1, 5, 33))


@pytest.mark.parametrize("code, channels, group", [("e4m3", 64, 32), ("uint4", 70, 32), ("int8", 64, 1), ("int4", 96, 24)])
def test_other_weights_keep_their_activations(code: str, channels: int, group: int) -> None:
    generator = Generator().manual_seed(4)
    weight = draw(generator, 40, channels, code, group)
    x = torch.randn(9, channels, generator=generator)
    assert not roundable(weight)
    assert torch.equal(multiply(x, pack_codes(weight, activations="int8"), 40), multiply(x, pack_codes(weight), 40))


def test_groups_that_are_no_runs_of_channels_keep_them_too() -> None:
    generator = Generator().manual_seed(5)
    weight = draw(generator, 40, 96, "uint4", 32)
    weight = weight._replace(group_of=torch.randint(0, 3, (96,), generator=generator, dtype=torch.int32))
    assert not roundable(weight)


@pytest.mark.parametrize("count", [1, 5, 40])
def test_rows_of_several_formats_are_one_product(count: int) -> None:
    generator = Generator().manual_seed(7)
    segments = mixed(generator)
    x, norm = torch.randn(count, 64, generator=generator), torch.rand(64, generator=generator)
    both = [native.multiply_packed(x, pack_segments(segments, activations=way), 140, None, norm, 1e-5) for way in ("int8", "full")]
    parts = [native.multiply_packed(x, pack_segments([part], activations="int8"), part.shape[0], None, norm, 1e-5) for part in segments]
    assert torch.equal(both[0], torch.cat(parts, 1))
    assert torch.equal(both[0][:, 50:62], both[1][:, 50:62]) and torch.equal(both[0][:, 95:], both[1][:, 95:]), "numbers are no codes"
    tokens = torch.arange(140)
    valid = torch.ones(140, dtype=torch.bool)
    assert torch.equal(*(cycle.embed(tokens, valid, pack_segments(segments, activations=way), 64) for way in ("int8", "full")))


@pytest.mark.parametrize("name", FLAGS)
def test_activations_too_small_for_a_scale_are_zeros(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """127 over such a number is infinite."""
    use_products_for(name, monkeypatch)
    generator = Generator().manual_seed(12)
    for code, parts in product(INTEGERS, ("", "minimums")):
        weight = draw(generator, 40, 96, code, 32, parts)
        x = torch.randn(3, 96, generator=generator)
        x[1, 32:64] *= 1e-38
        x[2] = 0.0
        x[2, 40] = -3e-37
        zeros = x.clone()
        zeros[1, 32:64] = zeros[2] = 0.0
        packed = pack_codes(weight, activations="int8")
        assert torch.equal(multiply(x, packed, 40), multiply(zeros, packed, 40))


def test_rows_that_are_no_numbers_spoil_no_other() -> None:
    generator = Generator().manual_seed(8)
    weight = draw(generator, 40, 64, "uint4", 32, "minimums")
    x = torch.randn(5, 64, generator=generator)
    x[1, 40], x[2, 3], x[3] = math.nan, math.inf, 0.0
    found = multiply(x, pack_codes(weight, activations="int8"), 40)
    assert not found[1:3].isfinite().any() and torch.equal(found[3], torch.zeros(40))
    assert torch.equal(found[[0, 4]], multiply(x[[0, 4]], pack_codes(weight, activations="int8"), 40))


@pytest.mark.parametrize("name", FLAGS)
def test_other_processors_have_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they have fused multiply-adds. The others' sums are rounded once more."""
    fused = "-mfma" in FLAGS[name]
    results = []
    for other in (False, True):
        if other:
            use_products_for(name, monkeypatch)
        generator = Generator().manual_seed(9)
        results.append(
            [
                check(draw(generator, 83, channels, code, group, parts), generator, (1, 2, 3, 4, 5, 6, 7, 8, 9, 33))
                for code in INTEGERS
                for parts in PARTS
                for channels, group in ((96, 32), (64, 16))
            ]
        )
    for here, there in zip(*results, strict=True):
        assert torch.equal(here, there) or not fused


@pytest.mark.parametrize("count", [1, 6])
def test_experts(count: int) -> None:
    generator = Generator().manual_seed(10)
    hidden, width, number = 64, 96, 4
    weights = [
        draw(generator, number * rows, channels, "uint4", 32, "minimums") for rows, channels in ((2 * width, hidden), (hidden, width))
    ]
    x, chosen = torch.randn(count, hidden, generator=generator), torch.randint(0, number, (count, 2), generator=generator)
    share = torch.rand(count, 2, generator=generator)

    def mixed_by(way: str) -> Tensor:
        packed = [experts.pack_experts(weight, number, activations=way) for weight in weights]
        out: Tensor = experts.mix(x, chosen, share, *packed, width, True, None, None, 1.0, 0.0, False)
        return out

    enter, leave = (dequantise(weight, torch.float32).double().unflatten(0, (number, -1)) for weight in weights)
    expected = torch.zeros(count, hidden, dtype=torch.float64)
    for token in range(count):
        for expert, part in zip(chosen[token], share[token].double(), strict=True):
            gate, up = (enter[expert] @ rounded(x[token : token + 1])[0]).chunk(2)
            active = (torch.nn.functional.silu(gate) * up).float()
            expected[token] += part * (leave[expert] @ rounded(active[None])[0])
    # The two roundings in between may differ by one where a float32 sum is next to a half.
    torch.testing.assert_close(mixed_by("int8").double(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
    assert not torch.equal(mixed_by("int8"), mixed_by("full"))


KEYS: dict[str, Any] = {"max_context": 64, "max_rows": 2, "buckets": [1, 2], "prefill_chunks": [4, 8], "sampling_classes": ["noise"]}
TREE = {"num_steps": 2, "topk": 2, "num_draft_tokens": 5}


@pytest.fixture(scope="module")
def codes(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of int4 weights."""
    path = tmp_path_factory.mktemp("codes")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    source = write_hf(build_hf("llama", head_dim=16, max_position_embeddings=128, **sizes), path / "source")
    return str(quantise(source, path, "pack-quantized", seed=3)[0])


@pytest.mark.parametrize("shape", [{"num_steps": 3, "topk": 1, "num_draft_tokens": 4}, TREE], ids=["chain", "tree"])
def test_drafts_change_no_bit(codes: str, shape: dict[str, int]) -> None:
    asked = [[5, 9, 3, 22, 5, 9, 3], *prompts(3, lengths=(2, 9), vocab=64)]
    params = [SamplingParams(max_tokens=20, ignore_eos=True, temperature=(0.0, 0.7)[i % 2], seed=i) for i in range(len(asked))]
    found = []
    for variant, sizes in (("none", {}), ("ngram", shape)):
        with LLM(codes, variant=variant, runtime="compiled", activations="int8", **KEYS, **sizes) as llm:
            outputs, logits = committed(llm, asked, params)
            assert llm.plan.numerics == "batch_invariant" and outputs[0].metrics.activations == "int8"
            # The head of this layout stays in full precision.
            assert llm.decoders["target"] == "one native op per pass, activations of 8 bits in 8 of 9 products"
            found.append(([out.token_ids for out in outputs], logits))
    assert found[1] == found[0]
    with LLM(codes, variant="none", runtime="compiled", **KEYS) as llm:
        outputs, logits = committed(llm, asked, params)
        assert llm.plan.activations == outputs[0].metrics.activations == "full" and "8 bits" not in llm.decoders["target"]
    assert logits != found[0][1], "activations are rounded"


def test_the_experts_of_a_checkpoint(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 96}
    folder = str(quantise_gpt_oss(write_mixture(tmp_path / "source", "gpt_oss", easy=True, **sizes)[0], tmp_path)[0])
    found = []
    for activations in ("full", "int8"):
        with LLM(folder, variant="none", runtime="compiled", activations=activations, **KEYS) as llm:
            found.append(llm.decoders["target"])
            assert llm.generate([[5, 9, 3]], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids
    assert found[1].startswith(found[0]) and "activations of 8 bits in" in found[1]


def test_where_there_is_nothing_to_round_it_is_an_error(codes: str, tmp_path: Path) -> None:
    plain = str(write_hf(build_hf("llama", max_position_embeddings=128), tmp_path / "plain"))
    with pytest.raises(ConfigError, match=r"kernels\.activations: expected full, unless the target has weights of 4 or 8 bits"):
        LLM(plain, variant="none", runtime="compiled", activations="int8", **KEYS)
    for keys in ({"runtime": "eager"}, {"runtime": "compiled", "linear": "reference"}):
        with pytest.raises(ConfigError, match=r"kernels\.activations: expected full, unless linear layers are native"):
            LLM(codes, variant="none", activations="int8", **keys, **KEYS)
    with pytest.raises(ConfigError, match=r"kernels\.activations: found 'int4'.*expected one of full, int8, bfloat16"):
        LLM(codes, variant="none", activations="int4", **KEYS)


def in_bfloat16(generator: Generator, outputs: int, channels: int) -> Tensor:
    return torch.randn(outputs, channels, generator=generator).bfloat16().float()


@pytest.mark.parametrize("threads", [1, 2])
def test_products_of_bfloat16_are_those_of_activations_in_bfloat16(threads: int) -> None:
    torch.set_num_threads(threads)
    generator = Generator().manual_seed(threads)
    for outputs, channels in ((83, 96), (33, 65), (5, 128), (64, 1), (700, 257)):
        weight, x = in_bfloat16(generator, outputs, channels), torch.randn(max(ROWS), channels, generator=generator) * 9
        packed = pack_segments([weight], activations="bfloat16")
        whole, halves = multiply(x, packed, outputs), x.bfloat16().double()
        error = (whole - halves @ weight.double().T).abs()
        assert bool((error <= 4e-6 * (halves.abs() @ weight.abs().double().T)).all())
        assert not torch.equal(whole, multiply(x, pack_segments([weight]), outputs)), "activations were rounded"
        for count in ROWS:
            assert torch.equal(multiply(x[:count], packed, outputs), whole[:count])
            assert torch.equal(multiply(x[-count:], packed, outputs), whole[-count:])


def test_numbers_of_other_precision_keep_their_activations_in_bfloat16() -> None:
    generator = Generator().manual_seed(13)
    x = torch.randn(5, 64, generator=generator)
    for weight in (torch.randn(40, 64, generator=generator), torch.randn(40, 64, generator=generator).half().float()):
        packed = [pack_segments([weight], activations=way) for way in ("bfloat16", "full")]
        assert torch.equal(multiply(x, packed[0], 40), multiply(x, packed[1], 40))
    codes = draw(generator, 40, 64, "int4", 32)
    assert torch.equal(multiply(x, pack_codes(codes, "bfloat16"), 40), multiply(x, pack_codes(codes), 40))


def test_rows_in_bfloat16_and_codes_are_one_product() -> None:
    """And each row of the table is what it was."""
    generator = Generator().manual_seed(14)
    segments = [in_bfloat16(generator, 40, 65), draw(generator, 33, 65, "int8", 65)]
    x = torch.randn(9, 65, generator=generator)
    packed = pack_segments(segments, activations="bfloat16")
    parts = [multiply(x, pack_segments([part], activations="bfloat16"), part.shape[0]) for part in segments]
    assert torch.equal(multiply(x, packed, 73), torch.cat(parts, 1))
    found = cycle.embed(torch.arange(73), torch.ones(73, dtype=torch.bool), packed, 65)
    assert torch.equal(found, torch.cat((segments[0], dequantise(segments[1], torch.float32))))


@pytest.mark.parametrize("name", FLAGS)
def test_other_processors_have_the_same_bits_in_bfloat16(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they have fused multiply-adds: the instruction for pairs adds both products one after the other, the odd one first."""
    results = []
    for other in (False, True):
        if other:
            use_products_for(name, monkeypatch)
        generator = Generator().manual_seed(15)
        found = []
        for outputs, channels in ((83, 96), (33, 65), (700, 256)):
            packed = pack_segments([in_bfloat16(generator, outputs, channels)], activations="bfloat16")
            x = torch.randn(33, channels, generator=generator)
            x[1, 3], x[2, 5], x[4] = math.nan, math.inf, 0.0
            found += [multiply(x[:count], packed, outputs) for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 33)]
        results.append(found)
    for here, there in zip(*results, strict=True):
        assert torch.equal(here.isnan(), there.isnan()) and bool(here[:1].isfinite().all()) and not bool(here[1:2].isfinite().any())
        assert torch.equal(here.nan_to_num(), there.nan_to_num()) or "-mfma" not in FLAGS[name]


def test_experts_in_bfloat16() -> None:
    generator = Generator().manual_seed(16)
    hidden, width, number, count = 64, 96, 4, 6
    weights = [in_bfloat16(generator, number * rows, channels) for rows, channels in ((2 * width, hidden), (hidden, width))]
    x, chosen = torch.randn(count, hidden, generator=generator), torch.randint(0, number, (count, 2), generator=generator)
    share = torch.rand(count, 2, generator=generator)
    enter, leave = (weight.double().unflatten(0, (number, -1)) for weight in weights)
    packed = [experts.pack_experts(weight, number, activations="bfloat16") for weight in weights]
    found = experts.mix(x, chosen, share, *packed, width, True, None, None, 1.0, 0.0, False)
    expected = torch.zeros(count, hidden, dtype=torch.float64)
    for token in range(count):
        for expert, part in zip(chosen[token], share[token].double(), strict=True):
            gate, up = (enter[expert] @ x[token].bfloat16().double()).chunk(2)
            active = (torch.nn.functional.silu(gate) * up).bfloat16().double()
            expected[token] += part * (leave[expert] @ active)
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of weights in bfloat16."""
    return str(write_hf(build_hf("llama", max_position_embeddings=128).bfloat16(), tmp_path_factory.mktemp("halves")))


@pytest.mark.parametrize("shape", [{"num_steps": 3, "topk": 1, "num_draft_tokens": 4}, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("draft_activations", ["auto", "full"])
def test_drafts_change_no_bit_in_bfloat16(halves: str, shape: dict[str, int], draft_activations: str) -> None:
    """The target as its own draft, whose products round as well."""
    asked = [[5, 9, 3, 22, 5, 9, 3], *prompts(3, lengths=(2, 9), vocab=64)]
    params = [SamplingParams(max_tokens=20, ignore_eos=True, temperature=(0.0, 0.7)[i % 2], seed=i) for i in range(len(asked))]
    how: dict[str, Any] = {"runtime": "compiled", "activations": "bfloat16", **KEYS}
    with LLM(halves, variant="none", **how) as llm:
        outputs, logits = committed(llm, asked, params)
        assert outputs[0].metrics.activations == llm.plan.activations == "bfloat16"
        assert llm.decoders == {"target": "one native op per pass, activations in bfloat16 in 25 of 25 products"}
        expected = [out.token_ids for out in outputs], logits
    with LLM(halves, variant="standalone", draft=halves, draft_activations=draft_activations, **how, **shape) as llm:
        outputs, logits = committed(llm, asked, params)
        assert llm.metrics is not None and llm.metrics.acceptance_length > 1.5
        assert ("bfloat16" in llm.decoders["draft"]) == (draft_activations == "auto")
        assert ([out.token_ids for out in outputs], logits) == expected
    with LLM(halves, variant="none", **{**how, "activations": "full"}) as llm:
        assert committed(llm, asked, params)[1] != expected[1], "activations are rounded"


def test_draft_activations_are_a_choice(codes: str) -> None:
    how: dict[str, Any] = {"variant": "standalone", "draft": codes, "runtime": "compiled", "num_steps": 2, "topk": 1, **KEYS}
    with LLM(codes, **how) as llm:
        assert llm.decoders["target"] == "one native op per pass"
        assert llm.decoders["draft"] == "one native op per pass, activations of 8 bits in 8 of 9 products"
        rounded = llm.generate([[5, 9, 3]], SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids
    with LLM(codes, draft_activations="full", **how) as llm:
        assert llm.decoders["draft"] == "one native op per pass"
        assert llm.generate([[5, 9, 3]], SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids == rounded
    with pytest.raises(ConfigError, match=r"kernels\.draft_activations: expected one of auto, full, found 'int8'"):
        LLM(codes, draft_activations="int8", **how)


def test_drafts_round_only_what_is_theirs_alone() -> None:
    """A layer, or the codes of one, that a draft has from the target serves both."""
    generator = Generator().manual_seed(17)
    layers = [Linear(64, 40) for _ in range(5)]
    for layer in layers[:3]:
        set_weight(layer, PackedWeight([draw(generator, 40, 64, "uint4", 32)], torch.float32))
    set_weight(layers[2], layers[0].weight)
    for layer in layers[3:]:
        layer.stored = torch.bfloat16
    target, draft = torch.nn.ModuleList([layers[0], layers[3]]), torch.nn.ModuleList([layers[1], layers[2], layers[3], layers[4]])
    assert round_activations(draft, ("int8", "bfloat16"), target) == (
        "activations of 8 bits in 1 of 4 products, activations in bfloat16 in 1 of 4 products"
    )
    assert [layer.weight.activations for layer in layers[:2]] == ["full", "int8"]
    assert [layer.activations for layer in layers[3:]] == ["full", "bfloat16"]

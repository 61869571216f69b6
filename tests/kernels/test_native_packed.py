"""Native products of weights of low precision: the bits of the same products of the numbers they stand for."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

from graphspec import LLM, SamplingParams
from graphspec.errors import ConfigError
from graphspec.kernels import native
from graphspec.kernels.linear.packed import CODES, Packed, dequantise
from graphspec.kernels.native import cycle, pack_codes, pack_linear, pack_segments
from graphspec.models.decoder import Decoder
from graphspec.models.layers import Embedding, Linear
from graphspec.models.packed_weight import PackedWeight
from graphspec.models.stack import pack_network
from graphspec.models.vocabulary import set_weight
from tests.kernels.test_native_stack import PLAN, facts, fill, scene
from tests.support.checkpoints import build_hf, write_hf
from tests.support.instruction_sets import use_products_for
from tests.support.quantised_checkpoints import quantise

PARTS = ("", "zeros", "minimums", "super", "super minimums")
ROWS = (1, 2, 3, 5, 6, 8, 9, 33, 64, 100)
SHAPES = ((83, 70, 32), (33, 64, 16), (5, 46, 46), (64, 20, 1), (40, 34, 128))
"""Outputs, channels, group: blocks and groups that are cut short, a scale per row, a scale per channel."""


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def draw(
    generator: Generator, outputs: int, channels: int, code: str, group: int, parts: str = "", dtype: torch.dtype = torch.float16
) -> Packed:
    """A weight of random codes: every code but NaN."""
    groups = -(-channels // group)

    def factors(like: torch.dtype, columns: int = groups) -> Tensor:
        return (torch.rand(outputs, columns, generator=generator) / 4 - 0.05).to(like)

    def integers(maximum: int) -> Tensor:
        return torch.randint(0, maximum, (outputs, groups), generator=generator, dtype=torch.uint8)

    bits = 4 if code in ("int4", "uint4", "e2m1") else 8
    codes = torch.randint(0, 256, (outputs, channels * bits // 8), generator=generator, dtype=torch.uint8)
    if code == "e4m3":
        codes = torch.where((codes & 127) == 127, 0, codes)
    made: dict[str, Tensor] = {"scales": factors(dtype)}
    if parts == "zeros":
        made["zeros"] = integers(16)
    if parts == "minimums":
        made["minimums"] = -factors(dtype)
    if "super" in parts:
        made |= {"scales": integers(64), "super_scales": factors(torch.float16, 1)}
    if parts == "super minimums":
        made |= {"minimums": integers(64), "super_minimums": -factors(torch.float16, 1)}
    return Packed(codes.view(CODES[code]), code=code, group=group, **made)


def multiply(x: Tensor, packed: Tensor, outputs: int) -> Tensor:
    product: Tensor = native.multiply_packed(x, packed, outputs, None, None, 0.0)
    return product


def check_products(weight: Packed, generator: Generator, counts: tuple[int, ...] = ROWS) -> None:
    """The products of a weight and of its numbers, bit for bit."""
    (outputs, channels), codes, numbers = weight.shape, pack_codes(weight), pack_linear(dequantise(weight, torch.float32))
    x = torch.randn(max(counts), channels, generator=generator)
    for count in counts:
        expected = multiply(x[:count], numbers, outputs)
        assert expected.isfinite().all() and expected.any()
        assert torch.equal(multiply(x[:count], codes, outputs).view(torch.int32), expected.view(torch.int32)), (
            weight.code,
            weight.shape,
            count,
        )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("code", CODES)
def test_a_product_has_the_bits_of_the_product_of_its_numbers(code: str, parts: str, threads: int) -> None:
    torch.set_num_threads(threads)
    generator = Generator().manual_seed(threads)
    for shape in SHAPES:
        outputs, channels, group = shape
        check_products(draw(generator, outputs, channels, code, group, parts), generator)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("parts", ["", "zeros", "minimums"])
@pytest.mark.parametrize("code", CODES)
def test_scales_of_other_precision(code: str, parts: str, dtype: torch.dtype) -> None:
    """A scaled code with a float32 scale is rounded, so a fused multiply-add of its minimum would have other bits."""
    generator = Generator().manual_seed(3)
    check_products(draw(generator, 83, 70, code, 32, parts, dtype), generator, (1, 5, 33))


@pytest.mark.parametrize("parts", ["", "zeros"])
def test_groups_that_are_no_runs_of_channels(parts: str) -> None:
    generator = Generator().manual_seed(4)
    weight = draw(generator, 40, 70, "uint4", 32, parts)
    check_products(weight._replace(group_of=torch.randint(0, 3, (70,), generator=generator, dtype=torch.int32)), generator, (1, 5, 33))


def test_scales_that_are_divided() -> None:
    generator = Generator().manual_seed(5)
    weight = draw(generator, 40, 64, "e2m1", 16)
    weight = weight._replace(super_scales=torch.rand(40, 1, generator=generator) + 0.7, divides=True)
    check_products(weight, generator, (1, 5, 33))


def test_threads_share_a_large_product() -> None:
    torch.set_num_threads(2)
    generator = Generator().manual_seed(6)
    check_products(draw(generator, 700, 256, "uint4", 32, "minimums"), generator, (1, 5))


def mixed(generator: Generator) -> list[Packed | Tensor]:
    bfloat = torch.randn(12, 64, generator=generator).bfloat16().float()
    numbers = torch.randn(45, 64, generator=generator)
    return [draw(generator, 50, 64, "uint4", 32, "super minimums"), bfloat, draw(generator, 33, 64, "int8", 16), numbers]


@pytest.mark.parametrize("count", [1, 5, 9, 40])
def test_rows_of_several_formats_are_one_product(count: int) -> None:
    torch.set_num_threads(2)
    generator = Generator().manual_seed(7)
    segments = mixed(generator)
    numbers = torch.cat([part if isinstance(part, Tensor) else dequantise(part, torch.float32) for part in segments])
    x, bias = torch.randn(count, 64, generator=generator), torch.randn(len(numbers), generator=generator)
    norm = torch.rand(64, generator=generator)
    found, expected = (
        native.multiply_packed(x, packed, len(numbers), bias, norm, 1e-5) for packed in (pack_segments(segments), pack_linear(numbers))
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("code", CODES)
def test_rows_are_looked_up_in_a_packed_weight(code: str) -> None:
    generator = Generator().manual_seed(8)
    segments = [draw(generator, 50, 64, code, 32, "minimums"), *mixed(generator)]
    numbers = torch.cat([part if isinstance(part, Tensor) else dequantise(part, torch.float32) for part in segments])
    token = torch.arange(-1, len(numbers) + 1)
    valid = torch.ones_like(token, dtype=torch.bool)
    valid[3] = False
    expected = torch.nn.functional.pad(numbers, (0, 0, 1, 1)) * valid[:, None]
    assert torch.equal(cycle.embed(token, valid, pack_segments(segments), 64), expected)


@pytest.mark.parametrize("name", ["avx2", "generic"])
def test_products_of_other_vector_classes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_products_for(name, monkeypatch)
    generator = Generator().manual_seed(9)
    for code in CODES:
        for parts in PARTS:
            check_products(draw(generator, 83, 70, code, 32, parts), generator, (1, 2, 3, 4, 5, 6, 9, 33))
    weight = torch.randn(83, 45, generator=generator)
    x = torch.randn(30, 45, generator=generator)
    for dtype in (torch.bfloat16, torch.float16):
        narrow = pack_linear(weight.to(dtype).float())
        assert narrow.dtype is dtype
        whole = multiply(x, narrow, 83)
        assert all(torch.equal(multiply(x[:count], narrow, 83), whole[:count]) for count in (1, 2, 3, 4, 5, 6, 7))
        torch.testing.assert_close(whole, x @ weight.to(dtype).float().T)


def test_what_has_no_product_is_refused() -> None:
    generator = Generator().manual_seed(10)
    weight = draw(generator, 4, 8, "e4m3", 4)
    weight.codes.view(torch.uint8)[2, 3] = 255
    with pytest.raises(ConfigError, match="NaN"):
        pack_codes(weight)
    with pytest.raises(ConfigError, match=r"one length.*\[8, 16\]"):
        pack_segments([torch.ones(2, 8), torch.ones(2, 16)])
    with pytest.raises(ConfigError, match="8 channels"):
        multiply(torch.ones(1, 9), pack_linear(torch.ones(2, 8)), 2)
    with pytest.raises(ConfigError, match="8 channels"):
        multiply(torch.ones(1, 9), pack_codes(draw(generator, 4, 8, "int8", 4)), 4)


FORMATS: dict[str, tuple[str, int, str]] = {
    "Q4_1": ("uint4", 16, "minimums"), "Q8_0": ("int8", 16, ""), "int4": ("int4", 24, ""), "Q4_K": ("uint4", 8, "super minimums"),
    "fp8": ("e4m3", 48, ""), "fp4": ("e2m1", 16, "super"),
}  # fmt: skip
MIXED = ("Q4_K", "Q8_0")


def quantised(network: nn.Module, formats: tuple[str, ...]) -> tuple[Any, Any]:
    """Two copies: weights as random codes, and as the numbers they stand for. Queries, keys and values have the formats in turn."""
    generator = Generator().manual_seed(11)
    coded, plain = copy.deepcopy(network), copy.deepcopy(network)
    pairs = list(zip(coded.modules(), plain.modules(), strict=True))
    for one, other in pairs:
        if isinstance(one, Linear | Embedding) and isinstance(one.weight, nn.Parameter):
            outputs, channels = one.weight.shape
            parts = one.parts if isinstance(one, Linear) and len(one.parts) == 3 else (outputs,)
            chosen = [FORMATS[formats[place % len(formats)]] for place in range(len(parts))]
            drawn = [
                draw(generator, count, channels, code, group, extra) for count, (code, group, extra) in zip(parts, chosen, strict=True)
            ]
            weight = PackedWeight(drawn, torch.float32)
            set_weight(one, weight)
            set_weight(other, nn.Parameter(weight.dequantise(), requires_grad=False))
    return coded, plain


@pytest.mark.parametrize("formats", [*((name,) for name in FORMATS), MIXED], ids="-".join)
def test_a_network_of_codes_has_the_bits_of_the_network_of_their_numbers(formats: tuple[str, ...]) -> None:
    """All of it one native op per pass: embedding, layers and head."""
    torch.set_num_threads(2)
    model = facts(hidden_size=48, num_heads=4, num_kv_heads=2, intermediate_size=56, attention_bias=True, mlp_bias=True)
    networks = quantised(fill(Decoder(model, (0, 2, 3), 64)), formats)
    for tree in (True, False):
        at, results = scene(model, tree=tree), []
        for network in networks:
            ours, attention = copy.deepcopy(network), at.attention()
            assert pack_network(ours, PLAN) is None
            assert not any(isinstance(module, PackedWeight) for module in ours.modules()), "codes are held once"
            hidden, taps = ours(at.token, attention)
            results.append((hidden[at.valid], taps[at.valid], ours.logits(hidden)[at.valid], attention.kv_pool[:, :, 1:]))
        assert all(x.isfinite().all() for x in results[0])
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_head_that_is_the_embedding_is_packed_once() -> None:
    network, _ = quantised(fill(Decoder(facts(tie_word_embeddings=True), (), 64)), ("Q8_0",))
    network.lm_head.weight = network.embed_tokens.weight
    assert pack_network(network, PLAN) is None
    assert network.lm_head.packed is network.embed_tokens.packed


def test_formats_that_no_stack_takes_run_op_by_op() -> None:
    model = facts(hidden_size=48, num_heads=4, num_kv_heads=2)
    generator = Generator().manual_seed(12)

    def with_weight(name: str, *codes: str, parts: tuple[int, ...]) -> tuple[Any, Tensor]:
        network = fill(Decoder(model, (), 64))
        weight = PackedWeight([draw(generator, count, 48, code, 16) for code, count in zip(codes, parts, strict=True)], torch.float32)
        set_weight(network.layers[1].get_submodule(name), weight)
        return network, weight.dequantise()

    at = scene(model, tree=True)
    for name, codes, parts, reason in (
        ("mlp.gate_up_proj", ("int8", "uint4"), (40, 40), "gates and ups of different formats"),
        ("self_attn.qkv_proj", ("int8", "uint4"), (70, 58), "rows of a format that are no multiple of 32"),
    ):
        network, numbers = with_weight(name, *codes, parts=parts)
        plain = copy.deepcopy(network)
        set_weight(plain.layers[1].get_submodule(name), nn.Parameter(numbers, requires_grad=False))
        assert pack_network(network, PLAN) == reason and network.stack is None
        for module in plain.modules():
            if isinstance(module, Linear):
                module.pack()
        assert torch.equal(*(each(at.token, at.attention()).hidden_BTH[at.valid] for each in (network, plain)))


@pytest.mark.parametrize("layout", ["pack-quantized", "fp8-block", "gptq"])
def test_compiled_engines_of_codes_emit_the_tokens_of_their_numbers(layout: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    source = write_hf(build_hf("llama", head_dim=16, max_position_embeddings=128, **sizes), tmp_path / "source")
    prompts, found = [[5, 9, 3, 22, 5, 9, 3], [40, 2, 17, 33, 8, 40, 2, 17]], []
    for folder in quantise(source, tmp_path, layout, seed=3):
        keys: dict[str, Any] = {"runtime": "compiled", "max_context": 64, "page_size": 8, "max_rows": 2, "buckets": [2]}
        llm = LLM(str(folder), variant="none", **keys)
        assert llm.decoders == {"target": "one native op per pass"}
        outputs = llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
        found.append([list(output.token_ids) for output in outputs])
    assert found[0] == found[1]

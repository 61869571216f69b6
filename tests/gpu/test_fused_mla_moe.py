"""Latent attention and mixtures of experts on a GPU, in bfloat16 and in sizes of DeepSeek-V2-Lite and DeepSeek-V3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphspec.kernels.attention.fused import latent_attention as fused_attention
from graphspec.kernels.attention.fused import latent_kv_write as fused_write
from graphspec.kernels.attention.fused import latent_position_attention as by_position
from graphspec.kernels.attention.latent_attention import latent_attention
from graphspec.kernels.attention.latent_chunk_attention import latent_chunk_attention
from graphspec.kernels.attention.latent_kv_write import latent_kv_write
from graphspec.kernels.linear.fused import head_product as fused_head_product
from graphspec.kernels.linear.fused import moe_mlp as fused_mlp
from graphspec.kernels.linear.fused import moe_route as fused_route
from graphspec.kernels.linear.fused import packed_moe_mlp as fused_packed_mlp
from graphspec.kernels.linear.head_product import head_product
from graphspec.kernels.linear.moe_mlp import moe_mlp
from graphspec.kernels.linear.moe_route import moe_route
from graphspec.kernels.linear.packed import Packed, dequantise
from tests.support.float_law import assert_float_law, widened

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DEVICE = "cuda"


def attention_case(ends: list[int], tokens: int, heads: int, page_size: int, columns: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(tokens)
    lanes, pages = len(ends), len(ends) * columns + 1
    table = (torch.randperm(pages - 1, generator=generator) + 1).view(lanes, columns).to(torch.int32)
    # A chain in the first lane, arbitrary bits in the others.
    bits = torch.rand(lanes, tokens, 128, generator=generator) < 0.5
    bits[0] = torch.arange(128) <= torch.arange(tokens)[:, None]
    bits &= torch.arange(128) < tokens
    case = {
        "query_latent_BTQL": torch.randn(lanes, tokens, heads, 512, generator=generator).bfloat16(),
        "query_rope_BTQR": torch.randn(lanes, tokens, heads, 64, generator=generator).bfloat16(),
        "latent_pool": torch.randn(2, 1, pages, page_size, 1, 576, generator=generator).bfloat16(),
        "layer": 1,
        "table_BP": table,
        "prefix_begin_BT": torch.zeros(lanes, tokens, dtype=torch.int64),
        "prefix_end_B": torch.tensor(ends),
        "ancestors_BTX": (bits.view(lanes, tokens, 2, 64).to(torch.int64) << torch.arange(64)).sum(-1),
        "scale": 192**-0.5,
    }
    return {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in case.items()}


@pytest.mark.references("latent_attention")
@pytest.mark.parametrize(
    ("ends", "tokens", "heads", "page_size", "columns"),
    [
        ([1900, 0, 255], 4, 16, 64, 32),
        ([700, 31], 1, 128, 16, 60),
        ([130], 70, 16, 1, 260),
        ([4100], 4, 128, 64, 68),
    ],
)
def test_latent_attention(ends: list[int], tokens: int, heads: int, page_size: int, columns: int) -> None:
    case = attention_case(ends, tokens, heads, page_size, columns)
    out = fused_attention.OP(**case)
    assert_float_law(out, latent_attention(**case), latent_attention(**widened(case)))
    assert torch.equal(fused_attention.OP(**case), out)


def test_latent_attention_depends_on_nothing_else() -> None:
    """Bits of a chain are those of its tokens one at a time, alone, over a wider table."""
    case = attention_case([1022, 77], 4, 16, 16, 80)
    out = fused_attention.OP(**case)
    for token in range(4):
        one = {k: case[k][:1, token : token + 1] for k in ("query_latent_BTQL", "query_rope_BTQR", "prefix_begin_BT")}
        one |= {k: case[k] for k in ("latent_pool", "layer", "scale")}
        one["table_BP"] = torch.nn.functional.pad(case["table_BP"][:1], (0, 100))
        one["prefix_end_B"] = case["prefix_end_B"][:1] + token
        one["ancestors_BTX"] = torch.ones(1, 1, 2, dtype=torch.int64, device=DEVICE) * torch.tensor([1, 0], device=DEVICE)
        assert torch.equal(fused_attention.OP(**one)[0, 0], out[0, token])


@pytest.mark.parametrize(("end", "tokens", "heads", "page_size"), [(2000, 32, 16, 16), (8190, 8, 128, 64), (9000, 100, 16, 1)])
def test_by_position_latent_attention_has_the_bits_of_plain_decoding(end: int, tokens: int, heads: int, page_size: int) -> None:
    """Each node's ancestors are a random half of the slots; alone, their rows are in the slots of their positions. 8190: splits double."""
    case = attention_case([end, end], tokens, heads, page_size, -(-(end + tokens) // page_size))
    together = by_position.OP(**case)[1]
    table, words = case["table_BP"][1].tolist(), case["ancestors_BTX"][1].tolist()
    for token in range(0, tokens, 5):
        path = [j for j in range(tokens) if words[token][j // 64] >> (j % 64) & 1]
        if not path:
            continue
        pool = case["latent_pool"].clone()
        for depth, node in enumerate(path):
            to, source = (divmod(end + slot, page_size) for slot in (depth, node))
            pool[:, :, table[to[0]], to[1]] = case["latent_pool"][:, :, table[source[0]], source[1]]
        one = {k: case[k][1:, token : token + 1] for k in ("query_latent_BTQL", "query_rope_BTQR", "prefix_begin_BT")}
        one |= {"latent_pool": pool, "layer": case["layer"], "scale": case["scale"], "table_BP": case["table_BP"][1:]}
        one |= {"prefix_end_B": case["prefix_end_B"][1:] + len(path) - 1}
        one["ancestors_BTX"] = torch.ones(1, 1, 1, dtype=torch.int64, device=DEVICE)
        assert torch.equal(by_position.OP(**one)[0, 0], together[token])


@pytest.mark.references("head_product")
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("values", [False, True], ids=["queries", "values"])
def test_the_products_around_latent_attention_have_the_bits_of_every_row_alone(values: bool, heads: int) -> None:
    generator = torch.Generator(DEVICE).manual_seed(heads)
    weight = torch.randn(heads, 256, 512, generator=generator, device=DEVICE).bfloat16() / 16
    weight = weight[:, 128:].transpose(1, 2) if values else weight[:, :128]
    x = torch.randn(1, 512, heads, weight.shape[1] + 64, generator=generator, device=DEVICE).bfloat16()[..., :-64]
    case = {"x_BTQK": x, "weight_QKO": weight}
    whole = fused_head_product.OP(**case)
    assert_float_law(whole, head_product(**case), head_product(**widened(case)))
    for rows in (1, 2, 8, 16, 17, 63, 64, 65, 100):
        assert torch.equal(fused_head_product.OP(x[:, :rows], weight), whole[:, :rows])


@pytest.mark.references("latent_chunk_attention")
def test_latent_chunk_attention() -> None:
    case = attention_case([300, 0], 64, 16, 16, 40)
    slot = case.pop("prefix_end_B")[:, None] + torch.arange(64, device=DEVICE)
    del case["ancestors_BTX"]
    case |= {"slot_BT": slot, "valid_BT": slot < 350}
    found = fused_attention.CHUNK_OP(**case)
    assert_float_law(found, latent_chunk_attention(**case), latent_chunk_attention(**widened(case)))


@pytest.mark.references("latent_kv_write")
@pytest.mark.parametrize("interleaved", [True, False])
def test_latent_kv_write(interleaved: bool) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE).bfloat16()

    slot = torch.tensor([[5, 6, 7, 8], [0, 1, 2, 3]], device=DEVICE)
    case = {
        "latent_pool": random(2, 1, 9, 16, 1, 576),
        "layer": 1,
        "latent_BTE": random(2, 4, 576),
        "query_rope_BTQR": random(2, 4, 128, 192)[..., 128:],
        "norm_weight_L": random(512),
        "rope_LD": random(8, 64).float(),
        "rope_row_BT": torch.arange(8, device=DEVICE).view(2, 4),
        "table_BP": torch.tensor([[3, 1], [8, 2]], dtype=torch.int32, device=DEVICE),
        "slot_BT": slot,
        "valid_BT": slot != 7,
        "eps": 1e-6,
        "interleaved": interleaved,
    }
    written, expected, oracle = ({**case, "latent_pool": case["latent_pool"].clone()} for _ in range(3))
    oracle = widened(oracle)
    assert_float_law(fused_write.OP(**written), latent_kv_write(**expected), latent_kv_write(**oracle))
    assert_float_law(*(x["latent_pool"][:, :, 1:] for x in (written, expected, oracle)))


SIZES = [(1, 6, 64, 2048, 1408), (8, 8, 128, 2048, 768), (40, 6, 64, 2048, 1408), (130, 4, 16, 1024, 512), (4, 8, 32, 7168, 2048)]


@pytest.mark.references("moe_route", "moe_mlp")
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "relu2"])
@pytest.mark.parametrize(("tokens", "topk", "experts", "hidden", "width"), SIZES)
def test_moe(tokens: int, topk: int, experts: int, hidden: int, width: int, gated: bool) -> None:
    generator = torch.Generator(DEVICE).manual_seed(tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE)

    logits, valid = random(tokens, experts), torch.arange(tokens, device=DEVICE) != 3
    options = (topk, 4, 2, 2, True, True, 2.5) if topk <= experts // 2 else (topk, 1, 1, 2, True, True, 2.5)
    index, weight = fused_route.OP(logits, random(experts) * 0.1, valid, *options)
    generator.manual_seed(tokens)
    logits_again, bias = random(tokens, experts), random(experts) * 0.1
    expected_index, expected_weight = moe_route(logits_again, bias, valid, *options)
    assert torch.equal(index, expected_index)
    torch.testing.assert_close(weight, expected_weight, rtol=1e-5, atol=1e-6)
    case = {
        "x_TH": random(tokens, hidden).bfloat16(),
        "index_TK": index,
        "weight_TK": weight,
        "gate_up_EFH": (random(experts, (1 + gated) * width, hidden) / hidden**0.5).bfloat16(),
        "down_EHF": (random(experts, hidden, width) / width**0.5).bfloat16(),
    }
    out = fused_mlp.OP(**case)
    assert_float_law(out, moe_mlp(**case), moe_mlp(**widened(case)))
    assert torch.equal(fused_mlp.OP(**case), out)


@pytest.mark.references("packed_moe_mlp")
@pytest.mark.parametrize("tokens", [1, 9, 200])
def test_packed_experts_have_the_bits_of_their_numbers(tokens: int) -> None:
    """MXFP4 with biases and clamped gates, as in gpt-oss."""
    experts, topk, hidden, width = 16, 4, 960, 736
    generator = torch.Generator(DEVICE).manual_seed(tokens)

    def weight(rows: int, channels: int) -> Packed:
        codes = torch.randint(0, 256, (rows, channels // 2), generator=generator, device=DEVICE, dtype=torch.uint8)
        powers = torch.randint(119, 122, (rows, channels // 32), generator=generator, device=DEVICE, dtype=torch.uint8)
        return Packed(codes, powers.view(torch.float8_e8m0fnu), "e2m1", 32)

    gate_up, down = weight(experts * 2 * width, hidden), weight(experts * hidden, width)
    case = {
        "x_TH": torch.randn(tokens, hidden, generator=generator, device=DEVICE).bfloat16(),
        "index_TK": torch.rand(tokens, experts, generator=generator, device=DEVICE).topk(topk).indices,
        "weight_TK": torch.rand(tokens, topk, generator=generator, device=DEVICE),
        "gate_up_bias_EF": torch.randn(experts, 2 * width, generator=generator, device=DEVICE).bfloat16(),
        "down_bias_EH": torch.randn(experts, hidden, generator=generator, device=DEVICE).bfloat16(),
        "alpha": 1.702,
        "limit": 7.0,
    }
    numbers = {"gate_up_EFH": dequantise(gate_up, torch.bfloat16), "down_EHF": dequantise(down, torch.bfloat16)}
    numbers = {name: one.unflatten(0, (experts, -1)) for name, one in numbers.items()}
    expected = fused_mlp.OP(**case, **numbers)
    assert_float_law(expected, moe_mlp(**case, **numbers), moe_mlp(**widened(case | numbers)))
    assert torch.equal(fused_packed_mlp.OP(**case, gate_up=gate_up, down=down), expected)


def test_moe_bits_do_not_depend_on_the_batch_and_replay() -> None:
    generator = torch.Generator(DEVICE).manual_seed(1)
    case = {
        "x_TH": torch.randn(24, 2048, generator=generator, device=DEVICE).bfloat16(),
        "index_TK": torch.rand(24, 32, generator=generator, device=DEVICE).topk(6).indices,
        "weight_TK": torch.rand(24, 6, generator=generator, device=DEVICE),
        "gate_up_EFH": torch.randn(32, 2816, 2048, generator=generator, device=DEVICE).bfloat16() / 45,
        "down_EHF": torch.randn(32, 2048, 1408, generator=generator, device=DEVICE).bfloat16() / 37,
    }
    out = fused_mlp.OP(**case)
    for token in (0, 11, 23):
        one = {k: v[token : token + 1] if k.endswith(("TH", "TK")) else v for k, v in case.items()}
        assert torch.equal(fused_mlp.OP(**one)[0], out[token])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fused_mlp.OP(**case)
    for _ in range(3):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, out)

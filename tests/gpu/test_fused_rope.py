"""Norms of heads, RoPE and the write of keys and values on a GPU: against float64, in every layout an engine can have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphspec.kernels import op_of
from graphspec.kernels.attention import rope_kv_write
from graphspec.kernels.groups import Heads
from graphspec.kernels.linear.fused.linear_kv_write import fused_linear_kv_write
from graphspec.kernels.linear.linear import hidden_of, linear
from tests.support.float_law import assert_float_law, widened

OP = op_of("rope_kv_write")

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DEVICE = "cuda"
LAYERS, LANES, TOKENS, SLOTS = 3, 3, 9, 128
HEADS = [((32, 8), 64, 64), ((6, 2), 80, 32), ((8, 2), 256, 64), ((20, 5), 96, 96), ((3, 3), 24, 6)]
Case = dict[str, Any]


def rope_case(
    *, dtype: torch.dtype = torch.bfloat16, norm: str = "none", page_size: int = 16, layer: int = 1, heads: tuple[int, int] = (32, 8),
    dim: int = 128, rotary: int = 128, kept: torch.dtype | None = None,
) -> Case:  # fmt: skip
    """Tokens anywhere in the slots of their lanes, a third of them invalid; query, key and value are views of one projection.

    Args:
        norm: ``none``, ``plain`` or ``offset`` (weights are added to 1).
        heads: of the queries, and of keys and values.
        dim, rotary: channels of a head, and those of them that rotate.
        kept: dtype of the pool; None: that of the query.
    """
    generator = torch.Generator().manual_seed(dim + page_size)
    queries, groups = heads
    columns = SLOTS // page_size
    pages = LANES * columns + 1
    fused = torch.randn(LANES, TOKENS, queries + 2 * groups, dim, generator=generator).to(dtype)
    query, key, value = fused.to(DEVICE).split((queries, groups, groups), 2)
    angle = torch.rand(SLOTS, rotary // 2, generator=generator) * 6
    valid = torch.rand(LANES, TOKENS, generator=generator) < 0.7
    slot = torch.stack([torch.randperm(SLOTS, generator=generator)[:TOKENS] for _ in range(LANES)])
    case: Case = {
        "query_BTQD": query,
        "key_BTGD": key,
        "value_BTGD": value,
        "rope_LD": torch.cat((angle.cos(), angle.sin()), -1),
        # Rows outside the table are clamped into it.
        "rope_row_BT": torch.randint(-3, SLOTS + 3, (LANES, TOKENS), generator=generator),
        "kv_pool": torch.randn(LAYERS, 2, pages, page_size, groups, dim, generator=generator).to(kept or dtype),
        "layer": layer,
        "table_BP": (torch.randperm(pages - 1, generator=generator) + 1).view(LANES, columns).to(torch.int32),
        "slot_BT": torch.where(valid, slot, 7 * SLOTS),
        "valid_BT": valid,
    }
    if norm != "none":
        case |= {name: (torch.randn(dim, generator=generator) * 0.3 + 1).to(dtype) for name in ("query_norm", "key_norm")}
        case |= {"norm_eps": 1e-6, "norm_offset": norm == "offset"}
    return {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in case.items()}


def called(function: Any, case: Case) -> tuple[Tensor, Tensor]:
    """The queries, and the call's pool without the dummy page."""
    own = {**case, "kv_pool": case["kv_pool"].clone()}
    return function(**own), own["kv_pool"][:, :, 1:]


def assert_holds(case: Case) -> None:
    """The law for queries and keys; values and everything that is not written, to the bit; and the same bits again."""
    reference = called(rope_kv_write.rope_kv_write, case)
    oracle = called(rope_kv_write.rope_kv_write, widened(case))
    found = called(OP.implementation("fused"), case)
    for f, r, o in zip(found, reference, oracle, strict=True):
        assert_float_law(f, r, o)
    before, (_, pool), (_, expected) = case["kv_pool"][:, :, 1:], found, reference
    others = [layer for layer in range(LAYERS) if layer != case["layer"]]
    assert torch.equal(pool[others], before[others])
    assert torch.equal(pool[case["layer"], 1], expected[case["layer"], 1])
    untouched = (expected == before).all(-1)
    assert not untouched.all() and torch.equal(pool[untouched], before[untouched])
    for f, again in zip(found, called(OP.implementation("fused"), case), strict=True):
        assert torch.equal(f, again)


@pytest.mark.references("rope_kv_write")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("norm", ["none", "plain", "offset"])
def test_dtypes_and_norms(dtype: torch.dtype, norm: str) -> None:
    assert_holds(rope_case(dtype=dtype, norm=norm))


@pytest.mark.parametrize("norm", ["none", "plain"])
@pytest.mark.parametrize(
    ("heads", "dim", "rotary"), [((32, 8), 64, 64), ((6, 2), 80, 32), ((8, 2), 256, 64), ((20, 5), 96, 96), ((3, 3), 24, 6)]
)
def test_heads_and_partial_rotation(norm: str, heads: tuple[int, int], dim: int, rotary: int) -> None:
    assert_holds(rope_case(norm=norm, heads=heads, dim=dim, rotary=rotary))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_pages_and_layers(page_size: int, layer: int) -> None:
    """Triton makes a constant of the layer numbered 1, and of a page of one slot."""
    assert_holds(rope_case(page_size=page_size, layer=layer, norm="plain"))


def test_a_pool_of_another_dtype() -> None:
    assert_holds(rope_case(dtype=torch.float32, kept=torch.float16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("norm", ["none", "plain"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("numerics", ["fast", "batch_invariant"])
def test_projections_that_write(dtype: torch.dtype, norm: str, dim: int, numerics: str) -> None:
    """The product, norms, RoPE and the write in one launch: the law, and nothing else is written."""
    case = rope_case(dtype=dtype, norm=norm, dim=dim, rotary=dim)
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(LANES, TOKENS, 1024, generator=generator)
    weight, scale = torch.randn(48 * dim, 1024, generator=generator) / 32, torch.rand(1024, generator=generator) + 0.5
    product = {"x": x, "weight": weight, "norm_weight": scale}
    product = {name: value.to(dtype).to(DEVICE) for name, value in product.items()} | {"norm_eps": 1e-5}
    where = {name: value for name, value in case.items() if name not in ("query_BTQD", "key_BTGD", "value_BTGD")}

    def apart(product: Case, where: Case) -> tuple[Tensor, Tensor]:
        heads = hidden_of(linear(**product)).unflatten(-1, (-1, dim)).split((32, 8, 8), 2)
        return called(rope_kv_write.rope_kv_write, {**dict(zip(("query_BTQD", "key_BTGD", "value_BTGD"), heads, strict=True)), **where})

    def together(norm_eps: float = 0.0, norm_offset: bool = False, **own: Any) -> Tensor:
        entering = (product["x"], product["weight"], None, product["norm_weight"], product["norm_eps"], False)
        query = fused_linear_kv_write(numerics)(*entering, Heads(**own, head_eps=norm_eps, head_offset=norm_offset))
        assert query is not None
        return query

    found, reference, oracle = called(together, where), apart(product, where), apart(widened(product), widened(where))
    for f, r, o in zip(found, reference, oracle, strict=True):
        assert_float_law(f, r, o)
    before = case["kv_pool"][:, :, 1:]
    untouched = (reference[1] == before).all(-1)
    assert not untouched.all() and torch.equal(found[1][untouched], before[untouched])


def test_one_lane_of_one_token() -> None:
    """As plain decoding calls it."""
    case = rope_case(norm="plain")
    lane = {name: case[name][:1] for name in ("table_BP",)}
    token = {name: case[name][:1, :1] for name in case if "_BT" in name}
    assert_holds({**case, **lane, **token, "slot_BT": token["slot_BT"] * 0 + 5, "valid_BT": token["valid_BT"] | True})

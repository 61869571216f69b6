"""Projections that rotate and write: the bits of ``linear`` and ``rope_kv_write`` one after the other, for numbers and for codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from graphspec.kernels import select_kernels
from graphspec.kernels.attention.fused.rope_kv_write import rope_kv_write
from graphspec.kernels.attention.rope_kv_write import rope_kv_write as plain_rope_kv_write
from graphspec.kernels.fused.launch import recording
from graphspec.kernels.groups import Heads
from graphspec.kernels.linear.fused.linear import linear
from graphspec.kernels.linear.fused.linear_choice import LinearConfig, LinearShape, LinearTable, fast_config
from graphspec.kernels.linear.fused.linear_kv_write import fused_linear_kv_write, linear_kv_write
from graphspec.kernels.linear.linear import ResidualStream, hidden_of
from graphspec.kernels.linear.linear import linear as plain_linear
from graphspec.kernels.linear.packed import CODES
from tests.kernels.fused.test_packed_linear import weight
from tests.support.float_law import assert_float_law, widened

LAYERS, SLOTS, INPUTS = 3, 48, 96
pytestmark = pytest.mark.usefixtures("nan_memory")


def places(
    lanes: int, tokens: int, groups: int, dim: int, dtype: torch.dtype, *, page_size: int = 16, kept: torch.dtype | None = None
) -> dict[str, Any]:
    """Tokens anywhere in the slots of their lanes, some of them invalid; rows of the table outside of it are clamped."""
    columns = SLOTS // page_size
    pages = lanes * columns + 1
    angle = torch.rand(SLOTS, dim // 2) * 6
    valid = torch.rand(lanes, tokens) < 0.7
    slot = torch.stack([torch.randperm(SLOTS)[:tokens] for _ in range(lanes)])
    return {
        "rope_LD": torch.cat((angle.cos(), angle.sin()), -1),
        # Views, as those of an engine's buffers are.
        "rope_row_BT": torch.randint(-3, SLOTS + 3, (tokens, lanes)).t(),
        "kv_pool": torch.randn(LAYERS, 2, pages, page_size, groups, dim).to(kept or dtype),
        "layer": 1,
        "table_BP": (torch.randperm(pages - 1) + 1).view(lanes, columns).to(torch.int32),
        "slot_BT": torch.where(valid, slot, 7 * SLOTS)[:, :tokens],
        "valid_BT": torch.cat((valid, valid), 1)[:, :tokens],
    }


def projection(
    rows: tuple[int, int], heads: tuple[int, int], dim: int, *parts: str, dtype: torch.dtype = torch.bfloat16, inputs: int = INPUTS
) -> dict[str, Any]:
    """Arguments of the product; parts: ``bias``, ``norm``, ``offset``, and ``squares`` from the product before."""
    outputs = (heads[0] + 2 * heads[1]) * dim
    made: dict[str, Any] = {"x": torch.randn(*rows, inputs), "weight": torch.randn(outputs, inputs) / inputs**0.5}
    made["bias"] = torch.randn(outputs) if "bias" in parts else None
    made["norm_weight"] = torch.randn(inputs) if "norm" in parts else None
    made = {name: value if value is None else value.to(dtype) for name, value in made.items()}
    squares = made["x"].float().unflatten(-1, (2, -1)).pow(2).sum(-1) if "squares" in parts else None
    return made | {"norm_eps": 1e-5, "norm_offset": "offset" in parts, "squares": squares}


def apart(product: dict[str, Any], config: Sequence[int] | None, where: dict[str, Any]) -> Tensor:
    """The two ops one after the other."""
    groups, dim = where["kv_pool"].shape[4:]
    heads = linear(**product, config=config).unflatten(-1, (-1, dim))
    return rope_kv_write(*heads.split((heads.shape[2] - 2 * groups, groups, groups), 2), **where)


def with_norms(where: dict[str, Any], dtype: torch.dtype, offset: bool = False) -> dict[str, Any]:
    """Norms of heads, as arguments of :func:`rope_kv_write`."""
    weights = {name: (torch.randn(where["kv_pool"].shape[5]) * 0.3 + 1).to(dtype) for name in ("query_norm", "key_norm")}
    return {**where, **weights, "norm_eps": 1e-6, "norm_offset": offset}


def by_references(product: dict[str, Any], where: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Queries and pool by plain equations."""
    groups, dim = where["kv_pool"].shape[4:]
    heads = hidden_of(plain_linear(**{name: value for name, value in product.items() if name != "squares"})).unflatten(-1, (-1, dim))
    pool = where["kv_pool"].clone()
    query = plain_rope_kv_write(*heads.split((heads.shape[2] - 2 * groups, groups, groups), 2), **{**where, "kv_pool": pool})
    return query, pool[:, :, 1:]


def heads_of(where: dict[str, Any]) -> Heads:
    """Arguments of :func:`rope_kv_write` as the group."""
    return Heads(**{{"norm_eps": "head_eps", "norm_offset": "head_offset"}.get(name, name): value for name, value in where.items()})


def together(product: dict[str, Any], config: LinearConfig, where: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Queries of the one launch, and its pool."""
    assert where["kv_pool"].shape[5] % config.tile_outputs == 0, "else the op would not be called"
    pool = where["kv_pool"].clone()
    query = linear_kv_write(**product, config=config.encoded(), heads=heads_of({**where, "kv_pool": pool}))
    assert query.is_contiguous() and not query.isnan().any()
    # Page 0 is nobody's: which of the invalid tokens is there is open.
    return query, pool[:, :, 1:]


def assert_same(product: dict[str, Any], config: LinearConfig, where: dict[str, Any]) -> None:
    """The same bits in queries and in the pool, of which every other slot stays as it is."""
    query, pool = together(product, config, where)
    own = {**where, "kv_pool": where["kv_pool"].clone()}
    assert torch.equal(query, apart(product, config.encoded(), own))
    assert torch.equal(pool, own["kv_pool"][:, :, 1:])
    assert not torch.equal(pool[where["layer"], 0], where["kv_pool"][where["layer"], 0, 1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("parts", [(), ("bias",), ("norm",), ("norm", "offset", "bias"), ("norm", "squares")], ids="+".join)
def test_bits_of_both_ops(dtype: torch.dtype, parts: tuple[str, ...]) -> None:
    product = projection((2, 3), (4, 2), 32, *parts, dtype=dtype)
    assert_same(product, LinearConfig(16, 32, 32, 1, 4, 2, scan=True), places(2, 3, 2, 32, dtype))


@pytest.mark.parametrize("tile_outputs", [16, 32, 64])
@pytest.mark.parametrize("splits", [1, 3])
def test_tiles_of_a_part_of_a_head_and_splits(tile_outputs: int, splits: int) -> None:
    """Half of a tile is of the first half of a head, half of the second."""
    product = projection((3, 7), (3, 1), 64, "norm", "bias")
    assert_same(product, LinearConfig(16, tile_outputs, 32, splits, 4, 2), places(3, 7, 1, 64, torch.bfloat16))


@pytest.mark.parametrize("dim", [16, 48, 80])
def test_channels_that_are_no_power_of_two(dim: int) -> None:
    product = projection((1, 5), (2, 2), dim)
    assert_same(product, LinearConfig(16, 16, 32, 1, 4, 2), places(1, 5, 2, dim, torch.bfloat16))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_pages_and_layers(page_size: int, layer: int) -> None:
    where = places(2, 4, 2, 32, torch.bfloat16, page_size=page_size) | {"layer": layer}
    assert_same(projection((2, 4), (2, 2), 32), LinearConfig(16, 32, 32, 1, 4, 2), where)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tile_outputs", "splits"), [(64, 1), (64, 3), (16, 1), (16, 3)])
@pytest.mark.parametrize("offset", [False, True])
def test_norms_of_heads(dtype: torch.dtype, tile_outputs: int, splits: int, offset: bool) -> None:
    """A program that has its whole head, and one that puts tiles and splits together; the sum of a norm has no order to hold to."""
    product = projection((2, 5), (3, 2), 64, "norm", "bias", dtype=dtype)
    where = with_norms(places(2, 5, 2, 64, dtype), dtype, offset)
    config = LinearConfig(16, tile_outputs, 32, splits, 4, 2)
    found, expected = together(product, config, where), by_references(product, where)
    for one, reference, exact in zip(found, expected, by_references(widened(product), widened(where)), strict=True):
        assert_float_law(one, reference, exact)
    for one, again in zip(found, together(product, config, where), strict=True):
        assert torch.equal(one, again)


def test_a_pool_of_another_dtype_and_values_that_are_infinite() -> None:
    """Values aren't multiplied by anything, not even by 1 and 0."""
    where = places(1, 4, 1, 32, torch.float32, kept=torch.float16)
    product = projection((1, 4), (2, 1), 32, "bias", dtype=torch.float32)
    product["bias"][-5:] = torch.inf
    assert_same(product, LinearConfig(16, 32, 32, 1, 4, 2), where)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("parts", [(), ("norm", "bias")], ids="+".join)
def test_codes(code: str, parts: tuple[str, ...]) -> None:
    product = projection((1, 3), (2, 1), 64, *parts, inputs=256, dtype=torch.float32) | {"weight": weight(code, 4 * 64, 256, 32)}
    assert_same(product, LinearConfig(16, 32, 32, 2, 4, 2), places(1, 3, 1, 64, torch.float32))


@pytest.mark.parametrize(("numerics", "rows"), [("fast", (1, 5)), ("batch_invariant", (1, 5)), ("batch_invariant", (2, 36))])
def test_the_tiles_are_those_of_the_product_alone(numerics: str, rows: tuple[int, int]) -> None:
    """With a stream, whose squares the product before has left; of more than 64 rows too where bits must not depend on their number."""
    kernels = select_kernels("fused", "auto", "cpu", dtype="float32", numerics=numerics)
    assert kernels.linear_kv_write is not None
    product, where = projection(rows, (2, 1), 64, "norm", "squares", dtype=torch.float32), places(*rows, 1, 64, torch.float32)
    normed = [product[name] for name in ("weight", "bias", "norm_weight", "norm_eps", "norm_offset")]
    x = ResidualStream(product["x"], product["squares"])
    own = {**where, "kv_pool": where["kv_pool"].clone()}
    heads = kernels.linear(x, *normed).unflatten(-1, (-1, 64))
    expected = kernels.rope_kv_write(*heads.split((2, 1, 1), 2), **own)
    found = kernels.linear_kv_write(x, *normed, heads_of(where))
    assert found is not None and torch.equal(found, expected)
    assert torch.equal(where["kv_pool"][:, :, 1:], own["kv_pool"][:, :, 1:])


def test_shapes_that_need_both_ops() -> None:
    """Part of a head that rotates, tiles wider than a head, and products that are left to the library."""
    write = fused_linear_kv_write()
    product, where = projection((1, 4), (2, 1), 64), places(1, 4, 1, 64, torch.bfloat16)
    arguments = [product[name] for name in ("weight", "bias", "norm_weight", "norm_eps", "norm_offset")]
    with recording() as launches:
        assert write(product["x"], *arguments, heads_of({**where, "rope_LD": where["rope_LD"][:, :32]})) is None
        more = heads_of(places(1, 48, 1, 64, torch.bfloat16))
        assert write(product["x"].expand(1, 4, -1).repeat(1, 20, 1), *arguments, more) is None
        shape = LinearShape(4, 256, INPUTS, "bfloat16")
        wide = LinearTable({shape: LinearConfig(16, 128, 32, 1, 4, 2)})
        assert fused_linear_kv_write("fast", wide)(product["x"], *arguments, heads_of(where)) is None
        assert not launches
        library = LinearTable({shape: None})
        assert fused_linear_kv_write("fast", library)(product["x"], *arguments, heads_of(where)) is None
        assert write(product["x"], *arguments, heads_of(where)) is not None
    assert [launch.kernel.fn.__name__ for launch in launches] == ["_linear"]


def test_real_heads_are_served() -> None:
    """In bfloat16, the projections of targets and of heads, at every number of rows of a cycle."""
    for dim, outputs, inputs in ((128, 6144, 4096), (128, 6144, 8192), (64, 960, 576), (64, 3072, 2048), (128, 10240, 8192)):
        for rows in (1, 8, 16, 17, 32, 33, 64):
            for norm in (False, True):
                config = fast_config(LinearShape(rows, outputs, inputs, "bfloat16", norm=norm))
                assert config is not None and dim % config.tile_outputs == 0

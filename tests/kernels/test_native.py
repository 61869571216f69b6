"""The C++ kernels: batch invariance, refusals, their build cache, and calls inside a compiled program."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from graphspec.errors import ConfigError, ResourceError
from graphspec.kernels import native, resolve, select_kernels
from graphspec.kernels.native import build as native_build
from graphspec.models.layers import Linear
from tests.kernels.cases.attention import random_pool
from tests.support.float_law import assert_float_law

HEADS, GROUPS, DIM = 6, 2, 20


def pool_and_table(page_size: int, columns: int, lanes: int = 2, layers: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(page_size)
    return random_pool(generator, lanes=lanes, columns=columns, page_size=page_size, heads=GROUPS, dim=DIM, layers=layers)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("length", [1, 31, 100])
def test_a_query_attends_alike_alone_in_a_batch_and_in_a_chunk(page_size: int, length: int) -> None:
    """Bit for bit: a query's sums run over its visible slots in one order, independent of other queries."""
    tokens = 7
    pool, table = pool_and_table(page_size, -(-(length + tokens) // page_size))
    query = torch.randn(2, tokens, HEADS, DIM, generator=torch.Generator().manual_seed(1))
    begin, end = torch.zeros(2, tokens, dtype=torch.int64), torch.full((2,), length)
    causal = ((1 << (torch.arange(tokens) + 1)) - 1)[None, :, None].expand(2, -1, -1)
    together = native.tree_attention(query, pool, 1, table, begin, end, causal, 0.2)
    valid = torch.ones(2, tokens, dtype=torch.bool)
    chunk = native.chunk_attention(query, pool, 1, table, begin, end[:, None] + torch.arange(tokens), valid, 0.2)
    assert torch.equal(together, chunk)
    for lane in range(2):
        for t in range(tokens):
            one = slice(lane, lane + 1)
            alone = native.tree_attention(query[one, t : t + 1], pool, 1, table[one], begin[one, :1], end[one] + t, causal[one, :1], 0.2)
            assert torch.equal(alone[0, 0], together[lane, t])


def test_a_node_attends_alike_before_and_after_its_path_is_compacted() -> None:
    """Ancestors scattered over the window against the same keys moved to consecutive slots."""
    pool, table = pool_and_table(4, 12)
    path = torch.tensor([[0, 3, 8, 17], [0, 1, 5, 20]])
    words = (torch.ones_like(path) << path).sum(-1)[:, None, None]
    query, end = torch.randn(2, 1, HEADS, DIM), torch.tensor([9, 13])
    begin = torch.ones(2, 1, dtype=torch.int64)
    scattered = native.tree_attention(query, pool, 0, table, begin, end, words, 0.3)
    select_kernels("reference", "native", "cpu").kv_move(pool, table, end, path, torch.tensor([4, 4]))
    compact = native.tree_attention(query, pool, 0, table, begin, end, torch.full_like(words, 0b1111), 0.3)
    assert torch.equal(scattered, compact)


def test_threads_change_nothing() -> None:
    pool, table = pool_and_table(16, 40)
    query, begin = torch.randn(2, 64, HEADS, DIM), torch.zeros(2, 64, dtype=torch.int64)
    slot, valid = 500 + torch.arange(64).expand(2, 64), torch.ones(2, 64, dtype=torch.bool)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(native.chunk_attention(query, pool, 1, table, begin, slot, valid, 0.2))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("dim", [DIM, 64])
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_few_queries_over_many_keys_attend_as_many_do(dim: int, threads: int) -> None:
    """Few queries divide keys among threads, many divide queries: the bits are those of a query alone."""
    tokens, length, few = 30, 1100, 4
    generator = torch.Generator().manual_seed(dim)
    pool, table = random_pool(generator, lanes=2, columns=71, page_size=16, heads=GROUPS, dim=dim, layers=2)
    query = torch.randn(2, tokens, HEADS, dim, generator=generator)
    slot, valid = length + torch.arange(tokens).expand(2, -1), torch.ones(2, tokens, dtype=torch.bool)
    begin = torch.randint(0, 60, (2, tokens), generator=generator)
    begin[0, 0] = 0
    pool[0, 0, table[1, 40].long(), 3] = torch.nan  # in the keys of layer 0
    torch.set_num_threads(threads)
    for layer in (0, 1):
        many = native.chunk_attention(query, pool, layer, table, begin, slot, valid, 0.2)
        for t in range(0, tokens, few):
            part = slice(t, t + few)
            found = native.chunk_attention(query[:, part], pool, layer, table, begin[:, part], slot[:, part], valid[:, part], 0.2)
            torch.testing.assert_close(found, many[:, part], rtol=0, atol=0, equal_nan=True)
        words = ((1 << (torch.arange(few) + 1)) - 1)[None, :, None].expand(2, -1, -1)
        tree = native.tree_attention(query[:, :few], pool, layer, table, begin[:, :few], torch.full((2,), length), words, 0.2)
        torch.testing.assert_close(tree, many[:, :few], rtol=0, atol=0, equal_nan=True)
        assert many[0].isfinite().all() and bool(many[1].isnan().any()) == (layer == 0)


def test_strided_queries_are_read_in_place() -> None:
    pool, table = pool_and_table(16, 3)
    wide = torch.randn(2, 5, (HEADS + 3) * DIM)
    query = wide[..., DIM : (HEADS + 1) * DIM].view(2, 5, HEADS, DIM)
    begin, end = torch.zeros(2, 5, dtype=torch.int64), torch.tensor([30, 17])
    words = torch.ones(2, 5, 1, dtype=torch.int64)
    assert not query.is_contiguous()
    found = native.tree_attention(query, pool, 1, table, begin, end, words, 0.2)
    assert torch.equal(found, native.tree_attention(query.contiguous(), pool, 1, table, begin, end, words, 0.2))


def test_a_visible_nan_propagates_within_its_lane_only() -> None:
    pool, table = pool_and_table(16, 2)
    pool[0, 0, table[0, 0].long(), 3] = torch.nan
    query, begin = torch.randn(2, 1, HEADS, DIM), torch.zeros(2, 1, dtype=torch.int64)
    out = native.tree_attention(query, pool, 0, table, begin, torch.tensor([9, 9]), torch.zeros(2, 1, 1, dtype=torch.int64), 0.2)
    assert out[0].isnan().all() and out[1].isfinite().all()


def test_large_scores_do_not_overflow() -> None:
    pool, table = pool_and_table(16, 2)
    query, begin, end = torch.randn(2, 3, HEADS, DIM) * 200, torch.zeros(2, 3, dtype=torch.int64), torch.tensor([20, 30])
    words = torch.ones(2, 3, 1, dtype=torch.int64)
    reference = select_kernels("reference", "reference", "cpu").tree_attention
    found = native.tree_attention(query, pool, 1, table, begin, end, words, 1.0)
    oracle = reference(query.double(), pool.double(), 1, table, begin, end, words, 1.0)
    assert_float_law(found, reference(query, pool, 1, table, begin, end, words, 1.0), oracle)


FLOATS = r"kv_pool: expected one of torch\.float32, .*torch\.float16, found torch\.float64"
QUERIES = [(dtype, torch.float32, r"query: expected torch\.float32") for dtype in (torch.bfloat16, torch.float16, torch.float64)]


@pytest.mark.parametrize(("of_query", "of_pool", "message"), [*QUERIES, (torch.float32, torch.float64, FLOATS)])
def test_other_dtypes_are_refused(of_query: torch.dtype, of_pool: torch.dtype, message: str) -> None:
    pool, table = pool_and_table(16, 2)
    query, begin = torch.randn(2, 1, HEADS, DIM), torch.zeros(2, 1, dtype=torch.int64)
    rest = (1, table, begin, torch.tensor([9, 9]), torch.ones(2, 1, 1, dtype=torch.int64), 0.2)
    with pytest.raises(ConfigError, match=message):
        native.tree_attention(query.to(of_query), pool.to(of_pool), *rest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [33, 64])
@pytest.mark.parametrize("length", [21, 1100])
def test_a_pool_of_16_bits_gives_the_bits_of_its_numbers_in_float32(dtype: torch.dtype, dim: int, length: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    pool, table = random_pool(generator, lanes=2, columns=72, page_size=16, heads=GROUPS, dim=dim, layers=2)
    narrow = pool.to(dtype)
    narrow[0, 0, table[0, 0].long(), 0] = torch.tensor([6.1e-5, -3e-6, 0.0, 6e-8]).to(dtype).repeat(16)[:dim]  # small and denormal ones
    begin, end = torch.zeros(2, 40, dtype=torch.int64), torch.full((2,), length)
    for tokens in (1, 3, 40):
        query = torch.randn(2, tokens, HEADS, dim, generator=generator)
        words = ((1 << (torch.arange(tokens) + 1)) - 1)[None, :, None].expand(2, -1, -1)
        where = 0, table, begin[:, :tokens], end, words
        found, wide = (native.tree_attention(query, each, *where, 0.2) for each in (narrow, narrow.float()))
        assert torch.equal(found, wide)


@pytest.mark.parametrize("length", [250, 1015])
@pytest.mark.parametrize("begin", [0, 5, 300])
def test_nodes_on_both_sides_of_a_tile_attend_as_in_a_chain(length: int, begin: int) -> None:
    """Nodes of a tree against each of them after its own path: positions decide what is summed together, not slots of the window."""
    generator = torch.Generator().manual_seed(length)
    pool, table = random_pool(generator, lanes=1, columns=70, page_size=16, heads=GROUPS, dim=DIM, layers=1)
    tokens, end, move = 40, torch.tensor([length]), select_kernels("reference", "native", "cpu").kv_move
    parents = [-1, *(max(0, n - 1 - n % 3) for n in range(1, tokens))]
    paths: list[list[int]] = []
    for n, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), n])
    words = torch.tensor([sum(1 << n for n in path) for path in paths])[None, :, None]
    query, begins = torch.randn(1, tokens, HEADS, DIM, generator=generator), torch.full((1, tokens), min(begin, length))
    together = native.tree_attention(query, pool, 0, table, begins, end, words, 0.2)
    assert max(map(len, paths)) > 10, "paths that cross the border of a tile"
    for n, path in enumerate(paths):
        own = pool.clone()
        move(own, table, end, torch.tensor([path]), torch.tensor([len(path)]))
        one = query[:, n : n + 1], own, 0, table, begins[:, :1]
        alone = native.tree_attention(*one, end + len(path), torch.zeros(1, 1, 1, dtype=torch.int64), 0.2)
        assert torch.equal(alone[0, 0], together[0, n])


def test_heads_must_divide() -> None:
    pool, table = pool_and_table(16, 2)
    with pytest.raises(ConfigError, match="a multiple of 2"):
        native.tree_attention(
            torch.randn(2, 1, 5, DIM), pool, 1, table, torch.zeros(2, 1, dtype=torch.int64), torch.tensor([9, 9]),
            torch.ones(2, 1, 1, dtype=torch.int64), 0.2,
        )  # fmt: skip


def test_build_is_cached_and_whole(tmp_path: Path) -> None:
    library = native_build.LIBRARY.build(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [library.name]
    written = library.stat().st_mtime_ns
    assert native_build.LIBRARY.build(tmp_path) == library and library.stat().st_mtime_ns == written
    other = replace(native_build.LIBRARY, flags=(*native_build.FLAGS, "-DOTHER"))
    assert other.build(tmp_path) != library


def test_no_compiler_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ResourceError, match=r"a C\+\+ compiler.*none on PATH.*runtime=eager"):
        native_build.LIBRARY.build(tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ResourceError, match="no-such-compiler"):
        native_build.LIBRARY.build(tmp_path)


def test_a_failing_compiler_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'out of cheese' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(ResourceError, match="exit code 3: out of cheese"):
        native_build.LIBRARY.build(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_source_has_no_warnings(tmp_path: Path) -> None:
    sources = [str(Path(native_build.__file__).with_name(name)) for name in native_build.SOURCES]
    command = [native_build.find_compiler(), *native_build.FLAGS, "-Wall", "-Wextra", "-Werror", "-fsyntax-only", *sources]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_compiled_write_then_attend_is_in_order_and_copies_no_pool() -> None:
    from torch._inductor.utils import run_and_get_code

    kernels = select_kernels("compiled", "native", "cpu")
    layers, lanes, tokens, width = 3, 2, 3, HEADS * DIM
    pool, table = pool_and_table(4, 9, layers=layers)
    weight = torch.randn(layers, width, width + 2 * GROUPS * DIM) * 0.1
    begin, end = torch.zeros(lanes, tokens, dtype=torch.int64), torch.tensor([20, 7])
    slot, valid = end[:, None] + torch.arange(tokens), torch.tensor([[True, True, True], [True, True, False]])
    words = torch.tensor([[[1], [3], [5]], [[1], [3], [3]]])
    path, count = torch.tensor([[0, 2], [0, 1]]), torch.tensor([2, 1])

    angle = torch.rand(9, DIM // 2)
    rope, rope_row = torch.cat((angle.cos(), angle.sin()), -1), slot % 9

    def step(kv_pool: Tensor, hidden: Tensor) -> Tensor:
        for layer in range(layers):
            query, key, value = (hidden @ weight[layer]).split((width, GROUPS * DIM, GROUPS * DIM), -1)
            key, value = (x.unflatten(-1, (GROUPS, DIM)) for x in (key, value))
            query = query.unflatten(-1, (HEADS, DIM))
            query = kernels.rope_kv_write(query, key, value, rope, rope_row, kv_pool, layer, table, slot, valid)
            out = kernels.tree_attention(query, kv_pool, layer, table, begin, end, words, DIM**-0.5)
            hidden = hidden + out.flatten(-2)
        kernels.kv_move(kv_pool, table, end, path, count)
        return hidden

    hidden = torch.randn(lanes, tokens, width)
    eager_pool, compiled_pool = pool.clone(), pool.clone()
    expected = step(eager_pool, hidden)
    address = compiled_pool.data_ptr()
    torch._dynamo.reset()
    found, codes = run_and_get_code(torch.compile(step, fullgraph=True, dynamic=False), compiled_pool, hidden)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(compiled_pool[:, :, 1:], eager_pool[:, :, 1:], rtol=1e-5, atol=1e-5)
    assert not torch.equal(compiled_pool, pool) and compiled_pool.data_ptr() == address
    # A copy of the pool would be a buffer, or a loop, over all of its elements or over one side of one layer.
    code = "\n".join(codes)
    pages, size = pool.shape[2], pool.shape[3]
    for allocation in (line for line in code.splitlines() if "= empty_strided" in line):
        shape = [int(x) for x in allocation.split("((")[1].split(")")[0].split(",") if x.strip()]
        assert torch.Size(shape).numel() < pool.numel(), allocation
    for elements in (pool.numel(), pool[0].numel(), pool[0, 0].numel(), layers * 2 * pages * size):
        assert f"static_cast<int64_t>({elements}L)" not in code
    assert "aten.clone" not in code and "aten.copy" not in code


@pytest.mark.parametrize(("channels", "outputs"), [(192, 384), (33, 17), (64, 1100), (8, 16)])
def test_a_row_of_a_linear_layer_has_the_same_bits_alone_and_among_others(channels, outputs):
    generator = torch.Generator().manual_seed(channels)
    weight, x = torch.randn(outputs, channels, generator=generator), torch.randn(23, channels, generator=generator)
    packed = native.pack_linear(weight)
    whole = native.multiply_packed(x, packed, outputs, None, None, 0.0)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for count in (1, 2, 3, 4, 5, 6, 7, 13):
            assert torch.equal(native.multiply_packed(x[:count], packed, outputs, None, None, 0.0), whole[:count])
    assert torch.equal(native.multiply_packed(x.T.contiguous().T, packed, outputs, None, None, 0.0), whole), "strided rows"
    assert native.multiply_packed(x[None, :0], packed, outputs, None, None, 0.0).shape == (1, 0, outputs)


def test_packed_layers_of_a_network_multiply_as_before():
    layer = Linear(24, 30, 10, bias=True)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    x = torch.randn(2, 3, 24, generator=torch.Generator().manual_seed(2))
    before = layer(x)
    layer.pack()
    layer.pack()
    assert layer.weight is None, "the weight is held once"
    torch.testing.assert_close(layer(x), before)
    with pytest.raises(ConfigError, match="float32"):
        native.pack_linear(torch.zeros(4, 4, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("choice", "mode", "device", "dtype", "expected"),
    [
        ("auto", "compiled", "cpu", "float32", "native"),
        ("auto", "compiled", "cpu", "bfloat16", "reference"),
        ("auto", "compiled", "cuda", "float32", "reference"),
        ("auto", "reference", "cpu", "float32", "reference"),
        ("native", "reference", "cpu", "float32", "native"),
    ],
)
def test_auto_is_native_only_where_native_works(choice, mode, device, dtype, expected):
    assert resolve("kernels.linear", choice, mode, device, dtype) == expected


@pytest.mark.parametrize(("device", "dtype"), [("cuda", "float32"), ("cpu", "bfloat16")])
def test_native_is_never_replaced_silently(device, dtype):
    with pytest.raises(ConfigError, match=r"kernels\.linear"):
        select_kernels("compiled", "reference", device, linear="native", dtype=dtype)

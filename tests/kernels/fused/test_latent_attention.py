"""Latent attention and its writes: against attention before absorption, against transformers, and the kernels at their limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphspec.errors import ConfigError
from graphspec.kernels.attention.fused import _latent
from graphspec.kernels.attention.fused import latent_attention as fused
from graphspec.kernels.attention.fused import latent_kv_write as fused_write
from graphspec.kernels.attention.latent_attention import latent_attention
from graphspec.kernels.attention.latent_chunk_attention import latent_chunk_attention
from graphspec.kernels.attention.latent_kv_write import latent_kv_write
from graphspec.kernels.fused.launch import recording
from tests.kernels.cases.attention import poison_unseen, random_latent_pool, visible_slots
from tests.kernels.proof.attention import latent_attention_case
from tests.support.float_law import assert_float_law, widened

pytestmark = pytest.mark.usefixtures("nan_memory")


def call(
    ends: list[int],
    tokens: int,
    heads: int,
    *,
    page_size: int = 16,
    columns: int = 4,
    latent: int = 24,
    rope: int = 8,
    words: int = 1,
    seed: int = 0,
) -> dict[str, Any]:
    """Lanes with these prefixes and a chain of ``tokens`` after each; what no query sees is NaN."""
    generator = torch.Generator().manual_seed(seed)
    lanes = len(ends)
    pool, table = random_latent_pool(generator, lanes=lanes, columns=columns, page_size=page_size, dim=latent + rope, layers=1)
    bits = torch.arange(64 * words) <= torch.arange(tokens)[:, None]
    ancestors = (bits.view(tokens, words, 64).to(torch.int64) << torch.arange(64)).sum(-1).expand(lanes, -1, -1).contiguous()
    begin, end = torch.zeros(lanes, tokens, dtype=torch.int64), torch.tensor(ends)
    poison_unseen(pool, table, visible_slots(begin, end, ancestors, columns * page_size))
    return {
        "query_latent_BTQL": torch.randn(lanes, tokens, heads, latent, generator=generator),
        "query_rope_BTQR": torch.randn(lanes, tokens, heads, rope, generator=generator),
        "latent_pool": pool,
        "layer": 0,
        "table_BP": table,
        "prefix_begin_BT": begin,
        "prefix_end_B": end,
        "ancestors_BTX": ancestors,
        "scale": 0.2,
    }


def lanes_of(case: dict[str, Any], lanes: slice) -> dict[str, Any]:
    shared = ("latent_pool", "layer", "scale")
    return {key: value if key in shared else value[lanes] for key, value in case.items()}


def assert_right(case: dict[str, Any], found: Tensor) -> None:
    assert_float_law(found, latent_attention(**case), latent_attention(**widened(case)))


def test_reference_is_the_attention_before_absorption() -> None:
    """Keys ``W_UK c`` next to the shared rotated part, values ``W_UV c``, per head, one query at a time."""
    case = widened(call([5, 19], 3, 4, latent=12, rope=4))
    generator = torch.Generator().manual_seed(1)
    up_key, up_value = (torch.randn(4, width, 12, generator=generator, dtype=torch.float64) for width in (7, 9))
    plain = torch.randn(2, 3, 4, 7, generator=generator, dtype=torch.float64)
    case["query_latent_BTQL"] = torch.einsum("btqn,qnl->btql", plain, up_key)
    out = torch.einsum("btql,qvl->btqv", latent_attention(**case), up_value)
    pool, table = case["latent_pool"][0, 0, :, :, 0], case["table_BP"].long()
    for lane, end in enumerate((5, 19)):
        for token in range(3):
            slot = torch.arange(end + token + 1)
            rows = pool[table[lane, slot // 16], slot % 16]
            for head in range(4):
                key = torch.cat((rows[:, :12] @ up_key[head].T, rows[:, 12:]), -1)
                query = torch.cat((plain[lane, token, head], case["query_rope_BTQR"][lane, token, head]))
                weight = torch.softmax(key @ query * 0.2, 0)
                torch.testing.assert_close(out[lane, token, head], weight @ (rows[:, :12] @ up_value[head].T))


def test_chunk_reference_is_the_tree_reference_of_a_chain() -> None:
    case = call([9, 0], 5, 3)
    tree = latent_attention(**case)
    chunk = {key: case[key] for key in case if key not in ("prefix_end_B", "ancestors_BTX")}
    slot = case["prefix_end_B"][:, None] + torch.arange(5)
    found = latent_chunk_attention(**chunk, slot_BT=slot, valid_BT=torch.ones(2, 5, dtype=torch.bool))
    torch.testing.assert_close(found, tree)


@pytest.mark.parametrize("interleaved", [True, False])
def test_write_reference_equals_transformers(interleaved: bool) -> None:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf

    latent, rope = torch.randn(2, 3, 24), torch.randn(2, 3, 5, 8)
    angle = torch.rand(2, 3, 4)
    norm = hf.DeepseekV3RMSNorm(16)
    norm.weight.data = torch.randn(16)
    rotate = hf.apply_rotary_pos_emb_interleave if interleaved else hf.apply_rotary_pos_emb
    cos, sin = (torch.cat((x, x), -1) for x in (angle.cos(), angle.sin()))
    angles = torch.cat((angle.cos(), angle.sin()), -1).flatten(0, 1)
    query, key = rotate(rope.transpose(1, 2), latent[:, None, :, 16:], cos, sin)
    pool, table = torch.zeros(1, 1, 7, 2, 1, 24), torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    slot = torch.tensor([[0, 3, 4], [5, 1, 2]])
    arguments = (
        norm.weight.detach(),
        angles,
        torch.arange(6).view(2, 3),
        table,
        slot,
        torch.ones(2, 3, dtype=torch.bool),
        1e-6,
        interleaved,
    )
    out = latent_kv_write(pool, 0, latent, rope, *arguments)
    torch.testing.assert_close(out, query.transpose(1, 2))
    rows = pool[0, 0, table.gather(1, slot // 2).long(), slot % 2, 0]
    torch.testing.assert_close(rows, torch.cat((norm(latent[..., :16]), key[:, 0]), -1))
    assert not pool[0, 0, 0].any()


@pytest.mark.parametrize(
    ("ends", "tokens", "heads", "options"),
    [
        ([0, 1, 31], 1, 1, {}),
        ([30], 33, 1, {"columns": 5}),
        ([7, 61], 5, 7, {"columns": 5}),
        ([3], 65, 1, {"columns": 9, "words": 2}),
        ([20], 11, 3, {"page_size": 1, "columns": 35, "latent": 16, "rope": 16}),
        ([33], 2, 3, {"latent": 5, "rope": 2}),
    ],
)
def test_tile_block_and_word_boundaries(ends: list[int], tokens: int, heads: int, options: dict[str, int]) -> None:
    case = call(ends, tokens, heads, **options)
    assert_right(case, fused.OP(**case))


@pytest.mark.parametrize("end", [239, 255, 256, 257])
def test_split_boundaries(end: int) -> None:
    case = call([end, 300], 3, 2, columns=20)
    assert_right(case, fused.OP(**case))


def test_holes_in_what_is_seen_may_hold_nan() -> None:
    """Slots before every begin, and between the bits of the window: NaN in the pool, and no bit of the result moves."""
    case = call([23, 40], 2, 3, columns=7)
    case["prefix_begin_BT"][:] = torch.tensor([[5, 19], [33, 200]])
    case["ancestors_BTX"][:, :, 0] = torch.tensor([[1 | 1 << 40, 1 << 7], [1 << 3, (1 << 33) - (1 << 63)]])
    case["latent_pool"] = torch.randn(case["latent_pool"].shape)
    whole = fused.OP(**case)
    visible = visible_slots(case["prefix_begin_BT"], case["prefix_end_B"], case["ancestors_BTX"], 7 * 16)
    poison_unseen(case["latent_pool"], case["table_BP"], visible)
    assert case["latent_pool"].isnan().any()
    assert torch.equal(fused.OP(**case), whole)
    assert_right(case, whole)


def test_splits_grow_with_the_lane_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few splits allowed: a long lane has larger ones next to a short lane, and both have the bits they have alone."""
    monkeypatch.setattr(_latent, "SPLIT", 32)
    monkeypatch.setattr(_latent, "SPLITS", 4)
    case = call([10, 400], 2, 2, columns=28)
    out = fused.OP(**case)
    assert_right(case, out)
    for lane in range(2):
        assert torch.equal(fused.OP(**lanes_of(case, slice(lane, lane + 1))), out[lane : lane + 1])


def test_bits_do_not_depend_on_batch_tokens_or_table_width() -> None:
    case = call([254, 13], 3, 5, columns=17)
    out = fused.OP(**case)
    assert torch.equal(fused.OP(**case), out)
    wider = {**case, "table_BP": torch.nn.functional.pad(case["table_BP"], (0, 20))}
    assert torch.equal(fused.OP(**wider), out)
    for lane in range(2):
        assert torch.equal(fused.OP(**lanes_of(case, slice(lane, lane + 1)))[0], out[lane])
    for token in range(3):
        # The chain one token at a time, as plain decoding sees it.
        one = {**case, **{key: case[key][:, token : token + 1] for key in ("query_latent_BTQL", "query_rope_BTQR", "prefix_begin_BT")}}
        one |= {"prefix_end_B": case["prefix_end_B"] + token, "ancestors_BTX": torch.ones(2, 1, 1, dtype=torch.int64)}
        assert torch.equal(fused.OP(**one)[:, 0], out[:, token])


def test_a_query_that_sees_nothing_is_zero_even_in_many_splits() -> None:
    case = call([290, 2], 3, 2, columns=20)
    case["prefix_begin_BT"][:, 1] = 10**9
    case["ancestors_BTX"][:, 1] = 0
    out = fused.OP(**case)
    assert not out[:, 1].any()
    assert_right(case, out)


def test_strided_queries_and_half_precision() -> None:
    case = call([40, 3], 3, 4)
    strided = {**case, "query_latent_BTQL": case["query_latent_BTQL"].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)}
    assert not strided["query_latent_BTQL"].is_contiguous()
    assert torch.equal(fused.OP(**strided), fused.OP(**case))
    half = {k: v.half() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in case.items()}
    oracle = latent_attention(**widened(half))
    out = fused.OP(**half)
    assert out.dtype == torch.float16
    assert (out.double() - oracle).abs().max() <= 2e-3 * oracle.abs().max()


def test_chunk_beyond_one_tile() -> None:
    case = call([21, 0], 21, 3, columns=3)
    chunk = {key: case[key] for key in case if key not in ("prefix_end_B", "ancestors_BTX")}
    chunk |= {"slot_BT": case["prefix_end_B"][:, None] + torch.arange(21), "valid_BT": torch.arange(21) < torch.tensor([[21], [4]])}
    found = fused.CHUNK_OP(**chunk)
    torch.testing.assert_close(found, latent_chunk_attention(**chunk), rtol=2e-6, atol=2e-6)
    assert not found[1, 4:].any()


def test_more_words_than_the_kernel_knows_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 2 words"):
        fused.latent_attention(**call([3], 2, 1, words=3))


def test_write_touches_its_slots_and_nothing_else() -> None:
    pool = torch.randn(2, 1, 5, 4, 1, 11)
    before, latent = pool.clone(), torch.randn(1, 3, 11)
    latent[0, 1] = torch.nan
    slot, valid = torch.tensor([[2, 10**12, 5]]), torch.tensor([[True, False, True]])
    table = torch.tensor([[3, 1]], dtype=torch.int32)
    angles, row = torch.rand(3, 4), torch.arange(3)[None]
    fused_write.OP(pool, 1, latent, torch.randn(1, 3, 1, 4), torch.ones(7), angles, row, table, slot, valid, 1e-6, True)
    changed = (pool != before).flatten(-2).any(-1)
    expected = torch.zeros_like(changed)
    expected[1, 0, 3, 2] = expected[1, 0, 1, 1] = True
    assert torch.equal(changed, expected)


def test_groups_of_tiles_share_their_partials_and_no_bit_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partials of one launch hold a part of the tiles: two, one and all give the same bits, in tiles that cross lanes and end half full."""
    monkeypatch.setattr(_latent, "SPLIT", 32)
    case = call([70, 13], 3, 7, columns=6)
    whole = fused.OP(**case)
    assert_right(case, whole)
    one = 3 * 16 * (24 + 2) * 4  # splits, rows of a float32 tile, channels and the two statistics of each
    for scratch in (one, 2 * one, 4 * one - 1):
        monkeypatch.setattr(_latent, "SCRATCH", scratch)
        with recording() as launches:
            fused.latent_attention(**case)
        merges = [launch for launch in launches if launch.kernel.fn.__name__ == "_merge"]
        assert len(merges) == -(-4 // (scratch // one)) and len(launches) == 2 * len(merges)
        assert torch.equal(fused.OP(**case), whole)


@pytest.mark.parametrize(("lanes", "tokens", "heads", "words"), [(8, 100, 128, 2), (8, 8, 128, 1), (1, 5, 128, 1), (64, 8, 16, 1)])
def test_partials_are_bounded(lanes: int, tokens: int, heads: int, words: int) -> None:
    """DeepSeek's heads: 8 trees of 100 nodes would have 6.7 GB of partials."""
    with recording() as launches:
        case = latent_attention_case("", tokens, heads, 131072, lanes=lanes, words=words)
        case.launcher(**case.arguments())
    for launch in launches:
        tensors = {id(value): value for value in launch.args if isinstance(value, Tensor)}
        kept = [t for t in tensors.values() if t.dtype == torch.float32]
        assert 0 < sum(t.numel() * t.element_size() for t in kept) <= 64 * 2**20
    if lanes == 1:
        assert len(launches) == 2, "a chain at batch 1 is one group"
        assert launches[0].grid[0] * launches[0].grid[1] >= 2 * 132

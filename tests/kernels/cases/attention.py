"""Small inputs of the ops of ``graphspec.kernels.attention``, odd sizes included, by name; drawn on the CPU."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from graphspec.kernels.op import Case


def random_latent_pool(
    generator: torch.Generator, *, lanes: int, columns: int, page_size: int, dim: int, layers: int
) -> tuple[Tensor, Tensor]:
    """A random latent pool of row width ``dim`` and a shuffled page table over it."""
    pages = lanes * columns + 1
    table = (torch.randperm(pages - 1, generator=generator) + 1).view(lanes, columns).to(torch.int32)
    return torch.randn(layers, 1, pages, page_size, 1, dim, generator=generator), table


def page_feature_case(
    generator: torch.Generator, lanes: int, page_size: int, columns: int, features: int, width: int, nodes: int = 0
) -> Case:
    """Lanes of any length at any offset in their pages. With ``nodes`` the tokens are on a path over rows, and the last lane is padded."""

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    pages = lanes * columns + 1
    case: Case = {
        "page_feature": torch.randn(1, 1, pages, 1, 1, features, generator=generator),
        "page_size": page_size,
        "table_BP": (torch.randperm(pages - 1, generator=generator) + 1).view(lanes, columns).to(torch.int32),
        "begin_R": draw(0, columns * page_size - width + 1, lanes),
        "length_B": draw(0, width + 1, lanes),
        "feature_BTF": torch.randn(lanes, nodes or width, features, generator=generator),
    }
    if not nodes:
        # For chunks of prompts they are columns of the message.
        case["begin_R"], case["length_B"] = torch.stack((case["begin_R"], case["length_B"]), 1).unbind(1)
        return case
    row = torch.cat((torch.randperm(lanes, generator=generator)[:-1], torch.tensor([lanes])))
    case["length_B"][-1] = 0
    case["table_BP"][-1] = 0
    begin = torch.cat((case["begin_R"], torch.tensor([-(2**40)])))
    return {**case, "begin_R": begin, "path_BA": draw(0, nodes, lanes, width), "lane_row_B": row}


def random_pool(
    generator: torch.Generator, *, lanes: int, columns: int, page_size: int, heads: int, dim: int, layers: int
) -> tuple[Tensor, Tensor]:
    """A random pool and a shuffled page table over it."""
    pages = lanes * columns + 1
    table = (torch.randperm(pages - 1, generator=generator) + 1).view(lanes, columns).to(torch.int32)
    return torch.randn(layers, 2, pages, page_size, heads, dim, generator=generator), table


def visible_slots(prefix_begin_BT: Tensor, prefix_end_B: Tensor, ancestors_BTX: Tensor, length: int) -> Tensor:
    """Visibility, bool ``[B, T, length]``, by plain loops, independent of the reference."""
    lanes, tokens, words = ancestors_BTX.shape
    visible = torch.zeros(lanes, tokens, length, dtype=torch.bool)
    for lane in range(lanes):
        end = int(prefix_end_B[lane])
        for token in range(tokens):
            visible[lane, token, max(0, int(prefix_begin_BT[lane, token])) : max(0, end)] = True
            for j in range(64 * words):
                if int(ancestors_BTX[lane, token, j // 64]) >> (j % 64) & 1 and 0 <= end + j < length:
                    visible[lane, token, end + j] = True
    return visible


def random_windows(generator: Generator, lanes: int, tokens: int, words: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Begin and end of the prefix that each token sees, and its ancestors; one token of three or more sees nothing."""
    end = torch.randint(0, length, (lanes,), generator=generator)
    begin = torch.randint(0, 3, (lanes, tokens), generator=generator)
    reach = (torch.arange(64 * words) < length - end[:, None]) & (torch.arange(64 * words) < 2 * tokens)
    bits = (torch.rand(lanes, tokens, 64 * words, generator=generator) < 0.4) & reach[:, None]
    if tokens > 2:
        bits[0, 1], begin[0, 1] = False, length
    ancestors = (bits.view(lanes, tokens, words, 64).to(torch.int64) << torch.arange(64)).sum(-1)
    return begin, end, ancestors


def poison_unseen(kv_pool: Tensor, table_BP: Tensor, visible_BTL: Tensor) -> None:
    """Fill every slot that no query may see with NaN, in all layers, the dummy page included."""
    page_size = kv_pool.shape[3]
    slot_L = torch.arange(visible_BTL.shape[-1])
    seen = torch.zeros(kv_pool.shape[2], page_size, dtype=torch.bool)
    for lane in range(table_BP.shape[0]):
        visible_L = visible_BTL[lane].any(0)
        seen[table_BP[lane, slot_L // page_size].long(), slot_L % page_size] |= visible_L
    kv_pool[:, :, ~seen] = torch.nan


def with_sinks(generator: Generator, plain: list[Case]) -> list[Case]:
    """The same calls with a sink for each head, with capped scores, and with both."""
    made = []
    for number, case in enumerate(plain):
        more: Case = {"sink_Q": 2 * torch.randn(case["query_BTQD"].shape[2], generator=generator)} if number != 1 else {}
        made.append({**case, "kv_pool": case["kv_pool"].clone(), **more, "softcap": 0.7 if number % 2 else 0.0})
    return made


def chunk_attention(generator: Generator) -> list[Case]:
    def case(lanes: int, tokens: int, page_size: int, columns: int, queries: int, groups: int, dim: int, begin: int) -> Case:
        pool, table = random_pool(generator, lanes=lanes, columns=columns, page_size=page_size, heads=groups, dim=dim, layers=2)
        length = columns * page_size
        first = torch.randint(0, length - tokens + 1, (lanes, 1), generator=generator)
        slot = first + torch.arange(tokens)
        valid = torch.arange(tokens) < torch.randint(1, tokens + 1, (lanes, 1), generator=generator)
        begin_BT = torch.full((lanes, tokens), begin)
        visible = torch.zeros(lanes, tokens, length, dtype=torch.bool)
        for lane in range(lanes):
            for token in range(tokens):
                if valid[lane, token]:
                    visible[lane, token, begin : int(slot[lane, token]) + 1] = True
        poison_unseen(pool, table, visible)
        return {
            "query_BTQD": torch.randn(lanes, tokens, queries, dim, generator=generator),
            "kv_pool": pool,
            "layer": 1,
            "table_BP": table,
            "prefix_begin_BT": begin_BT,
            "slot_BT": torch.where(valid, slot, 10**9),
            "valid_BT": valid,
            "scale": dim**-0.5,
        }

    plain = [case(1, 1, 1, 3, 1, 1, 8, 0), case(3, 7, 4, 5, 6, 2, 5, 1), case(2, 33, 16, 5, 4, 4, 16, 3)]
    return [*plain, *with_sinks(generator, plain), case(1, 5, 4, 4, 4, 1, 512, 0)]


def kv_move(generator: Generator) -> list[Case]:
    def case(lanes: int, page_size: int, columns: int, heads: int, dim: int, layers: int, nodes: int, width: int) -> Case:
        pages = lanes * columns + 1
        path = torch.zeros(lanes, width, dtype=torch.int64)
        for lane in range(lanes):
            path[lane, 1:] = (torch.randperm(nodes - 1, generator=generator)[: width - 1] + 1).sort().values
        return {
            "kv_pool": torch.randn(layers, 2, pages, page_size, heads, dim, generator=generator),
            "table_RP": (torch.randperm(pages - 1, generator=generator) + 1).view(lanes, columns).to(torch.int32),
            "seq_len_R": torch.randint(0, columns * page_size - nodes + 1, (lanes,), generator=generator),
            "path_BA": path,
            "accept_len_B": torch.randint(0, width + 1, (lanes,), generator=generator),
        }

    def through_rows(case: Case) -> Case:
        """The same lanes with their rows in another order, and the last lane padded: it has the dummy row, which owns no pages."""
        lanes = case["path_BA"].shape[0]
        case["accept_len_B"][-1] = 0
        row = torch.cat((torch.randperm(lanes, generator=generator)[:-1], torch.tensor([lanes])))
        table, seq_len = case["table_RP"], case["seq_len_R"]
        return {
            **case,
            "table_RP": torch.cat((table, torch.zeros_like(table[:1]))),
            "seq_len_R": torch.cat((seq_len, torch.full_like(seq_len[:1], -(2**40)))),
            "lane_row_B": row,
        }

    many, latent = case(4, 16, 2, 2, 5, 3, 16, 6), case(2, 4, 5, 1, 6, 2, 9, 4)
    latent["kv_pool"] = latent["kv_pool"][:, :1].contiguous()
    return [case(1, 1, 6, 1, 1, 1, 5, 3), many, case(3, 3, 7, 3, 7, 2, 9, 4), through_rows(case(4, 4, 5, 2, 3, 2, 8, 4)), latent]


def latent_attention(generator: Generator) -> list[Case]:
    def case(lanes: int, tokens: int, page_size: int, columns: int, heads: int, latent: int, rope: int, words: int) -> Case:
        pool, table = random_latent_pool(generator, lanes=lanes, columns=columns, page_size=page_size, dim=latent + rope, layers=2)
        begin, end, ancestors = random_windows(generator, lanes, tokens, words, columns * page_size)
        poison_unseen(pool, table, visible_slots(begin, end, ancestors, columns * page_size))
        return {
            "query_latent_BTQL": torch.randn(lanes, tokens, heads, latent, generator=generator),
            "query_rope_BTQR": torch.randn(lanes, tokens, heads, rope, generator=generator),
            "latent_pool": pool,
            "layer": 1,
            "table_BP": table,
            "prefix_begin_BT": begin,
            "prefix_end_B": end,
            "ancestors_BTX": ancestors,
            "scale": 0.15,
        }

    return [
        case(1, 1, 1, 5, 1, 8, 2, 1),
        case(3, 5, 16, 4, 6, 40, 8, 1),
        case(2, 7, 1, 41, 3, 24, 6, 1),
        case(2, 40, 16, 9, 2, 32, 16, 2),
        case(1, 3, 4, 60, 16, 64, 16, 2),
    ]


def latent_chunk_attention(generator: Generator) -> list[Case]:
    def case(lanes: int, tokens: int, page_size: int, columns: int, heads: int, latent: int, rope: int, begin: int) -> Case:
        pool, table = random_latent_pool(generator, lanes=lanes, columns=columns, page_size=page_size, dim=latent + rope, layers=2)
        length = columns * page_size
        first = torch.randint(0, length - tokens + 1, (lanes, 1), generator=generator)
        slot = first + torch.arange(tokens)
        valid = torch.arange(tokens) < torch.randint(1, tokens + 1, (lanes, 1), generator=generator)
        slot_L = torch.arange(length)
        poison_unseen(pool, table, (slot_L >= begin) & (slot_L <= slot[..., None]) & valid[..., None])
        return {
            "query_latent_BTQL": torch.randn(lanes, tokens, heads, latent, generator=generator),
            "query_rope_BTQR": torch.randn(lanes, tokens, heads, rope, generator=generator),
            "latent_pool": pool,
            "layer": 1,
            "table_BP": table,
            "prefix_begin_BT": torch.full((lanes, tokens), begin),
            "slot_BT": torch.where(valid, slot, 10**9),
            "valid_BT": valid,
            "scale": 0.15,
        }

    return [case(1, 1, 1, 3, 1, 8, 2, 0), case(3, 7, 4, 5, 6, 20, 4, 1), case(2, 33, 16, 5, 4, 32, 16, 3)]


def latent_kv_write(generator: Generator) -> list[Case]:
    def case(lanes: int, tokens: int, page_size: int, columns: int, heads: int, latent: int, rope: int, interleaved: bool) -> Case:
        pages = lanes * columns + 1
        slots = torch.stack([torch.randperm(columns * page_size, generator=generator)[:tokens] for _ in range(lanes)])
        valid = torch.rand(lanes, tokens, generator=generator) < 0.7
        angle = torch.rand(7, rope // 2, generator=generator) * 7
        return {
            "latent_pool": torch.randn(3, 1, pages, page_size, 1, latent + rope, generator=generator),
            "layer": 1,
            "latent_BTE": torch.randn(lanes, tokens, latent + rope, generator=generator),
            "query_rope_BTQR": torch.randn(lanes, tokens, heads, rope + 3, generator=generator)[..., 3:],
            "norm_weight_L": torch.randn(latent, generator=generator),
            "rope_LD": torch.cat((angle.cos(), angle.sin()), -1),
            "rope_row_BT": torch.randint(-2, 9, (lanes, tokens), generator=generator),
            "table_BP": (torch.randperm(pages - 1, generator=generator) + 1).view(lanes, columns).to(torch.int32),
            "slot_BT": torch.where(valid, slots, torch.tensor(-7)),
            "valid_BT": valid,
            "eps": 1e-6,
            "interleaved": interleaved,
        }

    return [
        case(1, 1, 1, 1, 1, 4, 2, True),
        case(3, 5, 1, 9, 6, 24, 8, False),
        case(2, 6, 16, 3, 16, 40, 16, True),
        case(2, 3, 4, 5, 33, 7, 6, True),
    ]


def page_feature_write(generator: Generator) -> list[Case]:
    return [
        page_feature_case(generator, 1, 4, 3, 5, 4),
        page_feature_case(generator, 3, 1, 9, 7, 6),
        page_feature_case(generator, 2, 3, 8, 2049, 17),
        page_feature_case(generator, 4, 4, 3, 6, 5, nodes=9),
        page_feature_case(generator, 2, 16, 2, 3, 1, nodes=1),
    ]


def rope_kv_write(generator: Generator) -> list[Case]:
    def case(lanes: int, tokens: int, page_size: int, columns: int, queries: int, heads: int, dim: int, rotary: int, norm: bool) -> Case:
        pages = lanes * columns + 1
        slots = torch.stack([torch.randperm(columns * page_size, generator=generator)[:tokens] for _ in range(lanes)])
        valid = torch.rand(lanes, tokens, generator=generator) < 0.7
        fused = torch.randn(lanes, tokens, (queries + 2 * heads) * dim, generator=generator)
        query, key, value = fused.split((queries * dim, heads * dim, heads * dim), -1)
        angle = torch.rand(7, rotary // 2, generator=generator) * 6
        made: Case = {
            "query_BTQD": query.unflatten(-1, (queries, dim)),
            "key_BTGD": key.unflatten(-1, (heads, dim)),
            "value_BTGD": value.unflatten(-1, (heads, dim)),
            "rope_LD": torch.cat((angle.cos(), angle.sin()), -1),
            "rope_row_BT": torch.randint(-2, 9, (lanes, tokens), generator=generator),
            "kv_pool": torch.randn(3, 2, pages, page_size, heads, dim, generator=generator),
            "layer": 1,
            "table_BP": (torch.randperm(pages - 1, generator=generator) + 1).view(lanes, columns).to(torch.int32),
            "slot_BT": torch.where(valid, slots, torch.tensor(-7)),
            "valid_BT": valid,
        }
        if norm:
            made |= {name: torch.randn(dim, generator=generator) for name in ("query_norm", "key_norm")}
            made |= {"norm_eps": 1e-6, "norm_offset": tokens % 2 == 0}
        return made

    return [
        case(1, 1, 1, 1, 1, 1, 2, 2, False),
        case(3, 5, 1, 9, 6, 2, 8, 8, True),
        case(2, 6, 16, 3, 3, 3, 12, 6, True),
        case(2, 3, 4, 3, 20, 4, 24, 24, False),
        case(1, 3, 4, 3, 4, 1, 512, 512, False),
    ]


def tree_attention(generator: Generator) -> list[Case]:
    def case(lanes: int, tokens: int, page_size: int, columns: int, queries: int, groups: int, dim: int, layers: int, words: int) -> Case:
        pool, table = random_pool(generator, lanes=lanes, columns=columns, page_size=page_size, heads=groups, dim=dim, layers=layers)
        begin, end, ancestors = random_windows(generator, lanes, tokens, words, columns * page_size)
        poison_unseen(pool, table, visible_slots(begin, end, ancestors, columns * page_size))
        return {
            "query_BTQD": torch.randn(lanes, tokens, queries, dim, generator=generator),
            "kv_pool": pool,
            "layer": layers - 1,
            "table_BP": table,
            "prefix_begin_BT": begin,
            "prefix_end_B": end,
            "ancestors_BTX": ancestors,
            "scale": dim**-0.5,
        }

    plain = [
        case(1, 1, 1, 5, 1, 1, 8, 1, 1),
        case(3, 5, 16, 4, 6, 2, 16, 2, 1),
        case(2, 7, 1, 41, 6, 2, 5, 3, 1),
        case(2, 40, 16, 9, 3, 3, 24, 2, 2),
        case(1, 9, 4, 30, 8, 2, 64, 1, 2),
    ]
    return [*plain, *with_sinks(generator, plain), case(1, 3, 4, 8, 8, 1, 512, 1, 1)]

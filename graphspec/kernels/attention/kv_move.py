"""Compaction of the accepted path's KV, all layers at once: a parallel copy between overlapping ranges."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import Case, KernelOp, Written
from .paged_kv_write import locate


def kv_move(
    kv_pool: Written, table_RP: Tensor, seq_len_R: Tensor, path_BA: Tensor, accept_len_B: Tensor, lane_row_B: Tensor | None = None
) -> None:
    """Move row ``seq_len + path[i]`` to ``seq_len + i`` for ``i < accept_len``, in every layer, keys and values, in place.

    Source and destination ranges overlap: every row is read before any is written. An implementation gives all A rows of a (lane, layer,
    channel chunk) to one program for that reason. Other slots keep their bits; suppressed writes go to the dummy page 0 or nowhere.

    Args:
        kv_pool: ``[layers, sides, pages, page_size, G, D]``, contiguous, written in place: keys and values, or one latent row.
        table_RP: int32, no page in two lanes whose run is not empty. seq_len_R: int64.
        path_BA: int64 nodes. accept_len_B: int64, at most A; 0 moves nothing, and nothing of that lane's row is used.
        lane_row_B: int64, the row of ``table`` and ``seq_len`` that belongs to each lane; None: they have one per lane, in this order.
    """
    table_BP = table_RP if lane_row_B is None else table_RP[lane_row_B]
    seq_len_B = seq_len_R if lane_row_B is None else seq_len_R[lane_row_B]
    layers, sides, _, page_size, _, _ = kv_pool.shape
    step_A = torch.arange(path_BA.shape[1], device=path_BA.device)
    valid_BA = step_A < accept_len_B[:, None]
    source_page_BA, source_offset_BA = locate(table_BP, seq_len_B[:, None] + path_BA, valid_BA, page_size)
    page_BA, offset_BA = locate(table_BP, seq_len_B[:, None] + step_A, valid_BA, page_size)
    layer_L111 = torch.arange(layers, device=kv_pool.device)[:, None, None, None]
    side_E11 = torch.arange(sides, device=kv_pool.device)[:, None, None]
    rows = kv_pool[layer_L111, side_E11, source_page_BA, source_offset_BA]
    kv_pool.index_put_((layer_L111, side_E11, page_BA, offset_BA), rows)


def _cases(generator: torch.Generator) -> list[Case]:
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


OP = KernelOp(kv_move, _cases, native="native.state")

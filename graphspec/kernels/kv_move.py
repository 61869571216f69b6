"""Compaction of the accepted path's KV, all layers at once: a parallel copy between overlapping ranges."""

from __future__ import annotations

import torch
from torch import Tensor

from .op import Case, KernelOp
from .paged_kv_write import locate


def kv_move(kv_pool: Tensor, table_BP: Tensor, seq_len_B: Tensor, path_BA: Tensor, accept_len_B: Tensor) -> None:
    """Move row ``seq_len + path[i]`` to ``seq_len + i`` for ``i < accept_len``, in every layer, keys and values, in place.

    Source and destination ranges overlap: every row is read before any is written. An implementation gives all A rows of a (lane, layer,
    channel chunk) to one program for that reason. Other slots keep their bits; suppressed writes go to the dummy page 0.

    Args:
        kv_pool: ``[layers, 2, pages, page_size, G, D]``, contiguous, written in place.
        table_BP: int32, no page in two lanes.
        seq_len_B: int64. path_BA: int64 nodes. accept_len_B: int64, at most A; 0 moves nothing.
    """
    layers, _, _, page_size, _, _ = kv_pool.shape
    step_A = torch.arange(path_BA.shape[1], device=path_BA.device)
    valid_BA = step_A < accept_len_B[:, None]
    source_page_BA, source_offset_BA = locate(table_BP, seq_len_B[:, None] + path_BA, valid_BA, page_size)
    page_BA, offset_BA = locate(table_BP, seq_len_B[:, None] + step_A, valid_BA, page_size)
    layer_L111 = torch.arange(layers, device=kv_pool.device)[:, None, None, None]
    side_211 = torch.arange(2, device=kv_pool.device)[:, None, None]
    rows = kv_pool[layer_L111, side_211, source_page_BA, source_offset_BA]
    kv_pool.index_put_((layer_L111, side_211, page_BA, offset_BA), rows)


def _cases(generator: torch.Generator) -> list[Case]:
    def case(lanes: int, page_size: int, columns: int, heads: int, dim: int, layers: int, nodes: int, width: int) -> Case:
        pages = lanes * columns + 1
        path = torch.zeros(lanes, width, dtype=torch.int64)
        for lane in range(lanes):
            path[lane, 1:] = (torch.randperm(nodes - 1, generator=generator)[: width - 1] + 1).sort().values
        return {
            "kv_pool": torch.randn(layers, 2, pages, page_size, heads, dim, generator=generator),
            "table_BP": (torch.randperm(pages - 1, generator=generator) + 1).view(lanes, columns).to(torch.int32),
            "seq_len_B": torch.randint(0, columns * page_size - nodes + 1, (lanes,), generator=generator),
            "path_BA": path,
            "accept_len_B": torch.randint(0, width + 1, (lanes,), generator=generator),
        }

    return [case(1, 1, 6, 1, 1, 1, 5, 3), case(4, 16, 2, 2, 5, 3, 16, 6), case(3, 3, 7, 3, 7, 2, 9, 4)]


OP = KernelOp(name="kv_move", contract=kv_move.__doc__ or "", reference=kv_move, cases=_cases, mutates=("kv_pool",))

"""Compaction of the accepted path's KV, all layers at once: a parallel copy between overlapping ranges."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import Int32, Int64, Written, kernel_op
from .rope_kv_write import locate


@kernel_op(native="native.cycle")
def kv_move(
    kv_pool: Written[Tensor], table_RP: Int32, seq_len_R: Int64, path_BA: Int64, accept_len_B: Int64, lane_row_B: Int64 | None = None
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

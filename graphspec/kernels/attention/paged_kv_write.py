"""Location of logical slots in the paged pool, and the scatter of keys and values into it, for the references of several ops."""

from __future__ import annotations

import torch
from torch import Tensor


def locate(table_BP: Tensor, slot_BT: Tensor, valid_BT: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Page and offset of logical slots, int64, shape of ``slot_BT``; page 0, the dummy page, for invalid ones.

    Out-of-range slots of invalid entries are clamped before the table is read.
    """
    slot_BT = slot_BT.clamp(0, table_BP.shape[1] * page_size - 1)
    column_BT = torch.div(slot_BT, page_size, rounding_mode="floor")
    page_BT = table_BP.gather(1, column_BT).to(torch.int64)
    return torch.where(valid_BT, page_BT, 0), slot_BT % page_size


def paged_kv_write(
    kv_pool: Tensor, layer: int, key_BTGD: Tensor, value_BTGD: Tensor, table_BP: Tensor, slot_BT: Tensor, valid_BT: Tensor
) -> None:
    """Write the keys and values of one layer into their pages, in place.

    Logical slot s of lane b is on page ``table[b, s // page_size]`` at offset ``s % page_size``. Invalid tokens are written to page 0, the
    dummy page, which is never read; their slot may be out of range.

    Args:
        kv_pool: ``[layers, 2, pages, page_size, G, D]``, contiguous, written in place; index 0 of dim 1 is the key.
        layer: static.
        key_BTGD, value_BTGD: cast to the dtype of the pool.
        table_BP: int32. slot_BT: int64, distinct per lane where valid. valid_BT: bool.
    """
    page_BT, offset_BT = locate(table_BP, slot_BT, valid_BT, kv_pool.shape[3])
    side_211 = torch.arange(2, device=kv_pool.device)[:, None, None]
    rows_2BTGD = torch.stack((key_BTGD, value_BTGD)).to(kv_pool.dtype)
    # Scatter into the pool itself: through a view, the compiler would copy the whole pool, twice per graph.
    kv_pool.index_put_((torch.full_like(side_211, layer), side_211, page_BT, offset_BT), rows_2BTGD)

"""The kernel set of ``kernels.attention=flashinfer``: FlashInfer's kernels for calls they support exactly, fused kernels for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..host_step import PreparedCall
from ..registry import KernelSet
from . import version
from .planner import Bound, Planner
from .xqa import XqaWindow, bind_window


@dataclass(frozen=True, slots=True)
class FlashInferKernels(KernelSet):
    """``xqa`` for windows of exactly a call's queries, planned wrappers for prompts and for chains over latent rows, else fused kernels."""

    serves_windows: ClassVar[bool] = True
    planner: Planner

    def own_window(self, table_BP: Tensor, page_size: int, prefix_end_B: Tensor, ancestors_BTX: Tensor) -> XqaWindow:
        return bind_window(table_BP, page_size, prefix_end_B, ancestors_BTX)

    def bind_call(self, call: PreparedCall) -> Bound | None:
        return self.planner.bind(call)

    def host_step(self) -> Planner:
        return self.planner

    def check_model(
        self, name: str, page_size: int, dtype: str, num_heads: int, num_kv_heads: int, head_dim: int, windows: Sequence[int | None],
        *, latent: tuple[int, int] | None,
    ) -> None:  # fmt: skip
        version.check_pool(name, page_size, dtype, num_heads, num_kv_heads, head_dim, windows, latent=latent)

"""The kernel set of ``kernels.mode=fused``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..registry import KernelSet
from .launch import NAMESPACE


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]


STORED: Any = torch.library.custom_op(f"{NAMESPACE}::stored", _copies, mutates_args=(), schema="(Tensor[] tensors) -> Tensor[]")
STORED.register_fake(_copies)


@dataclass(frozen=True, slots=True)
class FusedKernels(KernelSet):
    """Opaque operators, for each of which Inductor writes every input that it could fuse into a kernel anew."""

    def stored(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(STORED(list(tensors)))

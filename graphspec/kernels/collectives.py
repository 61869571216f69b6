"""Collectives of an engine's ranks inside a program: sums after products whose input is split over ranks, and gathered logits.

Every rank computes all that follows the logits from the same bits, so nothing else is exchanged. Collectives are torch's functional ones:
they have shapes without data, stay in one region of ``torch.compile``, and are captured with the rest of a program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

collectives = torch.ops._c10d_functional  # noqa: SLF001  the operators of torch.distributed's functional collectives
ONE_SHOT_BYTES = 512 * 2**10
"""Largest tensor that is summed in one shot, in which every rank reads the whole tensor of every other; a larger one goes in pieces."""


@torch.library.custom_op("graphspec::one_shot_sum", mutates_args=(), device_types="cuda")
def one_shot_sum(memory: Tensor, x: Tensor, group: str) -> Tensor:
    """The sum of every rank's ``x``, added in order of rank by one kernel, which first copies ``x`` into ``memory``.

    An operator of ours around torch's, because Inductor looks into that one: it hands it copies of ``memory``, which no other rank may
    read, or allocates memory of its own for every sum, depending on torch's version.

    Args:
        memory: uint8, which every rank of the group may read; scratch.
        x: contiguous, of at most as many bytes.
        group: name of a process group.
    """
    shared = memory[: x.numel() * x.element_size()].view(x.dtype).view(x.shape)
    out: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(shared, x, "sum", group)
    return out


@one_shot_sum.register_fake
def _(memory: Tensor, x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x)


class Comm(Protocol):
    """Collectives over the ranks of an engine; every rank calls them in the same order."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's ``x``, the same bits on every rank; shape and dtype stay."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's ``x`` side by side along the last dimension, in order of rank: ``[..., ranks * n]`` from ``[..., n]``."""
        ...


@dataclass(frozen=True, slots=True)
class OrderedComm:
    """Sums are gathered and then added in order of rank, so that every rank makes the same additions. For CPUs.

    Attributes:
        size: ranks.
        group: name of a process group.
    """

    size: int
    group: str

    def all_reduce(self, x: Tensor) -> Tensor:
        total, *others = self.parts(x).unbind()
        for other in others:
            total = total + other
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self.parts(x).unbind(), dim=-1)

    def parts(self, x: Tensor) -> Tensor:
        """Every rank's ``x``, ``[ranks, ...]``."""
        gathered = collectives.all_gather_into_tensor(x.contiguous().flatten(), self.size, self.group)
        out: Tensor = collectives.wait_tensor(gathered)
        return out.view(self.size, *x.shape)


@dataclass(frozen=True, slots=True)
class DeviceComm(OrderedComm):
    """Sums are NCCL's, or made in one shot where GPUs can access each other's memory.

    NCCL sums every element once and copies the sum, in rings and trees, but does not guarantee it; ``runtime.debug`` compares the ranks.
    Which of them it takes depends on the size of a tensor.

    Attributes:
        symmetric: uint8, memory of :data:`ONE_SHOT_BYTES` that every rank may read; one kernel copies a tensor into it and adds those of
            all ranks in order. None: there is none.
        ordered: every sum is made in order of rank, whatever its size: in one shot, or gathered where there is no such memory.
    """

    symmetric: Tensor | None = None
    ordered: bool = False

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if self.symmetric is not None and x.numel() * x.element_size() <= ONE_SHOT_BYTES:
            return one_shot_sum(self.symmetric, x, self.group)
        if self.ordered and self.symmetric is not None:
            pieces = x.flatten().split(ONE_SHOT_BYTES // x.element_size())
            return torch.cat([one_shot_sum(self.symmetric, piece, self.group) for piece in pieces]).view(x.shape)
        if self.ordered:
            return OrderedComm.all_reduce(self, x)
        reduced: Tensor = collectives.wait_tensor(collectives.all_reduce(x, "sum", self.group))
        return reduced


def make_comm(group: dist.ProcessGroup, device: torch.device, numerics: str = "fast") -> Comm:
    """The collectives of a device, chosen before anything is captured. Every rank calls this at the same time.

    Args:
        group: all ranks; its backend for the device is gloo on a CPU and NCCL on GPUs.
        device: of this rank.
        numerics: all but ``fast``: sums have one order, whatever the number of rows.
    """
    import torch.distributed._functional_collectives  # shapes of the operators without data

    size, name = group.size(), str(group.group_name)
    if device.type != "cuda":
        return OrderedComm(size, name)
    import torch.distributed._symmetric_memory as symmetric_memory

    here, found = torch.cuda.current_device(), torch.cuda.device_count()
    if size > found or not all(torch.cuda.can_device_access_peer(here, other) for other in range(size) if other != here):
        return DeviceComm(size, name, ordered=numerics != "fast")
    memory = symmetric_memory.empty(ONE_SHOT_BYTES, dtype=torch.uint8, device=device)
    symmetric_memory.rendezvous(memory, group)
    return DeviceComm(size, name, memory, ordered=numerics != "fast")

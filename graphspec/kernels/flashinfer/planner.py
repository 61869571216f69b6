"""The planned calls of one engine: their wrappers, and the operators that run them inside a program."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ...errors import CaptureError
from ..fused.launch import like_first, multiprocessors, operator
from ..host_step import PreparedCall, RowSpan
from . import version
from .wrappers import LatentWrapper, PromptWrapper, Wrapper, backend_for, make_wrapper, workspace_bytes


class _Slot:
    """A supported call and its wrappers, by number of lanes."""

    def __init__(self, call: PreparedCall) -> None:
        self.call = call
        self.wrappers: dict[int, Wrapper] = {}

    def wrapper(self, lanes: int, scale: float) -> Wrapper:
        found = self.wrappers.get(lanes)
        if found is None:
            raise CaptureError(f"attention of {self.call.tokens} tokens", "a plan before the launch", f"none for {lanes} lanes")
        if scale != self.call.shape.scale:
            raise CaptureError(f"attention of {self.call.tokens} tokens", f"scale {self.call.shape.scale}, as planned", scale)
        return found


_slots: WeakValueDictionary[int, _Slot] = WeakValueDictionary()
"""Calls by the number that is passed to operators; the engine that owns a call keeps it alive."""
_numbers = itertools.count()


def planned_chunk(query_BTQD: Tensor, kv_pool: Tensor, layer: int, number: int, scale: float) -> Tensor:
    """Causal attention over keys and values, according to the last plan.

    Args:
        query_BTQD: as the pool.
        kv_pool: ``[layers, 2, pages, page_size, G, D]``, read only.
        layer: static.
        number: of the call.
        scale: static; multiplies the scores.

    Returns:
        ``[B, T, Q, D]``.

    Raises:
        CaptureError: nothing was planned.
    """
    lanes, _, heads, dim = query_BTQD.shape
    wrapper = _slots[number].wrapper(lanes, scale)
    assert isinstance(wrapper, PromptWrapper)
    query = query_BTQD.contiguous()
    out = torch.empty_like(query)
    wrapper.run(query.view(-1, heads, dim), kv_pool[layer, 0], kv_pool[layer, 1], out.view(-1, heads, dim))
    return out


def planned_latent(
    query_latent_BTQL: Tensor, query_rope_BTQR: Tensor, latent_pool: Tensor, layer: int, number: int, scale: float
) -> Tensor:
    """Attention over latent rows, according to the last plan.

    Args:
        query_latent_BTQL, query_rope_BTQR: as the pool.
        latent_pool: ``[layers, 1, pages, page_size, 1, L + R]``, contiguous, read only.
        layer: static.
        number: of the call.
        scale: static; multiplies the scores.

    Returns:
        ``[B, T, Q, L]``.

    Raises:
        CaptureError: nothing was planned.
    """
    wrapper = _slots[number].wrapper(query_latent_BTQL.shape[0], scale)
    assert isinstance(wrapper, LatentWrapper)
    latent, rope = query_latent_BTQL.contiguous().flatten(0, 1), query_rope_BTQR.contiguous().flatten(0, 1)
    out = torch.empty_like(latent)
    wrapper.run(latent, rope, latent_pool[layer, 0, :, :, 0], out)
    return out.view(query_latent_BTQL.shape)


CHUNK_OP = operator("flashinfer_chunk", planned_chunk, fake=like_first)
LATENT_OP = operator("flashinfer_latent", planned_latent, fake=like_first)


@dataclass(frozen=True, slots=True)
class Bound:
    """A supported call; see :class:`~graphspec.kernels.host_step.BoundCall`."""

    number: int

    def chunk(self, query_BTQD: Tensor, kv_pool: Tensor, layer: int, valid_BT: Tensor, scale: float) -> Tensor:
        return torch.where(valid_BT[..., None, None], CHUNK_OP(query_BTQD, kv_pool, layer, self.number, scale), 0.0)

    def latent(
        self, query_latent_BTQL: Tensor, query_rope_BTQR: Tensor, latent_pool: Tensor, layer: int, valid_BT: Tensor, scale: float
    ) -> Tensor:
        out_BTQL = LATENT_OP(query_latent_BTQL, query_rope_BTQR, latent_pool, layer, self.number, scale)
        return torch.where(valid_BT[..., None, None], out_BTQL, 0.0)


class Planner:
    """See :class:`~graphspec.kernels.host_step.HostStep`.

    The first plan of a call for a number of lanes creates its wrapper, with 8 MiB of lists on the device and as much pinned memory on the
    host. Programs with the same call share its wrapper: each launch is planned right before it, and launches are ordered on one stream.

    Args:
        device: of the pools.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._slots: dict[PreparedCall, tuple[int, _Slot]] = {}
        self._workspaces: list[Tensor] = []
        self._staged: torch.cuda.Event | None = None

    def bind(self, call: PreparedCall) -> Bound | None:
        """The bound call; None: not supported, so the fused kernel runs it."""
        shape = call.shape
        if not shape.latent and (shape.dim not in version.PROMPT_DIMS or call.anchor != "chunk" or call.begin > 0):
            return None
        if shape.latent and call.anchor == "chunk" and call.begin > 0:
            # The first chunk has one query more than keys, and the kernels compute offsets from that difference as unsigned.
            return None
        if call not in self._slots:
            number = next(_numbers)
            self._slots[call] = number, _Slot(call)
            _slots[number] = self._slots[call][1]
        return Bound(self._slots[call][0])

    def prepare(self, calls: Mapping[PreparedCall, Sequence[RowSpan]], lanes: int, page_size: int, table_width: int, dtype: str) -> None:
        """See :meth:`graphspec.kernels.host_step.HostStep.prepare`."""
        if self._staged is not None:
            # Wait for the copies of the last plans, whose host memory is overwritten below.
            self._staged.synchronize()
        for call, spans in calls.items():
            slot = self._slots[call][1]
            if lanes not in slot.wrappers:
                slot.wrappers[lanes] = make_wrapper(call, lanes, page_size, table_width, getattr(torch, dtype), self._workspace(call))
            slot.wrappers[lanes].plan(list(spans))
        if self.device.type == "cuda":
            if self._staged is None:
                self._staged = torch.cuda.Event()
            self._staged.record()

    def _workspace(self, call: PreparedCall) -> Tensor:
        """Scratch for the call, shared by all calls it is large enough for. It is never freed, since captured programs keep its address."""
        needed = workspace_bytes(call, multiprocessors(self.device), backend_for(self.device))
        for workspace in self._workspaces:
            if workspace.numel() >= needed:
                return workspace
        self._workspaces.append(torch.empty(needed, dtype=torch.uint8, device=self.device))
        return self._workspaces[-1]

"""Weights of low precision without data, by the configuration of a checkpoint alone: what plans count where there are no tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..facts.layouts import Layout
from ..facts.quantisation import Quantisation, Scheme
from ..kernels.linear.packed import CODES, Packed, code_bits
from .checkpoint import tensor_sources
from .experts import MixtureOfExperts
from .layers import Linear
from .packed_weight import PackedWeight, Segment
from .vocabulary import set_weight

_GATES = ("gate", "shared_expert_gate")
"""Layers that choose or weigh experts: no published checkpoint quantises them."""


def outline_weights(
    network: nn.Module, layout: Layout | None, quantisation: Quantisation, dtype: torch.dtype, without: nn.Module | None = None
) -> None:
    """Give the linear layers and the experts of a network on ``meta`` the weights that its checkpoint has.

    Args:
        network: without data.
        layout: its names in the checkpoint; None: not known, and every projection of a decoder layer has codes.
        quantisation: of the checkpoint.
        dtype: of the model.
        without: a network whose layers stay as they are, where the two share some.
    """
    others = set(without.modules()) if without is not None else set()
    for name, owner in list(network.named_modules()):
        if isinstance(owner, MixtureOfExperts) and owner not in others:
            for leaf in ("gate_up_EFH", "down_EHF"):
                sources = (f"{name}.experts",) if layout is None else tensor_sources(layout, f"{name}.{leaf}", ())
                scheme = quantisation.scheme(_stored_name(sources[0].replace("#", "0"), layout))
                if scheme is not None:
                    experts, rows, channels = owner.get_parameter(leaf).shape
                    owner.set_experts(leaf, PackedWeight((_segment(scheme, experts * rows, channels, dtype),), dtype))
        if owner in others or not isinstance(owner, Linear) or not isinstance(owner.weight, nn.Parameter):
            continue
        if layout is not None:
            sources = tensor_sources(layout, f"{name}.weight", ())
        else:
            sources = (f"{name}.weight",) if name.endswith("_proj") else ("lm_head.weight",)
        outputs, channels = owner.weight.shape
        parts = owner.parts if len(sources) == len(owner.parts) else (outputs // len(sources),) * len(sources)
        layers = [_stored_name(source, layout) for source in sources]
        schemes = [None if layer.split(".")[-1] in _GATES else quantisation.scheme(layer) for layer in layers]
        if any(schemes):
            segments = [_segment(scheme, rows, channels, dtype) for scheme, rows in zip(schemes, parts, strict=True)]
            set_weight(owner, PackedWeight(segments, dtype))


def _stored_name(source: str, layout: Layout | None) -> str:
    """The layer of a tensor, as configurations call it."""
    name = source.removesuffix(".weight")
    for theirs, ours in layout.renamed if layout is not None else ():
        if ours and name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def _segment(scheme: Scheme | None, rows: int, channels: int, dtype: torch.dtype) -> Segment:
    def meta(columns: int, kind: torch.dtype) -> Tensor:
        return torch.empty(rows, columns, dtype=kind, device="meta")

    if scheme is None:
        return meta(channels, dtype)
    group = scheme.group or channels
    groups = -(-channels // group)
    return Packed(
        meta(channels * code_bits(scheme.code) // 8, CODES[scheme.code]),
        meta(groups, getattr(torch, scheme.scale)),
        scheme.code,
        group,
        super_scales=meta(1, torch.float32) if scheme.whole else None,
        zeros=meta(groups, torch.uint8) if scheme.zeros else None,
    )

"""Checkpoints into our modules: one file per kind of network, one table per layout (:mod:`graphspec.layouts`)."""

from __future__ import annotations

from ..drafters.head_tensors import load_eagle, load_eagle3
from ..drafters.mtp.loading import load_mtp
from ..drafters.standalone.loading import load_standalone
from .target import load_target
from ..models.token_map import apply_token_map, load_token_map

__all__ = [
    "apply_token_map",
    "load_eagle",
    "load_eagle3",
    "load_mtp",
    "load_standalone",
    "load_target",
    "load_token_map",
]

"""Checkpoints into our modules: one file per kind of network, one table per layout (:mod:`graphspec.layouts`)."""

from __future__ import annotations

from .eagle import load_eagle3
from .target import load_target

__all__ = ["load_eagle3", "load_target"]

"""Checkpoints into our modules, by the tables of :mod:`graphspec.layouts`."""

from __future__ import annotations

from .target import load_target

__all__ = ["load_target"]

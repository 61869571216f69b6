"""Triton implementations of the ops of :mod:`graphspec.kernels.tree`."""

from __future__ import annotations

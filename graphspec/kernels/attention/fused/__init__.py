"""Triton implementations of the ops of :mod:`graphspec.kernels.attention`."""

from __future__ import annotations

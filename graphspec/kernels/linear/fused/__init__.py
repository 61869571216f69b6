"""Triton implementations of the ops of :mod:`graphspec.kernels.linear`."""

from __future__ import annotations

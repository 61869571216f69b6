"""Triton implementations of the ops of :mod:`graphspec.kernels.sampling`."""

from __future__ import annotations

"""Triton implementations of the ops of :mod:`graphspec.kernels.recurrent`."""

from __future__ import annotations

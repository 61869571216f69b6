"""Filters, noise and draws over a vocabulary."""

from __future__ import annotations

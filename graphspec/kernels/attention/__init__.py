"""Attention over pages, and the writes of keys and values."""

from __future__ import annotations

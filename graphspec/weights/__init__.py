"""Weights as files have them: quantised formats and GGUF, read into the one form that kernels take."""

from __future__ import annotations

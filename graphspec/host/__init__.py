"""The machine that a process runs on: building C++ with its compiler, waiting for free cores, progress in its terminal."""

from __future__ import annotations

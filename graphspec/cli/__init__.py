"""The command line: one command per file, and what only a terminal shows."""

from __future__ import annotations

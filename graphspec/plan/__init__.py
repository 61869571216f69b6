"""The plan of an engine: every size, derived once from the configuration and the facts of the checkpoints."""

from __future__ import annotations

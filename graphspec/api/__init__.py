"""The Python interface: prompts in, outputs out, over an engine that knows tokens only."""

from __future__ import annotations

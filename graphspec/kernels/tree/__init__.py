"""Trees and rows of a cycle: drafting, building, walking and committing them."""

from __future__ import annotations

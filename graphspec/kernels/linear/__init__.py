"""Linear layers of a few rows, packed weights, and mixtures of experts."""

from __future__ import annotations

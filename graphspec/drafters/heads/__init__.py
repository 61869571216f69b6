"""What several drafters share: reading of head folders, layers over a feature, and trees from their scores."""

from __future__ import annotations

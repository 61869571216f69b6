"""Memory in which an element that no kernel has written shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """Fresh memory is full of NaN, and of the largest integer."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(2).isnan().all() and torch.zeros(1).new_empty(2, dtype=torch.int64)[0] == 2**63 - 1
    yield
    torch.use_deterministic_algorithms(False)

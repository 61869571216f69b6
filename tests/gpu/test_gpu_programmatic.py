"""Programmatic launch: whole engines with and without it give the same tokens.

Run by ``make gpu-check``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphspec.api.llm import LLM
from graphspec.lab.measure import programmatic
from tests.gpu import limits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs sm_90"),
]


def engines(shape: str) -> list[dict[str, Any]]:
    """Those that the comparison of one shape builds."""
    keys = {"runtime": "captured", "mode": "fused", "device": "cuda", **programmatic.SHAPES[shape], **programmatic.ENGINE}
    return [keys] * (2 * len(programmatic.DTYPES))


@pytest.mark.seconds(lambda shape: limits.seconds(engines(shape)))
@pytest.mark.parametrize("shape", programmatic.SHAPES)
def test_engines_with_and_without_give_the_same_tokens(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programmatic, "SHAPES", {shape: programmatic.SHAPES[shape]})
    found = list(programmatic.compare(LLM, compiled=True))
    assert len(found) == len(programmatic.DTYPES)
    assert [finding for finding in found if finding.difference] == []
    assert all(finding.tokens > 0 for finding in found)

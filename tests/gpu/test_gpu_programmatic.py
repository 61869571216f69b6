"""Programmatic launch: whole engines with and without it give the same tokens.

Run by ``make gpu-check``.
"""

from __future__ import annotations

import pytest
import torch

from graphspec.lab.measure import programmatic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs sm_90"),
    pytest.mark.seconds(400),
]


@pytest.mark.parametrize("shape", programmatic.SHAPES)
def test_engines_with_and_without_give_the_same_tokens(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programmatic, "SHAPES", {shape: programmatic.SHAPES[shape]})
    found = list(programmatic.compare())
    assert len(found) == len(programmatic.DTYPES)
    assert [finding for finding in found if finding.difference] == []
    assert all(finding.tokens > 0 for finding in found)

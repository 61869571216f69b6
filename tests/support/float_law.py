"""The law of floats: against float64, at most twice the error of a reference of the same precision, plus one rounding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def widened(case: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call, floats in float64."""
    return {key: value.double() if torch.is_tensor(value) and value.is_floating_point() else value for key, value in case.items()}


def assert_float_law(found: Tensor, reference: Tensor, oracle: Tensor, *, dtype: torch.dtype | None = None, partly: bool = False) -> None:
    """Hold ``found`` to the law.

    Args:
        reference: by plain equations, of the same dtype.
        oracle: by the same in float64.
        dtype: whose rounding of the largest value is allowed; None: that of ``found``.
        partly: some values are infinite or NaN, the same in ``found`` and ``oracle``; they are not compared.
    """
    assert found.dtype == reference.dtype and found.shape == reference.shape
    finite = oracle.isfinite()
    assert torch.equal(found.isfinite(), finite) and (partly or finite.all())
    if finite.any():
        own = (reference.double() - oracle)[finite].abs().max()
        rounding = torch.finfo(dtype or found.dtype).eps * oracle[finite].abs().max()
        assert (found.double() - oracle)[finite].abs().max() <= 2 * own + rounding

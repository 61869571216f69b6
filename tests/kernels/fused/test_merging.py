"""Calls that the GPU tests repeat do merge parts, by their recorded launches."""

from __future__ import annotations

import pytest
from torch import Tensor

from graphspec.kernels.fused.launch import Launch
from tests.gpu._merging import MAX_BYTES, Merging, merging_calls, parts
from tests.support.launches import operator_calls

LANES = (1, 8)


def launches_of(call: Merging) -> list[Launch]:
    case = call.make("meta")
    return [launch for operator in operator_calls(lambda: call.function(**case)) for launch in operator.launches]


@pytest.mark.parametrize("lanes", LANES)
def test_every_call_merges(lanes: int) -> None:
    for call in merging_calls(lanes):
        assert max(map(parts, launches_of(call))) >= call.minimum, call.name


@pytest.mark.parametrize("lanes", LANES)
def test_merging_calls_fit_the_memory_bound(lanes: int) -> None:
    held: dict[int, Tensor] = {}
    for call in merging_calls(lanes):
        held |= {x.untyped_storage()._cdata: x for launch in launches_of(call) for x in launch.args if isinstance(x, Tensor)}
    assert MAX_BYTES / 2 <= sum(x.untyped_storage().nbytes() for x in held.values()) <= MAX_BYTES

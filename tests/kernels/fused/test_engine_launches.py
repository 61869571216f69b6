"""Triton's front end accepts all launches of engines: numbers that equal 1, strides and flags of the real calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gpu._merging import merging_calls, parts
from tests.kernels.fused._compiled import without_interpreter
from tests.support.launches import operator_calls


@pytest.fixture(scope="module", params=["one-lane", pytest.param("every-bucket", marks=pytest.mark.full)])
def engines(request: pytest.FixtureRequest) -> dict[str, Any]:
    arguments = ("--all",) if request.param == "every-bucket" else ()
    found: dict[str, Any] = json.loads(without_interpreter("tests.support.engine_launches", *arguments))
    return found


def test_every_launch_of_demo_engines_can_be_compiled(engines: dict[str, Any]) -> None:
    assert engines["refused"] == {}
    # Drafting, prefill, filters, catching up, latent attention and experts were among them.
    wanted = {"_linear", "_rope_kv_write", "_draft_level", "_tree_build", "_chunk_attention", "_least", "_apply_least", "_draft_window"}
    wanted |= {"_ngram_match", "_latent_attention", "_latent_kv_write", "_down", "_take_last", "_commit_rows", "_kv_move", "_marginal_pool"}
    assert wanted <= set(engines["kernels"])
    assert engines["distinct"] < engines["made"] / 5


def test_every_kernel_that_merges_is_repeated_on_a_gpu(engines: dict[str, Any]) -> None:
    """With parts to merge: what a last program loads from others is found in the kernels, what the calls launch in their launchers."""
    merging = {kernel for kernel, arguments in engines["merging"].items() if arguments}
    assert len(merging) >= 9
    for lanes in (1, 8):
        repeated = set()
        for call in merging_calls(lanes):
            case = call.make("meta")
            for operator in operator_calls(lambda call=call, case=case: call.function(**case)):  # type: ignore[misc]
                repeated |= {launch.kernel.fn.__name__ for launch in operator.launches if parts(launch) > 1}
        assert merging <= repeated

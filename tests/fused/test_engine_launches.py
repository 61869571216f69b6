"""What engines launch is accepted by Triton's front end: numbers that equal 1, strides and flags as they come, not as a case has them."""

from __future__ import annotations

import json

import pytest

from tests.fused._compiled import without_interpreter


@pytest.mark.parametrize("arguments", [(), pytest.param(("--all",), marks=pytest.mark.full)], ids=["one-lane", "every-bucket"])
def test_every_launch_of_demo_engines_can_be_compiled(arguments: tuple[str, ...]) -> None:
    found = json.loads(without_interpreter("tests._engine_launches", *arguments))
    assert found["refused"] == {}
    # Drafting, prefill, filters, catching up, latent attention and experts were among them.
    wanted = {"_linear", "_rope_kv_write", "_draft_level", "_tree_build", "_chunk_attention", "_least", "_apply_least", "_draft_window"}
    wanted |= {"_ngram_match", "_latent_attention", "_latent_kv_write", "_down", "_take_last", "_commit_rows", "_kv_move"}
    assert wanted <= set(found["kernels"])
    assert found["distinct"] < found["made"] / 5

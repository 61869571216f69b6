"""Sampling defaults of ``generation_config.json``: what counts, and errors that name file and key."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from graphspec.errors import CheckpointError
from graphspec.facts import read_sampling_defaults
from graphspec.shapes import GREEDY, NEUTRAL, SamplingClass, SamplingDefaults

if TYPE_CHECKING:
    from pathlib import Path


def read(folder: Path, values: Any) -> SamplingDefaults:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return read_sampling_defaults(folder)


def test_a_sampled_checkpoint_states_everything(tmp_path: Path) -> None:
    stated = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05}
    found = read(tmp_path, {"do_sample": True, "eos_token_id": [1], "max_new_tokens": 7, **stated})
    assert found == SamplingDefaults(**stated)
    assert found.sampling_class == SamplingClass(noise=True, truncate=True, penalties=True)


def test_what_is_not_stated_is_neutral(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == NEUTRAL, "no file"
    assert read(tmp_path, {}) == NEUTRAL
    assert NEUTRAL.sampling_class == GREEDY
    assert read(tmp_path, {"do_sample": True, "top_k": None}) == SamplingDefaults(temperature=1.0)
    assert read(tmp_path, {"do_sample": True, "temperature": 1, "top_k": 0}) == SamplingDefaults(temperature=1.0, top_k=0)
    assert read(tmp_path, {"do_sample": True, "temperature": 1e-40}).temperature == 0, "float32 has no such number"


@pytest.mark.parametrize("do_sample", [{}, {"do_sample": False}, {"do_sample": None}])
def test_without_do_sample_a_checkpoint_is_greedy(do_sample: dict[str, Any], tmp_path: Path) -> None:
    """As in transformers, whose penalty still applies."""
    filters = {"temperature": 0.6, "top_k": 20, "top_p": 0.8, "min_p": 0.1}
    assert read(tmp_path, {**do_sample, **filters}) == NEUTRAL
    assert read(tmp_path, {**do_sample, **filters, "repetition_penalty": 1.2}) == SamplingDefaults(repetition_penalty=1.2)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("do_sample", "yes", "true or false"),
        ("do_sample", 1, "true or false"),
        ("temperature", "0.6", "a number"),
        ("temperature", True, "a number"),
        ("temperature", [0.6], "a number"),
        ("temperature", -0.5, "a number >= 0"),
        ("temperature", 1e6, "at most 100000"),
        ("top_k", 20.0, "an integer"),
        ("top_k", "20", "an integer"),
        ("top_k", -2, ">= -1"),
        ("top_p", 0, "a number above 0"),
        ("top_p", 1.5, "at most 1"),
        ("top_p", {}, "a number"),
        ("min_p", -0.1, "0, or a number"),
        ("repetition_penalty", 0, ">= 0.01"),
        ("repetition_penalty", None, None),
        ("repetition_penalty", False, "a number"),
    ],
)
@pytest.mark.parametrize("do_sample", [True, False])
def test_a_bad_value_names_file_and_key(do_sample: bool, key: str, value: Any, expected: str | None, tmp_path: Path) -> None:
    values = {"do_sample": do_sample, key: value}
    if expected is None:
        assert read(tmp_path, values).repetition_penalty == 1
        return
    with pytest.raises(CheckpointError, match=expected) as caught:
        read(tmp_path, values)
    assert str(caught.value).startswith(f"{tmp_path / 'generation_config.json'}: {key}: expected ")


@pytest.mark.parametrize("text", ["[]", "3", "{", '{"temperature": NaN}'])
def test_a_file_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        read_sampling_defaults(tmp_path)
